"""Align: several arguments of one operation, brought to the same rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshshard.comm import Domain
from meshshard.errors import MeshshardError
from meshshard.tensor.shard_tensor import Sharding, ShardTensor, dim_of, refuse, sharded

__all__ = [
    "align_broadcast",
    "dim_of",
    "global_shape",
    "own_rows",
    "require_same_sharding",
    "shape_of",
    "unwrap_rows",
]


def require_same_sharding(func: Any, args: Any, kwargs: Any = None) -> ShardTensor:
    """The first sharded argument, once all have its sharding.

    Raises:
        NoShardRule: two shardings meet.
    """
    found = sharded([*args, *(kwargs or {}).values()])
    first = found[0]
    for other in found[1:]:
        if other._sharding is first._sharding or other._sharding == first._sharding:
            continue
        if other._sharding.domain.group != first._sharding.domain.group:
            raise refuse(func, args, kwargs, "two domains meet")
        raise refuse(
            func, args, kwargs, "two shardings meet: redistribute one to the other's sizes"
        )
    return first


def align_broadcast(func: Any, args: Any) -> tuple[list[Any], ShardTensor, int]:
    """Arguments of a broadcasting operation, plain tensors cut to own rows where they have all.

    Returns:
        The arguments, the first sharded one, and the sharded dim counted from the right.

    Raises:
        NoShardRule: shardings, or dims, do not match.
    """
    first = require_same_sharding(func, args)
    sharding = first._sharding
    back = native_ndim(first) - first._dim
    out = list(args)
    for i, a in enumerate(args):
        if type(a) is ShardTensor and native_ndim(a) - a._dim != back:
            raise refuse(func, args, None, "sharded dims do not line up")
        if type(a) is ShardTensor or not isinstance(a, Tensor) or a.ndim < back:
            continue
        rows = a.shape[a.ndim - back]
        if rows not in (1, sharding.total):
            raise refuse(func, args, None, f"a plain tensor has {rows} rows for {sharding.total}")
        if rows != 1:
            out[i] = own_rows(a, sharding, a.ndim - back)
    return out, first, back


def own_rows(x: Tensor, sharding: Sharding, dim: int) -> Tensor:
    """This rank's rows of a plain tensor that has all of them; its gradient is theirs."""
    if sharding.domain.size == 1:
        return x
    return x.narrow(dim, sharding.first, sharding.own)


def unwrap_rows(x: Any) -> tuple[Tensor, Sharding]:
    """Own rows and how rows are divided; those of a plain tensor are all on one rank.

    Raises:
        MeshshardError: rows are not the first dim.
    """
    if type(x) is not ShardTensor:
        return x, Sharding(Domain(device=x.device), [len(x)])
    if x.sharded_dim != 0:
        raise MeshshardError(f"rows must be the first dim, they are dim {x.sharded_dim}")
    return x.to_local(), x.sharding


def shape_of(x: ShardTensor) -> torch.Size:
    """The global shape."""
    return global_shape(x, native_shape(x))


def global_shape(x: ShardTensor, local: torch.Size) -> torch.Size:
    """A local shape with the rows of all ranks."""
    d = x._dim
    return torch.Size((*local[:d], x._sharding.total, *local[d + 1 :]))


_native = torch._C.DisableTorchFunctionSubclass


def native_ndim(x: Tensor) -> int:
    """Number of dims, asked without a rule."""
    with _native():
        return int(x.ndim)


def native_shape(x: Tensor) -> torch.Size:
    """Local shape, asked without a rule."""
    with _native():
        return x.shape
