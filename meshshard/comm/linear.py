"""Linear collectives and their adjoints: one pair of functions carries all of them.

A collective that is linear in its rows is an operator A; its gradient is the adjoint A*, another
collective, whose gradient is A again. So one autograd function differentiates them all, to any
order.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from meshshard.comm import process_group
from meshshard.errors import DomainError

if TYPE_CHECKING:
    from meshshard.comm.domain import Domain

__all__ = ["Gather", "Redistribute", "Replicate", "Shift", "Sum", "Window", "apply", "largest"]


class Linear(Protocol):
    """An operator on the rows of all ranks."""

    def __call__(self, x: Tensor) -> Tensor:
        """Its value on this rank."""

    def adjoint(self) -> Linear:
        """The operator of its gradient."""


def apply(op: Linear, x: Tensor) -> Tensor:
    """The operator on a tensor, differentiable."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return op(x)  # the same, without what autograd costs
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise DomainError(
            "torch.func does not go through messages between ranks: torch.autograd.grad"
        )
    out: Tensor = _Apply.apply(x, op)  # type: ignore[no-untyped-call]
    return out


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, op: Linear) -> Tensor:
        """The value."""
        ctx.op = op
        return op(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The value of the adjoint."""
        return apply(ctx.op.adjoint(), grad), None


@dataclass(frozen=True)
class Sum:
    """Partial to replicated: the sum over ranks, its own adjoint."""

    domain: Domain

    def __call__(self, x: Tensor) -> Tensor:
        """The sum, as a new tensor."""
        copy = x.clone(memory_format=torch.contiguous_format)
        return process_group.all_reduce(self.domain, copy, "all_reduce")

    def adjoint(self) -> Sum:
        """The same sum."""
        return self


@dataclass(frozen=True)
class Replicate:
    """The identity on replicated leaves, with the mean as its adjoint."""

    domain: Domain

    def __call__(self, x: Tensor) -> Tensor:
        """The same values."""
        return x.view_as(x)

    def adjoint(self) -> Mean:
        """The mean over ranks."""
        return Mean(self.domain)


@dataclass(frozen=True)
class Mean:
    """The mean over ranks, its own adjoint."""

    domain: Domain

    def __call__(self, x: Tensor) -> Tensor:
        """The mean, as a new tensor."""
        copy = x.clone(memory_format=torch.contiguous_format)
        return process_group.all_reduce(self.domain, copy, "all_reduce") / self.domain.size

    def adjoint(self) -> Mean:
        """The same mean."""
        return self


@dataclass(frozen=True)
class Redistribute:
    """Rows in one order, divided as `have`, divided as `want`; the adjoint goes back."""

    domain: Domain
    have: tuple[int, ...]
    want: tuple[int, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """This rank's rows under `want`."""
        if self.have == self.want:
            return x.view_as(x)
        rank = self.domain.rank
        send = _overlaps(self.have, self.want, rank)
        receive = _overlaps(self.want, self.have, rank)
        return process_group.all_to_all(self.domain, x, send, receive, "redistribute")

    def adjoint(self) -> Redistribute:
        """The way back."""
        return Redistribute(self.domain, self.want, self.have)


@dataclass(frozen=True)
class Gather:
    """Sharded to replicated: all rows on every rank."""

    domain: Domain
    sizes: tuple[int, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """All rows."""
        if self.domain.size == 1:
            return x.view_as(x)
        everywhere = x.repeat(self.domain.size, *[1] * (x.ndim - 1))
        send = [len(x)] * self.domain.size
        return process_group.all_to_all(self.domain, everywhere, send, self.sizes, "all_gather")

    def adjoint(self) -> ScatterSum:
        """Every rank's gradient of my rows, added."""
        return ScatterSum(self.domain, self.sizes)


@dataclass(frozen=True)
class ScatterSum:
    """The sum over ranks of whole tensors, each rank keeping its own rows."""

    domain: Domain
    sizes: tuple[int, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """My rows of the sum, added in the order of the ranks."""
        if self.domain.size == 1:
            return x.view_as(x)
        mine = self.sizes[self.domain.rank]
        receive = [mine] * self.domain.size
        rows = process_group.all_to_all(self.domain, x, self.sizes, receive, "scatter_sum")
        return rows.reshape(self.domain.size, mine, *x.shape[1:]).sum(dim=0)

    def adjoint(self) -> Gather:
        """All rows on every rank."""
        return Gather(self.domain, self.sizes)


@dataclass(frozen=True)
class Shift:
    """Rows round a ring: those of the rank `steps` before this one."""

    domain: Domain
    sizes: tuple[int, ...]
    steps: int

    def __call__(self, x: Tensor) -> Tensor:
        """The rows of that rank."""
        size, rank = self.domain.size, self.domain.rank
        if self.steps == 0:
            return x.view_as(x)
        source, target = (rank - self.steps) % size, (rank + self.steps) % size
        send, receive = [0] * size, [0] * size
        send[target], receive[source] = len(x), self.sizes[source]
        return process_group.all_to_all(self.domain, x, send, receive, "shift")

    def adjoint(self) -> Shift:
        """The same way back."""
        size = self.domain.size
        moved = tuple(self.sizes[(r - self.steps) % size] for r in range(size))
        return Shift(self.domain, moved, -self.steps % size)


@dataclass(frozen=True)
class Window:
    """Own rows between up to `reach` rows of the ranks before and after, in global order."""

    domain: Domain
    sizes: tuple[int, ...]
    reach: int

    def __call__(self, x: Tensor) -> Tensor:
        """The rows of the window of this rank, none where it owns none."""
        if self.domain.size == 1:
            return x.view_as(x)
        send, receive, first, last = self._tables()
        rows = [x[a:b] for a, b in zip(first, last, strict=True)]
        return process_group.all_to_all(self.domain, torch.cat(rows), send, receive, "window")

    def adjoint(self) -> Fold:
        """What windows have of a row, added at its owner."""
        return Fold(self)

    def _tables(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """Rows to and from each rank, and which of mine go there."""
        ends = [0, *accumulate(self.sizes)]
        rank, total = self.domain.rank, ends[-1]
        views = [
            (max(0, a - self.reach), min(total, b + self.reach)) if b > a else (a, a)
            for a, b in pairwise(ends)
        ]
        mine = ends[rank], ends[rank + 1]
        to = [(max(a, mine[0]), min(b, mine[1])) for a, b in views]
        low, high = views[rank]
        get = [max(0, min(high, b) - max(low, a)) for a, b in pairwise(ends)]
        first = [max(a - mine[0], 0) for a, _ in to]
        last = [max(b - mine[0], f) for (_, b), f in zip(to, first, strict=True)]
        return [b - a for a, b in zip(first, last, strict=True)], get, first, last


@dataclass(frozen=True)
class Fold:
    """The adjoint of a window."""

    window: Window

    def __call__(self, x: Tensor) -> Tensor:
        """Own rows, each the sum of what all windows have of it."""
        window = self.window
        if window.domain.size == 1:
            return x.view_as(x)
        send, receive, first, last = window._tables()
        back = process_group.all_to_all(window.domain, x, receive, send, "fold")
        out = x.new_zeros((window.sizes[window.domain.rank], *x.shape[1:]))
        for part, a, b in zip(torch.split(back, send), first, last, strict=True):
            out[a:b] += part
        return out

    def adjoint(self) -> Window:
        """The window."""
        return self.window


def largest(domain: Domain, x: Tensor, dims: tuple[int, ...] = (), keepdim: bool = False) -> Tensor:
    """The maximum over some dims and all ranks; its gradient is shared among all global ties.

    A rank without rows takes no part. Integers have no gradient.
    """
    if x.dtype == torch.bool:
        return largest(domain, x.to(torch.uint8), dims, keepdim).to(torch.bool)
    if x.is_floating_point():
        out: Tensor = _Largest.apply(x, domain, dims)  # type: ignore[no-untyped-call]
    else:
        out = _top(domain, x, dims)
    return out if keepdim or not dims else out.reshape(_without(out.shape, dims))


class _Largest(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, domain: Domain, dims: tuple[int, ...]) -> Tensor:
        """The value."""
        top = _top(domain, x, dims)
        ctx.save_for_backward(x == top)
        ctx.domain, ctx.dims = domain, dims
        return top

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """The value of the adjoint."""
        (hit,) = ctx.saved_tensors
        hit = hit.to(grad.dtype)
        ties = (hit.sum(ctx.dims, keepdim=True) if ctx.dims else hit.clone()).contiguous()
        if ctx.domain.size > 1:
            process_group.all_reduce(ctx.domain, ties, "all_reduce")
            grad = apply(Sum(ctx.domain), grad)
        return hit / ties * grad, None, None


def _top(domain: Domain, x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The maximum with all dims kept, of nothing: the smallest number there is."""
    if dims and not all(x.shape[d] for d in dims):
        least = -torch.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
        shape = [1 if d in dims else n for d, n in enumerate(x.shape)]
        top = x.new_full(shape, least)
    else:
        top = x.amax(dims, keepdim=True) if dims else x.clone()
    if domain.size == 1:
        return top
    # numbers meet as they lie in memory, which need not be alike on all ranks
    return process_group.all_reduce(domain, top.contiguous(), "all_reduce", "max")


def _without(shape: torch.Size, dims: tuple[int, ...]) -> list[int]:
    return [n for d, n in enumerate(shape) if d not in dims]


def _overlaps(have: tuple[int, ...], want: tuple[int, ...], rank: int) -> list[int]:
    """Rows that `rank` has under `have` and each rank has under `want`."""
    bounds = [0, *accumulate(have)]
    first, last = bounds[rank], bounds[rank + 1]
    ends = [0, *accumulate(want)]
    return [max(0, min(last, b) - max(first, a)) for a, b in pairwise(ends)]
