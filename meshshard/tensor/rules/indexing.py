"""Rules of indexing: selected rows stay on their ranks, and the result has their new sizes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from meshshard.errors import n_of
from meshshard.tensor._torch_private import native
from meshshard.tensor.align import (
    align_broadcast,
    global_shape,
    narrow_to_owned,
    ndim_of,
    require_same_sharding,
)
from meshshard.tensor.layout import as_layout
from meshshard.tensor.plain_edges import check_plain_edges
from meshshard.tensor.row_copy import row_copy
from meshshard.tensor.rules.table import named
from meshshard.tensor.rules.views import apply_and_follow
from meshshard.tensor.shard_tensor import (
    Rule,
    ShardTensor,
    apply_local,
    normalize_dim,
    refuse,
    wrap,
)
from meshshard.tensor.sharding import Sharding

broadcast_shapes: Any = torch.broadcast_shapes
broadcast_tensors: Any = torch.broadcast_tensors
ALL = slice(None)
GET, SET = "Tensor.__getitem__", "Tensor.__setitem__"


# --------------------------------------------------------------------------------------- x[index]
def getitem(x: Any, index: Any) -> Any:
    """x[index]: rows by an int, a slice, a mask or row numbers; other dims by any index.

    A plain table indexed by sharded row numbers gives sharded rows.
    """
    if type(x) is not ShardTensor:
        if type(index) is ShardTensor and not _is_mask(index):
            with native():
                return wrap(x[index], index._sharding, index._dim)
        raise refuse(GET, (x, index), None, "a plain tensor is indexed by a sharded mask")
    items = [_as_index(x, i) for i in (index if isinstance(index, tuple) else (index,))]
    if len(items) == 1 and _is_mask(items[0]) and items[0].dim() == ndim_of(x) > 1:
        return masked_select(x, items[0])
    items, row = _per_dim(x, items)
    row_index = items[row]
    items[row] = ALL
    if row_index is None or (isinstance(row_index, slice) and row_index == ALL):
        return _other_dims(x, items)
    if isinstance(row_index, int):
        items[row] = 0
        return _one_row(x, row_index)[tuple(items)]
    if isinstance(row_index, slice):
        return _other_dims(_row_slice(x, row_index), items)
    if not all(i is None or isinstance(i, (int, slice)) for i in items):
        why = "the rows and another dim are indexed by tensors at once"
        raise refuse(GET, (x, index), None, why)
    row_index = torch.as_tensor(row_index) if isinstance(row_index, list) else row_index
    if _is_mask(row_index):
        return _other_dims(_masked_rows(x, row_index), items)
    return index_select(x, x._dim, row_index)[tuple(items)]


def _as_index(x: ShardTensor, index: Any) -> Any:
    """One index: a NumPy array as a tensor, a tensor without dims as an int."""
    index = torch.as_tensor(index) if type(index).__module__ == "numpy" else index
    if isinstance(index, bool) or (isinstance(index, Tensor) and index.dim() == 0):
        if isinstance(index, bool) or index.dtype == torch.bool:
            why = "a single bool adds a dim: use None, or a mask with one bool for each row"
            raise refuse(GET, (x,), None, why)
        return int(index)
    return index


def _is_mask(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8)


def _per_dim(x: ShardTensor, items: list[Any]) -> tuple[list[Any], int]:
    """An index for each dim, and None for new dims; and the position of that of the sharded dim."""
    ndim = ndim_of(x)
    n_indexed = sum(i is not None and i is not Ellipsis for i in items)
    dots = [n for n, i in enumerate(items) if i is Ellipsis]
    at = dots[0] if dots else len(items)
    rest = items[at + 1 :] if dots else []
    items = [*items[:at], *[ALL] * (ndim - n_indexed), *rest]
    real = [n for n, i in enumerate(items) if i is not None]
    if len(real) != ndim:
        raise refuse(GET, (x,), None, f"expected at most {ndim} indices and one '...'")
    return items, real[x._dim]


def _other_dims(x: ShardTensor, items: list[Any]) -> ShardTensor:
    """Index dims other than the sharded one."""
    if all(isinstance(i, slice) and i == ALL for i in items):
        return x
    if any(type(i) is ShardTensor for i in items):
        why = "a dim other than the sharded one is indexed by a sharded tensor: see torch.gather"
        raise refuse(GET, (x,), None, why)
    if all(i is None or isinstance(i, (int, slice)) for i in items):
        real = [n for n, i in enumerate(items) if i is not None]
        dim = sum(not isinstance(i, int) for i in items[: real[x._dim]])
        with native():
            return wrap(x[tuple(items)], x._sharding, dim)
    items = [_numbers(i) for i in items]
    return apply_and_follow(Tensor.__getitem__, x, (tuple(items),), {})


def _numbers(item: Any) -> Any:
    """The numbers of what a mask of one dim selects; another index as it is."""
    return torch.nonzero(item)[:, 0] if _is_mask(item) and item.dim() == 1 else item


# ----------------------------------------------------------------------------------------- rows
def _row_slice(x: ShardTensor, rows: slice) -> ShardTensor:
    """A slice of the global rows; no communication."""
    old = x._sharding
    start, stop, step = rows.indices(old.total)
    parts, first = [], 0
    for n in old.sizes:
        parts.append(_local_slice(range(start, stop, step), first, n))
        first += n
    mine = parts[old.domain.rank]
    with native():
        local = x[(*[ALL] * x._dim, mine)]
        origin = None if old.origin is None else old.origin[mine]
    sizes = [len(range(p.start, p.stop, p.step)) for p in parts]
    return wrap(local, Sharding(old.domain, sizes, origin), x._dim)


def _local_slice(rows: range, first: int, n: int) -> slice:
    """The global rows of a range that are in first:first+n, as a slice of these n rows."""
    skip = max(0, -(-(first - rows.start) // rows.step))
    begin = rows.start + skip * rows.step - first
    end = min(rows.stop - first, n)
    return slice(begin, end, rows.step) if begin < end else slice(0, 0, rows.step)


def _one_row(x: ShardTensor, row: int) -> Tensor:
    """One global row, replicated; the sharded dim is kept, with size 1."""
    row, sharding = _checked_row(x, row), x._sharding
    copy = _rows_by_number(x, torch.tensor([row]))
    mine = sharding.first <= row < sharding.first + sharding.own
    with native():
        return row_copy(copy, x.narrow(x._dim, row - sharding.first if mine else 0, int(mine)))


def _checked_row(x: ShardTensor, row: int) -> int:
    """A row number, which may be negative, counted from the first global row.

    Raises:
        IndexError: the row does not exist.
    """
    total = x._sharding.total
    if not -total <= row < total:
        raise IndexError(f"index {row} is out of bounds for {n_of(total, 'rows')}")
    return row % total


def _rows_by_number(x: ShardTensor, rows: Tensor) -> Tensor:
    """Global rows by number, replicated: each rank fills in its rows, an all-reduce adds them."""
    sharding = x._sharding
    with native():
        local_rows = rows.to(x.device) - sharding.first
        mine = (local_rows >= 0) & (local_rows < sharding.own)
        local = x.index_select(x._dim, local_rows[mine])
        shape = list(x.shape)
        shape[x._dim] = len(rows)
        values = local.to(torch.uint8) if x.dtype == torch.bool else local
        whole = values.new_zeros(shape).index_add(x._dim, torch.nonzero(mine)[:, 0], values)
        return sharding.domain.all_reduce(whole).to(x.dtype)


def index_select(x: Any, dim: int, index: Any) -> Any:
    """torch.index_select; rows selected by plain row numbers are replicated.

    A plain table indexed by sharded row numbers gives sharded rows.
    """
    if type(x) is not ShardTensor:
        with native():
            out = torch.index_select(x, dim, index)
        return wrap(out, index._sharding, normalize_dim(dim, x.ndim))
    dim = normalize_dim(dim, ndim_of(x))
    if type(index) is ShardTensor:
        why = "the row numbers are sharded; gather them"
        raise refuse(torch.index_select, (x, index), None, why)
    if dim != x._dim:
        return apply_local(torch.index_select, x, (dim, index))
    total = x._sharding.total
    if len(index) and not (-total <= int(index.min()) and int(index.max()) < total):
        raise IndexError(f"index out of range for {total} rows")
    if index.ndim != 1:
        raise refuse(GET, (x,), None, f"row numbers of shape {tuple(index.shape)}; flatten them")
    check_plain_edges(x, index)
    return _rows_by_number(x, torch.where(index < 0, index + total, index))


def _masked_rows(x: ShardTensor, mask: Tensor) -> ShardTensor:
    """Rows where a mask is true."""
    old = x._sharding
    if type(mask) is ShardTensor:
        require_same_sharding("boolean mask", (x, mask))
        if ndim_of(mask) != 1:
            raise refuse("boolean mask", (x, mask), None, "a mask of rows must have one dim")
        with native():
            local_mask = mask.view_as(mask)
        sizes = old.domain.share(int(local_mask.sum()))
    else:
        if tuple(mask.shape) != (old.total,):
            raise IndexError(f"expected a mask of shape ({old.total},), got {tuple(mask.shape)}")
        sizes = [int(part.sum()) for part in torch.split(mask, list(old.sizes))]
        local_mask = narrow_to_owned(mask, old, 0)
    with native():
        rows = torch.nonzero(local_mask)[:, 0]
        local = x.index_select(x._dim, rows)
        origin = None if old.origin is None else old.origin[rows.to(old.origin.device)]
    return wrap(local, Sharding(old.domain, sizes, origin), x._dim)


def masked_select(x: Any, mask: Any) -> ShardTensor:
    """Elements where a mask is true, in one sharded dim.

    Communication: one gather of objects; that of torch.flatten unless the first dim is sharded.
    """
    broadcast_shapes(x.shape, mask.shape)  # raises identically on every rank
    given, first, back = align_broadcast(torch.masked_select, (x, mask))
    if back != max(ndim_of(x), ndim_of(mask)):
        x, mask = map(torch.flatten, broadcast_tensors(x, mask))
        return masked_select(x, as_layout(mask, x))
    with native():
        local = torch.masked_select(*given)
    domain = first._sharding.domain
    return wrap(local, Sharding(domain, domain.share(len(local))), 0)


def narrow(x: ShardTensor, dim: int, start: int, length: int) -> ShardTensor:
    """torch.narrow."""
    dim = normalize_dim(dim, ndim_of(x))
    total = global_shape(x)[dim]
    start = int(start)
    if not -total <= start <= total:
        raise IndexError(f"start out of range (expected {-total} to {total}, got {start})")
    start += total * (start < 0)
    if start + length > total:
        raise RuntimeError(f"start ({start}) + length ({length}) exceeds dimension size ({total}).")
    if dim == x._dim:
        return _row_slice(x, slice(start, start + length))
    return apply_local(Tensor.narrow, x, (dim, start, length))


def select(x: ShardTensor, dim: int, index: int) -> Any:
    """torch.select; a selected row is replicated."""
    dim = normalize_dim(dim, ndim_of(x))
    if dim == x._dim:
        return _one_row(x, index).squeeze(dim)
    return apply_local(Tensor.select, x, (dim, index), dim=x._dim - (dim < x._dim))


# ------------------------------------------------------------------------------- x[index] = value
def setitem(x: Any, index: Any, value: Any) -> None:
    """x[index] = value, in place on owned rows."""
    if type(x) is not ShardTensor:
        why = "a plain tensor cannot be changed in place by a sharded one"
        raise refuse(SET, (x, index, value), None, why)
    items = [_as_index(x, i) for i in (index if isinstance(index, tuple) else (index,))]
    full_mask = len(items) == 1 and _is_mask(items[0]) and items[0].dim() == ndim_of(x)
    if full_mask and not (type(value) is ShardTensor and ndim_of(x) == 1):
        masked = _owned_part(items[0], x)
        with native():
            x[masked] = _require_scalar(x, value)
        return
    items, row = _per_dim(x, items)
    _check_value(x, items, value)
    if type(value) is ShardTensor and _is_mask(items[row]) and items[row].dim() == 1:
        ndim = ndim_of(x) - sum(isinstance(i, int) for i in items)
        items[row] = _checked_mask(x, _owned_part(items[row], x), value, ndim)
    else:
        items[row], value = _local_target(x, items[row], value)
    with native():
        x[tuple(items)] = value


def _check_value(x: ShardTensor, items: list[Any], value: Any) -> None:
    """Check the shape of a value, by global shapes so that all ranks raise.

    Raises:
        RuntimeError: the value does not broadcast to what numbers and slices select.
    """
    simple = all(i is None or isinstance(i, (int, slice)) for i in items)
    if not simple or not isinstance(value, Tensor):
        return
    target = tuple(torch.empty(x.shape, device="meta")[tuple(items)].shape)
    given = tuple(value.shape)
    extra = max(0, len(given) - len(target))
    pairs = zip(reversed(given[extra:]), reversed(target), strict=False)
    if any(n != 1 for n in given[:extra]) or any(n not in (1, m) for n, m in pairs):
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {given} cannot be broadcast to {target}"
        )


def _checked_mask(x: ShardTensor, mask: Tensor, value: ShardTensor, ndim: int) -> Tensor:
    """The local mask; raise unless it selects as many rows as the value has on each rank.

    Communication: one gather of objects.
    """
    sharding = value._sharding
    with native():
        local_mask = mask.view_as(mask)
    sizes = x._sharding.domain.share(int(local_mask.sum()))
    same = sharding.domain.group == x._sharding.domain.group and sharding.sizes == tuple(sizes)
    if not same or x._dim != 0 or value._dim != 0 or ndim_of(value) != ndim:
        why = f"the mask selects {sizes} rows; expected a value of {ndim} dims with these sizes"
        raise refuse(SET, (x, value), None, why)
    return local_mask


def _local_target(x: ShardTensor, row_index: Any, value: Any) -> tuple[Any, Any]:
    """The owned rows to set, and this rank's part of the value."""
    if isinstance(row_index, slice):
        whole = row_index == ALL
        part = x if whole else _row_slice(x, row_index)
        value = _owned_part(value, part) if isinstance(value, Tensor) else value
        rows = range(*row_index.indices(x._sharding.total))
        return (ALL if whole else _local_slice(rows, x._sharding.first, x._sharding.own)), value
    value = _require_scalar(x, value)
    if isinstance(row_index, int):
        row = _checked_row(x, row_index) - x._sharding.first
        return slice(row, row + 1) if 0 <= row < x._sharding.own else slice(0, 0), value
    if _is_mask(row_index) and row_index.dim() == 1:
        return _owned_part(row_index, x), value
    raise refuse(SET, (x,), None, "rows cannot be set by row numbers: use a slice or a mask")


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


def _require_scalar(x: ShardTensor, value: Any) -> Any:
    if type(value) is ShardTensor or (isinstance(value, Tensor) and value.numel() != 1):
        raise refuse(SET, (x, value), None, "selected elements can only be set to one number")
    return value


# ----------------------------------------------------------------------------------------- tables
def one_hot(x: ShardTensor, num_classes: int = -1) -> ShardTensor:
    """F.one_hot; by default with the global number of classes."""
    classes = num_classes if num_classes >= 0 else int(torch.amax(x)) + 1
    return apply_local(F.one_hot, x, (classes,))


def take_along_dim(x: Any, indices: Any, dim: Any = None) -> Any:
    """torch.take_along_dim along a dim other than the sharded one."""
    (x, indices), first, back = align_broadcast(torch.take_along_dim, (x, indices))
    at, ndim = ndim_of(first) - back, ndim_of(x)
    if dim is None or ndim != ndim_of(indices) or normalize_dim(dim, ndim) == at:
        why = "expected a dim other than the sharded one, and tensors with the same number of dims"
        raise refuse(torch.take_along_dim, (x, indices), None, why)
    with native():
        return wrap(torch.take_along_dim(x, indices, dim), first._sharding, at)


RULES: dict[Any, Rule] = {
    Tensor.__getitem__: getitem,
    Tensor.__setitem__: setitem,
    **named({
        "index_select": index_select,
        "masked_select": masked_select,
        "narrow": narrow,
        "select": select,
        "take_along_dim": take_along_dim,
        "one_hot": one_hot,
    }),
}  # fmt: skip
