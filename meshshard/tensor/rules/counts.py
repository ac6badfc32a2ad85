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
    sharded_in,
    wrap,
)
from meshshard.tensor.sharding import Sharding

EXACT = "donot_use_mm_for_euclid_dist"


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
    """The weights in the layout of the input; None as it is."""
    return as_layout(weight, x) if isinstance(weight, Tensor) else weight


def _sharded_as_weight(x: Any, weight: Any) -> ShardTensor:
    """The input, sharded as the weights if it is plain."""
    return x if type(x) is ShardTensor else as_layout(x, weight)


def bincount(x: Any, weights: Any = None, minlength: int = 0) -> Any:
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
        kind = torch.bincount(x.new_zeros(1), None if weights is None else weights.new_ones(1))
        counts: Tensor = x._sharding.domain.all_reduce(local.to(kind.dtype if n else torch.int64))
        return counts


def _limits(x: ShardTensor, low: float, high: float, margin: float) -> tuple[float, float]:
    """The range of a histogram: by default that of the values, wider if it is a single number."""
    if low == high:
        if not global_shape(x).numel():
            return 0.0, 1.0
        values = x.detach()
        low, high = float(torch.amin(values)), float(torch.amax(values))
    return (low, high) if low != high else (low - margin, high + margin)


def histc(x: ShardTensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:  # noqa: A002
    """torch.histc, replicated.

    Communication: one all-reduce of the counts; two more if the range is that of the values.
    """
    low, high = _limits(x, min, max, 1.0)
    with native():
        return x._sharding.domain.all_reduce(torch.histc(x, bins, low, high))


def histogram(
    x: Any,
    bins: Any,
    *,
    range: Any = None,  # noqa: A002
    weight: Any = None,
    density: bool = False,
) -> Any:
    """torch.histogram, replicated.

    Communication: as `histc`.
    """
    bins = bins.gather() if type(bins) is ShardTensor else bins
    if not sharded_in([x, weight]):
        return torch.histogram(x, bins, weight=weight, density=density)
    x = _sharded_as_weight(x, weight)
    options: Any = {}
    if not isinstance(bins, Tensor):
        low, high = range or (0.0, 0.0)
        options = {"range": _limits(x, low, high, 0.5)}
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


def _places(sequence: Tensor, values: Any, *args: Any, **options: Any) -> Tensor:
    """torch.searchsorted of owned rows, of whose strides it would warn."""
    values = values.contiguous() if isinstance(values, Tensor) else values
    return torch.searchsorted(sequence.contiguous(), values, *args, **options)


def searchsorted(sequence: Any, values: Any, *args: Any, **options: Any) -> Any:
    """torch.searchsorted, row-wise in a plain sequence.

    The place in a sharded sequence is the sum of the places in the parts of all ranks.

    Communication: none in a plain sequence; one all-reduce of the places of plain values in a
    sharded one; that of `as_layout`, `reshard` or `_at_owners` for sharded values.
    """
    ndim = ndim_of(sequence)
    if ndim > 1 and not isinstance(values, Tensor):
        raise RuntimeError("searchsorted: a number is looked up in a sequence of one dim only")
    if (sorter := options.pop("sorter", None)) is not None:
        return torch.searchsorted(torch.gather(sequence, -1, sorter), values, *args, **options)
    if type(sequence) is not ShardTensor:
        if ndim == 1 or values._dim == ndim - 1:
            return _by_values(sequence, values, args, options)
        sequence = as_layout(sequence, values)
    if sequence._dim != ndim - 1:
        return _by_values(sequence, as_layout(values, sequence), args, options)
    if type(values) is ShardTensor:
        if ndim > 1 and values._dim != ndim - 1:
            return searchsorted(reshard(sequence, values._dim), values, *args, **options)
        if ndim > 1:
            out = searchsorted(reshard(sequence, 0), reshard(values, 0), *args, **options)
            return as_layout(out, values)
        return _at_owners(sequence, values, args, options)
    with native():
        local = torch.as_tensor(_places(sequence, values, *args, **options))
    return sequence._sharding.domain.all_reduce(local.to(torch.int64)).to(local.dtype)


def _by_values(sequence: Tensor, values: ShardTensor, args: Any, options: Any) -> ShardTensor:
    """The places of the owned values, where every rank has what they are looked up in."""
    with native():
        out = _places(sequence, values, *args, **options)
    return wrap(out, values._sharding, values._dim)


def _at_owners(sequence: ShardTensor, values: ShardTensor, args: Any, options: Any) -> ShardTensor:
    """The places of sharded values in a sharded sequence: each on the rank where its place is.

    Communication: one all-to-all of the first elements, one of counts, one of values and back.
    """
    old, domain = sequence._sharding, sequence._sharding.domain
    if not old.total:
        return _by_values(sequence.gather(), values, args, options)
    with native():
        have = [r for r, n in enumerate(old.sizes) if n]
        firsts = domain.all_gather(sequence[:1].detach(), [int(n > 0) for n in old.sizes])
        flat = values.detach().reshape(-1)
        part = _places(firsts, flat, *args, **options).to(torch.int64) - 1
        owner = torch.tensor(have, device=flat.device)[part.clamp_min(0)]
        order, send = domain.group_by_rank(owner)
        received, receive = domain.route(flat[order], send)
        found = _places(sequence, received, *args, **options) + old.first
        back = domain.all_to_all(found, receive, send, "places")
        out = torch.empty_like(back).index_copy_(0, order, back).reshape(values.shape)
        return wrap(out.to(found.dtype), values._sharding, values._dim)


def bucketize(values: Any, boundaries: Any, **options: Any) -> Any:
    """torch.bucketize: `searchsorted` with the arguments in the other order."""
    return searchsorted(boundaries, values, **options)


def cdist(x1: Any, x2: Any, *args: Any, **kwargs: Any) -> ShardTensor:
    """torch.cdist: the result is sharded along the points of the first, else of the second.

    Communication: none if one argument is plain; else all points of the second on every rank.
    """
    x1, x2 = (reshard(x, ndim_of(x) - 2) if _by_coordinates(x) else x for x in (x1, x2))
    if len(sharded_in([x1, x2])) == 2 and x1._dim == ndim_of(x1) - 2:
        x2 = x2.gather()  # smaller than the owned part of the result
    (first, *_) = sharded_in([x1, x2])
    back = ndim_of(first) - first._dim
    ndim = max(ndim_of(x1), ndim_of(x2))
    if back == 2:
        with native():
            out = torch.cdist(x1, x2, *args, **kwargs)
        return wrap(out, first._sharding, ndim - 2 if first is x1 else ndim - 1)
    if len(sharded_in([x1, x2])) == 2 and ndim_of(x2) - x2._dim != back:
        x2 = as_layout(x2, x1)
    (x1, x2), first, back = align_broadcast(torch.cdist, (x1, x2))
    with native():
        return wrap(torch.cdist(x1, x2, *args, **kwargs), first._sharding, ndim - back)


def _by_coordinates(x: Any) -> bool:
    return type(x) is ShardTensor and x._dim == ndim_of(x) - 1


def pdist(x: ShardTensor, p: float = 2.0) -> Any:
    """F.pdist: the distances of each owned row to the later ones, in order of the rows.

    Communication: one all-to-all of all rows; if dim 1 is sharded one all-reduce of the distances.
    """
    sharding = x._sharding
    if x._dim:
        i, j = torch.triu_indices(len(x), len(x), 1, device=x.device)
        pairs: Any = torch.index_select(x, 0, i) - torch.index_select(x, 0, j)
        return torch.linalg.vector_norm(pairs, p, -1)
    rows = sharding.rows(x.device)
    later = torch.arange(sharding.total, device=x.device) > rows[:, None]
    return torch.masked_select(torch.cdist(x, x, p, compute_mode=EXACT), wrap(later, sharding, 0))


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
        "pdist": pdist,
    }),
}  # fmt: skip
