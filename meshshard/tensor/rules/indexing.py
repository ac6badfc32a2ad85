"""Rules of indexing: selected rows stay on their ranks, and the result has their new sizes."""

from __future__ import annotations

import itertools
from typing import Any

import torch
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
from meshshard.tensor.elements import checked, flat_elements, rows_at, sharded_if_long
from meshshard.tensor.layout import as_layout
from meshshard.tensor.row_copy import row_copy
from meshshard.tensor.rules.row_reads import rows_of
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
GET = "Tensor.__getitem__"


# --------------------------------------------------------------------------------------- x[index]
def getitem(x: Any, index: Any) -> Any:
    """x[index]: rows by an int, a slice, a mask or row numbers; other dims by any index.

    Rows by sharded row numbers are sharded as these. Rows by as many plain row numbers as there are
    rows (a permutation or a resampling) are sharded as `x`, those by other plain row numbers are
    replicated.

    Communication: none for slices; one all-reduce for an int; one gather of objects for a sharded
    mask; for numbers that of `checked`, `sharded_if_long` and `rows_at`.
    """
    items = [as_index(x, i) for i in (index if isinstance(index, tuple) else (index,))]
    if type(x) is not ShardTensor:
        return _plain_at(x, items)
    if len(items) == 1 and is_mask(items[0]) and items[0].dim() == ndim_of(x) > 1:
        return _masked(x, items[0])
    items, row = per_dim(x, items)
    row_index, basic = items[row], all(is_basic(i) for n, i in enumerate(items) if n != row)
    if row_index is None or (isinstance(row_index, slice) and row_index == ALL):
        return _other_dims(x, items)
    items[row] = ALL
    if isinstance(row_index, int):
        items[row] = 0
        return _one_row(x, row_index)[tuple(items)]
    if isinstance(row_index, slice):
        return _other_dims(row_slice(x, row_index), items)
    row_index = torch.as_tensor(row_index) if isinstance(row_index, list) else row_index
    if basic and is_mask(row_index):
        return _other_dims(_masked_rows(x, row_index), items)
    items[row] = numbers_of(row_index)
    return _by_tensors(x, items, row)


def is_basic(index: Any) -> bool:
    """Whether an index is an int, a slice or None."""
    return index is None or isinstance(index, (int, slice))


def _plain_at(x: Tensor, items: list[Any]) -> ShardTensor:
    """A plain tensor indexed by sharded row numbers: sharded as these."""
    if Ellipsis in [i for i in items if not isinstance(i, Tensor)]:
        dots = next(n for n, i in enumerate(items) if i is Ellipsis)
        n = ndim_of(x) - sum(i is not None for i in items) + 1
        items = [*items[:dots], *[ALL] * n, *items[dots + 1 :]]
    items = [numbers_of(i) for i in items]
    at = [n for n, i in enumerate(items) if isinstance(i, Tensor)]
    kept = [n for n, i in enumerate(items) if not isinstance(i, int)]
    given, first, back = align_broadcast(GET, [items[n] for n in at])
    place = [kept.index(n) for n in at]
    front = place[0] if place == list(range(place[0], place[-1] + 1)) else 0
    ndim = max(map(ndim_of, given))
    for n, index in zip(at, given, strict=True):
        items[n] = index
    with native():
        return wrap(x[tuple(items)], first._sharding, front + ndim - back)


def _by_tensors(x: ShardTensor, items: list[Any], row: int) -> Any:
    """The rows, and maybe other dims, by tensors of numbers that broadcast.

    Communication: that of `rows_of` for one tensor; else of `checked` for each, and of `rows_at`.
    """
    basic = [i if is_basic(i) else ALL for i in items]
    y = _other_dims(x, basic)
    kept = [i for i in items if not isinstance(i, int)]
    at = [n for n, i in enumerate(kept) if not is_basic(i)]
    row = at.index(y._dim)
    indices = [numbers_of(torch.as_tensor(kept[n]).to(x.device)) for n in at]
    if len(at) == 1:
        return rows_of(y, at[0], indices[0])
    numbers = [checked(i, y.shape[n]) for n, i in zip(at, indices, strict=True)]
    order = [row, *(k for k in range(len(at)) if k != row)]
    number = numbers[row]
    for k in order[1:]:
        number = number * y.shape[at[k]] + numbers[k]
    rest = [d for d in range(ndim_of(y)) if d not in at]
    table: Any = y.permute([at[k] for k in order] + rest)
    out = rows_at(flat_elements(table, len(at)), sharded_if_long(number, x._sharding))
    first = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    n = ndim_of(number)
    return out.movedim(tuple(range(n)), tuple(range(first, first + n)))


def as_index(x: Any, index: Any) -> Any:
    """One index: a NumPy array as a tensor, a tensor without dims as an int."""
    index = torch.as_tensor(index) if type(index).__module__ == "numpy" else index
    if isinstance(index, bool) or (isinstance(index, Tensor) and index.dim() == 0):
        if isinstance(index, bool) or index.dtype == torch.bool:
            why = "a single bool adds a dim: use None, or a mask with one bool for each row"
            raise refuse(GET, (x,), None, why)
        return int(index)
    return index


def is_mask(item: Any) -> bool:
    """Whether an index is a tensor of bools."""
    return isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8)


def per_dim(x: ShardTensor, items: list[Any]) -> tuple[list[Any], int]:
    """An index for each dim, and None for new dims; and the position of that of the sharded dim."""
    ndim = ndim_of(x)
    n_indexed = sum(map(_dims_of, items))
    dots = [n for n, i in enumerate(items) if i is Ellipsis]
    at = dots[0] if dots else len(items)
    rest = items[at + 1 :] if dots else []
    items = [*items[:at], *[ALL] * (ndim - n_indexed), *rest]
    if sum(map(_dims_of, items)) != ndim or len(dots) > 1:
        raise refuse(GET, (x,), None, f"expected at most {ndim} indices and one '...'")
    _check_masks(x, items)
    items = [i for item in items for i in per_mask_dim(item)]
    real = [n for n, i in enumerate(items) if i is not None]
    return items, real[x._dim]


def _dims_of(item: Any) -> int:
    """The number of dims that one index is for."""
    return item.dim() if is_mask(item) else int(item is not None and item is not Ellipsis)


def _check_masks(x: ShardTensor, items: list[Any]) -> None:
    """Check masks by global shapes, so that all ranks raise.

    Raises:
        IndexError: a mask does not have the shape of the dims that it is for.
    """
    d = 0
    for item in items:
        wanted = tuple(global_shape(x)[d : d + _dims_of(item)])
        if is_mask(item) and tuple(item.shape) != wanted:
            raise IndexError(f"expected a mask of shape {wanted}, got {tuple(item.shape)}")
        d += _dims_of(item)


def _other_dims(x: ShardTensor, items: list[Any]) -> ShardTensor:
    """Index dims other than the sharded one."""
    if all(isinstance(i, slice) and i == ALL for i in items):
        return x
    items = [i.gather() if type(i) is ShardTensor else i for i in items]
    if all(map(is_basic, items)):
        real = [n for n, i in enumerate(items) if i is not None]
        dim = sum(not isinstance(i, int) for i in items[: real[x._dim]])
        with native():
            return wrap(x[tuple(items)], x._sharding, dim)
    x = _other_dims(x, [i if is_basic(i) else ALL for i in items])
    kept: list[Any] = [
        ALL if is_basic(i) else numbers_of(i) for i in items if not isinstance(i, int)
    ]
    for d, index in enumerate(kept):
        if isinstance(index, Tensor):  # ranks without rows do not check
            kept[d] = checked(index, x.shape[d])
    return apply_and_follow(Tensor.__getitem__, x, (tuple(kept),), {})


def numbers_of(item: Any) -> Any:
    """The numbers of what a mask of one dim selects; another index as it is."""
    item = torch.as_tensor(item) if isinstance(item, list) else item
    return torch.nonzero(item)[:, 0] if is_mask(item) and item.dim() == 1 else item


def per_mask_dim(item: Any) -> tuple[Any, ...]:
    """The numbers in each dim of what a mask of several dims selects; another index as it is."""
    many = is_mask(item) and item.dim() > 1
    return torch.nonzero(item, as_tuple=True) if many else (item,)


# ----------------------------------------------------------------------------------------- rows
def row_slice(x: ShardTensor, rows: slice) -> ShardTensor:
    """A slice of the global rows; no communication."""
    old = x._sharding
    start, stop, step = rows.indices(old.total)
    firsts = itertools.accumulate(old.sizes, initial=0)
    parts = [
        local_slice(range(start, stop, step), first, n)
        for first, n in zip(firsts, old.sizes, strict=False)
    ]
    mine = parts[old.domain.rank]
    with native():
        local = x[(*[ALL] * x._dim, mine)]
        origin = None if old.origin is None else old.origin[mine]
    sizes = [len(range(p.start, p.stop, p.step)) for p in parts]
    return wrap(local, Sharding(old.domain, sizes, origin), x._dim)


def local_slice(rows: range, first: int, n: int) -> slice:
    """The global rows of a range that are in first:first+n, as a slice of these n rows."""
    skip = max(0, -(-(first - rows.start) // rows.step))
    begin = rows.start + skip * rows.step - first
    end = min(rows.stop - first, n)
    return slice(begin, end, rows.step) if begin < end else slice(0, 0, rows.step)


def _one_row(x: ShardTensor, row: int) -> Tensor:
    """One global row, replicated; the sharded dim is kept, with size 1.

    Communication: one all-reduce, forward and backward.
    """
    row, sharding = checked_row(x, row), x._sharding
    moved: Any = x.movedim(x._dim, 0)
    copy = rows_at(moved, torch.tensor([row])).movedim(0, x._dim)
    mine = sharding.first <= row < sharding.first + sharding.own
    with native():
        return row_copy(copy, x.narrow(x._dim, row - sharding.first if mine else 0, int(mine)))


def checked_row(x: ShardTensor, row: int) -> int:
    """A row number, which may be negative, counted from the first global row.

    Raises:
        IndexError: the row does not exist.
    """
    total = x._sharding.total
    if not -total <= row < total:
        raise IndexError(f"index {row} is out of bounds for {n_of(total, 'rows')}")
    return row % total


def _masked_rows(x: ShardTensor, mask: Tensor) -> ShardTensor:
    """Rows where a mask is true.

    Communication: one gather of objects for a sharded mask; one all-to-all if it has other sizes.
    """
    old = x._sharding
    if type(mask) is ShardTensor:
        if ndim_of(mask) == 1 and mask.shape[0] == old.total and mask._sharding != old:
            mask = mask.redistribute(old.sizes)
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


def _masked(x: ShardTensor, mask: Tensor) -> ShardTensor:
    """Elements where a mask of all dims is true; unlike masked_select, backward needs no `x`.

    Communication: one gather of objects; that of torch.flatten unless the first dim is sharded.

    Raises:
        IndexError: the mask has another shape.
    """
    _check_masks(x, [mask])
    if x._dim:
        x, mask = torch.flatten(x), torch.flatten(mask)  # type: ignore[assignment]
    owned = as_layout(mask, x)
    with native():
        local = x[owned]
    domain = x._sharding.domain
    return wrap(local, Sharding(domain, domain.share(len(local))), 0)


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


def narrow(x: ShardTensor, dim: int, start: Any, length: int) -> ShardTensor:
    """torch.narrow."""
    dim = normalize_dim(dim, ndim_of(x))
    total = global_shape(x)[dim]
    if isinstance(start, Tensor):
        if start.ndim or type(start.item()) is not int:
            raise RuntimeError("start must be a 0-dim integral tensor.")
        start = int(start)
    if length < 0:
        raise RuntimeError("narrow(): length must be non-negative.")
    if not -total <= start <= total:
        raise IndexError(f"start out of range (expected {-total} to {total}, got {start})")
    start += total * (start < 0)
    if start + length > total:
        raise RuntimeError(f"start ({start}) + length ({length}) exceeds dimension size ({total}).")
    if dim == x._dim:
        return row_slice(x, slice(start, start + length))
    return apply_local(Tensor.narrow, x, (dim, start, length))


def select(x: ShardTensor, dim: int, index: int) -> Any:
    """torch.select; a selected row is replicated.

    Communication: along the sharded dim one all-reduce, forward and backward.
    """
    dim = normalize_dim(dim, ndim_of(x))
    if dim == x._dim:
        return _one_row(x, index).squeeze(dim)
    return apply_local(Tensor.select, x, (dim, index), dim=x._dim - (dim < x._dim))


RULES: dict[Any, Rule] = {
    Tensor.__getitem__: getitem,
    **named({
        "masked_select": masked_select,
        "narrow": narrow,
        "select": select,
    }),
}  # fmt: skip
