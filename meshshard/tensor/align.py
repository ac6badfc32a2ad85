"""Align: the arguments of one operation, narrowed to the same owned rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshshard.comm import Domain
from meshshard.errors import MeshshardError
from meshshard.tensor._torch_private import native
from meshshard.tensor.shard_tensor import ShardTensor, refuse, sharded_in
from meshshard.tensor.sharding import Sharding


def require_same_sharding(func: Any, args: Any, kwargs: Any = None) -> ShardTensor:
    """The first sharded argument, after a check that all have its sharding.

    Raises:
        NoShardRule: two arguments have different shardings.
    """
    first, *others = sharded_in([*args, *(kwargs or {}).values()])
    for other in others:
        if other._sharding is first._sharding or other._sharding == first._sharding:
            continue
        if other._sharding.domain.group != first._sharding.domain.group:
            raise refuse(func, args, kwargs, "the arguments belong to different domains")
        why = "the arguments have different sizes: redistribute one to the sizes of the other"
        raise refuse(func, args, kwargs, why)
    return first


def require_whole_domain(func: Any, args: Any, domain: Domain) -> None:
    """Raise inside a `DeepHalo`, where a rank has only the rows near its owned rows.

    Raises:
        NoShardRule: the function couples all rows, but the rank has only some of them.
    """
    if not domain.whole:
        why = "it couples rows, but a deep halo has only those near the owned rows"
        raise refuse(func, args, None, why)


def align_broadcast(func: Any, args: Any) -> tuple[list[Any], ShardTensor, int]:
    """Arguments of a broadcasting operation with the same owned rows.

    Plain tensors with all rows are narrowed; sharded ones get the sizes of the first.

    Returns:
        The arguments, the first sharded one, and the sharded dim counted from the right.

    Communication: none if all have the same sizes, as after row-wise operations; else one
    all-to-all for each argument with other sizes, as in `x[1:] - x[:-1]`.

    Raises:
        NoShardRule: domains, numbers of rows or sharded dims differ.
    """
    first = sharded_in(args)[0]
    sharding = first._sharding
    back = ndim_of(first) - first._dim
    out = list(args)
    for i, a in enumerate(args):
        if type(a) is ShardTensor:
            if ndim_of(a) - a._dim != back:
                raise refuse(func, args, None, "the sharded dims of the arguments do not line up")
            if a._sharding is not sharding and a._sharding != sharding:
                out[i] = _with_sizes_of(first, a, func, args)
        elif isinstance(a, Tensor) and a.ndim >= back:
            out[i] = narrow_to_broadcast(func, args, a, sharding, a.ndim - back)
    return out, first, back


def _with_sizes_of(first: ShardTensor, x: ShardTensor, func: Any, args: Any) -> ShardTensor:
    """The same rows with the sizes of another tensor.

    Raises:
        NoShardRule: the tensors belong to different domains or have different numbers of rows.
    """
    if x._sharding.domain.group != first._sharding.domain.group:
        raise refuse(func, args, None, "the arguments belong to different domains")
    if x._sharding.total != first._sharding.total:
        why = "the arguments have different numbers of rows"
        raise refuse(func, args, None, why)
    return x.redistribute(first._sharding.sizes)


def narrow_to_broadcast(func: Any, args: Any, x: Tensor, sharding: Sharding, dim: int) -> Tensor:
    """A plain tensor that broadcasts with owned rows: one row, or this rank's rows of all.

    Raises:
        NoShardRule: it has another number of rows.
    """
    rows, total = x.shape[dim], sharding.total
    if rows not in (1, total):
        why = f"a plain tensor has {rows} rows, expected 1 or {total}"
        raise refuse(func, args, None, why)
    return x if rows == 1 else narrow_to_owned(x, sharding, dim)


def narrow_to_owned(x: Tensor, sharding: Sharding, dim: int) -> Tensor:
    """This rank's rows of a plain tensor that has all rows; differentiable."""
    if sharding.domain.size == 1:
        return x
    return x.narrow(dim, sharding.first, sharding.own)


def unwrap_rows(x: Any) -> tuple[Tensor, Sharding]:
    """Local rows and their sharding; a plain tensor has the sharding of a single rank.

    Raises:
        MeshshardError: the sharded dim is not the first.
    """
    if type(x) is not ShardTensor:
        return x, Sharding(Domain(device=x.device), [len(x)])
    if x.sharded_dim != 0:
        raise MeshshardError(
            f"expected a tensor sharded along dim 0, got {tuple(x.shape)} sharded along dim "
            f"{x.sharded_dim}; move its rows to the front: x.movedim({x.sharded_dim}, 0)"
        )
    return x.to_local(), x.sharding


def global_shape(x: Tensor) -> torch.Size:
    """The shape with the rows of all ranks; of a plain tensor, its shape."""
    if type(x) is not ShardTensor:
        return x.shape
    local, d = local_shape(x), x._dim
    return torch.Size((*local[:d], x._sharding.total, *local[d + 1 :]))


def local_shape(x: Tensor) -> torch.Size:
    """The shape with local rows, without calling a rule."""
    with native():
        return x.shape


def ndim_of(x: Tensor) -> int:
    """Number of dims, without calling a rule."""
    with native():
        return int(x.ndim)
