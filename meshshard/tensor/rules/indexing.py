"""Rules of indexing: rows that are dropped change the sizes, and the new sizes are recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from meshshard.errors import n_of
from meshshard.tensor.align import (
    align_broadcast,
    dim_of,
    native_ndim,
    own_rows,
    require_same_sharding,
    shape_of,
)
from meshshard.tensor.rules.views import followed
from meshshard.tensor.shard_tensor import Rule, Sharding, ShardTensor, native, refuse, sharded, wrap

__all__ = ["RULES"]

ALL = slice(None)


def getitem(x: Any, index: Any) -> Any:
    """x[...]: rows by slices, masks and numbers; other dims by anything."""
    if type(x) is not ShardTensor:
        raise refuse(
            "Tensor.__getitem__", (x, index), None, "a plain tensor indexed by sharded rows"
        )
    items = [_item(x, i) for i in (index if isinstance(index, tuple) else (index,))]
    if len(items) == 1 and _is_mask(items[0]) and items[0].dim() == native_ndim(x) > 1:
        return masked_select(x, items[0])
    items, row = _spread(x, items)
    picked = items[row]
    items[row] = ALL
    if picked is None or (isinstance(picked, slice) and picked == ALL):
        return _other_dims(x, items)
    if isinstance(picked, int):
        return _other_dims_plain(_one_row(x, picked), items, row)
    if isinstance(picked, slice):
        return _other_dims(_row_slice(x, picked), items)
    if not all(i is None or isinstance(i, (int, slice)) for i in items):
        raise refuse(
            "Tensor.__getitem__", (x, index), None, "rows and other dims by tensors at once"
        )
    picked = torch.as_tensor(picked) if isinstance(picked, list) else picked
    if _is_mask(picked):
        return _other_dims(_masked_rows(x, picked), items)
    return _other_dims_plain(index_select(x, x._dim, picked), items, None)


def _item(x: ShardTensor, index: Any) -> Any:
    """One index; arrays of numpy are tensors, and tensors without dims are numbers."""
    index = torch.as_tensor(index) if type(index).__module__ == "numpy" else index
    if isinstance(index, bool) or (isinstance(index, Tensor) and index.dim() == 0):
        if isinstance(index, bool) or index.dtype == torch.bool:
            raise refuse("Tensor.__getitem__", (x,), None, "true or false for all rows at once")
        return int(index)
    return index


def _is_mask(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8)


def _spread(x: ShardTensor, items: list[Any]) -> tuple[list[Any], int]:
    """Indices one for each dim, with new dims between, and the place of the rows' own."""
    ndim = native_ndim(x)
    taken = sum(i is not None and i is not Ellipsis for i in items)
    dots = [n for n, i in enumerate(items) if i is Ellipsis]
    at = dots[0] if dots else len(items)
    rest = items[at + 1 :] if dots else []
    items = [*items[:at], *[ALL] * (ndim - taken), *rest]
    real = [n for n, i in enumerate(items) if i is not None]
    if len(real) != ndim:
        raise refuse(
            "Tensor.__getitem__", (x,), None, "a mask over several dims, or too many indices"
        )
    return items, real[x._dim]


def _other_dims(x: ShardTensor, items: list[Any]) -> ShardTensor:
    """Index dims other than the rows."""
    if all(isinstance(i, slice) and i == ALL for i in items):
        return x
    if any(type(i) is ShardTensor for i in items):
        raise refuse(
            "Tensor.__getitem__", (x,), None, "sharded indices of other dims; torch.gather"
        )
    if all(i is None or isinstance(i, (int, slice)) for i in items):
        real = [n for n, i in enumerate(items) if i is not None]
        dim = sum(not isinstance(i, int) for i in items[: real[x._dim]])
        with native():
            return wrap(x[tuple(items)], x._sharding, dim)
    out: ShardTensor = followed(torch.Tensor.__getitem__, x, (tuple(items),), {})
    return out


def _other_dims_plain(x: Tensor, items: list[Any], row: int | None) -> Tensor:
    """Index the other dims of a plain tensor whose row dim is there as one row, or as it is."""
    if row is not None:
        items[row] = 0
    return x[tuple(items)]


def _row_slice(x: ShardTensor, rows: slice) -> ShardTensor:
    """A slice of the global rows: own rows that are in it; no communication."""
    old = x._sharding
    start, stop, step = rows.indices(old.total)
    parts, first = [], 0
    for n in old.sizes:
        parts.append(_own_slice(range(start, stop, step), first, n))
        first += n
    mine = parts[old.domain.rank]
    with native():
        local = x[(*[ALL] * x._dim, mine)]
        origin = None if old.origin is None else old.origin[mine]
    sizes = [len(range(p.start, p.stop, p.step)) for p in parts]
    return wrap(local, Sharding(old.domain, sizes, origin), x._dim)


def _own_slice(rows: range, first: int, n: int) -> slice:
    """Which of the rows first:first+n are picked, as a slice of them."""
    skip = max(0, -(-(first - rows.start) // rows.step))
    begin = rows.start + skip * rows.step - first
    end = min(rows.stop - first, n)
    return slice(begin, end, rows.step) if begin < end else slice(0, 0, rows.step)


def _one_row(x: ShardTensor, row: int) -> Tensor:
    """One global row on every rank, the row dim kept."""
    return _some_rows(x, torch.tensor([_row(x, row)]))


def _row(x: ShardTensor, row: int) -> int:
    """A global row counted from the first.

    Raises:
        IndexError: there is no such row.
    """
    total = x._sharding.total
    if not -total <= row < total:
        raise IndexError(f"index {row} is out of bounds for {n_of(total, 'rows')}")
    return row % total


def _some_rows(x: ShardTensor, rows: Tensor) -> Tensor:
    """Global rows by number, replicated: every rank gives its own, the others add nothing."""
    sharding = x._sharding
    with native():
        own = rows.to(x.device) - sharding.first
        mine = (own >= 0) & (own < sharding.own)
        local = x.index_select(x._dim, own[mine])
        shape = list(x.shape)
        shape[x._dim] = len(rows)
        numbers = local.to(torch.uint8) if x.dtype == torch.bool else local
        whole = numbers.new_zeros(shape).index_add(x._dim, torch.nonzero(mine)[:, 0], numbers)
        return sharding.domain.all_reduce(whole).to(x.dtype)


def index_select(x: ShardTensor, dim: int, index: Tensor) -> Any:
    """Along other dims as ever; rows by replicated numbers give replicated rows."""
    dim = dim_of(dim, native_ndim(x))
    if type(index) is ShardTensor or type(x) is not ShardTensor:
        raise refuse(torch.index_select, (x, index), None, "sharded numbers of rows")
    if dim != x._dim:
        with native():
            return wrap(torch.index_select(x, dim, index), x._sharding, x._dim)
    total = x._sharding.total
    if len(index) and not (-total <= int(index.min()) and int(index.max()) < total):
        raise IndexError(f"index out of range for {total} rows")
    rows = torch.where(index < 0, index + total, index)
    return _some_rows(x, rows.reshape(-1)) if rows.ndim == 1 else refuse_shape(x, rows)


def refuse_shape(x: ShardTensor, rows: Tensor) -> Tensor:
    """Numbers of rows in a matrix: flatten them first."""
    raise refuse("Tensor.__getitem__", (x,), None, f"row numbers of shape {tuple(rows.shape)}")


def _masked_rows(x: ShardTensor, mask: Tensor) -> ShardTensor:
    """Rows where a mask is true; the new sizes are recorded."""
    old = x._sharding
    if type(mask) is ShardTensor:
        require_same_sharding("boolean mask", (x, mask))
        if native_ndim(mask) != 1:
            raise refuse("boolean mask", (x, mask), None, "a mask of rows has one dim")
        with native():
            own = mask.view_as(mask)
        sizes = old.domain.share(int(own.sum()))
    else:
        if tuple(mask.shape) != (old.total,):
            raise IndexError(f"the mask {tuple(mask.shape)} does not match {old.total} rows")
        sizes = [int(part.sum()) for part in torch.split(mask, list(old.sizes))]
        own = own_rows(mask, old, 0)
    with native():
        rows = torch.nonzero(own)[:, 0]
        local = x.index_select(x._dim, rows)
        origin = None if old.origin is None else old.origin[rows.to(old.origin.device)]
    return wrap(local, Sharding(old.domain, sizes, origin), x._dim)


def masked_select(x: Any, mask: Any) -> ShardTensor:
    """Numbers where a mask is true, as one sharded row of them; rows must be the first dim."""
    first = require_same_sharding(torch.masked_select, (x, mask))
    if type(x) is not ShardTensor or first._dim != 0:
        raise refuse(torch.masked_select, (x, mask), None, "rows must be the first dim")
    mask = mask if type(mask) is ShardTensor else own_rows(mask, x._sharding, 0)
    with native():
        local = torch.masked_select(x, mask)
    sizes = x._sharding.domain.share(len(local))
    return wrap(local, Sharding(x._sharding.domain, sizes), 0)


def narrow(x: ShardTensor, dim: int, start: int, length: int) -> ShardTensor:
    """A run along a dim."""
    dim = dim_of(dim, native_ndim(x))
    total = shape_of(x)[dim]
    start = int(start)
    if not -total <= start <= total:
        raise IndexError(f"start out of range (it is within {-total} and {total}, got {start})")
    start += total * (start < 0)
    if start + length > total:
        raise RuntimeError(f"start ({start}) + length ({length}) exceeds dimension size ({total}).")
    if dim == x._dim:
        return _row_slice(x, slice(start, start + length))
    with native():
        return wrap(x.narrow(dim, start, length), x._sharding, x._dim)


def select(x: ShardTensor, dim: int, index: int) -> Any:
    """One slice along a dim; a row is replicated."""
    dim = dim_of(dim, native_ndim(x))
    if dim == x._dim:
        return _one_row(x, index).squeeze(dim)
    with native():
        return wrap(x.select(dim, index), x._sharding, x._dim - (dim < x._dim))


def setitem(x: Any, index: Any, value: Any) -> None:
    """x[...] = value, in place on own rows."""
    if type(x) is not ShardTensor:
        raise refuse(
            "Tensor.__setitem__", (x, index, value), None, "a plain target of sharded rows"
        )
    items = [_item(x, i) for i in (index if isinstance(index, tuple) else (index,))]
    whole = len(items) == 1 and _is_mask(items[0]) and items[0].dim() == native_ndim(x)
    if whole and not (type(value) is ShardTensor and native_ndim(x) == 1):
        masked = own_part(items[0], x)
        with native():
            x[masked] = _plain_value(x, value)
        return
    items, row = _spread(x, items)
    if type(value) is ShardTensor and _is_mask(items[row]) and items[row].dim() == 1:
        ndim = native_ndim(x) - sum(isinstance(i, int) for i in items)
        items[row] = _picked(x, own_part(items[row], x), value, ndim)
    else:
        items[row], value = _target(x, items[row], value)
    with native():
        x[tuple(items)] = value


def _picked(x: ShardTensor, mask: Tensor, value: ShardTensor, ndim: int) -> Tensor:
    """A mask of own rows that take the rows of a value, in order.

    Communication: one gather of objects.
    """
    sharding = value._sharding
    with native():
        own = mask.view_as(mask)
    sizes = x._sharding.domain.share(int(own.sum()))
    same = sharding.domain.group == x._sharding.domain.group and sharding.sizes == tuple(sizes)
    if not same or x._dim != 0 or value._dim != 0 or native_ndim(value) != ndim:
        why = f"{sizes} rows are picked: give as many on each rank, of {ndim} dims"
        raise refuse("Tensor.__setitem__", (x, value), None, why)
    return own


def _target(x: ShardTensor, picked: Any, value: Any) -> tuple[Any, Any]:
    """Which own rows are set, and this rank's part of the value."""
    if isinstance(picked, slice):
        whole = picked == ALL
        part = x if whole else _row_slice(x, picked)
        value = own_part(value, part) if isinstance(value, Tensor) else value
        return (ALL if whole else _local_rows(x, picked)), value
    value = _plain_value(x, value)
    if isinstance(picked, int):
        own = _row(x, picked) - x._sharding.first
        return slice(own, own + 1) if 0 <= own < x._sharding.own else slice(0, 0), value
    if _is_mask(picked) and picked.dim() == 1:
        return own_part(picked, x), value
    raise refuse("Tensor.__setitem__", (x,), None, "rows by numbers")


def own_part(value: Tensor, x: ShardTensor) -> Tensor:
    """A value or mask as this rank's part of it."""
    if type(value) is ShardTensor:
        require_same_sharding("Tensor.__setitem__", (x, value))
        return value
    back = native_ndim(x) - x._dim
    if value.ndim >= back and value.shape[value.ndim - back] == x._sharding.total != 1:
        return own_rows(value, x._sharding, value.ndim - back)
    if value.ndim == 1 and value.shape[0] == x._sharding.total and value.dtype == torch.bool:
        return own_rows(value, x._sharding, 0)
    return value


def _plain_value(x: ShardTensor, value: Any) -> Any:
    """A number or a tensor without rows."""
    if type(value) is ShardTensor or (isinstance(value, Tensor) and value.numel() != 1):
        raise refuse("Tensor.__setitem__", (x, value), None, "rows that are picked take one number")
    return value


def _local_rows(x: ShardTensor, rows: slice) -> slice:
    """A slice of global rows as a slice of own rows."""
    start, stop, step = rows.indices(x._sharding.total)
    return _own_slice(range(start, stop, step), x._sharding.first, x._sharding.own)


def _on_other(func: Callable[..., Any], index_at: Sequence[int]) -> Rule:
    """gather, scatter and their kin along other dims: every argument row by row."""

    def _rule(x: Any, dim: int, *args: Any, **kwargs: Any) -> Any:
        every = [x, *args, *kwargs.values()]
        found = sharded(every)
        first = require_same_sharding(func, every)
        tensors = [a for a in (x, *(args[i] for i in index_at if i < len(args)))
                   if isinstance(a, Tensor)]  # fmt: skip
        dim = dim_of(dim, native_ndim(first))
        if dim == first._dim or len(found) < len(tensors):
            raise refuse(func, every, None, "along the sharded dim, or with plain rows")
        with native():
            return wrap(func(x, dim, *args, **kwargs), first._sharding, first._dim)

    return _rule


def embedding(x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Rows of a table, by sharded numbers."""
    if type(x) is not ShardTensor or type(weight) is ShardTensor:
        raise refuse(F.embedding, (x, weight), None, "a sharded table")
    names = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")
    given = dict(zip(names, args, strict=False)) | kwargs
    if given.get("max_norm") is not None or given.get("scale_grad_by_freq"):
        why = "max_norm and scale_grad_by_freq look at the numbers of all rows"
        raise refuse(F.embedding, (x,), None, why)
    with native():
        return wrap(F.embedding(x, weight, *args, **kwargs), x._sharding, x._dim)


def one_hot(x: ShardTensor, num_classes: int = -1) -> ShardTensor:
    """One column a class; the number of classes is the global one."""
    classes = num_classes if num_classes >= 0 else int(torch.amax(x)) + 1
    with native():
        return wrap(F.one_hot(x, classes), x._sharding, x._dim)


def take_along_dim(x: Any, indices: Any, dim: Any = None) -> Any:
    """As gather, along a dim other than the sharded one; other dims of size one are repeated."""
    (x, indices), first, back = align_broadcast(torch.take_along_dim, (x, indices))
    at = native_ndim(first) - back
    if dim is None or native_ndim(x) != native_ndim(indices) or dim_of(dim, native_ndim(x)) == at:
        why = "say along which dim, other than the sharded one, of tensors of equally many dims"
        raise refuse(torch.take_along_dim, (x, indices), None, why)
    with native():
        return wrap(torch.take_along_dim(x, indices, dim), first._sharding, at)


def _both(name: str, rule: Rule) -> dict[Any, Rule]:
    return {f: rule for h in (torch, torch.Tensor, F) if callable(f := getattr(h, name, None))}


SCATTERS = {
    "gather": (0,), "scatter": (0, 1), "scatter_": (0, 1), "scatter_add": (0, 1),
    "scatter_add_": (0, 1), "scatter_reduce": (0, 1),
}  # fmt: skip
RULES: dict[Any, Rule] = {
    torch.Tensor.__getitem__: getitem,
    torch.Tensor.__setitem__: setitem,
    **_both("index_select", index_select),
    **_both("masked_select", masked_select),
    **_both("narrow", narrow),
    **_both("select", select),
    **_both("take_along_dim", take_along_dim),
    **_both("embedding", embedding),
    **_both("one_hot", one_hot),
    torch._C._nn.one_hot: one_hot,
    **{
        f: _on_other(f, at)
        for name, at in SCATTERS.items()
        for h in (torch, torch.Tensor)
        if (f := getattr(h, name, None))
    },
}
