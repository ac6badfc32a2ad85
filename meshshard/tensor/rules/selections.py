"""Rules of order statistics: topk, kthvalue, medians, quantiles and mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshshard.tensor._torch_private import native
from meshshard.tensor.align import ndim_of
from meshshard.tensor.elements import element_numbers, flat_elements, rows_at
from meshshard.tensor.rules.sorts import order_keys, sort, sorted_rows
from meshshard.tensor.rules.table import named, wrap_all
from meshshard.tensor.shard_tensor import Rule, Sharded, ShardTensor, normalize_dim, wrap


def _local(func: Callable[..., Any], x: Sharded, args: Any, dim: int, keepdim: bool) -> Any:
    """A function of other dims than the sharded one, which returns values and indices."""
    with native():
        out = func(x, *args)
    return wrap_all(out, x._sharding, x._dim - (dim < x._dim and not keepdim))


def _selected(result: Any, x: Sharded, rows: Tensor, keepdim: bool) -> Any:
    """Values and replicated global rows along the sharded dim, one for each column."""
    dim = x._dim
    values = _values_of(x, rows)
    if not keepdim:
        values, rows = values.squeeze(dim), rows.squeeze(dim)
    return result((values, rows))


def _one_place(x: Sharded, place: int) -> Tensor:
    """The same place for each column, in the form that gather along the sharded dim expects."""
    shape = [1 if d == x._dim else n for d, n in enumerate(x.shape)]
    with native():
        return torch.full(shape, place, device=x.device)


def topk(
    x: Sharded,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,  # noqa: A002
) -> Any:
    """torch.topk; along the sharded dim the lowest rows of ties, sorted and replicated.

    Communication: along the sharded dim one all-to-all of up to k rows of each rank, and one
    all-reduce of values, forward and backward.
    """
    dim = normalize_dim(dim, ndim_of(x))
    if dim != x._dim:
        return _local(torch.topk, x, (k, dim, largest, sorted), dim, True)
    if not 0 <= k <= x._sharding.total:
        raise RuntimeError("selected index k out of range")
    sharding = x._sharding
    counts = [min(k, n) for n in sharding.sizes]
    with native():
        keys = order_keys(x.detach().movedim(dim, 0), largest)
        keys, rows = torch.sort(keys, dim=0, stable=True)
        n = counts[sharding.domain.rank]
        both = torch.stack([keys[:n], rows[:n] + sharding.first], 1)
        every = sharding.domain.all_gather(both, counts)
        order = torch.argsort(every[:, 0], dim=0, stable=True)[:k]
        rows = every[:, 1].gather(0, order).movedim(0, dim)
    return torch.return_types.topk((_values_of(x, rows), rows))


def _values_of(x: Sharded, rows: Tensor) -> Any:
    """Values at plain rows of each column, replicated.

    Communication: one all-reduce, forward and backward.
    """
    return rows_at(flat_elements(x), element_numbers(x, x._dim, rows))


def kthvalue(x: Sharded, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """torch.kthvalue; along the sharded dim replicated, the index by a stable sort.

    Communication: along the sharded dim that of a sort.
    """
    dim = normalize_dim(dim, ndim_of(x))
    if dim != x._dim:
        return _local(torch.kthvalue, x, (k, dim, keepdim), dim, keepdim)
    if not 1 <= k <= x._sharding.total:
        raise RuntimeError("kthvalue(): selected number k out of range for dimension")
    rows = _values_of(sorted_rows(x), _one_place(x, k - 1))
    return _selected(torch.return_types.kthvalue, x, rows, keepdim)


def _median(func: Callable[..., Any], result: Any) -> Rule:
    """The rule of median or nanmedian; over sharded rows replicated.

    Communication: over sharded rows that of a sort.
    """

    def _rule(x: Sharded, dim: int | None = None, keepdim: bool = False) -> Any:
        if dim is None:
            return _of_all(func, result, x)
        dim = normalize_dim(dim, ndim_of(x))
        if dim != x._dim:
            return _local(func, x, (dim, keepdim), dim, keepdim)
        if not x._sharding.total:
            raise IndexError(f"{func.__name__}(): expected a non-empty dim to reduce over")
        bad = torch.isnan(x).sum(dim, keepdim=True)
        count = x._sharding.total - bad
        place = (count - 1).clamp_min(0) // 2
        if func is torch.median:
            place = torch.where(bad > 0, count, place)
        return _selected(result, x, _values_of(sorted_rows(x), place), keepdim)

    return _rule


def _of_all(func: Callable[..., Any], result: Any, x: Sharded) -> Any:
    """The median of all elements, whose gradient all equal elements share."""
    flat: Any = flat_elements(x)
    if not flat._sharding.total:
        with native():
            return (x.sum() + torch.median(x.new_empty(0))).to(x.dtype)
    value = _median(func, result)(flat.detach(), 0)[0]
    if not x.is_floating_point():
        return value
    hit = (x == value) | (torch.isnan(x) & torch.isnan(value))
    mean = torch.where(hit, x, torch.zeros_like(x)).sum() / hit.sum()
    return torch.where(torch.isfinite(value), value + (mean - mean.detach()), value)


def _quantile(ignore_nan: bool) -> Rule:
    """The rule of quantile or nanquantile; over sharded rows replicated.

    Communication: over sharded rows that of a sort.
    """
    func = torch.nanquantile if ignore_nan else torch.quantile

    def _rule(
        x: Sharded, q: Any, dim: int | None = None, keepdim: bool = False, *,
        interpolation: str = "linear",
    ) -> Any:  # fmt: skip
        if not x.shape.numel():  # ranks without rows would raise alone, or not at all
            raise RuntimeError("quantile() input tensor must be non-empty")
        if type(q) is ShardTensor:
            q = q.gather()
        if type(x) is not ShardTensor:
            return func(x, q, dim, keepdim, interpolation=interpolation)
        scalar, ndim = not isinstance(q, Tensor) or not q.ndim, ndim_of(x)
        at: int = -1 if dim is None else normalize_dim(dim, ndim)
        if dim is not None and at != x._dim:
            with native():
                if x._sharding.own:
                    out = func(x, q, dim, keepdim, interpolation=interpolation)
                else:
                    out = _no_quantiles(x.sum(dim, keepdim=keepdim), q, interpolation)
            return wrap(out, x._sharding, x._dim - (at < x._dim and not keepdim) + (not scalar))
        flat = flat_elements(x) if dim is None else x
        with native():
            q = torch.as_tensor(q, dtype=x.dtype, device=x.device)
        out = _quantiles(flat, q.reshape(-1), ignore_nan, interpolation)
        if not keepdim:
            out = out.squeeze(flat._dim + 1)
        elif dim is None:
            out = out.reshape(-1, *[1] * ndim)
        return out[0] if scalar else out

    return _rule


def _no_quantiles(out: Tensor, q: Any, interpolation: str) -> Tensor:
    """Quantiles on a rank without rows, as torch refuses an empty tensor."""
    if isinstance(q, Tensor):
        out = out.expand(*q.shape, *out.shape)
        out = out + q.sum() * 0 if interpolation == "linear" else out  # in the graph on every rank
    return out


def _quantiles(x: Sharded, q: Tensor, ignore_nan: bool, interpolation: str) -> Any:
    """(len(q), …) quantiles along the sharded dim, which keeps size 1."""
    if not x._sharding.total:
        raise RuntimeError("quantile() input tensor must be non-empty")
    if bool(((q < 0) | (q > 1)).any()):
        raise RuntimeError("quantile() q values must be in the range [0, 1]")
    dim = x._dim
    last = x._sharding.total - 1
    bad = torch.isnan(x).sum(dim, keepdim=True)
    place = q.reshape(-1, *[1] * ndim_of(x))
    place = place * (last - bad if ignore_nan else torch.full_like(bad, last))
    place = place.clamp_min(0) if ignore_nan else torch.where(bad > 0, last, place)
    if interpolation in ("lower", "higher", "nearest"):
        func = {"lower": torch.floor, "higher": torch.ceil, "nearest": torch.round}[interpolation]
        place = func(place)
    order = sorted_rows(x)
    low = place.floor()
    values = _values_at(x, order, low)
    if interpolation not in ("linear", "midpoint"):
        return values
    weight = torch.full_like(place, 0.5) if interpolation == "midpoint" else place - low
    return values.lerp(_values_at(x, order, place.ceil()), weight.to(values.dtype))


def _values_at(x: Sharded, order: ShardTensor, places: Tensor) -> Any:
    """Values at places (k, …) of the sorted order, replicated."""
    along = places.to(torch.int64).squeeze(x._dim + 1).movedim(0, x._dim)
    values = _values_of(x, _values_of(order, along))
    return values.movedim(x._dim, 0).unsqueeze(x._dim + 1)


def mode(x: Sharded, dim: int = -1, keepdim: bool = False) -> Any:
    """torch.mode; along the sharded dim replicated, the index is that of the last such row.

    Communication: along the sharded dim that of a sort.
    """
    dim = normalize_dim(dim, ndim_of(x))
    if dim != x._dim:
        return _local(torch.mode, x, (dim, keepdim), dim, keepdim)
    if not x._sharding.total:
        raise IndexError("mode(): expected a non-empty dim to reduce over")
    values, order = sort(x.detach(), dim)
    starts = new_runs(values, dim)
    own = torch.ones_like(order).cumsum(dim) - 1
    first = torch.cummax(torch.where(starts, own, torch.zeros_like(own)), dim)[0]
    end = torch.max(own - first, dim, keepdim=True)[1]
    return _selected(torch.return_types.mode, x, _values_of(order, end), keepdim)


def new_runs(values: Sharded, dim: int) -> Sharded:
    """Whether each value along the sharded dim differs from the one before; true for the first.

    Communication: that of torch.roll and of torch.cumsum.
    """
    before = torch.roll(values, 1, dim)
    own = torch.ones_like(values, dtype=torch.int64).cumsum(dim)
    return (values != before) | (own == 1)


RULES: dict[Any, Rule] = {
    **named({"topk": topk, "kthvalue": kthvalue, "mode": mode}),
    **named({"quantile": _quantile(False), "nanquantile": _quantile(True)}),
    **named({"median": _median(torch.median, torch.return_types.median)}),
    **named({"nanmedian": _median(torch.nanmedian, torch.return_types.nanmedian)}),
}
