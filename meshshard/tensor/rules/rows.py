"""Rules of functions that move or repeat rows: every row of the result is taken by its number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from meshshard.tensor._torch_private import native
from meshshard.tensor.align import global_shape, narrow_to_owned, ndim_of
from meshshard.tensor.autocast import in_float32
from meshshard.tensor.layout import as_layout, rearranged, rows_between
from meshshard.tensor.rules.table import int_list, named
from meshshard.tensor.shard_tensor import (
    Rule,
    Sharded,
    ShardTensor,
    apply_local,
    local_of,
    normalize_dim,
    wrap,
)
from meshshard.tensor.sharding import Sharding
from meshshard.tensor.take_rows import sharding_of_rows, take_rows


def rows_by(number: Callable[[Tensor], Tensor], x: ShardTensor, sizes: Sequence[int]) -> Sharded:
    """Row number(i) of a tensor as row i of the result, for all rows of the sizes.

    Communication: that of `take_rows` and of `sharding_of_rows`.
    """
    old = x._sharding
    rows = number(Sharding(old.domain, sizes).rows(x.device))
    return take_rows(x, rows, sharding_of_rows(rows, old, sizes))


def _numbers(args: Sequence[Any]) -> list[int]:
    """Ints that are given one by one or as one list."""
    return int_list(args[0]) if len(args) == 1 else list(args)


def flip(x: ShardTensor, *dims: Any, **kwargs: Any) -> Sharded:
    """torch.flip; the sizes stay.

    Communication: along the sharded dim that of `rows_by`.
    """
    ndim = ndim_of(x)
    along = [normalize_dim(d, ndim) for d in _numbers(dims or (kwargs["dims"],))]
    if len(set(along)) < len(along):
        raise RuntimeError(f"flip: a dim appears multiple times in the list of dims {along}")
    last = x._sharding.total - 1
    if x._dim in along:
        x = rows_by(lambda i: last - i, x, x._sharding.sizes)
    return apply_local(torch.flip, x, ([d for d in along if d != x._dim],))


def roll(x: ShardTensor, shifts: Any, dims: Any = ()) -> Sharded:
    """torch.roll; without dims, of the flattened tensor. The sizes stay.

    Communication: along the sharded dim that of `rows_by`; that of torch.flatten without dims.
    """
    steps, along = int_list(shifts), [normalize_dim(d, ndim_of(x)) for d in int_list(dims)]
    if not along and len(steps) == 1:
        shape = global_shape(x)
        flat = roll(torch.flatten(x), shifts, 0)  # type: ignore[arg-type]
        return rearranged(flat, shape, x._dim, x._sharding)
    if len(steps) != len(along):
        raise RuntimeError(f"roll: expected one shift for each dim, got {steps} for {along}")
    for step, dim in zip(steps, along, strict=True):
        total = x._sharding.total
        if dim != x._dim:
            x = apply_local(torch.roll, x, (step, dim))
        elif total and step % total:
            x = rows_by(lambda i, n=total, s=step: (i - s) % n, x, x._sharding.sizes)  # type: ignore[misc]
    return x.clone()


def repeat(x: ShardTensor, *sizes: Any, **kwargs: Any) -> Sharded:
    """Tensor.repeat; along the sharded dim, every rank has as many times its number of rows.

    Communication: along the sharded dim that of `rows_by`.
    """
    times = _numbers(sizes or (kwargs["repeats"],))
    more = len(times) - ndim_of(x)
    if more < 0:
        raise RuntimeError(f"repeat: expected at least {ndim_of(x)} numbers, got {times}")
    at, old = x._dim + more, x._sharding
    if times[at] != 1:
        total, factor = old.total, times[at]
        x = rows_by(lambda i: i % max(total, 1), x, [n * factor for n in old.sizes])
    return apply_local(Tensor.repeat, x, ([*times[:at], 1, *times[at + 1 :]],), dim=at)


def tile(x: ShardTensor, *dims: Any, **kwargs: Any) -> Sharded:
    """torch.tile: `repeat`, once along dims that are not given."""
    times = _numbers(dims or (kwargs["dims"],))
    return repeat(x, [1] * (ndim_of(x) - len(times)) + times)


def repeat_interleave(x: Any, repeats: Any = None, dim: int | None = None, **_: Any) -> Sharded:
    """torch.repeat_interleave; copies of a row stay on its rank.

    Communication: one gather of objects if the numbers of copies are a tensor.
    """
    if repeats is None:  # x has the numbers of copies of 0, 1, 2, ...
        x, repeats, dim = torch.arange(x.shape[0], device=x.device), x, 0
    if dim is None:
        x, dim = torch.flatten(x), 0
    at = normalize_dim(dim, ndim_of(x))
    if isinstance(repeats, Tensor) and repeats.numel() == 1:
        repeats = int(local_of(repeats.sum()))
    if isinstance(repeats, Tensor) and repeats.shape != (x.shape[at],):
        raise RuntimeError(f"repeats must have one number for each row, got {repeats.shape}")
    if type(x) is not ShardTensor:  # then the numbers are sharded
        with native():
            rows = narrow_to_owned(x, repeats._sharding, at)
            x = wrap(rows.view_as(rows), repeats._sharding, at)
    if at != x._dim:
        plain = repeats.gather() if type(repeats) is ShardTensor else repeats
        return apply_local(torch.repeat_interleave, x, (plain, at))
    if isinstance(repeats, Tensor):
        like = wrap(x._sharding.rows(x.device), x._sharding, 0)
        return _interleaved(x, as_layout(repeats, like), at)
    old = x._sharding
    with native():
        origin = None if old.origin is None else old.origin.repeat_interleave(repeats)
        new = Sharding(old.domain, [n * repeats for n in old.sizes], origin)
        return wrap(torch.repeat_interleave(x, repeats, at), new, at)


def _interleaved(x: ShardTensor, repeats: ShardTensor, dim: int) -> ShardTensor:
    """Rows repeated on their ranks; on every rank an error if a number is negative on one."""
    old = x._sharding
    with native():
        wrong = bool((repeats < 0).any())
        own = -1 if wrong else int(repeats.sum())
    sizes = old.domain.share(own)
    if min(sizes) < 0:
        raise RuntimeError("repeats can not be negative")
    with native():
        local = torch.repeat_interleave(x, repeats, dim)
        counts = repeats if old.origin is None else repeats.to(old.origin.device)
        origin = None if old.origin is None else old.origin.repeat_interleave(counts)
    return wrap(local, Sharding(old.domain, sizes, origin), dim)


# ------------------------------------------------------------------------------------------ padding
def pad(x: Sharded, pad: Sequence[int], mode: str = "constant", value: Any = None) -> Sharded:
    """F.pad; along the sharded dim, added rows are on the first and the last rank, or are copies.

    Communication: along the sharded dim that of torch.cat, or of `take_rows`.
    """
    _require_valid(x, pad, mode)
    ndim = ndim_of(x)
    amounts = {ndim - 1 - i: (pad[2 * i], pad[2 * i + 1]) for i in range(len(pad) // 2)}
    at_rows = amounts.pop(x._dim, (0, 0))
    if mode == "constant":
        rest = [n for d in range(ndim - 1, -1, -1) for n in amounts.get(d, (0, 0))]
        wide = apply_local(F.pad, x, (rest, mode, value))
        return _with_constant_rows(wide, *at_rows, value or 0) if any(at_rows) else wide
    cast = mode == "replicate" or (mode == "reflect" and len(pad) < 6)  # by autocast
    out: Any = in_float32(x, "cpu").clone() if cast else x.clone()
    for dim, (before, after) in amounts.items():
        rows = torch.arange(-before, x.shape[dim] + after, device=x.device)
        rows = _source(rows, x.shape[dim], (before, after), mode)
        out = torch.index_select(out, dim, rows)
    if any(at_rows):
        total, before = x._sharding.total, at_rows[0]
        sizes = _padded_sizes(x._sharding, *at_rows)
        out = rows_by(lambda i: _source(i - before, total, at_rows, mode), out, sizes)
    return out


def constant_pad(x: Sharded, pad: Sequence[int], value: Any = 0) -> Sharded:
    """torch.constant_pad_nd."""
    return F.pad(x, pad, "constant", value)


def _require_valid(x: Sharded, pad: Sequence[int], mode: str) -> None:
    """Raise what torch raises, on every rank."""
    F.pad(torch.empty(global_shape(x), device="meta", dtype=x.dtype), pad, mode)


def _source(rows: Tensor, total: int, amounts: tuple[int, int], mode: str) -> Tensor:
    """The rows of a tensor that padded rows are copies of."""
    if mode == "replicate":
        return rows.clamp(0, total - 1)
    if mode == "circular":
        first = max(0, -amounts[0])  # what is left of negative amounts is repeated
        left = total - first - max(0, -amounts[1])
        return (rows - first) % max(left, 1) + first
    last = total - 1
    return last - (last - rows.abs()).abs()


def _padded_sizes(old: Sharding, before: int, after: int) -> list[int]:
    """Sizes with rows added to the first and the last rank, or taken away from the ends."""
    sizes = rows_between(old.sizes, max(0, -before), old.total - max(0, -after))
    sizes[0] += max(0, before)
    sizes[-1] += max(0, after)
    return sizes


def _with_constant_rows(x: Sharded, before: int, after: int, value: Any) -> Sharded:
    first, total = max(0, -before), x._sharding.total - max(0, -before) - max(0, -after)
    x = torch.narrow(x, x._dim, first, total)
    shape, dim = list(x.shape), x._dim
    parts = []
    for n in (before, after):
        shape[dim] = max(0, n)
        with native():
            parts.append(x.new_full(shape, value))
    return torch.cat([parts[0], x, parts[1]], dim)


RULES: dict[Any, Rule] = {
    **named({"flip": flip, "roll": roll, "tile": tile, "repeat_interleave": repeat_interleave}),
    Tensor.repeat: repeat,
    **named({"pad": pad}),
    torch.constant_pad_nd: constant_pad,
}
