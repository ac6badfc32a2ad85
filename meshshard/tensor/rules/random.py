"""Rules of random functions: a draw does not depend on the number of ranks or the partition.

The default generator gives one seed for each draw, identically on every rank, so replicated draws
stay equal; numbers are hashes of (seed, row in the source, position in the row).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from meshshard.tensor._torch_private import native
from meshshard.tensor.align import global_shape, local_shape
from meshshard.tensor.keyed_random import hash_uniform
from meshshard.tensor.rules.autograd import requires_grad_
from meshshard.tensor.rules.table import rowwise
from meshshard.tensor.shard_tensor import Rule, Sharded, ShardTensor, refuse, wrap


def _uniform(x: Sharded) -> Tensor:
    """Uniform numbers in [0, 1), float64, of the local shape of `x`."""
    seed = x._sharding.domain.shared_seed()
    with native():
        shape, sharding = x.shape, x._sharding
        rows = sharding.sources(x.device)
        one_row = [n if d != x._dim else 1 for d, n in enumerate(shape)]
        positions = torch.arange(math.prod(one_row), device=x.device).reshape(one_row)
        along_rows = [-1 if d == x._dim else 1 for d in range(len(shape))]
        return hash_uniform(seed, rows.view(along_rows), positions)


def dropout(x: Sharded, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """F.dropout, with a mask that does not depend on the partition."""
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if not training or p == 0:
        return x
    keep = _uniform(x) >= p
    with native():
        factor = keep.to(x.dtype) / (1 - p) if p < 1 else torch.zeros_like(x)
        out = x.mul_(factor) if inplace else x * factor
    return x if inplace else wrap(out, x._sharding, x._dim)


def native_dropout(x: Sharded, p: float = 0.5, train: bool = True) -> Any:
    """torch.dropout."""
    return dropout(x, p, train)


def rand_like(x: Sharded, **kwargs: Any) -> ShardTensor:
    """Uniform numbers in [0, 1)."""
    _default_only(torch.rand_like, x, kwargs)
    with native():
        draw = _uniform(x).to(kwargs.get("dtype") or x.dtype)
    return _made(draw, x, kwargs)


def randn_like(x: Sharded, **kwargs: Any) -> ShardTensor:
    """Normal numbers, by the inverse of the cumulative distribution."""
    _default_only(torch.randn_like, x, kwargs)
    with native():
        draw = _normal(x).to(kwargs.get("dtype") or x.dtype)
    return _made(draw, x, kwargs)


def bernoulli(x: Sharded, p: Any = None, **kwargs: Any) -> ShardTensor:
    """Zeros and ones, with the probabilities x, or p."""
    _default_only(torch.bernoulli, x, kwargs)
    with native():
        draw = (_uniform(x) < (x if p is None else p)).to(x.dtype)
    return wrap(draw, x._sharding, x._dim)


def uniform_(x: Sharded, low: float = 0.0, to: float = 1.0, **kwargs: Any) -> ShardTensor:
    """Fill with uniform numbers."""
    _default_only(torch.Tensor.uniform_, x, kwargs)
    low = kwargs.get("from", low)
    with native(), torch.no_grad():
        x.copy_(_uniform(x) * (to - low) + low)
    return x  # type: ignore[no-any-return]


def normal_(x: Sharded, mean: float = 0.0, std: float = 1.0, **kwargs: Any) -> ShardTensor:
    """Fill with normal numbers."""
    _default_only(torch.Tensor.normal_, x, kwargs)
    with native(), torch.no_grad():
        x.copy_(_normal(x) * std + mean)
    return x  # type: ignore[no-any-return]


def _default_only(func: Any, x: Sharded, kwargs: dict[str, Any]) -> None:
    if kwargs.get("generator") is not None:
        why = "its numbers depend on torch.manual_seed and the rows; omit the generator"
        raise refuse(func, (x,), None, why)


def _normal(x: Sharded) -> Tensor:
    draw: Tensor = torch.special.ndtri((_uniform(x) + 2.0**-54).clamp(max=1 - 2.0**-53))
    return draw


def _made(draw: Tensor, x: Sharded, kwargs: dict[str, Any]) -> ShardTensor:
    out = wrap(draw, x._sharding, x._dim)
    return requires_grad_(out) if kwargs.get("requires_grad") else out


def feature_dropout(
    x: Sharded, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    """F.dropout1d to 3d, which drop whole channels of a sample."""
    if x._dim > 1:
        why = f"samples and channels are along dims 0 and 1, but the sharded dim is {x._dim}"
        raise refuse("feature dropout", (x,), None, why)
    with native():
        channels = x.flatten(2)[..., :1].detach() if x.ndim > 2 else x.detach()
    mask = dropout(torch.ones_like(wrap(channels.clone(), x._sharding, x._dim)), p, training)
    with native():
        shape = local_shape(x)[:2] + (1,) * (len(global_shape(x)) - 2)
        scale = mask.view(shape)
        return x.mul_(scale) if inplace else wrap(x * scale, x._sharding, x._dim)


RULES: dict[Any, Rule] = {
    F.dropout: dropout,
    torch.dropout: native_dropout,
    F.dropout1d: feature_dropout,
    F.dropout2d: feature_dropout,
    F.dropout3d: feature_dropout,
    torch.rand_like: rand_like,
    torch.randn_like: randn_like,
    torch.bernoulli: bernoulli,
    torch.Tensor.bernoulli: bernoulli,
    torch.Tensor.uniform_: uniform_,
    torch.Tensor.normal_: normal_,
    **{
        f: rowwise(f)
        for f in (torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like)
    },
}
