"""Rules of groups of rows: sharded rows reduced to a few groups, and groups spread over rows.

What PyG's `scatter` calls for its norms and global pools: every row says which group it is of, and
the groups are replicated (the tokens mechanism). Other uses of these functions are `indexing`'s.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshshard.tensor.align import dim_of, native_ndim, own_rows, require_same_sharding
from meshshard.tensor.rules import indexing
from meshshard.tensor.shard_tensor import Rule, ShardTensor, native, refuse, wrap
from meshshard.tensor.tokens import reduce_tokens

__all__ = ["RULES"]


def scatter_add_(x: Any, dim: int, index: Any, src: Any) -> Any:
    """Sums of sharded rows by group, added to a plain tensor of groups.

    Communication: one all-reduce, forward and backward.
    """
    src = _rows_of(index, src, dim)
    if not _of_groups(x, dim, index, src):
        return indexing.RULES[Tensor.scatter_add_](x, dim, index, src)
    domain = src._sharding.domain
    with native():
        sums = torch.zeros_like(x).scatter_add(dim, index, src)
        return x.add_(reduce_tokens(domain, sums))


def scatter_add(x: Any, dim: int, index: Any, src: Any) -> Any:
    """The same, out of place."""
    if not _of_groups(x, dim, index, _rows_of(index, src, dim)):
        return indexing.RULES[Tensor.scatter_add](x, dim, index, src)
    return scatter_add_(x.clone(), dim, index, src)


def scatter_reduce_(
    x: Any, dim: int, index: Any, src: Any, reduce: str, *, include_self: bool = True
) -> Any:
    """The largest or smallest of sharded rows by group; the gradient is shared among all ties.

    Communication: one all-reduce of the extremes, one of what ties and one backward.
    """
    if not _of_groups(x, dim, index, src):
        raise refuse(Tensor.scatter_reduce_, (x, index, src), None, "not of groups of rows")
    if reduce not in ("amax", "amin") or include_self:
        why = f"{reduce!r}, include_self={include_self}"
        raise refuse(Tensor.scatter_reduce_, (x, index, src), None, why)
    sign = 1 if reduce == "amax" else -1
    with native():
        return x.copy_(_largest(x, dim, index, src * sign, src._sharding.domain) * sign)


def _largest(x: Tensor, dim: int, index: Tensor, src: Tensor, domain: Any) -> Tensor:
    """The largest by group, zero where there is none; ties have equal parts in its gradient."""
    rows = src.detach()
    low = torch.full_like(x, -torch.inf)
    top = domain.all_reduce(low.scatter_reduce(dim, index, rows, "amax"), "max")
    hit = (rows == top.gather(dim, index)).to(src.dtype)
    ties = domain.all_reduce(torch.zeros_like(low).scatter_add(dim, index, hit))
    part = src * hit / ties.gather(dim, index)
    out = reduce_tokens(domain, torch.zeros_like(low).scatter_add(dim, index, part))
    return torch.where(top.isinf(), torch.zeros_like(top), top) + (out - out.detach())


def _rows_of(index: Any, src: Any, dim: int) -> Any:
    """Plain numbers of all rows, ones for example, as sharded as the rows' groups are."""
    if (
        type(index) is not ShardTensor
        or type(src) is not Tensor
        or src.requires_grad
        or src.ndim != native_ndim(index)
    ):
        return src
    dim, sharding = dim_of(dim, src.ndim), index._sharding
    if dim != index._dim or src.shape[dim] != sharding.total:
        return src
    return ShardTensor.from_local(own_rows(src, sharding, dim).detach(), sharding, dim)


def _of_groups(x: Any, dim: int, index: Any, src: Any) -> bool:
    """Whether sharded rows are reduced to a plain tensor."""
    if type(x) is ShardTensor or type(index) is not ShardTensor or type(src) is not ShardTensor:
        return False
    first = require_same_sharding("scatter", (index, src))
    return dim_of(dim, native_ndim(first)) == first._dim == src._dim


def index_select(x: Any, dim: int, index: Any) -> Any:
    """Rows of a plain table by sharded numbers are sharded."""
    if type(x) is ShardTensor or type(index) is not ShardTensor:
        return indexing.index_select(x, dim, index)
    with native():
        return wrap(torch.index_select(x, dim, index), index._sharding, dim_of(dim, x.ndim))


def getitem(x: Any, index: Any) -> Any:
    """The same, x[index]."""
    spread = type(x) is not ShardTensor and type(index) is ShardTensor
    if not spread or index.dtype in (torch.bool, torch.uint8):
        return indexing.getitem(x, index)
    with native():
        return wrap(x[index], index._sharding, index._dim)


RULES: dict[Any, Rule] = {
    Tensor.scatter_add_: scatter_add_,
    Tensor.scatter_add: scatter_add,
    torch.scatter_add: scatter_add,
    Tensor.scatter_reduce_: scatter_reduce_,
    Tensor.index_select: index_select,
    torch.index_select: index_select,
    Tensor.__getitem__: getitem,
}
