"""Rules of reductions: over other dims every row alone, over the sharded dim by an all-reduce."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from meshshard.comm.linear import largest
from meshshard.tensor.align import dim_of, native_ndim, shape_of
from meshshard.tensor.shard_tensor import Rule, Sharded, ShardTensor, native, refuse, wrap

__all__ = ["RULES", "local_reduction", "wide"]

_linalg: Any = torch._C._linalg  # type: ignore[attr-defined]
HALF = (torch.bfloat16, torch.float16)
Dims = int | tuple[int, ...] | list[int] | None


def _dims(x: Sharded, dim: Dims) -> tuple[int, ...]:
    """Dims from the left; all for None and for an empty list, as torch has it."""
    ndim = native_ndim(x)
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return tuple(range(ndim))
    return tuple(dim_of(d, ndim) for d in ((dim,) if isinstance(dim, int) else dim))


def kept_dim(x: Sharded, dims: tuple[int, ...], keepdim: bool) -> int:
    """Where the sharded dim is after others were reduced."""
    return int(x._dim if keepdim else x._dim - sum(d < x._dim for d in dims))


def local_reduction(
    func: Callable[..., Any], x: Sharded, dims: tuple[int, ...], keepdim: bool, **more: Any
) -> ShardTensor:
    """A reduction that leaves the sharded dim alone."""
    with native():
        out = func(x, dims, keepdim=keepdim, **more)
    return wrap(out, x._sharding, kept_dim(x, dims, keepdim))


def count_of(x: Sharded, dims: tuple[int, ...]) -> int:
    """Numbers of the whole tensor that go into one result."""
    shape = shape_of(x)
    return math.prod(shape[d] for d in dims)


def total(x: Sharded, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Sum: local sums, then one all-reduce where rows are summed."""
    dims = _dims(x, dim)
    if x._dim not in dims:
        return local_reduction(torch.sum, x, dims, keepdim, dtype=dtype)
    with native():
        kept = dtype or x.dtype
        local = torch.sum(x, dims, keepdim=keepdim, dtype=wide(kept) if kept in HALF else dtype)
    whole = x._sharding.domain.all_reduce(local)
    return whole.to(kept) if kept in HALF else whole


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which sums over many rows are kept, as torch's own kernels do."""
    return torch.float32 if dtype in HALF else dtype


def mean(x: Sharded, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Mean: sum over the global count, never a mean of means."""
    if dim is None and dtype is None and not keepdim:  # the common case, without a detour
        with native():
            local, shape = x.sum(), x.shape
        if local.dtype not in HALF:
            width = math.prod(shape[: x._dim]) * math.prod(shape[x._dim + 1 :])
            return x._sharding.domain.all_reduce(local) / (width * x._sharding.total)
    dims = _dims(x, dim)
    if x._dim not in dims:
        return local_reduction(torch.mean, x, dims, keepdim, dtype=dtype)
    with native():
        kept = dtype or x.dtype
        local = torch.sum(x, dims, keepdim=keepdim, dtype=wide(kept) if kept in HALF else dtype)
        width = math.prod(x.shape[d] for d in dims if d != x._dim)
    out = x._sharding.domain.all_reduce(local) / (width * x._sharding.total)
    return out.to(kept) if kept in HALF else out


def nansum(x: Sharded, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Sum of the numbers that are not NaN."""
    return total(torch.where(torch.isnan(x), torch.zeros_like(x), x), dim, keepdim, dtype=dtype)


def nanmean(x: Sharded, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Mean of the numbers that are not NaN."""
    there = (~torch.isnan(x)).to(dtype or x.dtype)
    return nansum(x, dim, keepdim, dtype=dtype) / total(there, dim, keepdim)


def amax(x: Sharded, dim: Dims = (), keepdim: bool = False) -> Any:
    """Largest values; all global ties share the gradient."""
    dims = _dims(x, dim)
    if x._dim not in dims:
        return local_reduction(torch.amax, x, dims, keepdim)
    if not count_of(x, dims):
        raise IndexError("amax(): expected a non-empty tensor to reduce over")
    with native():
        return largest(x._sharding.domain, x.view_as(x), dims, keepdim)


def amin(x: Sharded, dim: Dims = (), keepdim: bool = False) -> Any:
    """Smallest values; all global ties share the gradient."""
    return _turned(amax(_turned(x), dim, keepdim))


def _turned(x: Any) -> Any:
    """Numbers in the opposite order, which has no overflow."""
    return -x if x.is_floating_point() else ~x


def maximum(x: Sharded, dim: Any = None, keepdim: bool = False) -> Any:
    """Largest value of all; with a dim, values and the lowest global places of them."""
    if dim is None:
        return amax(x)
    if isinstance(dim, Tensor):
        return torch.maximum(x, dim)
    return _extreme(torch.max, x, dim, keepdim)


def minimum(x: Sharded, dim: Any = None, keepdim: bool = False) -> Any:
    """Smallest value of all; with a dim, values and the lowest global places of them."""
    if dim is None:
        return amin(x)
    if isinstance(dim, Tensor):
        return torch.minimum(x, dim)
    return _extreme(torch.min, x, dim, keepdim)


def _extreme(func: Callable[..., Any], x: Sharded, dim: int, keepdim: bool) -> Any:
    answer = torch.return_types.max if func is torch.max else torch.return_types.min
    if x.dtype == torch.bool:
        values, places = _extreme(func, x.to(torch.uint8), dim, keepdim)
        return answer((values.to(torch.bool), places))
    dim = dim_of(dim, native_ndim(x))
    if dim != x._dim:
        with native():
            values, places = func(x, dim, keepdim=keepdim)
        at = kept_dim(x, (dim,), keepdim)
        return answer((wrap(values, x._sharding, at), wrap(places, x._sharding, at)))
    places = _place(x if func is torch.max else _turned(x), dim)
    with native():
        mine = (places >= x._sharding.first) & (places < x._sharding.first + x._sharding.own)
        local = torch.where(mine, places - x._sharding.first, 0)
        if x._sharding.own:
            value = torch.where(mine, torch.gather(x, dim, local), 0)
        else:
            value = x.sum(dim, keepdim=True, dtype=x.dtype)
        values = x._sharding.domain.all_reduce(value)
    if not keepdim:
        values, places = values.squeeze(dim), places.squeeze(dim)
    return answer((values, places))


def _place(x: Sharded, dim: int) -> Tensor:
    """Lowest global row of the largest value along the sharded dim, the dim kept."""
    sharding = x._sharding
    if not sharding.total:
        raise IndexError("max(): expected a non-empty dim to reduce over")
    with native(), torch.no_grad():
        x = x.detach()
        top = largest(sharding.domain, x, (dim,), True)
        shape = [1] * x.ndim
        shape[dim] = -1
        rows = torch.arange(sharding.own, device=x.device).view(shape) + sharding.first
        hit = (x == top) | torch.isnan(x)
        candidates = torch.where(hit, rows, sharding.total)
        return -largest(sharding.domain, -candidates, (dim,), True)


def argmax(x: Sharded, dim: int | None = None, keepdim: bool = False) -> Any:
    """Lowest global place of the largest value."""
    if dim is None:
        if x._dim != 0:
            raise refuse(torch.argmax, (x,), None, "without a dim, rows must be the first dim")
        width = count_of(x, tuple(range(1, native_ndim(x))))
        if not width * x._sharding.total:
            raise IndexError("argmax(): expected a non-empty tensor")
        flat = _flat(x)
        place = _place_flat(flat, x, width)
        return place.reshape([1] * native_ndim(x)) if keepdim else place
    return _extreme(torch.max, x, dim, keepdim)[1]


def argmin(x: Sharded, dim: int | None = None, keepdim: bool = False) -> Any:
    """Lowest global place of the smallest value."""
    return argmax(_turned(x), dim, keepdim)


def _flat(x: Sharded) -> Tensor:
    with native():
        flat: Tensor = x.detach().reshape(-1)
        return flat


def _place_flat(flat: Tensor, x: Sharded, width: int) -> Tensor:
    domain = x._sharding.domain
    top = largest(domain, flat, (0,), True)
    ids = torch.arange(len(flat), device=flat.device) + x._sharding.first * width
    far = torch.where((flat == top) | torch.isnan(flat), ids, x._sharding.total * width)
    return -largest(domain, -far, (0,), False)


def any_of(x: Sharded, dim: Dims = None, keepdim: bool = False) -> Any:
    """Whether any is true."""
    return _counted(x != 0, dim, keepdim) > 0


def all_of(x: Sharded, dim: Dims = None, keepdim: bool = False) -> Any:
    """Whether all are true."""
    return _counted(x == 0, dim, keepdim) == 0


def count_nonzero(x: Sharded, dim: Dims = None) -> Any:
    """How many are not zero."""
    return _counted(x != 0, dim, False)


def _counted(hit: Sharded, dim: Dims, keepdim: bool) -> Any:
    return total(hit, dim, keepdim, dtype=torch.int64)


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
    if x._dim not in dims and x._sharding.own:  # torch warns of a variance of nothing
        return local_reduction(torch.var, x, dims, keepdim, correction=correction)
    apart = x - mean(x, dims, True)
    apart = apart.abs() if x.is_complex() else apart
    return total(apart * apart, dims, keepdim) / max(count_of(x, dims) - correction, 0)


def std(x: Sharded, *args: Any, **kwargs: Any) -> Any:
    """Square root of the variance."""
    return torch.sqrt(var(x, *args, **kwargs))


def var_mean(x: Sharded, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Variance and mean."""
    keepdim = bool(kwargs.get("keepdim", len(args) > 1 and args[1]))
    return var(x, dim, *args, **kwargs), mean(x, None if isinstance(dim, bool) else dim, keepdim)


def std_mean(x: Sharded, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Standard deviation and mean."""
    first, second = var_mean(x, dim, *args, **kwargs)
    return torch.sqrt(first), second


def vector_norm(
    x: Sharded, ord: Any = 2, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None,  # noqa: A002
    out: Any = None,
) -> Any:  # fmt: skip
    """Norm of vectors: local norms of own rows, then the norm of these."""
    if out is not None:
        raise refuse(torch.linalg.vector_norm, (x,), None, "out=")
    dims = _dims(x, dim)
    if x._dim not in dims:
        with native():
            local = torch.linalg.vector_norm(x, ord, dims, keepdim, dtype=dtype)
        return wrap(local, x._sharding, kept_dim(x, dims, keepdim))
    if ord in (math.inf, float("inf")):
        return amax(x.abs(), dims, keepdim)
    if ord == -math.inf:
        return amin(x.abs(), dims, keepdim)
    if ord == 0:
        return total((x != 0).to(dtype or x.dtype), dims, keepdim)
    with native():
        if ord < 0 and not x._sharding.own:  # torch knows no such norm of nothing: it is infinite
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
    """torch.norm and Tensor.norm: the Frobenius and the vector norms."""
    if p == "nuc" or kwargs.get("out") is not None:
        raise refuse(torch.norm, (x,), None, "the nuclear norm couples all rows")
    return vector_norm(x, 2 if p in ("fro", None) else p, dim, keepdim, dtype=dtype)


def logsumexp(x: Sharded, dim: Dims, keepdim: bool = False) -> Any:
    """Log of the sum of exponentials, shifted by the global maximum."""
    dims = _dims(x, dim)
    if x._dim not in dims:
        return local_reduction(torch.logsumexp, x, dims, keepdim)
    top = _finite_top(x, dims)
    out = torch.log(total(torch.exp(x - top), dims, True)) + top
    return out if keepdim else out.squeeze(dims)


def _finite_top(x: Sharded, dims: tuple[int, ...]) -> Tensor:
    top: Tensor = amax(x.detach(), dims, True)
    return torch.where(torch.isfinite(top), top, torch.zeros_like(top))


def softmax(x: Sharded, dim: Any = None, *args: Any, dtype: Any = None, **_: Any) -> Any:
    """Softmax over any dim; over the sharded one by two all-reduces, overflow-safe."""
    return _softmax(torch.softmax, x, dim, args, dtype)


def log_softmax(x: Sharded, dim: Any = None, *args: Any, dtype: Any = None, **_: Any) -> Any:
    """Logarithm of the softmax."""
    return _softmax(torch.log_softmax, x, dim, args, dtype)


def softmin(x: Sharded, dim: Any = None, *args: Any, dtype: Any = None, **_: Any) -> Any:
    """Softmax of the negative."""
    return _softmax(torch.softmax, -x, dim, args, dtype)


def _softmax(func: Callable[..., Any], x: Sharded, dim: Any, args: Any, dtype: Any) -> Any:
    dtype = next((a for a in args if isinstance(a, torch.dtype)), dtype)
    if dim is None:
        raise refuse(func, (x,), None, "say over which dim")
    dim = dim_of(dim, native_ndim(x))
    if dim != x._dim:
        with native():
            return wrap(func(x, dim, dtype=dtype), x._sharding, x._dim)
    x = x if dtype is None else x.to(dtype)
    if not x._sharding.total:
        return x.clone()
    apart = x - _finite_top(x, (dim,))
    above = torch.exp(apart)
    below = total(above, dim, True)
    return above / below if func is torch.softmax else apart - torch.log(below)


def _both(name: str, rule: Rule) -> dict[Any, Rule]:
    homes = (torch, torch.Tensor, torch.linalg, torch.special, F)
    return {f: rule for h in homes if callable(f := getattr(h, name, None))}


RULES: dict[Any, Rule] = {
    **_both("sum", total), **_both("mean", mean), **_both("nansum", nansum),
    **_both("nanmean", nanmean), **_both("amax", amax), **_both("amin", amin),
    **_both("max", maximum), **_both("min", minimum), **_both("argmax", argmax),
    **_both("argmin", argmin), **_both("any", any_of), **_both("all", all_of),
    **_both("count_nonzero", count_nonzero), **_both("var", var), **_both("std", std),
    **_both("var_mean", var_mean), **_both("std_mean", std_mean),
    **_both("vector_norm", vector_norm), _linalg.linalg_vector_norm: vector_norm,
    torch.norm: norm, torch.Tensor.norm: norm, torch.functional.norm: norm,
    **_both("logsumexp", logsumexp), **_both("softmax", softmax),
    **_both("log_softmax", log_softmax), **_both("softmin", softmin),
}  # fmt: skip
