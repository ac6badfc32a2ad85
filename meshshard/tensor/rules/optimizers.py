"""Rules of what optimizers do with lists of tensors: row-wise for each tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshshard.comm import Domain
from meshshard.tensor._torch_private import FOREACH_NORM, UNSCALE, foreach_functions, native
from meshshard.tensor.align import local_shape, require_same_sharding
from meshshard.tensor.shard_tensor import Rule, ShardTensor, refuse, sharded_in, wrap


def _listed(func: Callable[..., Any]) -> Rule:
    """The rule of a pointwise function of lists: tensors at one position have one sharding."""

    def _rule(*args: Any, **kwargs: Any) -> Any:
        lists = [a for a in (*args, *kwargs.values()) if isinstance(a, (list, tuple))]
        for items in zip(*(a for a in lists if a and isinstance(a[0], Tensor)), strict=False):
            _check_position(func, items)
        with native():
            out = func(*args, **kwargs)
        if not isinstance(out, (list, tuple)):
            return out
        return [_wrap_like(o, x) for o, x in zip(out, lists[0], strict=True)]

    return _rule


def _check_position(func: Callable[..., Any], items: tuple[Any, ...]) -> None:
    """Raise unless all tensors with dims are sharded the same way, or none is; steps have no dims.

    Raises:
        NoShardRule: shardings or sharded dims differ, or some tensors are plain.
    """
    wide = [x for x in items if type(x) is ShardTensor or x.ndim]
    if not sharded_in(wide):
        return
    first = require_same_sharding(func, wide)
    if any(type(x) is not ShardTensor or x._dim != first._dim for x in wide):
        why = "the tensors at one position of the lists must all be sharded along one dim"
        raise refuse(func, items, None, why)


def _wrap_like(out: Tensor, x: Any) -> Any:
    if type(x) is not ShardTensor:
        return out
    if local_shape(out) != local_shape(x):
        why = f"its result has the local shape {tuple(out.shape)}"
        raise refuse("torch._foreach", (x,), None, why)
    return wrap(out, x._sharding, x._dim)


def foreach_norm(tensors: Any, ord: Any = 2, dtype: Any = None) -> list[Any]:  # noqa: A002
    """The norm of each tensor over all ranks."""
    return [torch.linalg.vector_norm(x, ord, dtype=dtype) for x in tensors]


def unscale(grads: Any, found_inf: Tensor, inverse: Tensor) -> None:
    """GradScaler: divide the gradients, and look for infinities on all ranks of every domain.

    Communication: one all-reduce of one number for each domain.
    """
    with native():
        UNSCALE(grads, found_inf, inverse)
    domains: list[Domain] = []
    for x in sharded_in(grads):
        if x._sharding.domain not in domains:
            domains.append(x._sharding.domain)
    for domain in domains:
        found_inf.copy_(domain.all_reduce(found_inf, "max"))


RULES: dict[Any, Rule] = {
    **{f: _listed(f) for f in foreach_functions()},
    FOREACH_NORM: foreach_norm,
    UNSCALE: unscale,
}
