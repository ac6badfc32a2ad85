"""Rules of counts and of positions: nonzero, histograms, searchsorted, cdist."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshshard.tensor._torch_private import native
from meshshard.tensor.align import align_broadcast, global_shape, ndim_of
from meshshard.tensor.layout import as_layout, reshard
from meshshard.tensor.rules.table import named
from meshshard.tensor.shard_tensor import (
    Rule,
    ShardTensor,
    refuse,
    sharded_in,
    wrap,
)
from meshshard.tensor.sharding import Sharding


def nonzero(x: ShardTensor, *, as_tuple: bool = False) -> Any:
    """torch.nonzero: global indices, sharded along dim 0 by the rank that has the element.

    Communication: one gather of objects; that of `reshard` unless the first dim is sharded.
    """
    x = reshard(x, 0) if x._dim else x
    domain, ndim = x._sharding.domain, ndim_of(x)
    with native():
        local = torch.nonzero(x)
        local[:, 0] += x._sharding.first
        sharding = Sharding(domain, domain.share(len(local)))
        if not as_tuple:
            return wrap(local, sharding, 0)
        return tuple(wrap(local[:, d].clone(), sharding, 0) for d in range(ndim))


def _weights(x: ShardTensor, weight: Any) -> Any:
    return as_layout(weight, x) if isinstance(weight, Tensor) else weight


def _sharded_as_weight(x: Any, weight: Any) -> ShardTensor:
    """The input, sharded as the weights if it is plain."""
    return x if type(x) is ShardTensor else as_layout(x, weight)


def bincount(x: Any, weights: Any = None, minlength: int = 0) -> Tensor:
    """torch.bincount, replicated.

    Communication: one all-reduce of the largest number, one of the counts.
    """
    x = _sharded_as_weight(x, weights)
    if ndim_of(x) != 1 or (x._sharding.total and int(torch.amin(x)) < 0):
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    n = int(torch.amax(x)) + 1 if x._sharding.total else 0
    weights = _weights(x, weights)
    with native():
        local = torch.bincount(x, weights, max(n, minlength))
        if weights is not None and x._sharding.total:  # torch counts no rows as integers
            local = local.to(torch.float32 if weights.dtype == torch.float32 else torch.float64)
        counts: Tensor = x._sharding.domain.all_reduce(local)
        return counts


def _limits(x: ShardTensor, low: float, high: float) -> tuple[float, float]:
    """The range of a histogram: by default that of the values."""
    if low == high and global_shape(x).numel():
        low, high = float(torch.amin(x)), float(torch.amax(x))
    return (low, high) if low != high else (low - 1, high + 1)


def histc(x: ShardTensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:  # noqa: A002
    """torch.histc, replicated.

    Communication: one all-reduce of the counts; two more if the range is that of the values.
    """
    low, high = _limits(x, min, max)
    with native():
        return x._sharding.domain.all_reduce(torch.histc(x, bins, low, high))


def histogram(
    x: Any,
    bins: Any,
    *,
    range: Any = None,
    weight: Any = None,
    density: bool = False,  # noqa: A002
) -> Any:
    """torch.histogram, replicated.

    Communication: as `histc`.
    """
    if not sharded_in([x, weight]):
        raise refuse(torch.histogram, (x, bins), None, "the bins are sharded")
    x = _sharded_as_weight(x, weight)
    bins = bins.gather() if type(bins) is ShardTensor else bins
    options: Any = {} if isinstance(bins, Tensor) else {"range": _limits(x, *(range or (0.0, 0.0)))}
    weight = _weights(x, weight)
    with native():
        counts, edges = torch.histogram(x, bins, weight=weight, **options)
        counts = x._sharding.domain.all_reduce(counts)
        if density:
            counts = counts / (counts.sum() * edges.diff())
    return torch.return_types.histogram((counts, edges))


def aminmax(x: ShardTensor, *, dim: int | None = None, keepdim: bool = False) -> Any:
    """torch.aminmax."""
    if dim is None:
        both = torch.amin(x), torch.amax(x)
        if keepdim:
            both = tuple(v.reshape([1] * ndim_of(x)) for v in both)  # type: ignore[assignment]
    else:
        both = torch.amin(x, dim, keepdim), torch.amax(x, dim, keepdim)
    return torch.return_types.aminmax(both)


def searchsorted(sequence: Any, values: Any, *args: Any, **options: Any) -> Any:
    """torch.searchsorted: in a plain sequence row-wise; in a sharded one the sum of the places.

    Communication: none in a plain sequence; one all-reduce in a sharded one.
    """
    func, ndim = torch.searchsorted, ndim_of(sequence)
    if options.get("sorter") is not None and sharded_in([sequence, options["sorter"]]):
        sorter = options.pop("sorter")
        sequence = torch.gather(sequence, -1, sorter)
        return searchsorted(sequence, values, *args, **options)
    if type(sequence) is not ShardTensor:
        if ndim == 1:
            return _by_values(sequence, values, args, options)
        if values._dim == ndim - 1:
            with native():
                return wrap(func(sequence, values, *args, **options), values._sharding, values._dim)
        sequence = as_layout(sequence, values)
    dim, sharding = sequence._dim, sequence._sharding
    if dim != ndim - 1:
        values = as_layout(values, sequence)
        with native():
            return wrap(func(sequence, values, *args, **options), sharding, dim)
    if type(values) is ShardTensor:
        if ndim == 1 or values._dim == ndim - 1:
            why = "sorted_sequence and values are sharded: gather the values"
            raise refuse(func, (sequence, values), None, why)
        return searchsorted(reshard(sequence, values._dim), values, *args, **options)
    with native():
        local = func(sequence, values, *args, **options)
    if not isinstance(values, Tensor):
        local = torch.as_tensor(local)
    return sharding.domain.all_reduce(local.to(torch.int64)).to(local.dtype)


def _by_values(sequence: Tensor, values: ShardTensor, args: Any, options: Any) -> ShardTensor:
    with native():
        out = torch.searchsorted(sequence, values, *args, **options)
    return wrap(out, values._sharding, values._dim)


def bucketize(values: Any, boundaries: Any, **options: Any) -> Any:
    """torch.bucketize: `searchsorted` with the arguments in the other order."""
    return searchsorted(boundaries, values, **options)


def cdist(x1: Any, x2: Any, *args: Any, **kwargs: Any) -> ShardTensor:
    """torch.cdist: sharded rows to plain points, or the other way round; or a sharded batch.

    Raises:
        NoShardRule: the points of both, or the coordinates, are sharded.
    """
    (first, *_) = sharded_in([x1, x2])
    back = ndim_of(first) - first._dim
    out_ndim = max(ndim_of(x1), ndim_of(x2))
    if back > 2:
        (x1, x2), first, back = align_broadcast(torch.cdist, (x1, x2))
        with native():
            return wrap(torch.cdist(x1, x2, *args, **kwargs), first._sharding, out_ndim - back)
    if len(sharded_in([x1, x2])) == 2 or back == 1:
        why = "all pairs of sharded rows, or of coordinates: gather one of the arguments"
        raise refuse(torch.cdist, (x1, x2), None, why)
    with native():
        out = torch.cdist(x1, x2, *args, **kwargs)
    return wrap(out, first._sharding, out_ndim - 2 if first is x1 else out_ndim - 1)


RULES: dict[Any, Rule] = {
    **named({
        "nonzero": nonzero,
        "argwhere": nonzero,
        "bincount": bincount,
        "histc": histc,
        "histogram": histogram,
        "aminmax": aminmax,
        "searchsorted": searchsorted,
        "bucketize": bucketize,
        "cdist": cdist,
    }),
}  # fmt: skip
