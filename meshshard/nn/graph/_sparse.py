"""Segment sums and maxima over in-edges that store no row per edge, and their adjoints.

A sum over in-edges is a product with a sparse CSR matrix. It is linear, so its gradient is a
product with the transpose, which is sorted once per graph. Every sum runs in the order of the
in-edges, so its bits do not depend on the number of ranks.

On the CPU, `SegmentSum.tiles` yields results of some 2,000 rows that are still in the cache when
the caller multiplies them; see `nn/conv/_aggregate_linear.py` for the speedup.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from meshshard.comm import linear
from meshshard.nn.graph._cached_on import cached_on
from meshshard.tensor import ShardGraph
from meshshard.tensor.shard_graph import offsets_of

__all__ = ["Incidence", "IndexSelect", "MaxBackward", "SegmentSum", "segment_max"]

RUN = 2048  # edges whose rows are compared at a time, so that they stay in the cache
TILE = 2048  # a tile has TILE to 2 * TILE - 1 rows


class SegmentSum:
    """Row i is the weighted sum, or the mean, of rows indices[indptr[i]:indptr[i + 1]].

    Attributes:
        indptr: (rows_out + 1,) int64 where the segment of each row begins.
        indices: (n_entries,) int64 row that each entry reads.
        columns: number of rows that are read from.
        weights: (n_entries,) weight of each entry, or None for 1.
        mean: divide by the number of entries.
        rows_out: number of rows of the result.
        in_order: whether `indices` are 0, 1, 2, …
    """

    def __init__(
        self,
        indptr: Tensor,
        indices: Tensor,
        columns: int,
        weights: Tensor | None = None,
        mean: bool = False,
    ) -> None:
        self.indptr, self.indices, self.columns = indptr, indices, columns
        self.weights, self.mean = weights, mean
        self.rows_out = len(indptr) - 1
        self.in_order = False
        self._matrices: dict[torch.dtype, Tensor] = {}
        self._tiles: dict[torch.dtype, list[tuple[slice, Tensor]]] = {}
        self._adjoint: linear.Linear | None = None

    @classmethod
    def of_runs(cls, indptr: Tensor) -> SegmentSum:
        """Sums of consecutive rows: row i is the sum of rows indptr[i]:indptr[i + 1]."""
        n = int(indptr[-1])
        sums = cls(indptr, torch.arange(n, device=indptr.device), n)
        sums.in_order = True
        select = IndexSelect(sums.rows, sums.rows_out)
        sums._adjoint, select._adjoint = select, sums
        return sums

    @cached_property
    def rows(self) -> Tensor:
        """(n_entries,) int64 row of the result that each entry is added to."""
        count = self.indptr.diff()
        return torch.repeat_interleave(torch.arange(len(count), device=count.device), count)

    @cached_property
    def _counts(self) -> Tensor:
        return self.indptr.diff().clamp(min=1)[:, None]

    def __call__(self, x: Tensor) -> Tensor:
        """(rows_out, …) sums of (columns, …) rows."""
        flat = _flat(x)
        if not flat.numel() or not len(self.indices):
            return x.new_zeros((self.rows_out, *x.shape[1:]))
        out = self._sum(self._matrix(x.dtype), flat, slice(None))
        return out.view(len(out), *x.shape[1:])

    def max(self, x: Tensor) -> Tensor:
        """(rows_out, channels) maxima of the same rows of a matrix; zero for empty segments."""
        if len(self.indices) and x.is_cpu:
            out: Tensor = torch.sparse.mm(self._matrix(x.dtype), x, "amax")
            return out
        rows = self.rows[:, None].expand(-1, x.shape[1])
        zeros = x.new_zeros(self.rows_out, x.shape[1])
        return zeros.scatter_reduce_(0, rows, x[self.indices], "amax", include_self=False)

    def tiles(self, x: Tensor, reduce: str = "sum") -> Iterator[tuple[slice, Tensor]]:
        """Yield blocks of consecutive rows, and their sums (or means) or maxima ("max")."""
        n = self.rows_out
        if not x.is_cpu or n < 2 * TILE or not len(self.indices):
            yield slice(0, n), self.max(x) if reduce == "max" else self(x)
            return
        if x.dtype not in self._tiles:
            self._tiles[x.dtype] = list(_row_tiles(self._matrix(x.dtype)))
        for rows, matrix in self._tiles[x.dtype]:
            if reduce == "max":
                yield rows, torch.sparse.mm(matrix, x, "amax")
            else:
                yield rows, self._sum(matrix, x, rows)

    def adjoint(self) -> linear.Linear:
        """The transpose: each row is the sum of the results that it was added to."""
        if self._adjoint is None:
            order, indptr = _sorted_by(self.indices, self.columns)
            weights = self.weights
            if self.mean:  # float64, cast to the dtype of each input later
                weights = (1 / self._counts[:, 0].double())[self.rows]
            weights = None if weights is None else weights[order]
            back = SegmentSum(indptr, self.rows[order], self.rows_out, weights)
            back._adjoint, self._adjoint = self, back
        return self._adjoint

    def _sum(self, matrix: Tensor, x: Tensor, rows: slice) -> Tensor:
        ordered = ("sum",) if x.is_cpu else ()  # a CPU kernel that adds in the order of entries
        out: Tensor = torch.sparse.mm(matrix, x, *ordered)
        return out.div_(self._counts[rows].to(x.dtype)) if self.mean else out

    def _matrix(self, dtype: torch.dtype) -> Tensor:
        """The operator as a sparse CSR tensor."""
        if dtype not in self._matrices:
            weights = self.weights
            if weights is None:
                weights = torch.ones(len(self.indices), device=self.indices.device)
            size = (self.rows_out, self.columns)
            self._matrices[dtype] = _csr(self.indptr, self.indices, weights.to(dtype), size)
        return self._matrices[dtype]


class IndexSelect:
    """Row i is row index[i]; the adjoint is a SegmentSum."""

    def __init__(self, index: Tensor, rows: int) -> None:
        self.index, self.rows = index, rows
        self._adjoint: linear.Linear | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """(len(index), …) selected rows of x (rows, …)."""
        return x.index_select(0, self.index)

    def adjoint(self) -> linear.Linear:
        """The transpose: sums over the positions at which a row was selected."""
        if self._adjoint is None:
            order, indptr = _sorted_by(self.index, self.rows)
            back = SegmentSum(indptr, order, len(self.index))
            back._adjoint, self._adjoint = self, back
        return self._adjoint


class Incidence:
    """Operators between the nodes and the edges of a graph.

    Attributes:
        sources: maps (n_local, …) rows to (n_owned_edges, …), the source of every edge.
        destinations: maps (n_owned, …) rows to (n_owned_edges, …), the destination of every edge.
        incoming: maps (n_owned_edges, …) to (n_owned, …), sums over the in-edges of every node.
    """

    def __init__(self, graph: ShardGraph) -> None:
        self.sources = IndexSelect(graph.indices, graph.n_local)
        self.incoming = SegmentSum.of_runs(graph.indptr)
        self.destinations: Any = self.incoming.adjoint()

    @classmethod
    def of(cls, graph: ShardGraph) -> Incidence:
        """The operators of a graph, cached."""
        return cached_on(graph, "incidence", lambda: cls(graph))


def segment_max(sums: SegmentSum, x: Tensor) -> Tensor:
    """(rows_out, …) maxima of the rows that `sums` would add; zero for empty segments.

    Ties share the gradient equally, as in PyG's max aggregation.
    """
    out: Tensor = _SegmentMax.apply(x, sums)  # type: ignore[no-untyped-call]
    return out


class _SegmentMax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sums: SegmentSum) -> Tensor:
        flat = _flat(x)
        top = sums.max(flat)
        ctx.save_for_backward(flat, top)
        ctx.sums = sums
        return top.view(len(top), *x.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        flat, top = ctx.saved_tensors
        return linear.apply(MaxBackward(ctx.sums, flat, top), grad), None


class MaxBackward:
    """The gradient of a segment maximum: rows that reach it share it equally.

    Attributes:
        sums: the segments.
        x: (columns, channels) the input of the maximum.
        top: (rows, channels) its result, all rows or a run of them.
        first: the row of the result that `top` begins with.
    """

    def __init__(self, sums: SegmentSum, x: Tensor, top: Tensor, first: int = 0) -> None:
        self.sums, self.x, self.top, self.first = sums, x, top, first

    def __call__(self, x: Tensor) -> Tensor:
        """(columns, …) gradients of the input from (rows, …) gradients of the result."""
        out = torch.zeros_like(self.x)
        self.add_to(out, x.reshape(self.top.shape))
        return out.view(len(out), *x.shape[1:])

    def add_to(self, out: Tensor, grad: Tensor) -> None:
        """Add the gradients of the input to `out`, block by block to stay in the cache."""
        for rows, edges, to, hit, ties in self.blocks():
            part = hit.mul_((grad[rows] / ties).index_select(0, to))
            if self.sums.in_order:
                out[edges] = part
            else:
                out.index_add_(0, self.sums.indices[edges], part)

    def adjoint(self) -> linear.Linear:
        """The transpose: the mean of the rows that reach the maximum."""
        return _MeanOfTies(self)

    def blocks(self) -> Iterator[tuple[slice, slice, Tensor, Tensor, Tensor]]:
        """Yield blocks of rows with their edges, and whether each edge reaches the maximum.

        Yields:
            rows and edges of the block, (edges,) the row in the block of each edge, (edges,
            channels) 1 where it reaches the maximum, and (rows, channels) how many do.
        """
        for rows, edges in self._runs():
            to = self.sums.rows[edges] - (self.first + rows.start)
            x = self.x
            index = self.sums.indices[edges]
            hit = x[edges].clone() if self.sums.in_order else x.index_select(0, index)
            hit.eq_(self.top[rows].index_select(0, to))
            ties = hit.new_zeros(rows.stop - rows.start, hit.shape[1]).index_add_(0, to, hit)
            yield rows, edges, to, hit, ties.clamp_(min=1)

    def _runs(self) -> Iterator[tuple[slice, slice]]:
        """Yield runs of rows that have about RUN edges, and those edges."""
        n = len(self.top)
        begin = self.sums.indptr[self.first : self.first + n + 1]
        wanted = torch.arange(int(begin[0]), int(begin[-1]) + RUN, RUN, device=begin.device)
        cuts = torch.searchsorted(begin, wanted).clamp(max=n)
        rows = sorted({0, *cuts.tolist(), n})
        edges = begin[torch.tensor(rows)].tolist()
        for (a, b), (c, d) in zip(pairwise(rows), pairwise(edges), strict=True):
            if d > c:
                yield slice(a, b), slice(c, d)


class _MeanOfTies:
    """The adjoint of MaxBackward."""

    def __init__(self, forward: MaxBackward) -> None:
        self.forward = forward

    def __call__(self, x: Tensor) -> Tensor:
        flat, sums = _flat(x), self.forward.sums
        out = torch.zeros_like(self.forward.top)
        for rows, edges, to, hit, ties in self.forward.blocks():
            added = hit.mul_(flat.index_select(0, sums.indices[edges]))
            out[rows] = torch.zeros_like(ties).index_add_(0, to, added) / ties
        return out.view(len(out), *x.shape[1:])

    def adjoint(self) -> linear.Linear:
        return self.forward


def _flat(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], math.prod(x.shape[1:]))


def _sorted_by(index: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The stable order that sorts an index, and the (n + 1,) offsets of its values in it."""
    return torch.argsort(index, stable=True), offsets_of(torch.bincount(index, minlength=n))


def _row_tiles(matrix: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield runs of rows of a CSR matrix, about equally long, and the matrix of each."""
    indptr, indices, values = matrix.crow_indices(), matrix.col_indices(), matrix.values()
    n = matrix.shape[0]
    cuts = torch.linspace(0, n, max(1, n // TILE) + 1, dtype=torch.float64).long().tolist()
    for a, b in pairwise(cuts):
        edges = slice(int(indptr[a]), int(indptr[b]))
        size = (b - a, matrix.shape[1])
        begin = indptr[a : b + 1] - indptr[a]
        yield slice(a, b), _csr(begin, indices[edges], values[edges], size)


def _csr(indptr: Tensor, indices: Tensor, values: Tensor, size: tuple[int, int]) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse")  # torch's notice that CSR is in beta
        return torch.sparse_csr_tensor(indptr, indices, values, size)
