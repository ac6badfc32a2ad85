"""HaloSubgraph: the rows and edges an ordinary convolution needs to be exact at its own nodes.

One hop is own nodes, their halo and all in-edges of own nodes. A convolution that weighs a
neighbor by its degree needs two: every edge that touches an own or a halo node, on whichever rank
it lives, and the nodes at their other ends, which have no features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from meshshard.comm import Exchange
from meshshard.nn.graph._sparse import Total
from meshshard.tensor import ShardGraph

__all__ = ["HaloSubgraph", "apart", "bipartite", "halo_subgraph_of", "padded"]

_known: WeakKeyDictionary[ShardGraph, dict[int, HaloSubgraph]] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class HaloSubgraph:
    """What a plain convolution is run on.

    Rows are own rows, halo rows, rows without features: the second hop, and such that make numbers
    of rows differ, so that they tell what the rows are. A rank without edges has one between two
    rows without features, for many aggregations fail on none.

    Attributes:
        graph: the graph that it is made of.
        n_rows: rows of the sources.
        n_to: rows of the destinations, the same rows unless the graph is bipartite.
        edge_index: (2, n_edges) int64 rows; own edges come first.
        origins: (n_rows,) int64 what random numbers of the rows are keyed by.
        names: (n_edges,) int64 what random numbers of the edges are keyed by.
        fetch: brings the attributes of the other edges behind those of own edges, if there are any.
    """

    graph: ShardGraph
    n_rows: int
    n_to: int
    edge_index: Tensor
    origins: Tensor
    names: Tensor
    fetch: Exchange | None = None

    def rows(self, x: Tensor) -> Tensor:
        """Own rows with their halo, and zeros: (n_rows, …).

        Communication: one exchange, forward and backward.
        """
        local = self.graph.domain.exchange(x, self.graph.exchange)
        return padded(local, self.n_rows)

    def own(self, x: Tensor) -> Tensor:
        """Own rows of (n_rows, …)."""
        return x[: self.graph.sources.own]

    def around(self, own: Tensor) -> Tensor:
        """Own rows where they stand, zeros elsewhere: (n_rows, …)."""
        return padded(own, self.n_rows)

    @cached_property
    def arriving(self) -> Total | None:
        """(n_to, …) sums of (n_edges, …) rows of edges, where these are sorted by destination."""
        to = self.edge_index[1]
        if self.fetch is not None or self.graph.edges.own != len(self.names):
            return None
        begin = F.pad(self.graph.indptr, (0, self.n_to - self.graph.nodes.own), value=len(to))
        return Total.of_runs(begin)

    def edges(self, x: Tensor) -> Tensor:
        """Attributes of own edges with those of the others: (n_edges, …).

        Communication: none with one hop, else one exchange, forward and backward.
        """
        every = x if self.fetch is None else self.graph.domain.exchange(x, self.fetch)
        return padded(every, len(self.names))


def halo_subgraph_of(graph: ShardGraph, hops: int) -> HaloSubgraph:
    """One hop or two, kept as long as the graph is.

    Communication: for one hop none. For two, at the first call: one exchange of who holds which
    rows, one all-to-all of counts and one of edges.
    """
    known = _known.setdefault(graph, {})
    if hops not in known:
        known[hops] = _one(graph) if hops == 1 else _two(graph)
    return known[hops]


def padded(x: Tensor, rows: int) -> Tensor:
    """More rows of zeros, up to a number."""
    more = rows - x.shape[0]
    return x if more == 0 else F.pad(x, [0] * (2 * x.ndim - 1) + [more])


def bipartite(graph: ShardGraph) -> bool:
    """Whether sources and destinations are different rows."""
    return graph.sources is not graph.nodes and graph.sources != graph.nodes


def _one(graph: ShardGraph) -> HaloSubgraph:
    assert graph.edges.origin is not None
    return _made(graph, graph.n_local, graph.edge_index, graph.edges.origin)


def _made(
    graph: ShardGraph, rows: int, ends: Tensor, names: Tensor, fetch: Exchange | None = None
) -> HaloSubgraph:
    """A subgraph of that many rows, and padding rows that keep row counts distinct."""
    none = ends.shape[1] == 0
    n_edges = ends.shape[1] + none
    taken = [n_edges, n_edges + 1]  # one more is what quantiles see: graph_conv.led
    n_to = apart(graph.nodes.own + 2 * none, taken) if bipartite(graph) else 0
    rows = apart(rows + 2 * none, [*taken, n_to])
    n_to = n_to or rows
    if none:
        ends, names = ends.new_tensor([[rows - 2], [n_to - 1]]), padded(names, 1)
    return HaloSubgraph(graph, rows, n_to, ends, padded(graph.origins, rows), names, fetch)


def apart(rows: int, taken: Sequence[int]) -> int:
    """The smallest number of rows from here on that is none of others, and not zero."""
    while rows == 0 or rows in taken:
        rows += 1
    return rows


def _two(graph: ShardGraph) -> HaloSubgraph:
    if graph.domain.size == 1 or bipartite(graph):
        return _one(graph)
    assert graph.edges.origin is not None
    rows, send = _wanted(graph)
    found, receive = graph.domain.route(_named(graph)[rows], send)
    own = graph.edges.own
    name = "edges of the second hop"
    fetch = Exchange(graph.domain, own, rows, send, receive, name)
    ids = _ids(graph)
    ends = found[:, :2].T.contiguous()
    outer = torch.unique(ends[~torch.isin(ends, ids)])
    order = torch.argsort(every := torch.cat([ids, outer]))
    more = order[torch.searchsorted(every, ends, sorter=order)]
    edges = torch.cat([graph.edge_index, more], dim=1)
    names = torch.cat([graph.edges.origin, found[:, 2]])
    return _made(graph, len(every), edges, names, fetch)


def _wanted(graph: ShardGraph) -> tuple[Tensor, list[int]]:
    """Own edges that other ranks want, grouped by rank, and how many each does.

    A rank wants the edges that touch a row it holds: owned there, or its halo.
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


def _named(graph: ShardGraph) -> Tensor:
    """(own edges, 3) int64 ids of both ends and the edge's name."""
    ids = _ids(graph)
    assert graph.edges.origin is not None
    return torch.stack([ids[graph.indices], ids[graph.destinations], graph.edges.origin], 1)


def _ids(graph: ShardGraph) -> Tensor:
    """(n_local,) int64 ids of local rows."""
    own = torch.arange(graph.sources.own, device=graph.domain.device) + graph.sources.first
    return torch.cat([own, graph.halo])
