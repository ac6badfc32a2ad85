"""Rules of scatter: sums and extremes of sharded rows by group, and writes in any sharding.

PyG's `scatter` calls them in its norms and global pools: every row has the index of a group, and
the groups are replicated (see `tensor/tokens.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshshard.comm import Domain
from meshshard.tensor._torch_private import native
from meshshard.tensor.align import narrow_to_owned, ndim_of, require_same_sharding
from meshshard.tensor.rules.row_writes import scattered
from meshshard.tensor.rules.table import functions_named, in_place
from meshshard.tensor.shard_tensor import Rule, ShardTensor, normalize_dim
from meshshard.tensor.tokens import reduce_tokens

_add = scattered(Tensor.scatter_add)
_reduce = scattered(Tensor.scatter_reduce)


def scatter_add_(x: Any, dim: int, index: Any, src: Any) -> Any:
    """Sums of sharded rows by group, added to a plain tensor of groups in place.

    Communication: one all-reduce, forward and backward.
    """
    src = _sharded_source(index, src, dim)
    if not _reduces_rows(x, dim, index, src):
        return in_place(_add)(x, dim, index, src)
    with native():
        sums = torch.zeros_like(x).scatter_add(dim, index, src)
        return x.add_(reduce_tokens(src._sharding.domain, sums))


def scatter_add(x: Any, dim: int, index: Any, src: Any) -> Any:
    """As `scatter_add_`, out of place."""
    if not _reduces_rows(x, dim, index, _sharded_source(index, src, dim)):
        return _add(x, dim, index, src)
    return scatter_add_(x.clone(), dim, index, src)


def scatter_reduce_(
    x: Any, dim: int, index: Any, src: Any, reduce: str, *, include_self: bool = True
) -> Any:
    """The largest or smallest of sharded rows by group; all global ties share the gradient.

    Communication: one all-reduce of the extremes, one of the ties and one backward.
    """
    groups = reduce in ("amax", "amin") and not include_self and x.is_floating_point()
    if not (groups and _reduces_rows(x, dim, index, src)):
        return in_place(_reduce)(x, dim, index, src, reduce, include_self=include_self)
    sign = 1 if reduce == "amax" else -1
    with native():
        return x.copy_(_largest(x, dim, index, src * sign, src._sharding.domain) * sign)


def _largest(x: Tensor, dim: int, index: Tensor, src: Tensor, domain: Domain) -> Tensor:
    """The largest by group, zero for empty groups; ties get equal parts of the gradient."""
    rows = src.detach()
    low = torch.full_like(x, -torch.inf)
    top = domain.all_reduce(low.scatter_reduce(dim, index, rows, "amax"), "max")
    hit = (rows == top.gather(dim, index)).to(src.dtype)
    ties = domain.all_reduce(torch.zeros_like(low).scatter_add(dim, index, hit))
    part = src * hit / ties.gather(dim, index)
    out = reduce_tokens(domain, torch.zeros_like(low).scatter_add(dim, index, part))
    return torch.where(top.isinf(), torch.zeros_like(top), top) + (out - out.detach())


def _sharded_source(index: Any, src: Any, dim: int) -> Any:
    """A plain source with all rows, for example of ones, sharded as the index; else as it is."""
    if (
        type(index) is not ShardTensor
        or type(src) is not Tensor
        or src.requires_grad
        or src.ndim != ndim_of(index)
    ):
        return src
    dim, sharding = normalize_dim(dim, src.ndim), index._sharding
    if dim != index._dim or src.shape[dim] != sharding.total:
        return src
    return ShardTensor.from_local(narrow_to_owned(src, sharding, dim).detach(), sharding, dim)


def _reduces_rows(x: Any, dim: int, index: Any, src: Any) -> bool:
    """Whether sharded rows are reduced to a plain tensor of groups."""
    if type(x) is ShardTensor or type(index) is not ShardTensor or type(src) is not ShardTensor:
        return False
    first = require_same_sharding("scatter", (index, src))
    return normalize_dim(dim, ndim_of(first)) == first._dim == src._dim


RULES: dict[Any, Rule] = {
    **dict.fromkeys(functions_named("scatter_reduce"), _reduce),
    **dict.fromkeys((Tensor.scatter_add, torch.scatter_add), scatter_add),
    Tensor.scatter_add_: scatter_add_,
    Tensor.scatter_reduce_: scatter_reduce_,
}
