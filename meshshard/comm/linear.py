"""Linear collectives and their adjoints: one autograd function differentiates all of them.

A collective that is linear in its rows is an operator A. Its gradient is the adjoint A*, which is
another collective, whose gradient is A again. So `apply` differentiates all of them, to any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from meshshard.comm.ranks import Ranks
from meshshard.errors import DomainError

__all__ = [
    "AllToAll",
    "Gather",
    "Redistribute",
    "Replicate",
    "Shift",
    "Sum",
    "Window",
    "apply",
    "largest",
]


class Linear(Protocol):
    """A linear operator on the rows of all ranks."""

    def __call__(self, x: Tensor) -> Tensor:
        """The part of the result that this rank holds."""

    def adjoint(self) -> Linear:
        """The operator that maps gradients of the result to gradients of the argument."""


def apply(op: Linear, x: Tensor) -> Tensor:
    """Apply an operator to a tensor, with its gradient."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return op(x)  # the same without the cost of autograd
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise DomainError(
            "torch.func cannot differentiate communication between ranks; use torch.autograd.grad"
        )
    out: Tensor = _Apply.apply(x, op)  # type: ignore[no-untyped-call]
    return out


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, op: Linear) -> Tensor:
        ctx.op = op
        return op(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return apply(ctx.op.adjoint(), grad), None


@dataclass(frozen=True)
class Sum:
    """Partial to replicated: the sum over ranks. It is its own adjoint."""

    ranks: Ranks

    def __call__(self, x: Tensor) -> Tensor:
        """The sum, as a new tensor."""
        copy = x.clone(memory_format=torch.contiguous_format)
        return self.ranks.all_reduce_(copy, "all_reduce")

    def adjoint(self) -> Sum:
        """The same sum."""
        return self


@dataclass(frozen=True)
class Replicate:
    """The identity on replicated leaves; its adjoint is the mean."""

    ranks: Ranks

    def __call__(self, x: Tensor) -> Tensor:
        """A view of the same values."""
        return x.view_as(x)

    def adjoint(self) -> Mean:
        """The mean over ranks."""
        return Mean(self.ranks)


@dataclass(frozen=True)
class Mean:
    """The mean over ranks. It is its own adjoint."""

    ranks: Ranks

    def __call__(self, x: Tensor) -> Tensor:
        """The mean, as a new tensor."""
        copy = x.clone(memory_format=torch.contiguous_format)
        return self.ranks.all_reduce_(copy, "all_reduce") / self.ranks.size

    def adjoint(self) -> Mean:
        """The same mean."""
        return self


@dataclass(frozen=True)
class Redistribute:
    """The same rows in the same order, from sizes `have` to sizes `want`."""

    ranks: Ranks
    have: tuple[int, ...]
    want: tuple[int, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """The rows of this rank with sizes `want`."""
        if self.have == self.want:
            return x.view_as(x)
        rank = self.ranks.rank
        send = _overlaps(self.have, self.want, rank)
        receive = _overlaps(self.want, self.have, rank)
        return self.ranks.all_to_all(x, send, receive, "redistribute")

    def adjoint(self) -> Redistribute:
        """From sizes `want` to sizes `have`."""
        return Redistribute(self.ranks, self.want, self.have)


@dataclass(frozen=True)
class AllToAll:
    """Consecutive rows to every rank: `send[r]` of them go to rank r, `receive[r]` come from it."""

    ranks: Ranks
    send: tuple[int, ...]
    receive: tuple[int, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """The received rows, ordered by rank."""
        return self.ranks.all_to_all(x, self.send, self.receive, "all_to_all")

    def adjoint(self) -> AllToAll:
        """The same rows back to where they came from."""
        return AllToAll(self.ranks, self.receive, self.send)


@dataclass(frozen=True)
class Gather:
    """Sharded to replicated: all rows on every rank."""

    ranks: Ranks
    sizes: tuple[int, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """All rows, ordered by rank."""
        if self.ranks.size == 1:
            return x.view_as(x)
        copies = x.repeat(self.ranks.size, *[1] * (x.ndim - 1))
        send = [len(x)] * self.ranks.size
        return self.ranks.all_to_all(copies, send, self.sizes, "all_gather")

    def adjoint(self) -> ScatterSum:
        """Every rank's gradient of the owned rows, summed."""
        return ScatterSum(self.ranks, self.sizes)


@dataclass(frozen=True)
class ScatterSum:
    """Partial to sharded: the owned rows of a sum over ranks, added in the order of the ranks."""

    ranks: Ranks
    sizes: tuple[int, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """(sizes[rank], …) owned rows of the sum."""
        if self.ranks.size == 1:
            return x.view_as(x)
        owned = self.sizes[self.ranks.rank]
        receive = [owned] * self.ranks.size
        rows = self.ranks.all_to_all(x, self.sizes, receive, "scatter_sum")
        return rows.reshape(self.ranks.size, owned, *x.shape[1:]).sum(dim=0)

    def adjoint(self) -> Gather:
        """All rows on every rank."""
        return Gather(self.ranks, self.sizes)


@dataclass(frozen=True)
class Shift:
    """The rows of the rank `steps` before this one in a ring."""

    ranks: Ranks
    sizes: tuple[int, ...]
    steps: int

    def __call__(self, x: Tensor) -> Tensor:
        """The rows of that rank."""
        size, rank = self.ranks.size, self.ranks.rank
        if self.steps == 0:
            return x.view_as(x)
        source, target = (rank - self.steps) % size, (rank + self.steps) % size
        send, receive = [0] * size, [0] * size
        send[target], receive[source] = len(x), self.sizes[source]
        return self.ranks.all_to_all(x, send, receive, "shift")

    def adjoint(self) -> Shift:
        """As many steps in the other direction."""
        size = self.ranks.size
        moved = tuple(self.sizes[(r - self.steps) % size] for r in range(size))
        return Shift(self.ranks, moved, -self.steps % size)


@dataclass(frozen=True)
class Window:
    """Owned rows, between up to `reach` rows before and after them in global order.

    A rank that owns no rows has an empty window.
    """

    ranks: Ranks
    sizes: tuple[int, ...]
    reach: int

    def __call__(self, x: Tensor) -> Tensor:
        """The rows of the window of this rank."""
        if self.ranks.size == 1:
            return x.view_as(x)
        send, receive, first, last = self._tables()
        rows = [x[a:b] for a, b in zip(first, last, strict=True)]
        return self.ranks.all_to_all(torch.cat(rows), send, receive, "window")

    def adjoint(self) -> Fold:
        """The copies of a row in all windows, added at its owner."""
        return Fold(self)

    def _tables(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """Number of rows to and from every rank; first and last owned row that goes to it."""
        ends = [0, *accumulate(self.sizes)]
        rank, total = self.ranks.rank, ends[-1]
        views = [
            (max(0, a - self.reach), min(total, b + self.reach)) if b > a else (a, a)
            for a, b in pairwise(ends)
        ]
        owned = ends[rank], ends[rank + 1]
        to = [(max(a, owned[0]), min(b, owned[1])) for a, b in views]
        low, high = views[rank]
        receive = [max(0, min(high, b) - max(low, a)) for a, b in pairwise(ends)]
        first = [max(a - owned[0], 0) for a, _ in to]
        last = [max(b - owned[0], f) for (_, b), f in zip(to, first, strict=True)]
        return [b - a for a, b in zip(first, last, strict=True)], receive, first, last


@dataclass(frozen=True)
class Fold:
    """The adjoint of a window: owned rows, each the sum of its copies in all windows."""

    window: Window

    def __call__(self, x: Tensor) -> Tensor:
        """(sizes[rank], …) owned rows."""
        window = self.window
        if window.ranks.size == 1:
            return x.view_as(x)
        send, receive, first, last = window._tables()
        back = window.ranks.all_to_all(x, receive, send, "fold")
        out = x.new_zeros((window.sizes[window.ranks.rank], *x.shape[1:]))
        for part, a, b in zip(torch.split(back, send), first, last, strict=True):
            out[a:b] += part
        return out

    def adjoint(self) -> Window:
        """The window."""
        return self.window


def largest(ranks: Ranks, x: Tensor, dims: tuple[int, ...] = (), keepdim: bool = False) -> Tensor:
    """The maximum over some dims and all ranks; its gradient is shared among all global ties.

    A rank without rows does not contribute. Integers and booleans have no gradient.
    """
    if x.dtype == torch.bool:
        return largest(ranks, x.to(torch.uint8), dims, keepdim).to(torch.bool)
    if x.is_floating_point():
        out: Tensor = _Largest.apply(x, ranks, dims)  # type: ignore[no-untyped-call]
    else:
        out = _maximum(ranks, x, dims)
    return out if keepdim or not dims else out.reshape(_without(out.shape, dims))


class _Largest(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, dims: tuple[int, ...]) -> Tensor:
        top = _maximum(ranks, x, dims)
        ctx.save_for_backward(x == top)
        ctx.ranks, ctx.dims = ranks, dims
        return top

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (hit,) = ctx.saved_tensors
        hit = hit.to(grad.dtype)
        ties = (hit.sum(ctx.dims, keepdim=True) if ctx.dims else hit.clone()).contiguous()
        if ctx.ranks.size > 1:
            ctx.ranks.all_reduce_(ties, "all_reduce")
            grad = apply(Sum(ctx.ranks), grad)
        return hit / ties * grad, None, None


def _maximum(ranks: Ranks, x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The maximum with keepdim; -inf, or the smallest integer of the dtype, for empty input."""
    if dims and not all(x.shape[d] for d in dims):
        least = -torch.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
        shape = [1 if d in dims else n for d, n in enumerate(x.shape)]
        top = x.new_full(shape, least)
    else:
        top = x.amax(dims, keepdim=True) if dims else x.clone()
    if ranks.size == 1:
        return top
    # The backend reduces memory, whose layout may differ between ranks.
    return ranks.all_reduce_(top.contiguous(), "all_reduce", "max")


def _without(shape: torch.Size, dims: tuple[int, ...]) -> list[int]:
    return [n for d, n in enumerate(shape) if d not in dims]


def _overlaps(have: tuple[int, ...], want: tuple[int, ...], rank: int) -> list[int]:
    """Number of rows that `rank` holds with sizes `have` and each rank with sizes `want`."""
    bounds = [0, *accumulate(have)]
    first, last = bounds[rank], bounds[rank + 1]
    ends = [0, *accumulate(want)]
    return [max(0, min(last, b) - max(first, a)) for a, b in pairwise(ends)]
