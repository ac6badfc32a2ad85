"""Rules of scans and products along one dim: a rank begins with the results of the ranks before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshshard.tensor._torch_private import native
from meshshard.tensor.align import ndim_of
from meshshard.tensor.rules.table import functions_named, in_place, named
from meshshard.tensor.shard_tensor import (
    Rule,
    Sharded,
    ShardTensor,
    apply_local,
    normalize_dim,
    wrap,
)


def _scan(func: Callable[..., Any]) -> Rule:
    """The rule of cumsum, cumprod or logcumsumexp.

    Communication: along the sharded dim one all-to-all of a row, forward and backward.
    """

    def _rule(x: Sharded, dim: int, *, dtype: Any = None) -> ShardTensor:
        dim = normalize_dim(dim, ndim_of(x))
        x = x if dtype is None else x.to(dtype)
        if dim != x._dim:
            return apply_local(func, x, (dim,))
        with native():
            rows = func(x, dim)
            before = _before(x, rows)
            n = before.shape[dim]
            both = torch.cat([before, x.to(rows.dtype)], dim)
            return wrap(func(both, dim).narrow(dim, n, rows.shape[dim]), x._sharding, dim)

    return _rule


def _before(x: Sharded, scanned: Tensor) -> Tensor:
    """The last scanned row of every rank before this one that has rows.

    All ranks have all of them in their graph, so that all call the same collectives in backward.
    """
    sharding, dim = x._sharding, x._dim
    domain = sharding.domain
    counts = [min(n, 1) for n in sharding.sizes]
    last = scanned.narrow(dim, max(sharding.own - 1, 0), counts[domain.rank])
    every = domain.all_gather(last.movedim(dim, 0), counts).movedim(0, dim)
    before: Tensor = every.narrow(dim, 0, sum(counts[: domain.rank]))
    return before


def _extremes(func: Callable[..., Any], result: Callable[..., Any]) -> Rule:
    """The rule of cummax or cummin: values and their global rows.

    Communication: along the sharded dim two all-to-alls of a row, one backward.
    """

    def _rule(x: Sharded, dim: int) -> Any:
        dim = normalize_dim(dim, ndim_of(x))
        sharding = x._sharding
        with native():
            values, rows = func(x, dim)
            if dim == x._dim:
                rows = rows + sharding.first
                before, rows_before = _before(x, values), _before(x, rows)
                n = before.shape[dim]
                values, places = func(torch.cat([before, x], dim), dim)
                view = [-1 if d == dim else 1 for d in range(x.ndim)]
                own = sharding.rows(x.device).view(view)
                numbers = torch.cat([rows_before, own.expand(rows.shape)], dim).gather(dim, places)
                values = values.narrow(dim, n, sharding.own)
                rows = numbers.narrow(dim, n, sharding.own)
        return result((wrap(values, sharding, x._dim), wrap(rows, sharding, x._dim)))

    return _rule


def prod(x: Sharded, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """torch.prod: the product of the products of all ranks.

    Communication: one all-to-all of a row, forward and backward.
    """
    sharding = x._sharding
    domain = sharding.domain
    if dim is not None:
        dim = normalize_dim(dim, ndim_of(x))
    if dim not in (None, x._dim):
        at = x._dim - (dim < x._dim and not keepdim)
        return apply_local(torch.prod, x, (dim, keepdim), {"dtype": dtype}, at)
    with native():
        given = (dim, keepdim) if dim is not None else ()
        local = torch.prod(x, *given, dtype=dtype)
        return domain.all_gather(local[None], [1] * domain.size).prod(0)


SCANS: dict[str, Rule] = {
    "cumsum": _scan(torch.cumsum),
    "cumprod": _scan(torch.cumprod),
    "logcumsumexp": _scan(torch.logcumsumexp),
    "cummax": _extremes(torch.cummax, torch.return_types.cummax),
    "cummin": _extremes(torch.cummin, torch.return_types.cummin),
    "prod": prod,
}
RULES: dict[Any, Rule] = {
    **named(SCANS),
    **{
        f: in_place(SCANS[f.__name__[:-1]])
        for f in functions_named("cumsum_ cumprod_ logcumsumexp_")
    },
}
