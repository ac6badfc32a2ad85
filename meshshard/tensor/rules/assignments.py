"""Rules of x[index] = value and index_put: owned rows by slices and masks, elements by numbers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from meshshard.tensor._torch_private import native
from meshshard.tensor.align import global_shape, narrow_to_owned, ndim_of
from meshshard.tensor.elements import checked, unflat
from meshshard.tensor.layout import as_layout
from meshshard.tensor.row_copy import plain
from meshshard.tensor.rules.indexing import (
    ALL,
    as_index,
    checked_row,
    getitem,
    is_basic,
    is_mask,
    local_slice,
    numbers_of,
    per_dim,
    row_slice,
)
from meshshard.tensor.rules.row_writes import add_rows, copy_rows, on_plain, write_elements
from meshshard.tensor.rules.table import in_place, named
from meshshard.tensor.shard_tensor import Rule, ShardTensor

SET = "Tensor.__setitem__"


def setitem(x: Any, index: Any, value: Any) -> None:
    """x[index] = value, in place: owned rows by slices and masks, any elements by numbers.

    Communication: none for an int, slices, and masks that set one number; that of `write` else.
    """
    items = [as_index(x, i) for i in (index if isinstance(index, tuple) else (index,))]
    if type(x) is not ShardTensor:
        _put_(x, tuple(items), value)
        return
    full_mask = len(items) == 1 and is_mask(items[0]) and items[0].dim() == ndim_of(x)
    if full_mask and _is_one(value):
        masked = _owned_mask(items[0], x)
        with native():
            x[masked] = value
        return
    if not (full_mask and ndim_of(x) > 1):
        items, row = per_dim(x, items)
        if _is_local(x, items, row, value):
            _set_local(x, items, row, value)
            return
    _put_(x, tuple(items), value)


def _is_one(value: Any) -> bool:
    """Whether a value is a number, which every rank can set."""
    return not isinstance(value, Tensor) or (type(value) is Tensor and value.numel() == 1)


def _is_local(x: ShardTensor, items: list[Any], row: int, value: Any) -> bool:
    """Whether each rank sets its own rows, by what it has."""
    if any(type(i) is ShardTensor for n, i in enumerate(items) if n != row):
        return False
    others = all(is_basic(i) for n, i in enumerate(items) if n != row)
    if _is_one(value):
        return isinstance(items[row], (int, slice)) or (is_mask(items[row]) and others)
    if not isinstance(items[row], slice) or not others:
        return False
    if type(value) is not ShardTensor:
        return True
    lined_up = ndim_of(value) - value._dim == _dims_from(items, row)
    return items[row] == ALL and value._sharding == x._sharding and lined_up


def _dims_from(items: list[Any], row: int) -> int:
    """The dims of what slices and numbers select, from the rows on."""
    return sum(not isinstance(i, int) for i in items[row:])


def _set_local(x: ShardTensor, items: list[Any], row: int, value: Any) -> None:
    _check_value(x, items, value)
    real = [n for n, i in enumerate(items) if i is not None]
    for n, size in zip(real, global_shape(x), strict=True):
        if n != row and not is_basic(items[n]):  # ranks without rows do not check
            items[n] = checked(numbers_of(items[n]), size)
    items[row], value = _local_target(x, items, row, value)
    with native():
        x[tuple(items)] = value


def _check_value(x: ShardTensor, items: list[Any], value: Any) -> None:
    """Check the shape of a value, by global shapes so that all ranks raise.

    Raises:
        RuntimeError: the value does not broadcast to what numbers and slices select.
    """
    if not all(map(is_basic, items)) or not isinstance(value, Tensor):
        return
    target = tuple(torch.empty(x.shape, device="meta")[tuple(items)].shape)
    given = tuple(value.shape)
    extra = max(0, len(given) - len(target))
    pairs = zip(reversed(given[extra:]), reversed(target), strict=False)
    if any(n != 1 for n in given[:extra]) or any(n not in (1, m) for n, m in pairs):
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {given} cannot be broadcast to {target}"
        )


def _local_target(x: ShardTensor, items: list[Any], row: int, value: Any) -> tuple[Any, Any]:
    """The owned rows to set, and this rank's part of the value."""
    index, sharding = items[row], x._sharding
    if isinstance(index, slice):
        part, back = x if index == ALL else row_slice(x, index), _dims_from(items, row)
        has_rows = type(value) is Tensor and value.ndim >= back and value.shape[-back] != 1
        if has_rows:
            value = narrow_to_owned(value, part._sharding, value.ndim - back)
        rows = range(*index.indices(sharding.total))
        return (ALL if part is x else local_slice(rows, sharding.first, sharding.own)), value
    if isinstance(index, int):
        at = checked_row(x, index) - sharding.first
        return slice(at, at + 1) if 0 <= at < sharding.own else slice(0, 0), value
    return _owned_mask(index, x), value


def _owned_mask(mask: Tensor, x: ShardTensor) -> Tensor:
    """This rank's part of a plain or sharded mask of all elements, or of all rows.

    Raises:
        IndexError: the mask has another shape.
    """
    full = ndim_of(mask) == ndim_of(x)
    wanted = global_shape(x) if full else (x._sharding.total,)
    if tuple(mask.shape) != tuple(wanted):
        raise IndexError(f"expected a mask of shape {tuple(wanted)}, got {tuple(mask.shape)}")
    if type(mask) is not ShardTensor:
        return narrow_to_owned(mask, x._sharding, x._dim if full else 0)
    if full:
        return as_layout(mask, x)
    return mask if mask._sharding == x._sharding else mask.redistribute(x._sharding.sizes)


def index_put(x: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    """torch.index_put, where None is for a whole dim."""
    return _put(x, tuple(ALL if i is None else i for i in indices), values, accumulate)


def _put(x: Any, indices: tuple[Any, ...], values: Any, accumulate: bool = False) -> Any:
    """X with values at indices, which are those of x[indices].

    Of several values for an element the last counts; with `accumulate`, they are added.

    Communication: that of x[indices] for numbers, and that of `write`.
    """
    if type(x) is not ShardTensor:
        return on_plain(x, 0, (indices, values), lambda y: _put(y, indices, values, accumulate))
    shape = (x._sharding.own, math.prod(global_shape(x)) // max(x._sharding.total, 1))
    with native():
        first = x._sharding.first * shape[1]
        ids = torch.arange(first, first + math.prod(shape), device=x.device)
    chosen = getitem(unflat(ids, x), indices)
    op = add_rows if accumulate else copy_rows
    return write_elements(x, plain(chosen), values, op)


index_put_, _put_ = in_place(index_put), in_place(_put)
RULES: dict[Any, Rule] = {
    Tensor.__setitem__: setitem,
    **named({"index_put": index_put, "index_put_": index_put_}),
}
