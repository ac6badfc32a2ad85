"""Rules of reductions: local over other dims, an all-reduce over the sharded dim."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshshard.comm.linear import largest
from meshshard.tensor._torch_private import native
from meshshard.tensor.align import global_shape, ndim_of
from meshshard.tensor.rules.table import named
from meshshard.tensor.shard_tensor import (
    Rule,
    Sharded,
    ShardTensor,
    apply_local,
    normalize_dim,
    refuse,
    wrap,
)
from meshshard.tensor.tokens import HALF, accumulation_dtype

Dims = int | tuple[int, ...] | list[int] | None


def _dims(x: Sharded, dim: Dims) -> tuple[int, ...]:
    """Nonnegative dims; all dims for None or an empty tuple, as in torch."""
    ndim = ndim_of(x)
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return tuple(range(ndim))
    dims = tuple(normalize_dim(d, ndim) for d in ((dim,) if isinstance(dim, int) else dim))
    if len(set(dims)) < len(dims):
        raise RuntimeError(f"a dim appears multiple times in the list of dims {dim}")
    return dims


def _remaining_dim(x: Sharded, dims: tuple[int, ...], keepdim: bool) -> int:
    """The sharded dim after other dims were reduced."""
    return int(x._dim if keepdim else x._dim - sum(d < x._dim for d in dims))


def _local(
    func: Callable[..., Any], x: Sharded, dims: tuple[int, ...], keepdim: bool, **options: Any
) -> ShardTensor:
    """A reduction over dims other than the sharded one."""
    at = _remaining_dim(x, dims, keepdim)
    return apply_local(func, x, (dims,), {"keepdim": keepdim, **options}, at)


def _count(x: Sharded, dims: tuple[int, ...]) -> int:
    """Number of elements of the whole tensor that are reduced to one."""
    shape = global_shape(x)
    return math.prod(shape[d] for d in dims)


def total(x: Sharded, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Sum: local sums, then one all-reduce if the sharded dim is reduced."""
    dims = _dims(x, dim)
    if x._dim not in dims:
        return _local(torch.sum, x, dims, keepdim, dtype=dtype)
    return _global_sum(x, dims, keepdim, dtype)


def _global_sum(
    x: Sharded, dims: tuple[int, ...], keepdim: bool, dtype: Any, count: int | None = None
) -> Any:
    """The sum over all ranks, divided by `count` if given; half precision is added in float32."""
    with native():
        kept = dtype or x.dtype
        wide = accumulation_dtype(kept) if kept in HALF else dtype
        local = torch.sum(x, dims, keepdim=keepdim, dtype=wide)
    whole = x._sharding.domain.all_reduce(local)
    whole = whole if count is None else whole / count
    return whole.to(kept) if kept in HALF else whole


def mean(x: Sharded, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Mean: the global sum over the global count, never a mean of means."""
    if dim is None and dtype is None and not keepdim:  # the common case, with the least overhead
        with native():
            local, shape = x.sum(), x.shape
        if local.dtype not in HALF and local.is_floating_point():
            width = math.prod(shape[: x._dim]) * math.prod(shape[x._dim + 1 :])
            return x._sharding.domain.all_reduce(local) / (width * x._sharding.total)
    kept = dtype or x.dtype
    if not (kept.is_floating_point or kept.is_complex):
        raise RuntimeError(f"mean(): expected a floating point or complex dtype, got {kept}")
    dims = _dims(x, dim)
    if x._dim not in dims:
        return _local(torch.mean, x, dims, keepdim, dtype=dtype)
    return _global_sum(x, dims, keepdim, dtype, _count(x, dims))


def nansum(x: Sharded, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Sum of the numbers that are not NaN."""
    return total(torch.where(torch.isnan(x), torch.zeros_like(x), x), dim, keepdim, dtype=dtype)


def nanmean(x: Sharded, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Mean of the numbers that are not NaN."""
    valid = (~torch.isnan(x)).to(dtype or x.dtype)
    return nansum(x, dim, keepdim, dtype=dtype) / total(valid, dim, keepdim)


def amax(x: Sharded, dim: Dims = (), keepdim: bool = False) -> Any:
    """Largest values; ties share the gradient, also across ranks."""
    dims = _dims(x, dim)
    if x._dim not in dims:
        return _local(torch.amax, x, dims, keepdim)
    if not _count(x, dims):
        raise IndexError("amax(): expected a non-empty tensor to reduce over")
    with native():
        return largest(x._sharding.domain, x.view_as(x), dims, keepdim)


def amin(x: Sharded, dim: Dims = (), keepdim: bool = False) -> Any:
    """Smallest values; ties share the gradient, also across ranks."""
    return _opposite_order(amax(_opposite_order(x), dim, keepdim))


def _opposite_order(x: Any) -> Any:
    """Values that sort the other way: the negative, or ~x of integers, which cannot overflow."""
    return -x if x.is_floating_point() else ~x


def maximum(x: Sharded, dim: Any = None, keepdim: bool = False) -> Any:
    """torch.max; with a dim, ties give the lowest global index."""
    if dim is None:
        return amax(x)
    if isinstance(dim, Tensor):
        return torch.maximum(x, dim)
    return _max_or_min(torch.max, x, dim, keepdim)


def minimum(x: Sharded, dim: Any = None, keepdim: bool = False) -> Any:
    """torch.min; with a dim, ties give the lowest global index."""
    if dim is None:
        return amin(x)
    if isinstance(dim, Tensor):
        return torch.minimum(x, dim)
    return _max_or_min(torch.min, x, dim, keepdim)


def _max_or_min(func: Callable[..., Any], x: Sharded, dim: int, keepdim: bool) -> Any:
    result = torch.return_types.max if func is torch.max else torch.return_types.min
    if x.dtype == torch.bool:
        values, indices = _max_or_min(func, x.to(torch.uint8), dim, keepdim)
        return result((values.to(torch.bool), indices))
    dim = normalize_dim(dim, ndim_of(x))
    if dim != x._dim:
        with native():
            values, indices = func(x, dim, keepdim=keepdim)
        at = _remaining_dim(x, (dim,), keepdim)
        return result((wrap(values, x._sharding, at), wrap(indices, x._sharding, at)))
    indices = _index_of_largest(x if func is torch.max else _opposite_order(x), dim)
    with native():
        mine = (indices >= x._sharding.first) & (indices < x._sharding.first + x._sharding.own)
        local = torch.where(mine, indices - x._sharding.first, 0)
        if x._sharding.own:
            value = torch.where(mine, torch.gather(x, dim, local), 0)
        else:
            value = x.sum(dim, keepdim=True, dtype=x.dtype)  # zeros that are part of the graph
        values = x._sharding.domain.all_reduce(value)
    if not keepdim:
        values, indices = values.squeeze(dim), indices.squeeze(dim)
    return result((values, indices))


def _index_of_largest(x: Sharded, dim: int) -> Tensor:
    """Lowest global row of the largest value along the sharded dim; the dim is kept."""
    sharding = x._sharding
    if not sharding.total:
        raise IndexError("max(): expected a non-empty dim to reduce over")
    with native(), torch.no_grad():
        shape = [1] * x.ndim
        shape[dim] = -1
        rows = torch.arange(sharding.own, device=x.device).view(shape) + sharding.first
        return _lowest_index(x, x.detach(), rows, sharding.total, dim)


def _lowest_index(x: Sharded, values: Tensor, index: Tensor, missing: int, dim: int) -> Tensor:
    """Lowest index of the global maximum or of a NaN, else `missing`; the dim is kept."""
    domain = x._sharding.domain
    hit = (values == largest(domain, values, (dim,), True)) | torch.isnan(values)
    return -largest(domain, -torch.where(hit, index, missing), (dim,), True)


def argmax(x: Sharded, dim: int | None = None, keepdim: bool = False) -> Any:
    """Lowest global index of the largest value."""
    if dim is not None:
        return _max_or_min(torch.max, x, dim, keepdim)[1]
    if x._dim != 0:
        raise refuse(torch.argmax, (x,), None, "without a dim, the sharded dim must be the first")
    width, missing = _count(x, tuple(range(1, ndim_of(x)))), global_shape(x).numel()
    if not missing:
        raise IndexError("argmax(): expected a non-empty tensor")
    with native():
        flat = x.detach().reshape(-1)
        ids = torch.arange(len(flat), device=flat.device) + x._sharding.first * width
        index = _lowest_index(x, flat, ids, missing, 0)
        return index.reshape([1] * x.ndim) if keepdim else index.squeeze(0)


def argmin(x: Sharded, dim: int | None = None, keepdim: bool = False) -> Any:
    """Lowest global index of the smallest value."""
    return argmax(_opposite_order(x), dim, keepdim)


def any_of(x: Sharded, dim: Dims = None, keepdim: bool = False) -> Any:
    """Whether any element is not zero."""
    return _truth(x, count_nonzero(x, dim, keepdim) > 0)


def all_of(x: Sharded, dim: Dims = None, keepdim: bool = False) -> Any:
    """Whether all elements are not zero."""
    return _truth(x, total(x == 0, dim, keepdim, dtype=torch.int64) == 0)


def _truth(x: Sharded, found: Any) -> Any:
    """Bools, which are uint8 for a uint8 tensor, as in torch."""
    return found.to(torch.uint8) if x.dtype == torch.uint8 else found


def count_nonzero(x: Sharded, dim: Dims = None, keepdim: bool = False) -> Any:
    """Number of elements that are not zero."""
    return total(x != 0, dim, keepdim, dtype=torch.int64)


def var(
    x: Sharded, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *,
    correction: float | None = None,
) -> Any:  # fmt: skip
    """Variance in two passes over the global rows."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    if correction is None:
        correction = 1 if unbiased in (None, True) else 0
    dims = _dims(x, dim)
    if x._dim not in dims and x._sharding.own:  # torch warns of the variance of an empty tensor
        return _local(torch.var, x, dims, keepdim, correction=correction)
    deviation = x - mean(x, dims, True)
    deviation = deviation.abs() if x.is_complex() else deviation
    return total(deviation * deviation, dims, keepdim) / max(_count(x, dims) - correction, 0)


def std(x: Sharded, *args: Any, **kwargs: Any) -> Any:
    """Square root of the variance; its gradient is 0 where the variance is, as in torch."""
    variance = var(x, *args, **kwargs)
    constant = variance == 0
    return variance.masked_fill(constant, 1).sqrt().masked_fill(constant, 0)


def _and_mean(func: Callable[..., Any]) -> Rule:
    """The rule of var_mean and std_mean."""

    def _rule(x: Sharded, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
        keepdim = bool(kwargs.get("keepdim", len(args) > 1 and args[1]))
        average = mean(x, None if isinstance(dim, bool) else dim, keepdim)
        return func(x, dim, *args, **kwargs), average

    return _rule


def vector_norm(
    x: Sharded, ord: Any = 2, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None,  # noqa: A002
    out: Any = None,
) -> Any:  # fmt: skip
    """Vector norm: the norm of the local norms."""
    if out is not None:
        raise refuse(
            torch.linalg.vector_norm, (x,), None, "out= is not supported; assign the result"
        )
    dims = _dims(x, dim)
    if x._dim not in dims:
        at = _remaining_dim(x, dims, keepdim)
        return apply_local(torch.linalg.vector_norm, x, (ord, dims, keepdim), {"dtype": dtype}, at)
    if ord == math.inf:
        return amax(x.abs(), dims, keepdim)
    if ord == -math.inf:
        return amin(x.abs(), dims, keepdim)
    if ord == 0:
        count = total((x != 0).to(dtype or x.dtype), dims, keepdim)
        if x.requires_grad and torch.is_grad_enabled():  # a gradient of zeros, as in torch
            none: Any = torch.where(x == 0, x, 0)
            count = count + total((none - none).to(count.dtype), dims, keepdim)
        return count.abs() if count.is_complex() else count
    with native():
        if ord < 0 and not x._sharding.own:  # it is infinite, but torch raises on an empty tensor
            local = torch.linalg.vector_norm(x, 2, dims, keepdim, dtype=dtype) + math.inf
        else:
            local = torch.linalg.vector_norm(x, ord, dims, keepdim, dtype=dtype)
        domain = x._sharding.domain
        norms = domain.all_gather(local[None], [1] * domain.size)
        return torch.linalg.vector_norm(norms, ord, 0)


def norm(
    x: Sharded, p: Any = "fro", dim: Dims = None, keepdim: bool = False, *args: Any,
    dtype: Any = None, **kwargs: Any,
) -> Any:  # fmt: skip
    """torch.norm and Tensor.norm: Frobenius, nuclear and vector norms."""
    if kwargs.get("out") is not None:
        raise refuse(torch.norm, (x,), None, "out= is not supported")
    if p == "nuc":
        dims = (0, 1) if dim is None else dim
        return torch.linalg.matrix_norm(x, "nuc", dims, keepdim, dtype=dtype)
    return vector_norm(x, 2 if p in ("fro", None) else p, dim, keepdim, dtype=dtype)


def logsumexp(x: Sharded, dim: Dims, keepdim: bool = False) -> Any:
    """Logarithm of the sum of exponentials, shifted by the global maximum."""
    dims = _dims(x, dim)
    if x._dim not in dims:
        return _local(torch.logsumexp, x, dims, keepdim)
    if not x.is_floating_point() and not x.is_complex():
        x = x.to(torch.get_default_dtype())
    if not _count(x, dims):
        return torch.log(total(torch.exp(x), dims, keepdim))
    top = _finite_max(x, dims)
    out = torch.log(total(torch.exp(x - top), dims, True)) + top
    return out if keepdim else out.squeeze(dims)


def _finite_max(x: Sharded, dims: tuple[int, ...]) -> Tensor:
    """Global maximum without gradient, zero where it is infinite or NaN."""
    top: Tensor = amax(x.detach(), dims, True)
    return torch.where(torch.isfinite(top), top, torch.zeros_like(top))


def _softmax(func: Callable[..., Any], sign: int = 1) -> Rule:
    """The rule of softmax, softmin (sign -1) or log_softmax; two all-reduces along sharded rows."""

    def _rule(x: Sharded, dim: Any = None, *args: Any, dtype: Any = None, **_: Any) -> Any:
        dtype = next((a for a in args if isinstance(a, torch.dtype)), dtype)
        x = x if sign == 1 else -x
        if dim is None:
            raise refuse(func, (x,), None, "pass dim=")
        dim = normalize_dim(dim, ndim_of(x))
        if dim != x._dim:
            return apply_local(func, x, (dim,), {"dtype": dtype})
        x = x if dtype is None else x.to(dtype)
        if not x._sharding.total:
            return x.clone()
        shifted = x - amax(x.detach(), (dim,), True)
        powers = torch.exp(shifted)
        sums = total(powers, dim, True)
        return powers / sums if func is torch.softmax else shifted - torch.log(sums)

    return _rule


RULES: dict[Any, Rule] = {
    **named({
        "sum": total, "mean": mean, "nansum": nansum, "nanmean": nanmean,
        "amax": amax, "amin": amin, "max": maximum, "min": minimum,
        "argmax": argmax, "argmin": argmin,
        "any": any_of, "all": all_of, "count_nonzero": count_nonzero,
        "var": var, "std": std, "var_mean": _and_mean(var), "std_mean": _and_mean(std),
        "vector_norm": vector_norm, "logsumexp": logsumexp,
        "softmax": _softmax(torch.softmax), "softmin": _softmax(torch.softmax, -1),
        "log_softmax": _softmax(torch.log_softmax),
    }),
    **dict.fromkeys((torch.norm, Tensor.norm, torch.functional.norm), norm),
}  # fmt: skip
