"""Rules of chance: a draw is keyed by the row in the source, so it is the same on any ranks.

The default generator gives one seed for each draw, equally on every rank, so replicated draws stay
equal; numbers are hashes of (seed, row in the source, place in the row).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from meshshard.tensor.align import native_shape, shape_of
from meshshard.tensor.rules.attributes import requires_grad_
from meshshard.tensor.shard_tensor import Rule, Sharded, ShardTensor, native, refuse, wrap

__all__ = ["RULES", "hash_uniform", "uniform"]


def uniform(x: Sharded) -> Tensor:
    """Own numbers of a uniform draw in [0, 1), float64, of the local shape of `x`."""
    seed = x._sharding.domain.shared_seed()
    with native():
        shape, sharding = x.shape, x._sharding
        rows = sharding.sources(x.device)
        column = [n if d != x._dim else 1 for d, n in enumerate(shape)]
        places = torch.arange(math.prod(column), device=x.device).reshape(column)
        along = [-1 if d == x._dim else 1 for d in range(len(shape))]
        return hash_uniform(seed, rows.view(along), places)


def hash_uniform(seed: int, *ids: Tensor) -> Tensor:
    """Numbers in [0, 1), float64, that a seed and ids alone decide; ids broadcast."""
    key = ids[0] + seed
    for more in ids[1:]:
        key = _mix(key) + more
    bits = _mix(_mix(key)) >> 11 & (2**53 - 1)
    return bits.to(torch.float64) * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64, which wraps (Steele, Lea and Flood, 2014)."""
    x = x + -7046029254386353131
    x = (x ^ _right(x, 30)) * -4658895280553007687
    x = (x ^ _right(x, 27)) * -7723592293110705685
    return x ^ _right(x, 31)


def _right(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def dropout(x: Sharded, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Dropout with a mask that does not depend on the partition."""
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if not training or p == 0:
        return x
    keep = uniform(x) >= p
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
        draw = uniform(x).to(kwargs.get("dtype") or x.dtype)
    return _made(draw, x, kwargs)


def randn_like(x: Sharded, **kwargs: Any) -> ShardTensor:
    """Normal numbers, by the inverse of their distribution."""
    _default_only(torch.randn_like, x, kwargs)
    with native():
        draw = _normal(x).to(kwargs.get("dtype") or x.dtype)
    return _made(draw, x, kwargs)


def bernoulli(x: Sharded, p: Any = None, **kwargs: Any) -> ShardTensor:
    """Zeros and ones with the probability that x says, or p."""
    _default_only(torch.bernoulli, x, kwargs)
    with native():
        draw = (uniform(x) < (x if p is None else p)).to(x.dtype)
    return wrap(draw, x._sharding, x._dim)


def uniform_(x: Sharded, low: float = 0.0, to: float = 1.0, **kwargs: Any) -> ShardTensor:
    """Fill with uniform numbers."""
    _default_only(torch.Tensor.uniform_, x, kwargs)
    low = kwargs.get("from", low)
    with native(), torch.no_grad():
        x.copy_(uniform(x) * (to - low) + low)
    return x  # type: ignore[no-any-return]


def normal_(x: Sharded, mean: float = 0.0, std: float = 1.0, **kwargs: Any) -> ShardTensor:
    """Fill with normal numbers."""
    _default_only(torch.Tensor.normal_, x, kwargs)
    with native(), torch.no_grad():
        x.copy_(_normal(x) * std + mean)
    return x  # type: ignore[no-any-return]


def _default_only(func: Any, x: Sharded, kwargs: dict[str, Any]) -> None:
    if kwargs.get("generator") is not None:
        raise refuse(func, (x,), None, "numbers are keyed by rows and torch.manual_seed alone")


def _normal(x: Sharded) -> Tensor:
    draw: Tensor = torch.special.ndtri((uniform(x) + 2.0**-54).clamp(max=1 - 2.0**-53))
    return draw


def _made(draw: Tensor, x: Sharded, kwargs: dict[str, Any]) -> ShardTensor:
    out = wrap(draw, x._sharding, x._dim)
    return requires_grad_(out) if kwargs.get("requires_grad") else out


def like(func: Callable[..., Any]) -> Rule:
    """zeros_like and its kin."""

    def _rule(x: Sharded, *args: Any, **kwargs: Any) -> ShardTensor:
        with native():
            return wrap(func(x, *args, **kwargs), x._sharding, x._dim)

    return _rule


def feature_dropout(x: Sharded, p: float = 0.5, training: bool = True,
                    inplace: bool = False) -> Any:  # fmt: skip
    """Whole channels of a sample are dropped: rows must be samples."""
    if x._dim != 0:
        raise refuse("feature dropout", (x,), None, f"rows are dim {x._dim}, samples are dim 0")
    with native():
        channels = x.flatten(2)[..., :1].detach() if x.ndim > 2 else x.detach()
    mask = dropout(torch.ones_like(wrap(channels.clone(), x._sharding, 0)), p, training)
    with native():
        shape = native_shape(x)[:2] + (1,) * (len(shape_of(x)) - 2)
        scale = mask.view(shape)
        return x.mul_(scale) if inplace else wrap(x * scale, x._sharding, 0)


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
    **{f: like(f) for f in (torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like)},
}
