"""Rules of normalization layers: row-wise, or with statistics over the rows of all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from meshshard.tensor.align import ndim_of
from meshshard.tensor.rules.table import named
from meshshard.tensor.shard_tensor import (
    Rule,
    Sharded,
    ShardTensor,
    apply_local,
    refuse,
    sharded_in,
)
from meshshard.tensor.tokens import accumulation_dtype

broadcast_shapes: Any = torch.broadcast_shapes


def layer_norm(
    x: Sharded, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None,
    eps: float = 1e-5,
) -> Any:  # fmt: skip
    """LayerNorm: row-wise, unless the sharded dim is normalized over."""
    _check_weights(F.layer_norm, x, normalized_shape, (weight, bias))
    dims = _last(x, len(normalized_shape))
    if type(x) is not ShardTensor:
        return _scaled(F.layer_norm(x, normalized_shape, eps=eps), weight, bias)
    if x._dim not in dims:
        return apply_local(F.layer_norm, x, (normalized_shape, weight, bias, eps))
    return _scaled(_standardized(x, dims, eps), weight, bias)


def rms_norm(
    x: Sharded, normalized_shape: Sequence[int], weight: Any = None, eps: Any = None
) -> Any:
    """RMSNorm: as LayerNorm, without the mean."""
    _check_weights(F.rms_norm, x, normalized_shape, (weight,))
    dims = _last(x, len(normalized_shape))
    if type(x) is not ShardTensor:
        return _scaled(F.rms_norm(x, normalized_shape, eps=eps), weight, None)
    if x._dim not in dims:
        return apply_local(F.rms_norm, x, (normalized_shape, weight, eps))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return _scaled(x * torch.rsqrt((x * x).mean(dims, keepdim=True) + eps), weight, None)


def _check_weights(func: Any, x: Any, shape: Sequence[int], weights: tuple[Any, ...]) -> None:
    """Check shapes and shardings, with the same result on every rank.

    Raises:
        NoShardRule: weights are sharded, but the features are not.
        RuntimeError: a shape does not fit, as in torch.
    """
    given = [w for w in weights if w is not None]
    rows = type(x) is ShardTensor and x._dim not in _last(x, len(shape))
    if rows and sharded_in(given):
        raise refuse(func, (x, *given), None, "expected sharded rows and plain weights")
    wanted = tuple(shape)
    if any(tuple(s) != wanted for s in (x.shape[-len(wanted) :], *(w.shape for w in given))):
        shapes = [tuple(w.shape) for w in (x, *given)]
        raise RuntimeError(f"normalized_shape {wanted} does not fit tensors of shapes {shapes}")


def batch_norm(*args: Any, **kwargs: Any) -> Any:
    """BatchNorm: mean and variance of each channel over all rows of all ranks, in two passes."""
    given = _bound(F.batch_norm, args, kwargs)
    x, running_mean, running_var = given.input, given.running_mean, given.running_var
    ndim = ndim_of(x)
    dims = tuple(d for d in range(ndim) if d != 1)
    dtype, x = x.dtype, _wide(x)
    columns = _column_shape(ndim)
    if given.training or running_mean is None:
        n = math.prod(x.shape[d] for d in dims)
        if n == 1:
            raise ValueError(f"Expected more than 1 value per channel, got {tuple(x.shape)}")
        mean = x.mean(dims)
        centered = x - mean.view(columns)
        var = (centered * centered).mean(dims)
        if running_mean is not None:
            _update(running_mean, mean, given.momentum)
            _update(running_var, var * (n / (n - 1)), given.momentum)
    else:
        var, centered = running_var, x - running_mean.view(columns)
    out = centered * torch.rsqrt(var + given.eps).view(columns)
    return _scaled(out, _shaped(given.weight, columns), _shaped(given.bias, columns)).to(dtype)


def _update(running: Any, new: Any, momentum: float) -> None:
    """Move a running statistic of the channels; a plain one needs those of all ranks.

    Communication: one all-to-all of a number for each channel if the channels are sharded.
    """
    with torch.no_grad():
        if type(running) is not ShardTensor and type(new) is ShardTensor:
            new = new.gather()
        running.lerp_(new.to(running.dtype), momentum)


def instance_norm(*args: Any, **kwargs: Any) -> Any:
    """InstanceNorm: statistics of each sample and channel over the points of all ranks."""
    given = _bound(F.instance_norm, args, kwargs)
    x = given.input
    if not given.use_input_stats:
        statistics = (given.running_mean, given.running_var)
        return batch_norm(x, *statistics, given.weight, given.bias, False, 0.0, given.eps)
    dims = tuple(range(2, ndim_of(x)))
    if math.prod(x.shape[2:]) < 2:
        raise ValueError(f"Expected more than 1 spatial element, got input size {tuple(x.shape)}")
    if given.running_mean is not None:
        with torch.no_grad():
            wide = _wide(x.detach())
            _update(given.running_mean, wide.mean(dims).mean(0), given.momentum)
            _update(given.running_var, wide.var(dims).mean(0), given.momentum)
    columns = _column_shape(ndim_of(x))
    out = _standardized(x, dims, given.eps)
    return _scaled(out, _shaped(given.weight, columns), _shaped(given.bias, columns))


def group_norm(
    x: Sharded, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    """GroupNorm: statistics of each sample and group over the points of all ranks."""
    shape = x.shape
    grouped = x.reshape(shape[0], num_groups, shape[1] // num_groups, *shape[2:])
    dims = tuple(range(2, ndim_of(grouped)))
    out = _standardized(grouped, dims, eps).reshape(shape)
    columns = _column_shape(len(shape))
    return _scaled(out, _shaped(weight, columns), _shaped(bias, columns))


def normalize(x: Sharded, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None) -> Any:
    """F.normalize: vectors of norm one."""
    if out is not None:
        raise refuse(F.normalize, (x,), None, "out= is given; assign the result")
    return x / torch.linalg.vector_norm(x, p, dim, keepdim=True).clamp_min(eps)


def cosine_similarity(x: Tensor, y: Tensor, dim: int = 1, eps: float = 1e-8) -> Any:
    """F.cosine_similarity of vectors along a dim of the broadcast shape."""
    shape = broadcast_shapes(x.shape, y.shape)
    x, y = (v if v.shape == shape else v.expand(shape) for v in (x, y))
    length = [torch.linalg.vector_norm(v, 2, dim, keepdim=True).clamp_min(eps) for v in (x, y)]
    return ((x / length[0]) * (y / length[1])).sum(dim)


def pairwise_distance(
    x: Tensor, y: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Any:
    """F.pairwise_distance: norms of differences, row-wise."""
    return torch.linalg.vector_norm(x - y + eps, p, -1, keepdim=keepdim)


def _standardized(x: Tensor, dims: tuple[int, ...], eps: float) -> Any:
    """Zero mean and unit variance over some dims, in two passes."""
    dtype, x = x.dtype, _wide(x)
    centered = x - x.mean(dims, keepdim=True)
    return (centered * torch.rsqrt((centered * centered).mean(dims, keepdim=True) + eps)).to(dtype)


def _wide(x: Any) -> Any:
    return x.to(accumulation_dtype(x.dtype))


def _bound(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> SimpleNamespace:
    """Arguments by name, with defaults."""
    bound = signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    return SimpleNamespace(**bound.arguments)


def _scaled(x: Any, weight: Any, bias: Any) -> Any:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _column_shape(ndim: int) -> list[int]:
    """The shape in which a number for each channel broadcasts along dim 1."""
    return [-1 if d == 1 else 1 for d in range(ndim)]


def _shaped(x: Any, columns: list[int]) -> Any:
    return None if x is None else x.view(columns)


def _last(x: Sharded, n: int) -> tuple[int, ...]:
    return tuple(range(ndim_of(x) - n, ndim_of(x)))


RULES: dict[Any, Rule] = {
    F.layer_norm: layer_norm,
    F.rms_norm: rms_norm,
    F.batch_norm: batch_norm,
    F.instance_norm: instance_norm,
    F.group_norm: group_norm,
    F.normalize: normalize,
    **named({"cosine_similarity": cosine_similarity, "pairwise_distance": pairwise_distance}),
}
