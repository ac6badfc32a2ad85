"""RowCopy: one row of a sharded tensor on every rank, which behaves as the view it is in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshshard.errors import NoShardRule
from meshshard.tensor._torch_private import native
from meshshard.tensor.moved import MOVED, is_moved

__all__ = ["RowCopy", "plain", "row_copy"]

_grad: Any = Tensor.grad
_requires_grad: Any = Tensor.requires_grad
_is_leaf: Any = Tensor.is_leaf
OF_THE_LEAF = {  # what is stored with a tensor that requires a gradient, so not with an alias of it
    _grad.__get__, _grad.__set__, _is_leaf.__get__, _requires_grad.__set__, Tensor.requires_grad_,
    Tensor.retain_grad, Tensor.register_hook,
}  # fmt: skip


class RowCopy(Tensor):
    """A row `x[i]` of a sharded tensor, or a view of one, replicated.

    In torch a row is a view. Here it is a copy, so what is written into it in place is also written
    to the owner of the row, and it cannot be used after `x` has changed. (In inference mode torch
    does not count changes, so there it still has the old values.)

    Raises:
        NoShardRule: an in-place function that autograd records, or a row that is out of date.
    """

    _whole: Tensor  # the copy of which this is a view, itself if it is none
    _owned: Tensor  # the row on its owner, no rows on other ranks: a view of the sharded tensor
    _seen: int  # version of the owned rows at the time of the copy

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function on plain tensors; write through what it changed."""
        if func in OF_THE_LEAF:
            with native():
                return func(*args, **(kwargs or {}))
        given = [*args, *(kwargs or {}).values()]
        rows = [a for a in given if type(a) is RowCopy]
        before = [_state(row) for row in rows]
        out = func(*map(plain, args), **{n: plain(a) for n, a in (kwargs or {}).items()})
        for row, state in zip(rows, before, strict=True):
            if _changed(row, state):
                _write_through(row, func)
        if isinstance(out, np.ndarray):
            out.flags.writeable = False  # NumPy does not tell what is written into it
        return _as_view(out, rows) if type(out) is Tensor else out


def row_copy(row: Tensor, owned: Tensor) -> RowCopy:
    """A replicated row that is linked to its owned rows: one on its owner, none elsewhere."""
    out = row.as_subclass(RowCopy)
    out._whole, out._owned, out._seen = row, owned, _version(owned)
    return out


def plain(value: Any) -> Any:
    """A row copy as a plain tensor, also in lists; another value as it is.

    Raises:
        NoShardRule: the sharded tensor was changed in place after the row was taken.
    """
    if isinstance(value, (list, tuple)) and any(type(a) is RowCopy for a in value):
        return [plain(a) for a in value]
    if type(value) is not RowCopy:
        return value
    if _version(value._owned) != value._seen:
        raise NoShardRule(
            "a row x[i] of a sharded tensor is a copy on every rank, and x was changed in place "
            "after it was taken: take the row again"
        )
    with native():
        return value.as_subclass(Tensor)


def _write_through(row: RowCopy, func: Any) -> None:
    """Write a changed copy to the owner of the row.

    Raises:
        NoShardRule: autograd records the function, or several elements share memory.
    """
    with native():
        recorded = row.requires_grad or row._owned.requires_grad
        places = zip(row._owned.shape, row._owned.stride(), strict=True)
        expanded = any(n > 1 and stride == 0 for n, stride in places)
    if is_moved(row._owned):
        raise NoShardRule(f"a row x[i] of a sharded tensor cannot be changed in place: {MOVED}")
    if expanded or (recorded and torch.is_grad_enabled()):
        name, what = getattr(func, "__name__", func), "expanded" if expanded else "differentiated"
        raise NoShardRule(
            f"{name} has no exact rule for a row x[i] of a sharded tensor that is {what}: the row "
            "is a copy on every rank; set rows by x[i] = value or x[i:i+1]"
        )
    with native(), torch.no_grad():
        row._owned.copy_(row._whole.expand_as(row._owned))
    row._seen = _version(row._owned)


def _as_view(out: Tensor, rows: Sequence[RowCopy]) -> Tensor:
    """The result, as a row copy where it shares memory with one."""
    for row in rows:
        if out.untyped_storage().data_ptr() == row._whole.untyped_storage().data_ptr():
            view = out.as_subclass(RowCopy)
            view._whole, view._owned, view._seen = row._whole, row._owned, row._seen
            return view
    return out


def _state(row: RowCopy) -> Tensor | int:
    """What tells whether a row is changed: its version; its values in inference mode."""
    with native():
        return row._whole.clone() if row.is_inference() else row._version


def _changed(row: RowCopy, state: Tensor | int) -> bool:
    with native():
        return row._version != state if isinstance(state, int) else not row._whole.equal(state)


def _version(x: Tensor) -> int:
    with native():
        return 0 if x.is_inference() else x._version
