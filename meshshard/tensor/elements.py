"""Elements and rows of sharded tensors by number, for reads and writes by index.

An element has a number: its row times the number of elements of a row, plus its place in the row,
so the elements of a rank are consecutive whichever dim is sharded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshshard.comm.linear import AllToAll, apply
from meshshard.tensor._torch_private import native
from meshshard.tensor.align import narrow_to_owned
from meshshard.tensor.shard_tensor import ShardTensor, wrap
from meshshard.tensor.sharding import Sharding
from meshshard.tensor.take_rows import sharding_of_rows, take_rows

__all__ = [
    "checked",
    "element_numbers",
    "flat_elements",
    "is_aligned",
    "renumbered",
    "require_fits",
    "rows_at",
    "sharded_if_long",
    "to_owners",
    "unflat",
]


def flat_elements(x: ShardTensor, n_dims: int | None = None) -> ShardTensor:
    """The elements in the order of their numbers, sharded; no communication.

    Args:
        x: sharded along any dim.
        n_dims: how many dims, the sharded one first, are joined; by default all.
    """
    old = x._sharding
    with native():
        local = x.movedim(x._dim, 0)
        width, rest = math.prod(local.shape[1:n_dims]), local.shape[n_dims or x.ndim :]
        local = local.reshape(old.own * width, *rest)
        local = local.view_as(local) if local is x else local
    return wrap(local, Sharding(old.domain, [n * width for n in old.sizes]), 0)


def unflat(flat: Tensor, x: ShardTensor) -> ShardTensor:
    """Local elements in the order of their numbers, as a tensor of the layout of `x`."""
    with native():
        shape = list(x.shape)
        rows = shape.pop(x._dim)
        return wrap(flat.reshape(rows, *shape).movedim(0, x._dim), x._sharding, x._dim)


def element_numbers(x: Any, dim: int, index: Tensor) -> Tensor:
    """Numbers of the elements that gather and scatter along a dim address; laid out as the index.

    Args:
        x: the tensor; of a plain one, dim 0 counts as the sharded dim.
        dim: counted from the left.
        index: plain or sharded, with numbers along `dim` that are in range.
    """
    shape = x.shape
    row_dim = x._dim if type(x) is ShardTensor else 0
    at, first = (index._dim, index._sharding.first) if type(index) is ShardTensor else (None, 0)

    def _coordinate(d: int) -> Tensor:
        if d == dim:
            return index
        with native():
            n = index.shape[d]
            along = torch.arange(n, device=index.device) + (first if d == at else 0)
            return along.view([-1 if k == d else 1 for k in range(len(shape))])

    with native():
        number = _coordinate(row_dim)
        for d in range(len(shape)):
            if d != row_dim:
                number = number * shape[d] + _coordinate(d)
        number = number.expand(index.shape).contiguous()
    return _like(index, number)


def _like(index: Tensor, local: Tensor) -> Tensor:
    """Local numbers, sharded as an index, or plain as it is."""
    return wrap(local, index._sharding, index._dim) if type(index) is ShardTensor else local


def renumbered(x: Any, index: Tensor) -> Tensor:
    """Element numbers from indices in the flattened tensor; laid out as the index."""
    shape = x.shape
    if type(x) is not ShardTensor or x._dim == 0:
        return index
    with native():
        inner = math.prod(shape[x._dim + 1 :])
        row, outer = index // inner % shape[x._dim], index // (inner * shape[x._dim])
        number = (row * math.prod(shape[: x._dim]) + outer) * inner + index % inner
    return _like(index, number)


def require_fits(func: Any, x: Any, dim: int, index: Any, src: Any = None) -> None:
    """Raise what torch raises in gather and scatter, by global shapes.

    Raises:
        RuntimeError: the index has another number of dims than the tensor or the source, or is
            larger.
    """
    given, shape = tuple(index.shape), tuple(x.shape)
    fits = len(given) == len(shape) and all(
        n <= m or d == dim for d, (n, m) in enumerate(zip(given, shape, strict=True))
    )
    if isinstance(src, Tensor):
        other = tuple(src.shape)
        fits = fits and len(other) == len(given)
        fits = fits and all(n <= m for n, m in zip(given, other, strict=True))
    if not fits:
        raise RuntimeError(f"{func.__name__}: index of shape {given} does not fit {shape}")


def is_aligned(index: Any, x: ShardTensor) -> bool:
    """Whether an index has the sharded dim and the sizes of a tensor."""
    return type(index) is ShardTensor and index._dim == x._dim and index._sharding == x._sharding


def checked(index: Tensor, n: int, negative: bool = True) -> Tensor:
    """Numbers from 0 to n - 1, from numbers that may be negative; laid out as the index.

    Communication: one all-reduce of a flag if the index is sharded.

    Raises:
        IndexError: on every rank, if a number is out of range on any.
    """
    with native():
        bad = ((index >= n) | (index < (-n if negative else 0))).any().to(torch.int64)
        if type(index) is ShardTensor:
            bad = index._sharding.domain.all_reduce_(bad[None], "errors", "max")
        if bad:
            least = -n if negative else 0
            raise IndexError(f"index out of range: expected numbers from {least} to {n - 1}")
        out = torch.where(index < 0, index + n, index) if negative else index.clone()
        out = out.to(torch.int64)
    return _like(index, out)


def rows_at(x: Any, index: Tensor) -> Any:
    """Rows of a tensor that is sharded along dim 0, by number: (*index.shape, *x.shape[1:]).

    The result of a sharded index is sharded as the index, that of a plain one is replicated.

    Communication: that of `take_rows`; an all-reduce, forward and backward, if replicated.
    """
    with native():
        shape = (*index.shape, *x.shape[1:])
        rows = index.reshape(-1).view(-1).to(x.device)
        if type(index) is not ShardTensor:
            return _replicated_rows(x, rows).reshape(shape)
        taken = take_rows(x, rows, x._sharding).reshape(shape)
    return wrap(taken, index._sharding, index._dim)


def sharded_if_long(index: Tensor, like: Sharding, dim: int = 0) -> Tensor:
    """A plain index with as many numbers along a dim as there are rows, sharded as the rows.

    Communication: that of `sharding_of_rows` if the index has one dim.
    """
    if type(index) is ShardTensor or index.ndim <= dim or index.shape[dim] != like.total:
        return index
    owned = narrow_to_owned(index, like, dim)
    if index.ndim == 1:
        return wrap(owned.clone(), sharding_of_rows(owned, like, like.sizes), 0)
    return wrap(owned.clone(), Sharding(like.domain, like.sizes), dim)


def _replicated_rows(x: ShardTensor, rows: Tensor) -> Tensor:
    """Rows on every rank, as the sum of those that each rank owns.

    Communication: one all-reduce, forward and backward.
    """
    sharding = x._sharding
    local_rows = rows - sharding.first
    mine = (local_rows >= 0) & (local_rows < sharding.own)
    local = x.index_select(0, local_rows[mine])
    values = local.to(torch.uint8) if x.dtype == torch.bool else local
    whole = values.new_zeros((len(rows), *x.shape[1:]))
    whole = whole.index_add(0, torch.nonzero(mine)[:, 0], values)
    return sharding.domain.all_reduce(whole).to(x.dtype)


def to_owners(
    sharding: Sharding, rows: Tensor, values: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Numbers of rows and a value for each, to the owners of the rows.

    Args:
        sharding: of the rows.
        rows: (n,) global numbers: sharded, or plain and the same on every rank.
        values: (n, …) tensors, sharded as the numbers or plain as they are.

    Returns:
        Local numbers of owned rows, and their values, in the order of the numbers.

    Communication: none for plain numbers; else one all-to-all of counts, one of the numbers, and
    one for each value forward and backward.
    """
    domain = sharding.domain
    with native():
        if type(rows) is not ShardTensor:
            mine = (rows >= sharding.first) & (rows < sharding.first + sharding.own)
            chosen = torch.nonzero(mine)[:, 0]
            return rows[chosen] - sharding.first, [v.index_select(0, chosen) for v in values]
        if domain.size == 1:
            return rows.view(-1).view_as(rows), [v.view_as(v) for v in values]
        order, send = domain.group_by_rank(sharding.owners(rows))
        mine, receive = domain.route(rows[order], send)
        op = AllToAll(domain, tuple(send), tuple(receive))
        return mine - sharding.first, [apply(op, v.index_select(0, order)) for v in values]
