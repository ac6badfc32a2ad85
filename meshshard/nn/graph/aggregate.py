"""aggregate: sums, means and maxima over in-edges, where a message is the source's row unchanged.

Nodes that read owned rows only are computed while the halo is being exchanged. No row is stored per
edge: sums are products with a sparse matrix (`_sparse`), and so are their gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from meshshard.comm import Exchange, linear
from meshshard.comm.exchange import PendingExchange
from meshshard.errors import MeshshardError, n_of
from meshshard.nn.graph._cached_on import cached_on
from meshshard.nn.graph._sparse import SegmentSum, segment_max
from meshshard.tensor import ShardGraph, ShardTensor
from meshshard.tensor.shard_graph import offsets_of

__all__ = ["NeighborSum", "aggregate", "in_edge_sum"]


def aggregate(x: Any, graph: ShardGraph, reduce: str = "sum") -> Any:
    """Sum, mean or maximum over the in-edges of every node; zero for nodes without in-edges.

    Args:
        x: (n_sources, …) rows of the sources, sharded; or plain on one rank.
        graph: the edges.
        reduce: "sum", "mean" or "max". Ties of a maximum share its gradient.

    Returns:
        (n_nodes, …) the same kind of tensor as `x`, sharded like `graph.nodes`.

    Raises:
        MeshshardError: an unknown reduction, or `x` is not sharded like `graph.sources`.

    Communication: one exchange of halo rows forward and one backward.
    """
    rows = _source_rows(x, graph)
    if reduce == "max":
        out = segment_max(in_edge_sum(graph), graph.local(rows))
    elif reduce in ("sum", "mean"):
        out = linear.apply(NeighborSum.of(graph, reduce == "mean"), rows)
    else:
        raise MeshshardError(f"aggregate: unknown reduction {reduce!r}; use sum, mean or max")
    return ShardTensor.from_local(out, graph.nodes) if type(x) is ShardTensor else out


def _source_rows(x: Any, graph: ShardGraph) -> Tensor:
    """The owned rows of `x`, once they are checked to be those of the sources."""
    sharded = type(x) is ShardTensor
    if sharded and (x.sharding != graph.sources or x.sharded_dim != 0):
        raise MeshshardError(
            f"aggregate: x is sharded on dim {x.sharded_dim} with {x.sharding}; expected dim 0 "
            f"with {graph.sources}, as the graph's sources"
        )
    if not sharded and (graph.domain.size > 1 or x.shape[0] != graph.sources.total):
        raise MeshshardError(
            f"aggregate: x is a plain tensor {tuple(x.shape)}; expected "
            f"{n_of(graph.sources.total, 'sources')}, sharded on "
            f"{n_of(graph.domain.size, 'ranks')}: shard(x, domain, graph.sources)"
        )
    rows: Tensor = x.to_local() if sharded else x
    return rows


def in_edge_sum(graph: ShardGraph) -> SegmentSum:
    """The sum over in-edges of local rows (owned, then halo), cached on the graph."""
    return cached_on(
        graph, "in-edge sum", lambda: SegmentSum(graph.indptr, graph.indices, graph.n_local)
    )


class NeighborSum:
    """Sums or means of owned rows over in-edges, with their exchange, as one linear operator.

    Split by destinations, so that the order of every sum is that of its in-edges: interior nodes,
    which read owned rows only, are summed while the halo is being exchanged, border nodes after it.
    """

    def __init__(
        self,
        plan: Exchange,
        indptr: Tensor,
        indices: Tensor,
        weights: Tensor | None = None,
        mean: bool = False,
    ) -> None:
        own = plan.n_owned
        count = indptr.diff()
        rows = torch.repeat_interleave(torch.arange(len(count), device=count.device), count)
        crossing = offsets_of((indices >= own).to(torch.int64))
        border = crossing[indptr[1:]] > crossing[indptr[:-1]]
        inner, outer = ~border[rows], border[rows]
        self.plan, self.rows_out = plan, len(count)
        self.border = torch.nonzero(border)[:, 0]
        self.interior = SegmentSum(
            offsets_of(torch.where(border, 0, count)),
            indices[inner],
            own,
            None if weights is None else weights[inner],
            mean,
        )
        read = torch.unique(indices[outer])
        self.read = read[read < own]  # owned rows that border nodes read
        columns = len(self.read) + plan.n_halo
        place = torch.where(
            indices[outer] < own,
            torch.searchsorted(self.read, indices[outer]),
            indices[outer] - own + len(self.read),
        )
        weights = None if weights is None else weights[outer]
        self.bordering = SegmentSum(offsets_of(count[border]), place, columns, weights, mean)

    @staticmethod
    def of(graph: ShardGraph, mean: bool = False) -> NeighborSum:
        """The unweighted sum or mean over the in-edges of a graph, cached on it."""
        arrays = graph.exchange, graph.indptr, graph.indices
        return cached_on(graph, ("neighbor sum", mean), lambda: NeighborSum(*arrays, mean=mean))

    def __call__(self, x: Tensor) -> Tensor:
        """(own nodes, …) sums of (own sources, …) rows."""
        pending = self.plan.start(x)
        out = self.interior(x)
        for border, rows in self._border_sums(x, pending):
            out.index_copy_(0, border, rows)
        return out

    def tiles(self, x: Tensor) -> Iterator[tuple[Any, Tensor]]:
        """Yield slices of all rows with their sums, then border rows, which replace theirs."""
        pending = self.plan.start(x)
        yield from self.interior.tiles(x)
        yield from self._border_sums(x, pending)

    def _border_sums(self, x: Tensor, pending: PendingExchange) -> Iterator[tuple[Tensor, Tensor]]:
        halo = pending.wait_halo()
        if len(self.border):
            yield self.border, self.bordering(torch.cat([x.index_select(0, self.read), halo]))

    def adjoint(self) -> NeighborSumAdjoint:
        """The transpose: every node's row goes to the rows that it reads."""
        return NeighborSumAdjoint(self)


class NeighborSumAdjoint:
    """The transpose of NeighborSum; interior rows are summed while halo gradients are sent."""

    def __init__(self, forward: NeighborSum) -> None:
        self.forward = forward

    def __call__(self, x: Tensor) -> Tensor:
        """(own sources, …) sums of (own nodes, …) rows."""
        sent = self._send(x)
        out = self.forward.interior.adjoint()(x)
        for rows, more in self._border_parts(*sent):
            out.index_add_(0, rows, more)
        return out

    def tiles(self, x: Tensor) -> Iterator[tuple[Any, Tensor]]:
        """Yield slices of all rows with their sums, then indices of rows and what to add there."""
        sent = self._send(x)
        interior: Any = self.forward.interior.adjoint()
        yield from interior.tiles(x)
        yield from self._border_parts(*sent)

    def _send(self, x: Tensor) -> tuple[Tensor, Any]:
        """Gradients of what border nodes read; those of halo rows are sent to their owners."""
        sums = self.forward
        read = sums.bordering.adjoint()(x.index_select(0, sums.border))
        return read, sums.plan.start_back(read[len(sums.read) :].contiguous())

    def _border_parts(self, parts: Tensor, pending: Any) -> Iterator[tuple[Tensor, Tensor]]:
        read = self.forward.read
        if len(read):
            yield read, parts[: len(read)]
        if pending is not None:
            yield self.forward.plan.send_rows, pending.wait()

    def adjoint(self) -> NeighborSum:
        """The operator itself."""
        return self.forward
