"""Rules of unique values and unique rows, by sorts of sharded rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshshard.tensor._torch_private import native
from meshshard.tensor.align import ndim_of
from meshshard.tensor.elements import rows_at, to_owners
from meshshard.tensor.layout import rearranged, reshard
from meshshard.tensor.rules.selections import new_runs
from meshshard.tensor.rules.sorts import sorted_rows
from meshshard.tensor.rules.table import functions_named
from meshshard.tensor.shard_tensor import Rule, Sharded, ShardTensor, normalize_dim, refuse, wrap
from meshshard.tensor.sharding import Sharding

MAX_COLUMNS = 64  # a sort for each


def unique(
    x: Sharded, sorted: bool = True, return_inverse: bool = False,  # noqa: A002
    return_counts: bool = False, dim: int | None = None,
) -> Any:  # fmt: skip
    """torch.unique: sorted values, or sorted rows along a dim; sharded, as there may be many.

    Values and counts are sharded by where the sort left them, in uneven sizes; the inverse is
    sharded as `x`. `values.gather()` gives the values on every rank.

    Communication: that of a sort, of one for each column with a dim; one gather of objects.
    """
    flat: Any = _rows(x, dim)
    width = flat.shape[1]
    if width > MAX_COLUMNS:
        why = f"it sorts by each of {width} columns; expected at most {MAX_COLUMNS}"
        raise refuse(torch.unique, (x,), {"dim": dim}, why)
    order: Any = None
    for column in reversed(range(width)):
        key = flat[:, column].detach()
        step = sorted_rows(key if order is None else rows_at(key, order))
        order = step if order is None else rows_at(order, step)
    return _runs(x, flat, order, (return_inverse, return_counts), dim)


def unique_consecutive(
    x: Sharded, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    """torch.unique_consecutive, sharded as `unique`.

    Communication: that of torch.roll, one all-to-all of counts and one gather of objects.
    """
    return _runs(x, _rows(x, dim), None, (return_inverse, return_counts), dim)


def _rows(x: Sharded, dim: int | None) -> Sharded:
    """(n, width) all elements, or the rows along a dim; sharded along the first dim."""
    if dim is None:
        return torch.flatten(x)[:, None]
    moved = x.movedim(normalize_dim(dim, ndim_of(x)), 0)
    rows = moved.shape[0]
    flat = moved.reshape(rows, moved.shape.numel() // rows) if rows else moved.flatten(1)
    if not flat.shape[1]:
        raise refuse(torch.unique, (x,), {"dim": dim}, "the rows have no elements")
    return flat if flat._dim == 0 else reshard(flat, 0)


def _runs(x: Sharded, flat: Any, order: Any, wanted: tuple[bool, bool], dim: int | None) -> Any:
    """The first of each run of equal rows, the run of each row, the lengths of the runs.

    Communication: that of `rows_at` and `new_runs`, and one gather of objects.
    """
    rows = flat if order is None else rows_at(flat, order)
    starts = new_runs(rows, 0).any(1)
    values = rows[starts]
    out = [_as_values(values, x, dim)]
    if wanted[0]:
        out.append(_inverse(torch.cumsum(starts.to(torch.int64), 0) - 1, order, x, dim))
    if wanted[1]:
        out.append(_lengths(starts, values._sharding))
    return tuple(out) if len(out) > 1 else out[0]


def _as_values(values: Sharded, x: Sharded, dim: int | None) -> Any:
    if dim is None:
        return values[:, 0]
    dim = normalize_dim(dim, ndim_of(x))
    rest = [n for d, n in enumerate(x.shape) if d != dim]
    return values.reshape(-1, *rest).movedim(0, dim)


def _inverse(runs: Sharded, order: Any, x: Sharded, dim: int | None) -> Any:
    """The run of each row, in the order of the rows of `x`.

    Communication: that of `to_owners`, and of `rearranged` without a dim.
    """
    if order is not None:
        old = runs._sharding
        with native():
            at, (found,) = to_owners(old, order, [runs])
            runs = wrap(torch.empty_like(found).index_copy_(0, at, found), old, 0)
    return rearranged(runs, x.shape, x._dim, x._sharding) if dim is None else runs


def _lengths(starts: Sharded, runs: Sharding) -> ShardTensor:
    """The length of each run: the distance to the next start.

    Communication: one all-to-all of the first start of each rank.
    """
    old = starts._sharding
    with native():
        at = torch.nonzero(starts)[:, 0] + old.first
        firsts = runs.domain.all_gather(at[:1], [min(n, 1) for n in runs.sizes])
        later = firsts[sum(n > 0 for n in runs.sizes[: runs.domain.rank + 1]) :]
        ends: Tensor = torch.cat([at[1:], later[:1] if len(later) else at.new_tensor([old.total])])
        return wrap(ends[: len(at)] - at, runs, 0)


RULES: dict[Any, Rule] = {
    **dict.fromkeys((torch.unique, Tensor.unique), unique),
    **dict.fromkeys(functions_named("unique_consecutive"), unique_consecutive),
}
