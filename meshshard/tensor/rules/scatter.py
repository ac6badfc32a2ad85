"""Rules of gather and scatter: along other dims, or sums of sharded rows by group.

PyG's `scatter` calls them in its norms and global pools: every row has the index of a group, and
the groups are replicated (the tokens mechanism).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshshard.comm import Domain
from meshshard.tensor._torch_private import native
from meshshard.tensor.align import narrow_to_owned, ndim_of, require_same_sharding
from meshshard.tensor.rules.table import functions_named
from meshshard.tensor.shard_tensor import Rule, ShardTensor, normalize_dim, refuse, sharded_in, wrap
from meshshard.tensor.tokens import reduce_tokens


def _along_other_dims(func: Callable[..., Any], tensors_at: Sequence[int]) -> Rule:
    """The rule of a function along a dim other than the sharded one, all arguments sharded."""

    def _rule(x: Any, dim: int, *args: Any, **kwargs: Any) -> Any:
        every = [x, *args, *kwargs.values()]
        first = require_same_sharding(func, every)
        tensors = [
            a for a in (x, *(args[i] for i in tensors_at if i < len(args))) if isinstance(a, Tensor)
        ]
        dim = normalize_dim(dim, ndim_of(first))
        if dim == first._dim or len(sharded_in(every)) < len(tensors):
            why = "it acts along the sharded dim, or an argument is plain"
            raise refuse(func, every, None, why)
        with native():
            return wrap(func(x, dim, *args, **kwargs), first._sharding, first._dim)

    return _rule


_add_along_other_dims = _along_other_dims(Tensor.scatter_add, (0, 1))
_add_along_other_dims_ = _along_other_dims(Tensor.scatter_add_, (0, 1))


def scatter_add_(x: Any, dim: int, index: Any, src: Any) -> Any:
    """Sums of sharded rows by group, added to a plain tensor of groups in place.

    Communication: one all-reduce, forward and backward.
    """
    src = _sharded_source(index, src, dim)
    if not _reduces_rows(x, dim, index, src):
        return _add_along_other_dims_(x, dim, index, src)
    with native():
        sums = torch.zeros_like(x).scatter_add(dim, index, src)
        return x.add_(reduce_tokens(src._sharding.domain, sums))


def scatter_add(x: Any, dim: int, index: Any, src: Any) -> Any:
    """As `scatter_add_`, out of place."""
    if not _reduces_rows(x, dim, index, _sharded_source(index, src, dim)):
        return _add_along_other_dims(x, dim, index, src)
    return scatter_add_(x.clone(), dim, index, src)


def scatter_reduce_(
    x: Any, dim: int, index: Any, src: Any, reduce: str, *, include_self: bool = True
) -> Any:
    """The largest or smallest of sharded rows by group; all global ties share the gradient.

    Communication: one all-reduce of the extremes, one of the ties and one backward.
    """
    given = (x, index, src)
    if not _reduces_rows(x, dim, index, src):
        why = "expected a plain tensor, and rows and their groups sharded along dim"
        raise refuse(Tensor.scatter_reduce_, given, None, why)
    if reduce not in ("amax", "amin") or include_self:
        why = (
            "expected 'amax' or 'amin' with include_self=False, got "
            f"{reduce!r} with include_self={include_self}"
        )
        raise refuse(Tensor.scatter_reduce_, given, None, why)
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
    **{f: _along_other_dims(f, (0,)) for f in functions_named("gather")},
    **{f: _along_other_dims(f, (0, 1)) for f in functions_named("scatter scatter_ scatter_reduce")},
    **dict.fromkeys((Tensor.scatter_add, torch.scatter_add), scatter_add),
    Tensor.scatter_add_: scatter_add_,
    Tensor.scatter_reduce_: scatter_reduce_,
}
