"""Rules of torch.reshape and the like: the sharded dim may be merged, split or moved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshshard.tensor._torch_private import called_by_dtensor, native
from meshshard.tensor.align import global_shape, local_shape, ndim_of
from meshshard.tensor.layout import rearranged, scaled_sizes
from meshshard.tensor.moved import moved_from
from meshshard.tensor.rules.table import named
from meshshard.tensor.shard_tensor import (
    Rule,
    ShardTensor,
    apply_local,
    normalize_dim,
    refuse,
    wrap,
)
from meshshard.tensor.sharding import Sharding

DTENSOR = (
    "tensor parallelism computes on owned rows: if the module treats rows independently, use "
    "by_own_rows(parallelize_module(module, ...))"
)
NOT_A_VIEW = "elements would move between ranks, so it cannot be a view: use reshape"


def reshape(x: ShardTensor, *shape: Any, **kwargs: Any) -> Any:
    """torch.reshape: a view of owned rows, or a copy where elements must move between ranks.

    Communication: none if a dim of the shape begins where the sharded dim does and its size fits
    the sizes; else as `layout.rearranged`. Which one follows from global shapes and sizes.
    """
    return _to_shape(x, shape, kwargs, may_move=True)


def view(x: ShardTensor, *shape: Any, **kwargs: Any) -> Any:
    """Tensor.view of a shape or a dtype; refused where elements must move between ranks."""
    wanted = kwargs.get("dtype", shape[0] if len(shape) == 1 else None)
    if not isinstance(wanted, torch.dtype):
        return _to_shape(x, shape, kwargs, may_move=False)
    if wanted.itemsize != x.element_size() and x._dim == ndim_of(x) - 1:
        why = f"{wanted} has another itemsize, which would change the size of the sharded dim"
        raise refuse("view", (x,), None, why)
    return apply_local(Tensor.view, x, (wanted,))


def _to_shape(x: ShardTensor, shape: Any, kwargs: dict[str, Any], may_move: bool) -> Any:
    wanted = kwargs.get("shape", kwargs.get("size", shape))
    wanted = wanted[0] if len(wanted) == 1 and not isinstance(wanted[0], int) else wanted
    if x._dim == 0 and len(wanted) > 1:  # the common case, with the least overhead
        first, *rest = wanted
        sharding = x._sharding
        with native():
            if first in (sharding.total, -1) and math.prod(rest) == math.prod(x.shape[1:]) > 0:
                return wrap(x.reshape(sharding.own, *rest), sharding, 0)
    return reshaped(x, [int(n) for n in wanted], may_move)


def reshaped(x: ShardTensor, wanted: list[int], may_move: bool = True) -> Any:
    """The tensor with another global shape; plain if it has one element and no dim.

    Communication: that of `reshape`.

    Raises:
        RuntimeError: the shape has another number of elements, as in torch.
        NoShardRule: elements must move between ranks, but may not.
    """
    whole = global_shape(x)
    if -1 in wanted:
        rest = math.prod(n for n in wanted if n != -1)
        if not rest:
            raise RuntimeError(f"reshape: the size of -1 in {wanted} is ambiguous without elements")
        wanted = [n if n != -1 else whole.numel() // rest for n in wanted]
    if math.prod(wanted) != whole.numel():
        raise RuntimeError(f"shape '{wanted}' is invalid for input of shape {tuple(whole)}")
    found = _row_dim(x, wanted)
    if found is None and not may_move:
        raise refuse("view", (x,), None, NOT_A_VIEW)
    if found is None and not wanted:
        return x.gather().reshape(())
    if found is None:
        dim = wanted.index(max(wanted))
        sizes = scaled_sizes(x._sharding, wanted[dim])
        return moved_from(x, rearranged(x, wanted, dim, Sharding(x._sharding.domain, sizes)))
    dim, sharding = found
    local = [sharding.own if d == dim else n for d, n in enumerate(wanted)]
    with native():
        out = x.reshape(local)
        if x._sharding.own <= 1 and _share_memory(out, x):
            out = out if _is_view(x, local, dim, sharding) else out.clone()
        return wrap(out, sharding, dim)


def _is_view(x: ShardTensor, shape: Sequence[int], dim: int, sharding: Sharding) -> bool:
    """Whether torch's reshape is a view, which the strides of at most one owned row cannot tell."""
    old, new = x._sharding.total, sharding.total
    rows = 2 * max(1, old // max(new, 1))
    try:
        _with_rows(x, rows).view(
            [rows * new // max(old, 1) if d == dim else n for d, n in enumerate(shape)]
        )
    except RuntimeError:
        return False
    return True


def _with_rows(x: ShardTensor, rows: int) -> Tensor:
    """A tensor without data with the strides that `x`, of at most one row, has with more rows.

    In memory, the rows lie between the elements of dims with the same or a larger stride.
    """
    shape = [rows if d == x._dim else n for d, n in enumerate(local_shape(x))]
    with native():
        strides = x.stride()
    each = strides[x._dim]
    strides = tuple(rows * s if d != x._dim and s >= each else s for d, s in enumerate(strides))
    with native():
        return torch.empty_strided(shape, strides, device="meta")


def _share_memory(x: Tensor, y: Tensor) -> bool:
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


def is_contiguous(x: ShardTensor, **options: Any) -> bool:
    """As that of the local rows; one row or none count as several of their strides."""
    with native():
        rows = x if x._sharding.own > 1 else _with_rows(x, 2)
        return rows.is_contiguous(**options)


def contiguous(x: ShardTensor, **options: Any) -> ShardTensor:
    """The tensor if it is contiguous, else a copy; identically on every rank."""
    if is_contiguous(x, **options):
        return x
    options.setdefault("memory_format", torch.contiguous_format)
    return apply_local(Tensor.clone, x, (), options)


def _row_dim(x: ShardTensor, wanted: list[int]) -> tuple[int, Sharding] | None:
    """The sharded dim of the wanted shape and its sharding, if no element moves between ranks."""
    whole, old = global_shape(x), x._sharding
    before = math.prod(whole[: x._dim])
    candidates = [d for d in range(len(wanted)) if math.prod(wanted[:d]) == before]
    for d in candidates:
        if wanted[d] == old.total:
            return d, old
    for d in candidates:
        new, rows = wanted[d], old.total
        if rows and new % rows == 0:
            return d, _split_rows(old, new // rows)
        if rows and new and rows % new == 0:
            each = rows // new
            if not any(n % each for n in old.sizes):
                origin = None if old.origin is None else old.origin[::each] // each
                return d, Sharding(old.domain, [n // each for n in old.sizes], origin)
    return None


def _split_rows(old: Sharding, n: int) -> Sharding:
    """The sharding if each row becomes several."""
    if old.origin is None:
        return Sharding(old.domain, [n * rows for rows in old.sizes])
    parts = torch.arange(n, device=old.origin.device)
    origin = (old.origin[:, None] * n + parts).flatten()
    return Sharding(old.domain, [n * rows for rows in old.sizes], origin)


def _as_other(may_move: bool) -> Rule:
    """The rule of reshape_as and view_as."""

    def _rule(x: Any, other: Tensor) -> Any:
        if x is other and called_by_dtensor():
            raise refuse("DTensor", (x,), None, DTENSOR)
        if type(x) is ShardTensor:
            return reshaped(x, list(global_shape(other)), may_move)
        return x.reshape(global_shape(other))

    return _rule


def flatten(x: ShardTensor, start_dim: int = 0, end_dim: int = -1) -> Any:
    """Join consecutive dims; a copy where elements must move between ranks."""
    shape = list(global_shape(x))
    first, last = normalize_dim(start_dim, len(shape)), normalize_dim(end_dim, len(shape))
    if first > last:
        raise RuntimeError("flatten() has invalid args: start_dim cannot come after end_dim")
    if first == last:
        return x  # as torch, whose result is then the same object
    return reshaped(x, [*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :]])


def unflatten(x: ShardTensor, dim: int, sizes: Sequence[int]) -> Any:
    """Split one dim into several; a copy where elements must move between ranks."""
    shape = list(global_shape(x))
    dim = normalize_dim(dim, len(shape))
    rest = -math.prod(sizes) if -1 in sizes else 0
    sizes = [n if n != -1 else shape[dim] // rest for n in sizes]
    return reshaped(x, [*shape[:dim], *sizes, *shape[dim + 1 :]])


RULES: dict[Any, Rule] = named({
    "contiguous": contiguous, "is_contiguous": is_contiguous,
    "reshape": reshape, "view": view, "reshape_as": _as_other(True), "view_as": _as_other(False),
    "flatten ravel": flatten, "unflatten": unflatten,
})  # fmt: skip
