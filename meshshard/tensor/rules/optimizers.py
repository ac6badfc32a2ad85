"""Rules of what optimizers do with lists of tensors: each tensor's rows alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshshard.comm import Domain
from meshshard.tensor.align import native_shape, require_same_sharding
from meshshard.tensor.shard_tensor import Rule, ShardTensor, native, refuse, sharded, wrap

__all__ = ["RULES"]


def _listed(func: Callable[..., Any]) -> Rule:
    """A function of lists, item by item: tensors of one place have one sharding."""

    def _rule(*args: Any, **kwargs: Any) -> Any:
        lists = [a for a in (*args, *kwargs.values()) if isinstance(a, (list, tuple))]
        for items in zip(*(a for a in lists if a and isinstance(a[0], Tensor)), strict=False):
            _same_place(func, items)
        with native():
            out = func(*args, **kwargs)
        if not isinstance(out, (list, tuple)):
            return out
        return [_like(o, x) for o, x in zip(out, lists[0], strict=True)]

    return _rule


def _same_place(func: Callable[..., Any], items: tuple[Any, ...]) -> None:
    """Numbers of steps are plain and have no dims; all else is sharded, or nothing is."""
    wide = [x for x in items if type(x) is ShardTensor or x.ndim]
    if not sharded(wide):
        return
    first = require_same_sharding(func, wide)
    if any(type(x) is not ShardTensor or x._dim != first._dim for x in wide):
        raise refuse(func, items, None, "plain and sharded tensors share a place in the lists")


def _like(out: Tensor, x: Any) -> Any:
    if type(x) is not ShardTensor:
        return out
    if native_shape(out) != native_shape(x):
        raise refuse("torch._foreach", (x,), None, f"a result of shape {tuple(out.shape)}")
    return wrap(out, x._sharding, x._dim)


def foreach_norm(tensors: Any, ord: Any = 2, dtype: Any = None) -> list[Any]:  # noqa: A002
    """The norm of each tensor, over all ranks."""
    return [torch.linalg.vector_norm(x, ord, dtype=dtype) for x in tensors]


def unscale(grads: Any, found_inf: Tensor, inverse: Tensor) -> None:
    """GradScaler's division, and its search for infinities on all ranks of every domain.

    Communication: one all-reduce of one number for each domain.
    """
    with native():
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inverse)
    domains: list[Domain] = []
    for x in sharded(grads):
        if x._sharding.domain not in domains:
            domains.append(x._sharding.domain)
    for domain in domains:
        found_inf.copy_(domain.all_reduce(found_inf, "max"))


def _lists() -> list[Callable[..., Any]]:
    names = [n for n in dir(torch) if n.startswith(("_foreach_", "_fused_ad", "_fused_sgd"))]
    odd = ("_foreach_norm", "_foreach_powsum", "_foreach_max")
    return [getattr(torch, n) for n in names if n not in odd]


RULES: dict[Any, Rule] = {
    **{f: _listed(f) for f in _lists()},
    torch._foreach_norm: foreach_norm,
    torch._amp_foreach_non_finite_check_and_unscale_: unscale,
}
