"""aggregate: sums, means and maxima over in-edges, where a message is the source's row as it is.

The rows of nodes that read no halo are computed while the halo travels. No row is made for each
edge: sums are products with a sparse matrix (`_sparse`), and so are their gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshshard.comm import Exchange, linear
from meshshard.errors import MeshshardError
from meshshard.nn._sparse import Total, kept, largest, starts
from meshshard.tensor import ShardGraph, ShardTensor

__all__ = ["NeighbourSum", "aggregate"]


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
        out = largest(kept(graph, "sums", lambda: _sums(graph)), graph.local(rows))
    elif reduce in ("sum", "mean"):
        out = linear.apply(kept(graph, "sum", lambda: NeighbourSum.of(graph)), rows)
    else:
        raise MeshshardError(f"aggregate: reduction {reduce!r} is unknown: sum, mean or max")
    if reduce == "mean":
        count = graph.indptr.diff().clamp(min=1).to(out.dtype)
        out = out / count.view(-1, *[1] * (out.ndim - 1))
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
            f"aggregate: a plain tensor {tuple(x.shape)} for {graph.sources.total} sources on "
            f"{graph.domain.size} ranks; shard(x, domain, graph.sources)"
        )
    rows: Tensor = x.to_local() if sharded else x
    return rows


def _sums(graph: ShardGraph) -> Total:
    return Total(graph.indptr, graph.indices, graph.n_local)


class NeighbourSum:
    """Own rows to sums over in-edges, as one linear operator with its exchange.

    Split by destinations, in whose rows the order of summation stays: those that read own rows only
    are summed while the halo travels; the others, a few, from the rows that they read.
    """

    def __init__(self, plan: Exchange, indptr: Tensor, indices: Tensor, weights: Any) -> None:
        own = plan.n_owned
        count = indptr.diff()
        rows = torch.repeat_interleave(torch.arange(len(count), device=count.device), count)
        crossing = starts((indices >= own).to(torch.int64))
        border = crossing[indptr[1:]] > crossing[indptr[:-1]]
        inner, outer = ~border[rows], border[rows]
        self.plan = plan
        self.border = torch.nonzero(border)[:, 0]
        self.inner = Total(
            starts(torch.where(border, 0, count)), indices[inner], own, _of(weights, inner)
        )
        read = torch.unique(indices[outer])
        self.read = read[read < own]
        columns = len(self.read) + plan.n_halo
        place = torch.where(
            indices[outer] < own,
            torch.searchsorted(self.read, indices[outer]),
            indices[outer] - own + len(self.read),
        )
        self.outer = Total(starts(count[border]), place, columns, _of(weights, outer))

    @classmethod
    def of(cls, graph: ShardGraph) -> NeighbourSum:
        """The plain sum over the in-edges of a graph."""
        return cls(graph.exchange, graph.indptr, graph.indices, None)

    def __call__(self, x: Tensor) -> Tensor:
        """(own nodes, …) sums of (own sources, …) rows."""
        running = self.plan.start(x)
        out = self.inner(x)
        halo = running.arrived()
        if len(self.border):
            rows = torch.cat([x.index_select(0, self.read), halo])
            out.index_copy_(0, self.border, self.outer(rows))
        return out

    def adjoint(self) -> NeighbourSpread:
        """Rows of nodes to those that they have read."""
        return NeighbourSpread(self)


class NeighbourSpread:
    """The transpose of NeighbourSum: gradients of the halo travel while the others are summed."""

    def __init__(self, sums: NeighbourSum) -> None:
        self.sums = sums

    def __call__(self, x: Tensor) -> Tensor:
        """(own sources, …) sums of (own nodes, …) rows."""
        sums = self.sums
        outer = sums.outer.adjoint()(x.index_select(0, sums.border))
        pending = sums.plan.start_back(outer[len(sums.read) :].contiguous())
        out = sums.inner.adjoint()(x)
        out.index_add_(0, sums.read, outer[: len(sums.read)])
        if pending is not None:
            out.index_add_(0, sums.plan.send_rows, pending.wait())
        return out

    def adjoint(self) -> NeighbourSum:
        """The way back."""
        return self.sums


def _of(weights: Any, edges: Tensor) -> Any:
    return None if weights is None else weights[edges]
