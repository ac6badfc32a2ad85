"""Rules of x[index] = value and index_put: owned rows by slices and masks, elements by numbers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from meshshard.tensor._torch_private import native
from meshshard.tensor.align import global_shape, narrow_to_owned, ndim_of, require_same_sharding
from meshshard.tensor.elements import unflat
from meshshard.tensor.row_copy import plain
from meshshard.tensor.rules.indexing import (
    ALL,
    as_index,
    checked_row,
    getitem,
    is_basic,
    is_mask,
    local_slice,
    per_dim,
    per_mask_dim,
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
        index_put_(x, tuple(items), value)
        return
    full_mask = len(items) == 1 and is_mask(items[0]) and items[0].dim() == ndim_of(x)
    one = not isinstance(value, Tensor) or (type(value) is Tensor and value.numel() == 1)
    if full_mask and one:
        masked = _owned_part(items[0], x)
        with native():
            x[masked] = value
        return
    if not (full_mask and ndim_of(x) > 1):
        items, row = per_dim(x, [i for item in items for i in per_mask_dim(item)])
        if _is_local(x, items, row, value):
            _set_local(x, items, row, value)
            return
    index_put_(x, tuple(items), value)


def _is_local(x: ShardTensor, items: list[Any], row: int, value: Any) -> bool:
    """Whether each rank sets its own rows, by what it has."""
    if any(type(i) is ShardTensor for n, i in enumerate(items) if n != row):
        return False
    if isinstance(items[row], slice):
        same = type(value) is not ShardTensor or value._sharding == x._sharding
        return same and (items[row] == ALL or type(value) is not ShardTensor)
    others = all(is_basic(i) for n, i in enumerate(items) if n != row)
    return (isinstance(items[row], int) or (is_mask(items[row]) and others)) and (
        not isinstance(value, Tensor) or (type(value) is Tensor and value.numel() == 1)
    )


def _set_local(x: ShardTensor, items: list[Any], row: int, value: Any) -> None:
    _check_value(x, items, value)
    items[row], value = _local_target(x, items[row], value)
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


def _local_target(x: ShardTensor, row_index: Any, value: Any) -> tuple[Any, Any]:
    """The owned rows to set, and this rank's part of the value."""
    if isinstance(row_index, slice):
        whole = row_index == ALL
        part = x if whole else row_slice(x, row_index)
        value = _owned_part(value, part) if isinstance(value, Tensor) else value
        rows = range(*row_index.indices(x._sharding.total))
        return (ALL if whole else local_slice(rows, x._sharding.first, x._sharding.own)), value
    if isinstance(row_index, int):
        row = checked_row(x, row_index) - x._sharding.first
        return slice(row, row + 1) if 0 <= row < x._sharding.own else slice(0, 0), value
    return _owned_part(row_index, x), value


def _owned_part(value: Tensor, x: ShardTensor) -> Tensor:
    """This rank's part of a value or a mask, which may be plain or sharded."""
    if type(value) is ShardTensor:
        require_same_sharding(SET, (x, value))
        return value
    back = ndim_of(x) - x._dim
    if value.ndim >= back and value.shape[value.ndim - back] == x._sharding.total != 1:
        return narrow_to_owned(value, x._sharding, value.ndim - back)
    if value.ndim == 1 and value.shape[0] == x._sharding.total and value.dtype == torch.bool:
        return narrow_to_owned(value, x._sharding, 0)
    return value


def index_put(x: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    """torch.index_put: x with values at indices, which may be those of x[indices].

    Of several values for an element the last counts; with `accumulate`, they are added.

    Communication: that of x[indices] for numbers, and that of `write`.
    """
    indices = tuple(ALL if i is None else i for i in indices)
    if type(x) is not ShardTensor:
        return on_plain(
            x, 0, (indices, values), lambda y: index_put(y, indices, values, accumulate)
        )
    shape = (x._sharding.own, math.prod(global_shape(x)) // max(x._sharding.total, 1))
    with native():
        first = x._sharding.first * shape[1]
        ids = torch.arange(first, first + math.prod(shape), device=x.device)
    chosen = getitem(unflat(ids, x), indices)
    op = add_rows if accumulate else copy_rows
    return write_elements(x, plain(chosen), values, op)


index_put_ = in_place(index_put)
RULES: dict[Any, Rule] = {
    Tensor.__setitem__: setitem,
    **named({"index_put": index_put, "index_put_": index_put_}),
}
