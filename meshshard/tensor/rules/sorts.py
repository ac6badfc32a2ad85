"""Rules of sorts: sort, argsort, msort along any dim; an exact sample sort along sharded rows."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from meshshard.comm import Domain
from meshshard.tensor._torch_private import native
from meshshard.tensor.align import ndim_of, require_whole_domain
from meshshard.tensor.elements import to_owners
from meshshard.tensor.rules.table import functions_named
from meshshard.tensor.shard_tensor import (
    Rule,
    ShardTensor,
    apply_local,
    normalize_dim,
    refuse,
    wrap,
)
from meshshard.tensor.sharding import Sharding

SAMPLES = 32  # of each column for each rank, from which the parts of the ranks are chosen


def order_keys(x: Tensor, descending: bool = False) -> Tensor:
    """int64 numbers in the order of torch.sort: NaN is the largest, 0.0 and -0.0 are equal."""
    if x.is_floating_point():
        wide = torch.where(x == 0, 0, x).double()
        bits = wide.view(torch.int64)
        keys = torch.where(bits < 0, bits ^ torch.iinfo(torch.int64).max, bits)
        keys = torch.where(torch.isnan(x), torch.iinfo(torch.int64).max, keys)
    else:
        keys = x.to(torch.int64)
        keys = keys ^ torch.iinfo(torch.int64).min if x.dtype == torch.uint64 else keys
    return ~keys if descending else keys


def sorted_rows(x: Any, descending: bool = False) -> ShardTensor:
    """Global rows in sorted order along the sharded dim, for each column; stable, sharded as `x`.

    A sample sort: splitters, chosen from samples of each column, say which rank gets an element;
    equal values are ordered by row, so that ties are divided too. The ranks sort what they get, and
    send the row of each element to the owner of its place.

    Communication: one all-to-all of samples and one of counts; twice counts, elements and places.
    """
    sharding, dim = x._sharding, x._dim
    domain = sharding.domain
    require_whole_domain("sort", (x,), domain)
    with native():
        if x.is_complex():
            raise refuse("sort", (x,), None, "complex numbers have no order")
        if domain.size == 1:
            return wrap(
                torch.argsort(x.detach(), dim=dim, descending=descending, stable=True),
                sharding,
                dim,
            )
        moved = x.detach().movedim(dim, 0)
        keys = order_keys(moved.reshape(sharding.own, math.prod(moved.shape[1:])), descending)
        width = keys.shape[1]
        rows = sharding.rows(x.device)[:, None].expand(keys.shape)
        columns = torch.arange(width, device=x.device).expand(keys.shape)
        owner = _owner(sharding, keys, rows)
        items = torch.stack([v.reshape(-1) for v in (keys, rows, columns)], 1)
        places, found = _places(domain, _sent(domain, owner.reshape(-1), items), width)
        flat = Sharding(domain, [n * width for n in sharding.sizes])
        to = wrap(places, flat, 0)
        at, (row,) = to_owners(flat, to, [found])
        out = keys.new_empty(keys.numel()).index_copy_(0, at, row)
        return wrap(out.view(moved.shape).movedim(0, dim), sharding, dim)


def _owner(sharding: Sharding, keys: Tensor, rows: Tensor) -> Tensor:
    """The rank that sorts each element: the number of splitters below it.

    Samples are as dense on every rank, so that a rank with few rows does not skew the splitters.
    """
    domain = sharding.domain
    owner = torch.zeros_like(keys)
    keys_in, order = torch.sort(keys, dim=0, stable=True)
    wanted = SAMPLES * domain.size
    counts = [min(n, -(-n * wanted // max(sharding.total, 1))) for n in sharding.sizes]
    count = counts[domain.rank]
    at = (torch.arange(count, device=keys.device) * 2 + 1) * len(keys) // max(2 * count, 1)
    sample = torch.stack([keys_in[at], rows.gather(0, order)[at]], 1)
    every = domain.all_gather(sample, counts)
    order = torch.argsort(every[:, 1], dim=0, stable=True)
    order = order.gather(0, torch.argsort(every[:, 0].gather(0, order), dim=0, stable=True))
    for r in range(1, domain.size):
        if not len(every):
            break
        chosen = order[len(every) * r // domain.size]
        key, row = (every[:, k].gather(0, chosen[None]) for k in (0, 1))
        owner += (keys > key) | ((keys == key) & (rows >= row))
    return owner


def _sent(domain: Domain, owner: Tensor, items: Tensor) -> Tensor:
    """The items that this rank gets, in the order of the ranks that send them.

    Communication: one all-to-all of counts, one of the items.
    """
    order, counts = domain.group_by_rank(owner)
    return domain.route(items[order], counts)[0]


def _places(domain: Domain, items: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The number of the element to which each row goes, and the row.

    Args:
        domain: the ranks.
        items: (n, 3) keys, rows and columns that this rank got.
        width: number of columns.
    """
    for k in (1, 0, 2):
        items = items[torch.argsort(items[:, k], stable=True)]
    counts = torch.bincount(items[:, 2], minlength=width)
    every = domain.all_gather(counts[None], [1] * domain.size)
    before = every[: domain.rank].sum(0)
    place = torch.arange(len(items), device=items.device) - (counts.cumsum(0) - counts)[items[:, 2]]
    return (place + before[items[:, 2]]) * width + items[:, 2], items[:, 1].contiguous()


def sort(x: ShardTensor, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
    """torch.sort; along the sharded dim it is stable, and both results are sharded as `x`.

    Communication: along the sharded dim that of `sorted_rows` and one all-to-all of values, forward
    and backward.
    """
    dim = normalize_dim(dim, ndim_of(x))
    if dim == x._dim:
        order = sorted_rows(x, descending)
        return torch.return_types.sort((torch.gather(x, dim, order), order))
    with native():
        out = torch.sort(x, dim=dim, descending=descending, stable=True)
        both = (wrap(o, x._sharding, x._dim) for o in out)
    return torch.return_types.sort(tuple(both))  # type: ignore[arg-type]


def _sort(x: ShardTensor, *args: Any, **kwargs: Any) -> Any:
    """torch.sort, whose arguments may begin with `stable`."""
    return sort(x, **_options(args, kwargs))


def argsort(x: ShardTensor, *args: Any, **kwargs: Any) -> ShardTensor:
    """torch.argsort: global rows along the sharded dim."""
    options = _options(args, kwargs)
    dim = normalize_dim(options.get("dim", -1), ndim_of(x))
    descending = options.get("descending", False)
    if dim == x._dim:
        return sorted_rows(x, descending)
    return apply_local(torch.argsort, x, (), {"dim": dim, "descending": descending, "stable": True})


def _options(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = ("dim", "descending")
    if args and isinstance(args[0], bool):
        names = ("stable", "dim", "descending")  # type: ignore[assignment]
    return dict(zip(names, args, strict=False)) | kwargs


RULES: dict[Any, Rule] = {
    **dict.fromkeys(functions_named("sort"), _sort),
    **dict.fromkeys(functions_named("argsort"), argsort),
    **{f: (lambda x: sort(x, 0)[0]) for f in functions_named("msort")},
}
