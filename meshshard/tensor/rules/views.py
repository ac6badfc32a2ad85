"""Rules of views: each finds the new place of the sharded dim."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshshard.tensor._torch_private import native
from meshshard.tensor.align import global_shape, ndim_of, require_whole_domain
from meshshard.tensor.layout import rows_between
from meshshard.tensor.moved import moved_from
from meshshard.tensor.rules.table import functions_named, named
from meshshard.tensor.shard_tensor import (
    Rule,
    Sharded,
    ShardTensor,
    apply_local,
    normalize_dim,
    refuse,
    wrap,
)
from meshshard.tensor.sharding import Sharding
from meshshard.tensor.take_rows import take_rows

MARK = 7919  # size of the sharded dim of a meta tensor, which no other dim has


# -------------------------------------------------------------------------------- dims in any order
def apply_and_follow(
    func: Callable[..., Any], x: ShardTensor, args: Any, kwargs: Any
) -> ShardTensor:
    """Call a function that moves dims; a call on a meta tensor finds the new sharded dim."""
    with native():
        shape = [MARK if d == x._dim else 2 for d in range(x.ndim)]
        moved = func(torch.empty(shape, device="meta"), *args, **kwargs).shape
    return apply_local(func, x, args, kwargs, list(moved).index(MARK))


def _moving(func: Callable[..., Any]) -> Rule:
    """The rule of a function that only permutes dims."""

    def _rule(x: ShardTensor, *args: Any, **kwargs: Any) -> Any:
        return apply_and_follow(func, x, args, kwargs)

    return _rule


def _in_place(func: Callable[..., Any], moved: Rule) -> Rule:
    """The rule of a function that changes the dims of a tensor, from that of the one that returns.

    It calls `func` with what `moved` finds: the arguments for the local rows and the new dim.
    """

    def _rule(x: ShardTensor, *args: Any, **kwargs: Any) -> Any:
        given, dim = moved(x, *args, **kwargs)
        with native():
            func(x, *given)
        x._dim = dim
        return x

    return _rule


def _moved_dims(func: Callable[..., Any]) -> Rule:
    def _find(x: Sharded, *args: Any, **kwargs: Any) -> Any:
        dims = (*args, *kwargs.values())
        return dims, apply_and_follow(func, x.detach(), dims, {})._dim

    return _find


# --------------------------------------------------------------------------------- dims of size one
def _squeezed(x: ShardTensor, dim: Any = None) -> tuple[tuple[tuple[int, ...]], int]:
    """The dims that squeeze removes, and the new sharded dim, -1 if it is removed."""
    shape = global_shape(x)
    dims = range(len(shape)) if dim is None else (dim if isinstance(dim, (tuple, list)) else (dim,))
    removed = sorted(d for d in {normalize_dim(d, len(shape)) for d in dims} if shape[d] == 1)
    if x._dim in removed:
        return (tuple(removed),), -1
    return (tuple(removed),), x._dim - sum(d < x._dim for d in removed)


def squeeze(x: ShardTensor, dim: Any = None) -> Any:
    """Remove dims whose global size is one; without the sharded one the tensor is replicated."""
    (removed,), at = _squeezed(x, dim)
    if at < 0:  # a row, which writes through
        rest = tuple(d - (d > x._dim) for d in removed if d != x._dim)
        row: Any = torch.select(x, x._dim, 0)
        return row.squeeze(rest) if rest else row
    return apply_local(Tensor.squeeze, x, (removed,), dim=at)


def _squeezed_in_place(x: ShardTensor, dim: Any = None) -> Any:
    given, at = _squeezed(x, dim)
    if at < 0:
        why = f"the sharded dim has size 1, and the result is plain: use squeeze({x._dim})"
        raise refuse(Tensor.squeeze_, (x,), None, why)
    return given, at


def _unsqueezed(x: ShardTensor, dim: int) -> tuple[tuple[int], int]:
    dim = normalize_dim(dim, ndim_of(x) + 1)
    return (dim,), x._dim + (dim <= x._dim)


def unsqueeze(x: ShardTensor, dim: int) -> ShardTensor:
    """Insert a dim of size one."""
    given, at = _unsqueezed(x, dim)
    return apply_local(torch.unsqueeze, x, given, dim=at)


def expand(x: ShardTensor, *sizes: Any, size: Any = None, **_: Any) -> Any:
    """Repeat dims of size one without a copy; new dims come first.

    A sharded dim of one row that is repeated gives a replicated tensor.

    Communication: none; one all-to-all if the sharded dim is repeated.
    """
    sizes = sizes or tuple(size)
    wanted = list(sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes)
    whole = torch.empty(global_shape(x), device="meta").expand(wanted).shape
    at = x._dim + len(wanted) - ndim_of(x)
    if whole[at] != x._sharding.total:
        return x.gather().expand(whole)
    return apply_local(Tensor.expand, x, ([*wanted[:at], -1, *wanted[at + 1 :]],), dim=at)


def expand_as(x: Any, other: Tensor) -> Any:
    """Expand to the shape of another tensor."""
    if type(x) is ShardTensor:
        return expand(x, list(global_shape(other)))
    return x + torch.zeros_like(other).to(x.dtype)


# --------------------------------------------------------------------------------- sharded matrices
def _shift(x: Sharded, dim1: int, dim2: int) -> int:
    """What to add to the offset of a diagonal for the owned rows (dim1) or columns (dim2)."""
    first: int = x._sharding.first
    if x._dim in (dim1, dim2):
        require_whole_domain("a diagonal", (x,), x._sharding.domain)
    return first if x._dim == dim1 else -first if x._dim == dim2 else 0


def diagonal(x: ShardTensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> ShardTensor:
    """torch.diagonal, a view; each rank has the part that is in its rows or columns."""
    ndim, old = ndim_of(x), x._sharding
    dim1, dim2 = normalize_dim(dim1, ndim), normalize_dim(dim2, ndim)
    if dim1 == dim2:
        raise RuntimeError(f"diagonal dimensions cannot be identical {dim1}, {dim2}")
    shift = _shift(x, dim1, dim2)
    if x._dim not in (dim1, dim2):
        at = x._dim - (dim1 < x._dim) - (dim2 < x._dim)
        return apply_local(torch.diagonal, x, (offset, dim1, dim2), dim=at)
    n, m = global_shape(x)[dim1], global_shape(x)[dim2]
    low, high = max(0, -offset), min(n, m - offset)  # rows of the diagonal
    if x._dim == dim2:
        low, high = low + offset, high + offset
    sizes = rows_between(old.sizes, low, high)
    skip = max(0, low - old.first)
    origin = None if old.origin is None else old.origin[skip : skip + sizes[old.domain.rank]]
    with native():
        part = torch.diagonal(x, offset + shift, dim1, dim2)
        return wrap(part, Sharding(old.domain, sizes, origin), part.ndim - 1)


def linalg_diagonal(
    x: ShardTensor, *, offset: int = 0, dim1: int = -2, dim2: int = -1
) -> ShardTensor:
    """torch.linalg.diagonal."""
    return diagonal(x, offset, dim1, dim2)


def _triangle(func: Callable[..., Any]) -> Rule:
    """The rule of tril and triu; owned rows or columns have a shifted diagonal."""

    def _rule(x: ShardTensor, diagonal: int = 0) -> Any:
        ndim = ndim_of(x)
        shifted = diagonal + _shift(x, ndim - 2, ndim - 1)
        with native():
            out = func(x, shifted)
        return out if out is x else wrap(out, x._sharding, x._dim)

    return _rule


# ------------------------------------------------------------------------------------------ windows
def unfold(x: ShardTensor, dimension: int, size: int, step: int) -> Sharded:
    """Tensor.unfold; along the sharded dim a rank has the windows that begin in its rows.

    Communication: along the sharded dim that of `take_rows`, of the rows of its windows.
    """
    dim, old = normalize_dim(dimension, ndim_of(x)), x._sharding
    if dim != x._dim:
        return apply_local(Tensor.unfold, x, (dim, size, step))
    whole = torch.empty(old.total, device="meta").unfold(0, size, step).shape[0]
    ends = [min(whole, -(-end // step)) for end in itertools.accumulate(old.sizes, initial=0)]
    ends[-1] = whole  # windows of size 0 may begin after the last row
    sizes = [b - a for a, b in itertools.pairwise(ends)]
    start, own = ends[old.domain.rank], sizes[old.domain.rank]
    last = (start + own - 1) * step + size if own else start * step
    rows = torch.arange(start * step, last, device=x.device)
    new = Sharding(old.domain, sizes)
    windows: Sharded = take_rows(x, rows, new)
    with native():
        if own:
            local = windows.unfold(dim, size, step)
        else:  # torch refuses windows that are longer than the dim
            local = windows.unsqueeze(-1).expand(*windows.shape, size)
        out: ShardTensor = moved_from(x, wrap(local, new, dim))
        return out


MOVING = "transpose swapaxes swapdims movedim moveaxis permute t adjoint"
RULES: dict[Any, Rule] = {
    **{f: _moving(f) for f in functions_named(MOVING)},
    **{f: _moving(f) for f in (getattr(Tensor, n).__get__ for n in ("T", "mT", "H", "mH"))},
    **{
        f: _in_place(f, _moved_dims(getattr(Tensor, f.__name__[:-1])))
        for f in functions_named("transpose_ swapaxes_ swapdims_ t_")
    },
    Tensor.squeeze_: _in_place(Tensor.squeeze_, _squeezed_in_place),
    Tensor.unsqueeze_: _in_place(Tensor.unsqueeze_, _unsqueezed),
    **named({
        "squeeze": squeeze, "unsqueeze": unsqueeze,
        "expand broadcast_to": expand, "expand_as": expand_as,
    }),
    Tensor.unfold: unfold,
    **dict.fromkeys((torch.diagonal, Tensor.diagonal), diagonal),
    torch.linalg.diagonal: linalg_diagonal,
    **{f: _triangle(f) for f in functions_named("tril triu tril_ triu_")},
}  # fmt: skip
