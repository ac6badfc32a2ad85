"""Rules of normalization layers: rows alone, or statistics over all rows weighted by count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from meshshard.tensor.align import native_ndim, shape_of
from meshshard.tensor.rules.reductions import wide
from meshshard.tensor.shard_tensor import Rule, Sharded, native, refuse, wrap

__all__ = ["RULES"]


def layer_norm(
    x: Sharded, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None,
    eps: float = 1e-5,
) -> Any:  # fmt: skip
    """LayerNorm: rows alone, unless the rows are what is normalized over."""
    dims = _last(x, len(normalized_shape))
    if x._dim not in dims:
        with native():
            out = F.layer_norm(x, normalized_shape, weight, bias, eps)
        return wrap(out, x._sharding, x._dim)
    return _scaled(_standard(x, dims, eps), weight, bias)


def rms_norm(
    x: Sharded, normalized_shape: Sequence[int], weight: Any = None, eps: Any = None
) -> Any:
    """RMSNorm: as LayerNorm, without the mean."""
    dims = _last(x, len(normalized_shape))
    if x._dim not in dims:
        with native():
            return wrap(F.rms_norm(x, normalized_shape, weight, eps), x._sharding, x._dim)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return _scaled(x * torch.rsqrt((x * x).mean(dims, keepdim=True) + eps), weight, None)


def batch_norm(*args: Any, **kwargs: Any) -> Any:
    """BatchNorm: one mean and variance a channel, over all rows of all ranks, in two passes."""
    given = _given(F.batch_norm, args, kwargs)
    x, running_mean, running_var = given.input, given.running_mean, given.running_var
    ndim = native_ndim(x)
    if x._dim == 1:
        raise refuse(F.batch_norm, (x,), None, "channels are sharded")
    dims = tuple(d for d in range(ndim) if d != 1)
    kept, x = x.dtype, _wider(x)
    columns = [-1 if d == 1 else 1 for d in range(ndim)]
    if given.training or running_mean is None:
        n = shape_of(x).numel() // max(shape_of(x)[1], 1)
        if n < 2:
            raise ValueError(f"Expected more than 1 value per channel, got {tuple(shape_of(x))}")
        mean = x.mean(dims)
        apart = x - mean.view(columns)
        var = (apart * apart).mean(dims)
        if running_mean is not None:
            with torch.no_grad():
                running_mean.lerp_(mean.to(running_mean.dtype), given.momentum)
                running_var.lerp_((var * (n / (n - 1))).to(running_var.dtype), given.momentum)
    else:
        var, apart = running_var, x - running_mean.view(columns)
    out = apart * torch.rsqrt(var + given.eps).view(columns)
    return _scaled(out, _shaped(given.weight, columns), _shaped(given.bias, columns)).to(kept)


def instance_norm(*args: Any, **kwargs: Any) -> Any:
    """InstanceNorm: statistics of every sample and channel over its points, wherever they are."""
    given = _given(F.instance_norm, args, kwargs)
    x = given.input
    if x._dim == 1 or given.running_mean is not None:
        why = "channels are sharded" if x._dim == 1 else "running statistics"
        raise refuse(F.instance_norm, (x,), None, why)
    dims = tuple(range(2, native_ndim(x)))
    columns = [-1 if d == 1 else 1 for d in range(native_ndim(x))]
    out = _standard(x, dims, given.eps)
    return _scaled(out, _shaped(given.weight, columns), _shaped(given.bias, columns))


def group_norm(
    x: Sharded, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    """GroupNorm: statistics of every sample and group, over points wherever they are."""
    if x._dim == 1:
        raise refuse(F.group_norm, (x,), None, "channels are sharded")
    shape = shape_of(x)
    grouped = x.reshape(shape[0], num_groups, shape[1] // num_groups, *shape[2:])
    dims = tuple(range(2, native_ndim(grouped)))
    out = _standard(grouped, dims, eps).reshape(shape)
    columns = [-1 if d == 1 else 1 for d in range(len(shape))]
    return _scaled(out, _shaped(weight, columns), _shaped(bias, columns))


def normalize(x: Sharded, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Any = None) -> Any:
    """Vectors of norm one."""
    if out is not None:
        raise refuse(F.normalize, (x,), None, "out=")
    return x / torch.linalg.vector_norm(x, p, dim, keepdim=True).clamp_min(eps)


def cosine_similarity(x: Tensor, y: Tensor, dim: int = 1, eps: float = 1e-8) -> Any:
    """Cosine of the angle between vectors."""
    length = [torch.linalg.vector_norm(v, 2, dim, keepdim=True).clamp_min(eps) for v in (x, y)]
    return ((x / length[0]) * (y / length[1])).sum(dim)


def pairwise_distance(
    x: Tensor, y: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Any:
    """Norms of differences, row by row."""
    return torch.linalg.vector_norm(x - y + eps, p, -1, keepdim=keepdim)


def _standard(x: Tensor, dims: tuple[int, ...], eps: float) -> Any:
    """Zero mean and variance one over some dims, in two passes."""
    kept, x = x.dtype, _wider(x)
    apart = x - x.mean(dims, keepdim=True)
    return (apart * torch.rsqrt((apart * apart).mean(dims, keepdim=True) + eps)).to(kept)


def _wider(x: Any) -> Any:
    """Statistics are kept in float32 at least, as in torch's own kernels."""
    return x.to(wide(x.dtype))


def _given(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> SimpleNamespace:
    """Arguments by the names that torch gives them, defaults included."""
    bound = signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    return SimpleNamespace(**bound.arguments)


def _scaled(x: Any, weight: Any, bias: Any) -> Any:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _shaped(x: Any, columns: list[int]) -> Any:
    return None if x is None else x.view(columns)


def _last(x: Sharded, n: int) -> tuple[int, ...]:
    return tuple(range(native_ndim(x) - n, native_ndim(x)))


def _named(name: str, rule: Callable[..., Any]) -> dict[Any, Rule]:
    return {f: rule for h in (torch, F) if callable(f := getattr(h, name, None))}


RULES: dict[Any, Rule] = {
    F.layer_norm: layer_norm,
    F.rms_norm: rms_norm,
    F.batch_norm: batch_norm,
    F.instance_norm: instance_norm,
    F.group_norm: group_norm,
    F.normalize: normalize,
    **_named("cosine_similarity", cosine_similarity),
    **_named("pairwise_distance", pairwise_distance),
}
