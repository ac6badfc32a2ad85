"""Rules of random functions: a draw does not depend on the number of ranks or the partition.

The default generator gives one seed for each draw, identically on every rank, so replicated draws
stay equal; numbers are hashes of the seed and the number of the element in the source.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from meshshard.tensor._torch_private import native
from meshshard.tensor.align import local_shape, ndim_of
from meshshard.tensor.keyed_random import hash_uniform
from meshshard.tensor.rules.autograd import requires_grad_
from meshshard.tensor.rules.table import rowwise
from meshshard.tensor.shard_tensor import Rule, Sharded, ShardTensor, refuse, wrap


def uniform_numbers(x: Sharded) -> Tensor:
    """Uniform numbers in [0, 1), float64, of the local shape of `x`.

    An element's number is that in the whole tensor, with rows as in the source: the numbers do not
    depend on which dim is sharded either.
    """
    seed = x._sharding.domain.shared_seed()
    with native():
        shape, dim, sharding = x.shape, x._dim, x._sharding
        batch = torch.arange(math.prod(shape[:dim]), device=x.device) * sharding.total
        inner = math.prod(shape[dim + 1 :])
        rows = (batch[:, None] + sharding.sources(x.device)) * inner
        ids = rows[..., None] + torch.arange(inner, device=x.device)
        return hash_uniform(seed, ids).reshape(shape)


def dropout(x: Sharded, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """F.dropout, with a mask that does not depend on the partition."""
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if not training or p == 0:
        return x
    keep = uniform_numbers(x) >= p
    with native():
        factor = keep.to(x.dtype) / (1 - p) if p < 1 else torch.zeros_like(x)
        out = x.mul_(factor) if inplace else x * factor
    return x if inplace else wrap(out, x._sharding, x._dim)


def native_dropout(x: Sharded, p: float = 0.5, train: bool = True) -> Any:
    """torch.dropout."""
    return dropout(x, p, train)


def rand_like(x: Sharded, **kwargs: Any) -> ShardTensor:
    """Uniform numbers in [0, 1)."""
    default_only(torch.rand_like, x, kwargs)
    with native():
        draw = uniform_numbers(x).to(kwargs.get("dtype") or x.dtype)
    return made(draw, x, kwargs)


def randn_like(x: Sharded, **kwargs: Any) -> ShardTensor:
    """Normal numbers, by the inverse of the cumulative distribution."""
    default_only(torch.randn_like, x, kwargs)
    with native():
        draw = normal_numbers(x).to(kwargs.get("dtype") or x.dtype)
    return made(draw, x, kwargs)


def bernoulli(x: Sharded, p: Any = None, **kwargs: Any) -> ShardTensor:
    """Zeros and ones, with the probabilities x, or p."""
    default_only(torch.bernoulli, x, kwargs)
    with native():
        draw = (uniform_numbers(x) < (x if p is None else p)).to(x.dtype)
    return wrap(draw, x._sharding, x._dim)


def default_only(func: Any, x: Any, kwargs: dict[str, Any]) -> None:
    """Refuse a generator: its numbers would depend on the partition."""
    if kwargs.get("generator") is not None:
        why = "its numbers depend on torch.manual_seed and the rows; omit the generator"
        raise refuse(func, (x,), None, why)


def normal_numbers(x: Sharded) -> Tensor:
    """Normal numbers, float64, of the local shape of `x`."""
    draw: Tensor = torch.special.ndtri((uniform_numbers(x) + 2.0**-54).clamp(max=1 - 2.0**-53))
    return draw


def made(draw: Tensor, x: Sharded, kwargs: dict[str, Any]) -> ShardTensor:
    """Drawn numbers, sharded as `x`; a leaf if the options ask for a gradient."""
    out = wrap(draw, x._sharding, x._dim)
    return requires_grad_(out) if kwargs.get("requires_grad") else out


def replicated_numbers(x: Sharded, shape: Sequence[int]) -> Tensor:
    """Uniform numbers in [0, 1), float64, the same on all ranks of a tensor."""
    seed = x._sharding.domain.shared_seed()
    ids = torch.arange(math.prod(shape), device=x.device).reshape(tuple(shape))
    return hash_uniform(seed, ids)


def channel_numbers(x: Sharded, dims: int = 2) -> Tensor:
    """Uniform numbers, one for each index of the first dims, of the local shape or 1."""
    if ndim_of(x) < dims:
        raise RuntimeError(f"Feature dropout requires at least {dims} dims, got {tuple(x.shape)}")
    shape = local_shape(x)[:dims]
    if x._dim >= dims:
        numbers = replicated_numbers(x, shape)
    else:
        with native():
            like = x.detach().new_empty(shape)
        numbers = uniform_numbers(wrap(like, x._sharding, x._dim))
    return numbers.reshape(*shape, *[1] * (ndim_of(x) - dims))


def _feature_dropout(unbatched: int = 0) -> Rule:
    """The rule of F.dropout1d to 3d, which drop whole channels of a sample.

    Args:
        unbatched: number of dims of an input without samples, whose channels are its first dim.
    """

    def _rule(x: Sharded, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if not 0 <= p <= 1:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
        if not training or p == 0:
            return x
        keep = channel_numbers(x, 1 if ndim_of(x) == unbatched else 2) >= p
        with native():
            factor = keep.to(x.dtype) / (1 - p) if p < 1 else keep.to(x.dtype) * 0
            return x.mul_(factor) if inplace else wrap(x * factor, x._sharding, x._dim)

    return _rule


RULES: dict[Any, Rule] = {
    F.dropout: dropout,
    torch.dropout: native_dropout,
    F.dropout1d: _feature_dropout(2),
    F.dropout2d: _feature_dropout(),
    F.dropout3d: _feature_dropout(4),
    torch.feature_dropout: _feature_dropout(),
    torch.rand_like: rand_like,
    torch.randn_like: randn_like,
    torch.bernoulli: bernoulli,
    torch.Tensor.bernoulli: bernoulli,
    **{
        f: rowwise(f)
        for f in (torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like)
    },
}
