"""ShardGraph: the in-edges of this rank's nodes, and the exchange of the rows they read."""

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
from meshshard.tensor.shard_tensor import NoShardRule, Sharding, ShardTensor, local_of, name_of

__all__ = ["ShardGraph", "offsets_of"]


@dataclass(frozen=True, eq=False)
class ShardGraph:
    """One directed graph whose nodes are sharded; an edge lives with the owner of its destination.

    Own edges are sorted by destination, those of one destination in the order of the whole graph.
    Local rows of the sources are own rows, then halo rows by ascending id. It stands where PyG
    has `edge_index`.

    Attributes:
        nodes: how the destinations are divided.
        sources: how the sources are divided: `nodes`, unless the graph is bipartite.
        counts: own edges of every rank.
        names: (own edges,) int64 names of the edges that do not depend on the partition, where they
            are given.
        indptr: (own nodes + 1,) int64 where the in-edges of each own node begin.
        indices: (own edges,) int64 source of every edge, as a local row.
        halo: (n_halo,) int64 ids of the halo rows, ascending.
        origins: (n_local,) int64 row in the source file of every local row.
        exchange: brings halo rows behind own rows.
    """

    nodes: Sharding
    sources: Sharding
    counts: tuple[int, ...]
    names: Tensor | None
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
        origin: Tensor | None = None,
    ) -> ShardGraph:
        """The graph of own in-edges that name their sources by id.

        Args:
            ids: (own edges,) int64 ids of the sources, grouped by destination.
            indptr: (own nodes + 1,) int64 where each destination's begin.
            nodes: how the destinations are divided.
            sources: how the sources are divided, if not like the destinations.
            origin: (own edges,) int64 names of the edges that do not depend on the partition; by
                default made of both ends' rows in the source file, alike for parallel edges.

        Raises:
            DomainError: on every rank, where any names a source that there is not.

        Communication: one gather of objects, one all-to-all of counts, two of the halo's ids.
        """
        sources = sources or nodes
        domain = nodes.domain
        domain.run_collectively(lambda: _valid(ids, indptr, nodes, sources), "a graph")
        own = (ids >= sources.first) & (ids < sources.first + sources.own)
        away = torch.nonzero(~own).view(-1)
        halo, place = torch.unique(ids[away], return_inverse=True)
        plan = Exchange.of_halo(domain, sources.sizes, halo, "exchange of a graph")
        rows = (ids - sources.first).index_copy_(0, away, place + sources.own)
        return _graph(nodes, sources, (indptr, rows, halo), plan, origin)

    @staticmethod
    def from_edge_index(
        edge_index: Tensor, nodes: Sharding, sources: Sharding | None = None
    ) -> ShardGraph:
        """The graph of PyG's (2, n_edges) ids of sources and destinations, whole on every rank.

        An edge is named by its column: `take` gives own rows of features in that order.

        Raises:
            MeshshardError: an edge ends at a node that there is not.
            DomainError: on every rank, where an edge begins at a node that there is not.

        Communication: that of `from_ids`.
        """
        ends = edge_index[1]
        if len(ends) and not 0 <= int(ends.min()) <= int(ends.max()) < nodes.total:
            raise MeshshardError(
                f"destinations {int(ends.min())} to {int(ends.max())} are not all among "
                f"{n_of(nodes.total, 'rows')}"
            )
        to = ends - nodes.first
        mine = torch.nonzero((to >= 0) & (to < nodes.own)).view(-1)
        mine = mine[torch.argsort(to[mine], stable=True)]
        indptr = offsets_of(torch.bincount(to[mine], minlength=nodes.own))
        return ShardGraph.from_ids(edge_index[0, mine], indptr, nodes, sources, mine)

    @staticmethod
    def from_plan(plan: Plan, nodes: Sharding, exchange: Exchange) -> ShardGraph:
        """The graph that a folder holds, of any depth; in-edges of halo rows are left out.

        Communication: one gather of objects, one exchange of the rows' origins.
        """
        place = nodes.domain.device
        indptr = torch.from_numpy(plan.indptr[: plan.n_owned + 1].astype(np.int64)).to(place)
        rows = torch.from_numpy(plan.indices[: int(indptr[-1])].astype(np.int64)).to(place)
        halo = torch.from_numpy(plan.halo.astype(np.int64)).to(place)
        return _graph(nodes, nodes, (indptr, rows, halo), exchange, None)

    def __repr__(self) -> str:
        return (
            f"ShardGraph({n_of(self.nodes.total, 'nodes')} and "
            f"{n_of(sum(self.counts), 'edges')}, here {n_of(self.nodes.own, 'own nodes')}, "
            f"{n_of(len(self.halo), 'halo rows')}, {n_of(len(self.indices), 'edges')})"
        )

    def __getattr__(self, name: str) -> Any:
        """Refuse what code written for an edge_index asks of it."""
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
        """Refuse torch functions of an edge_index."""
        raise _not_an_edge_index(f"{name_of(func)}(edge_index)")

    @property
    def device(self) -> torch.device:
        """Where its arrays are."""
        return self.indices.device

    @property
    def domain(self) -> Domain:
        """The ranks."""
        return self.nodes.domain

    @property
    def n_local(self) -> int:
        """Local rows of the sources, own and halo."""
        return self.sources.own + len(self.halo)

    @cached_property
    def edges(self) -> Sharding:
        """How the edges are divided; `edges.origin` names them: it keys their random numbers.

        Without given names it is made of both ends' rows in the source.
        """
        names = self.names
        if names is None:
            to = self.nodes.sources(self.device)[self.destinations]
            names = to.mul_(self.sources.total).add_(self.origins[self.indices])
        return Sharding(self.domain, self.counts, names)

    @cached_property
    def destinations(self) -> Tensor:
        """(own edges,) int64 own row that every edge goes to."""
        count = self.indptr.diff()
        return torch.repeat_interleave(torch.arange(len(count), device=count.device), count)

    @cached_property
    def edge_index(self) -> Tensor:
        """(2, own edges) int64 local source row and own destination row of every edge."""
        return torch.stack([self.indices, self.destinations])

    @cached_property
    def interior(self) -> Tensor:
        """(own nodes,) bool, nodes that read own rows only: computed while halo rows travel."""
        crossing = offsets_of(self.indices >= self.sources.own)
        return crossing[self.indptr[1:]] == crossing[self.indptr[:-1]]

    def local(self, x: Any) -> Tensor:
        """Own rows of a sharded tensor, or of a plain one that has them, then halo rows.

        Raises:
            MeshshardError: on every rank, where a sharded tensor is divided otherwise.

        Communication: one exchange, forward and backward.
        """
        if isinstance(x, ShardTensor) and (x.sharding != self.sources or x.sharded_dim != 0):
            raise MeshshardError(
                f"rows {tuple(x.shape)} on dim {x.sharded_dim} in {x.sharding} are not divided as "
                f"the graph's sources, on dim 0 in {self.sources}; x.redistribute(sizes) divides "
                "them so"
            )
        return self.domain.exchange(local_of(x), self.exchange)

    def lift(self, x: Any) -> tuple[ShardTensor, ShardTensor]:
        """Rows of the source and of the destination of every edge: x[row] and x[col], (n_edges, …).

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
        """Edge features (n_edges, …), whole on every rank in the order of edge_index, sharded.

        Raises:
            MeshshardError: features of another number of edges, or a graph without an edge_index.
        """
        if self.names is None:
            raise MeshshardError(
                "take: edges of this graph are in no order of an edge_index; make their features "
                "from rows: graph.lift(x), nn.edge_vectors"
            )
        if len(features) != self.edges.total:
            raise MeshshardError(
                f"take: {tuple(features.shape)} features for {n_of(self.edges.total, 'edges')}"
            )
        return ShardTensor.from_local(features[self.names], self.edges)


def _not_an_edge_index(what: str) -> NoShardRule:
    return NoShardRule(
        f"{what}: a ShardGraph stands here, whose edges live with their destinations; "
        f"graph.lift(x) gives x[row] and x[col] of every edge, graph.degree() the in-degrees; "
        f"what changes edges (self-loops, dropped edges) belongs before ShardGraph.from_edge_index"
    )


def _graph(
    nodes: Sharding,
    sources: Sharding,
    arrays: tuple[Tensor, Tensor, Tensor],
    plan: Exchange,
    origin: Tensor | None,
) -> ShardGraph:
    """Names of rows, and the number of edges everywhere, added."""
    indptr, rows, halo = arrays
    counts: Sequence[int] = nodes.domain.share(len(rows))
    origins = nodes.domain.exchange(sources.sources(indptr.device), plan)
    return ShardGraph(nodes, sources, tuple(counts), origin, indptr, rows, halo, origins, plan)


def offsets_of(counts: Tensor) -> Tensor:
    """Where rows begin whose lengths these are, and where the last ends."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))


def _valid(ids: Tensor, indptr: Tensor, nodes: Sharding, sources: Sharding) -> None:
    if len(indptr) != nodes.own + 1 or int(indptr[-1]) != len(ids):
        raise MeshshardError(
            f"{n_of(len(indptr) - 1, 'rows')} with {n_of(int(indptr[-1]), 'edges')} for "
            f"{n_of(nodes.own, 'own nodes')} and {n_of(len(ids), 'sources')}"
        )
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < sources.total:
        raise MeshshardError(
            f"sources {int(ids.min())} to {int(ids.max())} are not all among "
            f"{n_of(sources.total, 'rows')}"
        )
