"""Sums of rows along edges without a row for each edge, and their adjoints.

A sum over in-edges is a sparse matrix, rows taken for edges are one too: each is linear, its
gradient is its transpose, and transposes are sorted once for each graph. Sums run in the order of
the in-edges, so they have the same bits on any ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from meshshard.comm import linear
from meshshard.tensor import ShardGraph
from meshshard.tensor.shard_graph import offsets_of

__all__ = ["Ends", "Take", "Total", "kept", "largest"]

RUN = 2048  # edges whose rows are compared at a time: a few arrays of them stay in the cache
TILE = 2048  # rows of a part, and up to twice as many: they stay in the cache
T = TypeVar("T")
_known: WeakKeyDictionary[ShardGraph, dict[str, Any]] = WeakKeyDictionary()


class Total:
    """Row i is the sum of rows indices[indptr[i]:indptr[i + 1]], each times its weight; or mean."""

    def __init__(
        self,
        indptr: Tensor,
        indices: Tensor,
        columns: int,
        weights: Any = None,
        mean: bool = False,
    ) -> None:
        self.indptr, self.indices, self.columns, self.weights = indptr, indices, columns, weights
        self.rows_out, self.mean = len(indptr) - 1, mean
        self._ones: dict[torch.dtype, Tensor] = {}
        self._tiles: dict[torch.dtype, list[tuple[slice, Tensor]]] = {}
        self.rows: Tensor | None = None
        self.in_order = False
        self._adjoint: linear.Linear | None = None

    @classmethod
    def of_runs(cls, indptr: Tensor) -> Total:
        """Sums of rows that lie one behind the other."""
        n = int(indptr[-1])
        total = cls(indptr, torch.arange(n, device=indptr.device), n)
        total.in_order = True
        total._adjoint = Take(_rows(total), len(indptr) - 1)
        total._adjoint._adjoint = total
        return total

    def __call__(self, x: Tensor) -> Tensor:
        """(rows, …) sums of (columns, …)."""
        flat = _flat(x)
        if not flat.numel() or not len(self.indices):
            return x.new_zeros((self.rows_out, *x.shape[1:]))
        out = self._of(self.matrix(x.dtype), flat, slice(None))
        return out.view(len(out), *x.shape[1:])

    def parts(self, x: Tensor, top: bool = False) -> Iterator[tuple[slice, Tensor]]:
        """Sums or maxima of a matrix, some rows at a time, for what reads them while cached."""
        n = self.rows_out
        if not x.is_cpu or n < 2 * TILE or not len(self.indices):
            yield slice(0, n), _tops(self, x) if top else self(x)
            return
        if x.dtype not in self._tiles:
            self._tiles[x.dtype] = list(tiles(self.matrix(x.dtype)))
        for where, matrix in self._tiles[x.dtype]:
            yield where, torch.sparse.mm(matrix, x, "amax") if top else self._of(matrix, x, where)

    def _of(self, matrix: Tensor, x: Tensor, where: slice) -> Tensor:
        out: Tensor = torch.sparse.mm(matrix, x, *_how("sum", x))
        return out.div_(self._counts[where].to(x.dtype)) if self.mean else out

    @cached_property
    def _counts(self) -> Tensor:
        return self.indptr.diff().clamp(min=1)[:, None]

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """The same as a sparse matrix of torch."""
        if dtype not in self._ones:
            weights = self.weights
            if weights is None:
                weights = torch.ones(len(self.indices), device=self.indices.device)
            size = (self.rows_out, self.columns)
            self._ones[dtype] = _csr(self.indptr, self.indices, weights.to(dtype), size)
        return self._ones[dtype]

    def adjoint(self) -> linear.Linear:
        """Sums over the rows that read a row."""
        if self._adjoint is None:
            order = torch.argsort(self.indices, stable=True)
            begin = offsets_of(torch.bincount(self.indices, minlength=self.columns))
            weights = self.weights
            if self.mean:  # of one source, in the precision that the largest type asks for
                weights = (1 / self._counts[:, 0].double())[_rows(self)]
            weights = None if weights is None else weights[order]
            back = Total(begin, _rows(self)[order], len(self.indptr) - 1, weights)
            back._adjoint, self._adjoint = self, back
        return self._adjoint


class Take:
    """Row i is row index[i]; the transpose is a sum."""

    def __init__(self, index: Tensor, rows: int) -> None:
        self.index, self.rows = index, rows
        self._adjoint: linear.Linear | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """(len(index), …) rows of (rows, …)."""
        return x.index_select(0, self.index)

    def adjoint(self) -> linear.Linear:
        """Sums over the places that a row was taken to."""
        if self._adjoint is None:
            order = torch.argsort(self.index, stable=True)
            begin = offsets_of(torch.bincount(self.index, minlength=self.rows))
            back = Total(begin, order, len(self.index))
            back._adjoint, self._adjoint = self, back
        return self._adjoint


class Ends:
    """Rows of nodes for the edges of a graph, and sums of rows of edges at their nodes.

    Attributes:
        sources: (own edges, …) rows of (n_local, …) rows.
        destinations: (own edges, …) rows of (own nodes, …) rows.
        arriving: (own nodes, …) sums of (own edges, …) rows.
    """

    def __init__(self, graph: ShardGraph) -> None:
        self.sources = Take(graph.indices, graph.n_local)
        self.arriving = Total.of_runs(graph.indptr)
        self.destinations: Any = self.arriving.adjoint()

    @classmethod
    def of(cls, graph: ShardGraph) -> Ends:
        """Those of a graph, kept as long as it is."""
        return kept(graph, "ends", lambda: cls(graph))


def kept(graph: ShardGraph, what: str, make: Callable[[], T]) -> T:
    """Something made of a graph, once."""
    known = _known.setdefault(graph, {})
    if what not in known:
        known[what] = make()
    found: T = known[what]
    return found


def largest(sums: Total, x: Tensor) -> Tensor:
    """(rows, …) the largest of the rows that a sum would add, zero where there are none.

    Ties share the gradient, as PyG's maximum does.
    """
    out: Tensor = _Largest.apply(x, sums)  # type: ignore[no-untyped-call]
    return out


class _Largest(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sums: Total) -> Tensor:
        """The value."""
        flat = _flat(x)
        out = _tops(sums, flat)
        ctx.save_for_backward(flat, out)
        ctx.sums = sums
        return out.view(len(out), *x.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Equal parts for all ties."""
        flat, out = ctx.saved_tensors
        sums: Total = ctx.sums
        again = torch.is_grad_enabled() and grad.requires_grad
        part = Spread(sums, flat, out)
        back = linear.apply(part, grad) if again else part(grad)
        return back, None


class Spread:
    """The gradient of a maximum: rows to those that it was reached in, in equal parts."""

    def __init__(self, sums: Total, x: Tensor, top: Tensor, first: int = 0) -> None:
        self.sums, self.x, self.top = sums, x, top
        self.first = first  # which row the first of `top` is

    def __call__(self, x: Tensor) -> Tensor:
        """(columns, …) of (rows, …)."""
        out = torch.zeros_like(self.x)
        self.add(out, x.reshape(self.top.shape))
        return out.view(len(out), *x.shape[1:])

    def add(self, out: Tensor, x: Tensor) -> None:
        """The same, added to what is there, some rows at a time, which stay in the cache."""
        for first, last, edges in self._runs():
            index, rows, hit = self._hits(edges, first)
            ties = hit.new_zeros(last - first, hit.shape[1]).index_add_(0, rows, hit)
            part = hit.mul_((x[first:last] / ties.clamp_(min=1)).index_select(0, rows))
            if self.sums.in_order:
                out[edges] = part
            else:
                out.index_add_(0, index, part)

    def adjoint(self) -> linear.Linear:
        """The mean of the rows that tie."""
        return Gathered(self)

    def _hits(self, edges: slice, first: int) -> tuple[Tensor, Tensor, Tensor]:
        """Columns and rows of some edges, and where they reach the maximum."""
        index, rows = self.sums.indices[edges], _rows(self.sums)[edges] - self.first
        x = self.x[edges].clone() if self.sums.in_order else self.x.index_select(0, index)
        return index, rows - first, x.eq_(self.top.index_select(0, rows))

    def _runs(self) -> Iterator[tuple[int, int, slice]]:
        """Runs of rows with about so many edges, and their edges."""
        n = len(self.top)
        begin = self.sums.indptr[self.first : self.first + n + 1]
        wanted = torch.arange(int(begin[0]), int(begin[-1]) + RUN, RUN, device=begin.device)
        cuts = torch.searchsorted(begin, wanted).clamp(max=n)
        rows = sorted({0, *cuts.tolist(), n})
        edges = begin[torch.tensor(rows)].tolist()
        for (a, b), (c, d) in zip(pairwise(rows), pairwise(edges), strict=True):
            if d > c:
                yield a, b, slice(c, d)


class Gathered:
    """The transpose of Spread."""

    def __init__(self, spread: Spread) -> None:
        self.spread = spread

    def __call__(self, x: Tensor) -> Tensor:
        """(rows, …) of (columns, …)."""
        spread, flat = self.spread, _flat(x)
        out = torch.zeros_like(spread.top)
        for first, last, edges in spread._runs():
            index, rows, hit = spread._hits(edges, first)
            ties = hit.new_zeros(last - first, hit.shape[1]).index_add_(0, rows, hit)
            added = torch.zeros_like(ties).index_add_(0, rows, hit * flat.index_select(0, index))
            out[first:last] = added / ties.clamp_(min=1)
        return out.view(len(out), *x.shape[1:])

    def adjoint(self) -> linear.Linear:
        """The way back."""
        return self.spread


def _rows(sums: Total) -> Tensor:
    if sums.rows is None:
        count = sums.indptr.diff()
        sums.rows = torch.repeat_interleave(torch.arange(len(count), device=count.device), count)
    return sums.rows


def _flat(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], math.prod(x.shape[1:]))


def _tops(sums: Total, x: Tensor) -> Tensor:
    if len(sums.indices) and x.is_cpu:
        out: Tensor = torch.sparse.mm(sums.matrix(x.dtype), x, "amax")
        return out
    rows = _rows(sums)[:, None].expand(-1, x.shape[1])
    return x.new_zeros(sums.rows_out, x.shape[1]).scatter_reduce_(
        0, rows, x[sums.indices], "amax", include_self=False
    )


def tiles(matrix: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Runs of rows of a sparse matrix, about alike in number, and the matrix of each."""
    indptr, indices, values = matrix.crow_indices(), matrix.col_indices(), matrix.values()
    n = matrix.shape[0]
    cuts = torch.linspace(0, n, max(1, n // TILE) + 1, dtype=torch.float64).long().tolist()
    for a, b in pairwise(cuts):
        edges = slice(int(indptr[a]), int(indptr[b]))
        size = (b - a, matrix.shape[1])
        begin = indptr[a : b + 1] - indptr[a]
        yield slice(a, b), _csr(begin, indices[edges], values[edges], size)


def _csr(indptr: Tensor, indices: Tensor, values: Tensor, size: tuple[int, int]) -> Tensor:
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse")  # that they are in beta, said once by torch
        return torch.sparse_csr_tensor(indptr, indices, values, size)


def _how(reduce: str, x: Tensor) -> tuple[str, ...]:
    """The reduction by name: a kernel in the order of the rows, which there is on the CPU."""
    return (reduce,) if x.is_cpu else ()
