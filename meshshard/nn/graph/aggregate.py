"""aggregate: sums, means and maxima over in-edges, where a message is the source's row as it is.

The rows of nodes that read no halo are computed while the halo travels. No row is made for each
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
from meshshard.nn.graph._sparse import Total, kept, largest
from meshshard.tensor import ShardGraph, ShardTensor
from meshshard.tensor.shard_graph import offsets_of

__all__ = ["NeighborSum", "aggregate", "in_edges"]


def aggregate(x: Any, graph: ShardGraph, reduce: str = "sum") -> Any:
    """Sum, mean or maximum over the in-edges of every node, zero where there are none.

    Args:
        x: (n_sources, …) rows of the sources, sharded; or plain on one rank.
        graph: the edges.
        reduce: "sum", "mean" or "max", whose gradient all ties share.

    Returns:
        (n_nodes, …) the same kind of tensor, divided as `graph.nodes`.

    Raises:
        MeshshardError: another reduction, or other rows than the sources.

    Communication: one exchange, forward and backward, of the halo's rows.
    """
    rows = _own(x, graph)
    if reduce == "max":
        out = largest(in_edges(graph), graph.local(rows))
    elif reduce in ("sum", "mean"):
        out = linear.apply(NeighborSum.of(graph, reduce == "mean"), rows)
    else:
        raise MeshshardError(f"aggregate: reduction {reduce!r} is unknown: sum, mean or max")
    return ShardTensor.from_local(out, graph.nodes) if type(x) is ShardTensor else out


def _own(x: Any, graph: ShardGraph) -> Tensor:
    sharded = type(x) is ShardTensor
    if sharded and (x.sharding != graph.sources or x.sharded_dim != 0):
        raise MeshshardError(
            f"aggregate: rows in {x.sharding} on dim {x.sharded_dim}, the graph's sources are in "
            f"{graph.sources}"
        )
    if not sharded and (graph.domain.size > 1 or x.shape[0] != graph.sources.total):
        raise MeshshardError(
            f"aggregate: a plain tensor {tuple(x.shape)} for "
            f"{n_of(graph.sources.total, 'sources')} on {n_of(graph.domain.size, 'ranks')}; "
            f" shard(x, domain, graph.sources)"
        )
    rows: Tensor = x.to_local() if sharded else x
    return rows


def in_edges(graph: ShardGraph) -> Total:
    """Sums over in-edges of local rows, kept as long as the graph is."""
    return kept(graph, "sums", lambda: Total(graph.indptr, graph.indices, graph.n_local))


class NeighborSum:
    """Own rows to sums or means over in-edges, as one linear operator with its exchange.

    Split by destinations, in whose rows the order of summation stays: those that read own rows only
    are summed while the halo travels; the others, a few, from the rows that they read.
    """

    def __init__(
        self,
        plan: Exchange,
        indptr: Tensor,
        indices: Tensor,
        weights: Any = None,
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
        self.inner = Total(
            offsets_of(torch.where(border, 0, count)),
            indices[inner],
            own,
            _of(weights, inner),
            mean,
        )
        read = torch.unique(indices[outer])
        self.read = read[read < own]
        columns = len(self.read) + plan.n_halo
        place = torch.where(
            indices[outer] < own,
            torch.searchsorted(self.read, indices[outer]),
            indices[outer] - own + len(self.read),
        )
        self.outer = Total(offsets_of(count[border]), place, columns, _of(weights, outer), mean)

    @staticmethod
    def of(graph: ShardGraph, mean: bool = False) -> NeighborSum:
        """The plain sum or mean over the in-edges of a graph, kept as long as it is."""
        given = graph.exchange, graph.indptr, graph.indices
        return kept(graph, "mean" if mean else "sum", lambda: NeighborSum(*given, mean=mean))

    def __call__(self, x: Tensor) -> Tensor:
        """(own nodes, …) sums of (own sources, …) rows."""
        running = self.plan.start(x)
        out = self.inner(x)
        for border, rows in self._arrived(x, running):
            out.index_copy_(0, border, rows)
        return out

    def parts(self, x: Tensor) -> Iterator[tuple[Any, Tensor]]:
        """The same of a matrix: all rows run by run, then those that replace some of them."""
        running = self.plan.start(x)
        yield from self.inner.parts(x)
        yield from self._arrived(x, running)

    def _arrived(self, x: Tensor, running: PendingExchange) -> Iterator[tuple[Tensor, Tensor]]:
        halo = running.wait_halo()
        if len(self.border):
            yield self.border, self.outer(torch.cat([x.index_select(0, self.read), halo]))

    def adjoint(self) -> NeighborSpread:
        """Rows of nodes to those that they have read."""
        return NeighborSpread(self)


class NeighborSpread:
    """The transpose of NeighborSum: gradients of the halo travel while the others are summed."""

    def __init__(self, sums: NeighborSum) -> None:
        self.sums = sums

    def __call__(self, x: Tensor) -> Tensor:
        """(own sources, …) sums of (own nodes, …) rows."""
        sent = self._send(x)
        out = self.sums.inner.adjoint()(x)
        for rows, more in self._arrived(*sent):
            out.index_add_(0, rows, more)
        return out

    def parts(self, x: Tensor) -> Iterator[tuple[Any, Tensor]]:
        """The same of a matrix: all rows run by run, then what is added to some of them."""
        sent = self._send(x)
        inner: Any = self.sums.inner.adjoint()
        yield from inner.parts(x)
        yield from self._arrived(*sent)

    def _send(self, x: Tensor) -> tuple[Tensor, Any]:
        sums = self.sums
        outer = sums.outer.adjoint()(x.index_select(0, sums.border))
        return outer, sums.plan.start_back(outer[len(sums.read) :].contiguous())

    def _arrived(self, outer: Tensor, pending: Any) -> Iterator[tuple[Tensor, Tensor]]:
        read = self.sums.read
        if len(read):
            yield read, outer[: len(read)]
        if pending is not None:
            yield self.sums.plan.send_rows, pending.wait()

    def adjoint(self) -> NeighborSum:
        """The way back."""
        return self.sums


def _of(weights: Any, edges: Tensor) -> Any:
    return None if weights is None else weights[edges]
