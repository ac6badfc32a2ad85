"""ShardGraph: the in-edges of this rank's nodes, and the exchange of their source rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshshard.comm import Domain, Exchange
from meshshard.errors import MeshshardError, n_of
from meshshard.graph.plan import Plan
from meshshard.tensor.shard_tensor import NoShardRule, ShardTensor, local_of, name_of
from meshshard.tensor.sharding import Sharding

__all__ = ["ShardGraph", "offsets_of"]


@dataclass(frozen=True, eq=False)
class ShardGraph:
    """One directed graph whose nodes are sharded; the owner of a node stores its in-edges.

    Owned edges are sorted by destination, those of one destination in the order of the whole graph.
    Local rows of the sources are owned rows, then halo rows by ascending id. Pass it to a layer in
    place of PyG's `edge_index`.

    Attributes:
        nodes: sharding of the destinations.
        sources: sharding of the sources: `nodes`, unless the graph is bipartite.
        counts: number of owned edges of every rank.
        edge_keys: (n_owned_edges,) int64 key of every edge, which does not depend on the
            partition; None if `edges` computes it from the origins of both ends.
        indptr: (n_owned + 1,) int64 offsets of the in-edges of each owned node.
        indices: (n_owned_edges,) int64 source of every edge, as a local row.
        halo: (n_halo,) int64 ids of the halo rows, ascending.
        origins: (n_local,) int64 row in the source file of every local row.
        exchange: appends the halo rows to owned rows.
    """

    nodes: Sharding
    sources: Sharding
    counts: tuple[int, ...]
    edge_keys: Tensor | None
    indptr: Tensor
    indices: Tensor
    halo: Tensor
    origins: Tensor
    exchange: Exchange

    @staticmethod
    def from_ids(
        ids: Tensor,
        indptr: Tensor,
        nodes: Sharding,
        sources: Sharding | None = None,
        edge_keys: Tensor | None = None,
    ) -> ShardGraph:
        """Make the graph from owned in-edges, whose sources are global ids.

        Args:
            ids: (n_owned_edges,) int64 global ids of the sources, grouped by destination.
            indptr: (n_owned + 1,) int64 offsets of the in-edges of each owned destination.
            nodes: sharding of the destinations.
            sources: sharding of the sources, by default that of the destinations.
            edge_keys: (n_owned_edges,) int64 key of every edge, which does not depend on the
                partition; by default computed from the rows of both ends in the source file, so
                parallel edges have equal keys.

        Raises:
            DomainError: a source does not exist; raised on every rank.

        Communication: one gather of objects, one all-to-all of counts, two of the halo's ids.
        """
        sources = sources or nodes
        domain = nodes.domain
        domain.run_collectively(lambda: _check_edges(ids, indptr, nodes, sources), "a graph")
        owned = (ids >= sources.first) & (ids < sources.first + sources.own)
        remote = torch.nonzero(~owned).view(-1)
        halo, position = torch.unique(ids[remote], return_inverse=True)
        exchange = Exchange.of_halo(domain, sources.sizes, halo, "halo exchange of a graph")
        rows = (ids - sources.first).index_copy_(0, remote, position + sources.own)
        return _make_graph(nodes, sources, (indptr, rows, halo), exchange, edge_keys)

    @staticmethod
    def from_edge_index(
        edge_index: Tensor, nodes: Sharding, sources: Sharding | None = None
    ) -> ShardGraph:
        """Make the graph from PyG's (2, n_edges) int64 `edge_index` with all edges, on every rank.

        The key of an edge is its column, so `take` shards edge features in that order.

        Raises:
            MeshshardError: a destination does not exist.
            DomainError: a source does not exist; raised on every rank.

        Communication: as `from_ids`.
        """
        ends = edge_index[1]
        if len(ends) and not 0 <= int(ends.min()) <= int(ends.max()) < nodes.total:
            raise MeshshardError(
                f"edge_index: expected destinations 0 to {nodes.total - 1}, got "
                f"{int(ends.min())} to {int(ends.max())}"
            )
        rows = ends - nodes.first
        owned = torch.nonzero((rows >= 0) & (rows < nodes.own)).view(-1)
        owned = owned[torch.argsort(rows[owned], stable=True)]
        indptr = offsets_of(torch.bincount(rows[owned], minlength=nodes.own))
        return ShardGraph.from_ids(edge_index[0, owned], indptr, nodes, sources, owned)

    @staticmethod
    def from_plan(plan: Plan, nodes: Sharding, exchange: Exchange) -> ShardGraph:
        """Make the graph from a stored plan of any number of hops, without in-edges of halo rows.

        Communication: one gather of objects, one exchange of the rows' origins.
        """
        device = nodes.domain.device
        indptr = torch.from_numpy(plan.indptr[: plan.n_owned + 1].astype(np.int64)).to(device)
        rows = torch.from_numpy(plan.indices[: int(indptr[-1])].astype(np.int64)).to(device)
        halo = torch.from_numpy(plan.halo.astype(np.int64)).to(device)
        return _make_graph(nodes, nodes, (indptr, rows, halo), exchange, None)

    def __repr__(self) -> str:
        return (
            f"ShardGraph({n_of(self.nodes.total, 'nodes')} and "
            f"{n_of(sum(self.counts), 'edges')}; rank {self.domain.rank}: "
            f"{n_of(self.nodes.own, 'owned nodes')}, {n_of(len(self.halo), 'halo rows')}, "
            f"{n_of(len(self.indices), 'edges')})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardGraph:
        """The same graph, which is constant: copies of a model share it."""
        return self

    def __getattr__(self, name: str) -> Any:
        """Refuse the attributes and methods of an edge_index; `hasattr` is false."""
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"ShardGraph has no attribute {name!r}")
        raise _not_an_edge_index(f"edge_index.{name}")

    def __getitem__(self, index: Any) -> Any:
        """Refuse `edge_index[0]`."""
        raise _not_an_edge_index(f"edge_index[{index!r}]")

    def __iter__(self) -> Any:
        """Refuse `row, col = edge_index`."""
        raise _not_an_edge_index("row, col = edge_index")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse torch functions on an edge_index."""
        raise _not_an_edge_index(f"{name_of(func)}(edge_index)")

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return self.indices.device

    @property
    def domain(self) -> Domain:
        """The ranks."""
        return self.nodes.domain

    @property
    def n_local(self) -> int:
        """Number of local rows of the sources, owned and halo."""
        return self.sources.own + len(self.halo)

    @cached_property
    def edges(self) -> Sharding:
        """Sharding of the edges; `edges.origin` holds the edge keys, given or computed."""
        keys = self.edge_keys
        if keys is None:
            keys = self.nodes.sources(self.device)[self.destinations]
            keys = keys.mul_(self.sources.total).add_(self.origins[self.indices])
        return Sharding(self.domain, self.counts, keys)

    @cached_property
    def destinations(self) -> Tensor:
        """(n_owned_edges,) int64 destination of every edge, as a local row."""
        count = self.indptr.diff()
        return torch.repeat_interleave(torch.arange(len(count), device=count.device), count)

    @cached_property
    def edge_index(self) -> Tensor:
        """(2, n_owned_edges) int64 source and destination of every edge, as local rows."""
        return torch.stack([self.indices, self.destinations])

    def local(self, x: Any) -> Tensor:
        """Owned rows, sharded or plain, followed by halo rows: (n_local, …).

        Raises:
            MeshshardError: a tensor is not sharded like the sources; raised on every rank.

        Communication: one exchange, forward and backward.
        """
        if isinstance(x, ShardTensor) and (x.sharding != self.sources or x.sharded_dim != 0):
            raise MeshshardError(
                f"ShardGraph.local: expected a tensor sharded along dim 0 with {self.sources}, got "
                f"{tuple(x.shape)} sharded along dim {x.sharded_dim} with {x.sharding}; use "
                "x.redistribute(graph.sources.sizes)"
            )
        return self.domain.exchange(local_of(x), self.exchange)

    def lift(self, x: Any) -> tuple[ShardTensor, ShardTensor]:
        """Source rows and destination rows of every edge, PyG's x[row] and x[col], (n_edges, …).

        Communication: one exchange, forward and backward.
        """
        local = self.local(x)
        ends = local[self.indices], local[self.destinations]
        return ShardTensor.from_local(ends[0], self.edges), ShardTensor.from_local(
            ends[1], self.edges
        )

    def degree(self) -> ShardTensor:
        """(n_nodes,) int64 number of in-edges of every node."""
        return ShardTensor.from_local(self.indptr.diff(), self.nodes)

    def take(self, features: Tensor) -> ShardTensor:
        """Shard plain edge features (n_edges, …) in the order of edge_index.

        Raises:
            MeshshardError: the features have another number of edges, or the graph was not made
                from an edge_index.
        """
        if self.edge_keys is None:
            raise MeshshardError(
                "ShardGraph.take: the graph was not made from an edge_index, so features "
                "cannot be assigned to its edges; compute them: graph.lift(x), nn.edge_vectors"
            )
        if len(features) != self.edges.total:
            raise MeshshardError(
                f"ShardGraph.take: expected features of {n_of(self.edges.total, 'edges')}, got "
                f"shape {tuple(features.shape)}"
            )
        return ShardTensor.from_local(features[self.edge_keys], self.edges)


class _EdgeIndexError(NoShardRule, AttributeError):
    """The graph was used as an edge_index."""


def _not_an_edge_index(what: str) -> NoShardRule:
    return _EdgeIndexError(
        f"{what}: the graph is a ShardGraph, not an edge_index; use graph.lift(x) for x[row] and "
        "x[col] of every edge and graph.degree() for the in-degrees, and change edges (self-loops, "
        "dropped edges) before ShardGraph.from_edge_index"
    )


def _make_graph(
    nodes: Sharding,
    sources: Sharding,
    arrays: tuple[Tensor, Tensor, Tensor],
    exchange: Exchange,
    edge_keys: Tensor | None,
) -> ShardGraph:
    """Make a graph; collect the number of edges of all ranks and the origins of halo rows."""
    indptr, rows, halo = arrays
    counts: Sequence[int] = nodes.domain.share(len(rows))
    origins = nodes.domain.exchange(sources.sources(indptr.device), exchange)
    return ShardGraph(
        nodes, sources, tuple(counts), edge_keys, indptr, rows, halo, origins, exchange
    )


def offsets_of(counts: Tensor) -> Tensor:
    """(n + 1,) offsets of n consecutive segments of given lengths, as `indptr`."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))


def _check_edges(ids: Tensor, indptr: Tensor, nodes: Sharding, sources: Sharding) -> None:
    if len(indptr) != nodes.own + 1 or int(indptr[-1]) != len(ids):
        raise MeshshardError(
            f"expected an indptr for {n_of(nodes.own, 'owned nodes')} and "
            f"{n_of(len(ids), 'sources')}, got one for {n_of(len(indptr) - 1, 'nodes')} and "
            f"{n_of(int(indptr[-1]), 'edges')}"
        )
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < sources.total:
        raise MeshshardError(
            f"expected sources 0 to {sources.total - 1}, got {int(ids.min())} to {int(ids.max())}"
        )
