"""Rules of joining and splitting: torch.cat, torch.stack, torch.split and the like."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshshard.comm import Domain
from meshshard.tensor._torch_private import native
from meshshard.tensor.align import global_shape, ndim_of
from meshshard.tensor.layout import as_layout, reshard, rows_between
from meshshard.tensor.rules.table import named
from meshshard.tensor.shard_tensor import (
    Rule,
    ShardTensor,
    normalize_dim,
    refuse,
    sharded_in,
    wrap,
)
from meshshard.tensor.sharding import Sharding


def cat(tensors: Sequence[Tensor], dim: int = 0, **_: Any) -> Any:
    """torch.cat; along the sharded dim, rows move between ranks to keep the order of torch.

    Communication: along the sharded dim one all-to-all for each tensor, forward and backward; else
    that of `as_layout`.
    """
    tensors = [x for x in tensors if global_shape(x) != (0,)] or tensors  # torch ignores them
    if not sharded_in(tensors):
        return torch.cat(tuple(tensors), dim)
    first = sharded_in(tensors)[0]
    dim = normalize_dim(dim, ndim_of(first))
    _require_same_shape(tensors, dim)
    if dim == first._dim:
        return _cat_rows(tensors, dim)
    parts: list[Tensor] = [as_layout(x, first) for x in tensors]
    with native():
        return wrap(torch.cat(parts, dim), first._sharding, first._dim)


def _require_same_shape(tensors: Sequence[Tensor], dim: int) -> None:
    """Check the global shapes, so that all ranks raise.

    Raises:
        RuntimeError: the shapes differ in another dim than `dim`, as in torch.
    """
    shapes = [tuple(global_shape(x)) for x in tensors]
    if len({(len(s), *s[:dim], *s[dim + 1 :]) for s in shapes}) > 1:
        raise RuntimeError(f"cat: expected the same shape except in dim {dim}, got {shapes}")


def _cat_rows(tensors: Sequence[Tensor], dim: int) -> Any:
    """torch.cat along the sharded dim; a rank owns as many rows as of all tensors together.

    Rows move between ranks, so that the result has the order of torch.cat. Rows of a plain tensor,
    for example a class token before the points, count as rows of one rank.

    Communication: one all-to-all for each tensor, and one of its sources if any has them.
    """
    found = sharded_in(tensors)
    domain = found[0]._sharding.domain
    tensors = [reshard(x, dim) if type(x) is ShardTensor and x._dim != dim else x for x in tensors]
    found = _with_plain_rows(tensors, domain, dim)
    old = [x._sharding for x in found]
    sizes = [sum(s.sizes[r] for s in old) for r in range(domain.size)]
    has_origin = any(s.origin is not None for s in old)
    parts, origins, start = [], [], 0
    for x, s in zip(found, old, strict=True):
        wanted = rows_between(sizes, start, start + s.total)
        rows = domain.redistribute(x.to_local().movedim(dim, 0), s.sizes, wanted)
        parts.append(rows.movedim(0, dim))
        if has_origin:
            origins.append(domain.redistribute(s.sources(domain.device) + start, s.sizes, wanted))
        start += s.total
    origin = torch.cat(origins) if has_origin else None
    return wrap(torch.cat(parts, dim), Sharding(domain, sizes, origin), dim)


def _with_plain_rows(tensors: Sequence[Tensor], domain: Domain, dim: int) -> list[ShardTensor]:
    """Shard plain tensors: all rows on the first rank if they come first, else on the last."""
    out: list[ShardTensor] = []
    for x in tensors:
        if type(x) is not ShardTensor:
            at = domain.size - 1 if out else 0
            sizes = [x.shape[dim] if r == at else 0 for r in range(domain.size)]
            x = wrap(x.narrow(dim, 0, sizes[domain.rank]), Sharding(domain, sizes), dim)
        out.append(x)
    return out


def stack(tensors: Sequence[Tensor], dim: int = 0, **_: Any) -> Any:
    """torch.stack along a new dim.

    Communication: that of `as_layout`.
    """
    first = sharded_in(tensors)[0]
    if len({global_shape(x) for x in tensors}) > 1:
        raise RuntimeError(f"stack expects equal shapes, got {[tuple(x.shape) for x in tensors]}")
    dim = normalize_dim(dim, ndim_of(first) + 1)
    parts: list[Tensor] = [as_layout(x, first) for x in tensors]
    with native():
        return wrap(torch.stack(parts, dim), first._sharding, first._dim + (dim <= first._dim))


def split(x: ShardTensor, split_size: Any, dim: int = 0) -> tuple[Any, ...]:
    """torch.split; along the sharded dim, rows stay on their ranks."""
    if isinstance(split_size, Tensor):
        raise refuse(torch.split, (x, split_size), None, "the split sizes are a tensor; pass ints")
    dim = normalize_dim(dim, ndim_of(x))
    total = global_shape(x)[dim]
    if isinstance(split_size, int):
        full, rest = divmod(total, max(split_size, 1))
        split_size = [split_size] * full + [rest] * bool(rest or not full)
    return _pieces(x, split_size, dim)


def _pieces(x: ShardTensor, sizes: Sequence[int], dim: int) -> tuple[Any, ...]:
    starts = itertools.accumulate(sizes, initial=0)
    return tuple(torch.narrow(x, dim, start, n) for start, n in zip(starts, sizes, strict=False))


def chunk(x: ShardTensor, chunks: int, dim: int = 0) -> tuple[Any, ...]:
    """torch.chunk."""
    dim = normalize_dim(dim, ndim_of(x))
    rows = global_shape(x)[dim]
    if not rows:
        return _pieces(x, [0] * chunks, dim)
    return split(x, -(-rows // chunks), dim)


def tensor_split(x: Any, *args: Any, dim: int = 0, **kwargs: Any) -> tuple[Any, ...]:
    """torch.tensor_split, into a number of pieces or at given indices, which may be sharded.

    Communication: one all-to-all of sharded indices.
    """
    parts, dim = [*args, *kwargs.values(), dim][:2]
    if isinstance(parts, Tensor):
        parts = (parts.gather() if type(parts) is ShardTensor else parts).tolist()
    if type(x) is not ShardTensor:
        return tuple(torch.tensor_split(x, parts, dim))
    dim = normalize_dim(dim, ndim_of(x))
    total = global_shape(x)[dim]
    if isinstance(parts, int):
        each, more = divmod(total, parts)
        return _pieces(x, [each + (i < more) for i in range(parts)], dim)
    cuts = [0, *(slice(int(p)).indices(total)[1] for p in parts), total]
    return tuple(
        torch.narrow(x, dim, min(a, b), max(b - a, 0)) for a, b in itertools.pairwise(cuts)
    )


def unbind(x: ShardTensor, dim: int = 0) -> tuple[Any, ...]:
    """torch.unbind along a dim other than the sharded one."""
    dim = normalize_dim(dim, ndim_of(x))
    if dim == x._dim:
        why = "each row would be gathered separately"
        raise refuse("iteration over sharded rows", (x,), None, why)
    with native():
        return tuple(wrap(p, x._sharding, x._dim - (dim < x._dim)) for p in torch.unbind(x, dim))


RULES: dict[Any, Rule] = named({
    "cat concat concatenate": cat, "stack": stack,
    "split split_with_sizes unsafe_split unsafe_split_with_sizes": split,
    "chunk unsafe_chunk": chunk, "tensor_split": tensor_split, "unbind": unbind,
})  # fmt: skip
