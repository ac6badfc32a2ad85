"""HaloSubgraph: the rows and edges on which an ordinary convolution is exact at the owned nodes.

One hop: owned nodes, their halo and all in-edges of owned nodes. A convolution that weights a
neighbor by its degree needs two hops: every edge that touches an owned or a halo node, whichever
rank owns it, and the nodes at the other ends, whose features are not exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from meshshard.comm import Exchange
from meshshard.nn.graph._cached_on import cached_on
from meshshard.nn.graph._sparse import SegmentSum
from meshshard.tensor import ShardGraph, Sharding, ShardTensor

__all__ = [
    "HaloSubgraph",
    "halo_subgraph_of",
    "has_rows_of",
    "is_bipartite",
    "pad_rows",
    "unused_count",
]


@dataclass(frozen=True, eq=False)
class HaloSubgraph:
    """What an ordinary convolution is called with on a rank.

    Rows are owned rows, halo rows, then rows without features: those of the second hop, and padding
    rows that make the numbers of rows and edges differ, so that a number says what its rows are. A
    rank without edges gets one edge between two padding rows, because many aggregations fail on
    empty input.

    Attributes:
        graph: the graph that this is a part of.
        hops: with 2, all edges that leave an owned or a halo node are included; with 1, or in a
            bipartite graph, those that end at nodes of other ranks are missing.
        n_rows: number of source rows.
        n_destinations: number of destination rows; they are the source rows unless the graph is
            bipartite.
        edge_index: (2, n_edges) int64 rows; owned edges come first.
        row_keys: (n_rows,) int64 keys of the random numbers of rows.
        edge_keys: (n_edges,) int64 keys of the random numbers of edges.
        fetch: brings the attributes of the other edges behind those of owned edges, if there are
            others.
    """

    graph: ShardGraph
    hops: int
    n_rows: int
    n_destinations: int
    edge_index: Tensor
    row_keys: Tensor
    edge_keys: Tensor
    fetch: Exchange | None = None

    def rows(self, owned: Tensor) -> Tensor:
        """(n_rows, …) owned rows, their halo, and padding.

        Communication: one exchange forward and one backward.
        """
        local = self.graph.domain.exchange(owned, self.graph.exchange)
        return self._pad(local, self.n_rows)

    def edges(self, owned: Tensor) -> Tensor:
        """(n_edges, …) attributes of owned edges, of the others, and padding.

        Communication: none with one hop; with two, one exchange forward and one backward.
        """
        every = owned if self.fetch is None else self.graph.domain.exchange(owned, self.fetch)
        return self._pad(every, len(self.edge_keys))

    def owned(self, x: Tensor) -> Tensor:
        """Owned rows of (n_rows, …)."""
        return x[: self.graph.sources.own]

    def place(self, owned: Tensor) -> Tensor:
        """(n_rows, …) owned rows in their places, zeros elsewhere."""
        return pad_rows(owned, self.n_rows)

    @cached_property
    def edge_sum(self) -> SegmentSum | None:
        """(n_destinations, …) sums of (n_edges, …); None unless edges are sorted by destination."""
        to = self.edge_index[1]
        if self.fetch is not None or self.graph.edges.own != len(self.edge_keys):
            return None
        padding = self.n_destinations - self.graph.nodes.own
        return SegmentSum.of_runs(F.pad(self.graph.indptr, (0, padding), value=len(to)))

    def _pad(self, x: Tensor, n: int) -> Tensor:
        return pad_rows(x, n)


def halo_subgraph_of(graph: ShardGraph, hops: int) -> HaloSubgraph:
    """The subgraph of one hop or two, cached on the graph.

    Communication: none for one hop. For two, at the first call: one exchange of which ranks hold
    which rows, one all-to-all of counts and one of edges.
    """
    key = "halo subgraph", hops
    return cached_on(graph, key, lambda: _one_hop(graph, hops) if hops == 1 else _two_hops(graph))


def pad_rows(x: Tensor, n: int) -> Tensor:
    """Rows of zeros appended, up to n rows."""
    more = n - x.shape[0]
    return x if more == 0 else F.pad(x, [0] * (2 * x.ndim - 1) + [more])


def is_bipartite(graph: ShardGraph) -> bool:
    """Whether sources and destinations are different rows."""
    return graph.sources is not graph.nodes and graph.sources != graph.nodes


def has_rows_of(x: Tensor, sharding: Sharding) -> bool:
    """Whether a tensor is sharded that way on dim 0; or, on one rank, has that many rows."""
    if type(x) is ShardTensor:
        return x.sharded_dim == 0 and x.sharding == sharding
    return sharding.domain.size == 1 and x.ndim > 0 and x.shape[0] == sharding.total


def unused_count(n: int, used: Sequence[int]) -> int:
    """The smallest positive number from n on that is not among others."""
    while n == 0 or n in used:
        n += 1
    return n


def _one_hop(graph: ShardGraph, hops: int) -> HaloSubgraph:
    assert graph.edges.origin is not None
    return _make(graph, hops, graph.n_local, graph.edge_index, graph.edges.origin)


def _make(
    graph: ShardGraph,
    hops: int,
    n_rows: int,
    edge_index: Tensor,
    edge_keys: Tensor,
    fetch: Exchange | None = None,
) -> HaloSubgraph:
    """A subgraph with padding rows that make the numbers of rows and edges differ."""
    empty = edge_index.shape[1] == 0
    n_edges = edge_index.shape[1] + empty
    used = [n_edges, n_edges + 1]  # one more in graph_conv.with_nonempty_first_segment
    n_to = unused_count(graph.nodes.own + 2 * empty, used) if is_bipartite(graph) else 0
    n_rows = unused_count(n_rows + 2 * empty, [*used, n_to])
    n_to = n_to or n_rows
    if empty:
        edge_index = edge_index.new_tensor([[n_rows - 2], [n_to - 1]])
        edge_keys = pad_rows(edge_keys, 1)
    row_keys = pad_rows(graph.origins, n_rows)
    return HaloSubgraph(graph, hops, n_rows, n_to, edge_index, row_keys, edge_keys, fetch)


def _two_hops(graph: ShardGraph) -> HaloSubgraph:
    if graph.domain.size == 1 or is_bipartite(graph):
        return _one_hop(graph, 1 if is_bipartite(graph) else 2)
    assert graph.edges.origin is not None
    rows, send = _requested_edges(graph)
    ids = _local_ids(graph)
    own_edges = [ids[graph.indices], ids[graph.destinations], graph.edges.origin]
    found, receive = graph.domain.route(torch.stack(own_edges, 1)[rows], send)
    name = "edges of the second hop"
    fetch = Exchange(graph.domain, graph.edges.own, rows, send, receive, name)
    ends = found[:, :2].T.contiguous()
    outer = torch.unique(ends[~torch.isin(ends, ids)])
    order = torch.argsort(every := torch.cat([ids, outer]))
    more = order[torch.searchsorted(every, ends, sorter=order)]
    edge_index = torch.cat([graph.edge_index, more], dim=1)
    edge_keys = torch.cat([graph.edges.origin, found[:, 2]])
    return _make(graph, 2, len(every), edge_index, edge_keys, fetch)


def _requested_edges(graph: ShardGraph) -> tuple[Tensor, list[int]]:
    """Owned edges that other ranks need, grouped by rank, and how many each rank needs.

    A rank needs the edges that touch a row that it holds, owned or halo.
    """
    domain, plan = graph.domain, graph.exchange
    holds = torch.zeros(plan.n_owned, domain.size, dtype=torch.uint8, device=domain.device)
    to = torch.repeat_interleave(torch.arange(domain.size), torch.tensor(plan.send))
    holds[plan.send_rows, to.to(domain.device)] = 1
    holds[:, domain.rank] = 1
    holds = domain.exchange(holds, plan)
    holds[:, domain.rank] = 0
    elsewhere = holds.any(1)
    edges = torch.nonzero(elsewhere[graph.indices] | elsewhere[graph.destinations])[:, 0]
    wanted = holds[graph.indices[edges]] | holds[graph.destinations[edges]]
    rank, at = torch.nonzero(wanted.T, as_tuple=True)
    return edges[at], torch.bincount(rank, minlength=domain.size).tolist()


def _local_ids(graph: ShardGraph) -> Tensor:
    """(n_local,) int64 ids of local rows."""
    own = torch.arange(graph.sources.own, device=graph.domain.device) + graph.sources.first
    return torch.cat([own, graph.halo])
