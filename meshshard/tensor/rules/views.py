"""Rules of shapes: the sharded dim is followed to its new place; rows may be joined or split."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from meshshard.comm import Domain
from meshshard.tensor.align import dim_of, native_ndim, own_rows, require_same_sharding, shape_of
from meshshard.tensor.shard_tensor import (
    Rule,
    Sharding,
    ShardTensor,
    called_from,
    native,
    refuse,
    sharded,
    wrap,
)

__all__ = ["RULES", "followed", "rows_between"]

DTENSOR = (
    "tensor parallelism takes own rows: by_own_rows(parallelize_module(module, ...)), "
    "where rows are treated alone"
)
MARK = 7919  # a size no other dim has: where it comes out, the sharded dim has gone


def followed(func: Callable[..., Any], x: ShardTensor, args: Any, kwargs: Any) -> Any:
    """A view of own rows; the place of the sharded dim is seen on a tensor without data."""
    with native():
        out = func(x, *args, **kwargs)
        shape = [MARK if d == x._dim else 2 for d in range(x.ndim)]
        seen = func(torch.empty(shape, device="meta"), *args, **kwargs).shape
    return wrap(out, x._sharding, list(seen).index(MARK))


def _moving(func: Callable[..., Any]) -> Rule:
    """Functions that only reorder dims."""

    def _rule(x: ShardTensor, *args: Any, **kwargs: Any) -> Any:
        return followed(func, x, args, kwargs)

    return _rule


def reshape(x: ShardTensor, *shape: Any, **kwargs: Any) -> ShardTensor:
    """Another shape of the same numbers; rows may be joined with what follows them, or split."""
    wanted = kwargs.get("shape", kwargs.get("size", shape))
    if len(wanted) == 1 and isinstance(wanted[0], torch.dtype):
        if wanted[0].itemsize != x.element_size() and x._dim == native_ndim(x) - 1:
            raise refuse("view", (x,), None, f"{wanted[0]} joins or splits the rows' numbers")
        with native():
            return wrap(x.view(wanted[0]), x._sharding, x._dim)
    wanted = wanted[0] if len(wanted) == 1 and not isinstance(wanted[0], int) else wanted
    if x._dim == 0 and len(wanted) > 1:  # the common case: rows stay in front, without a detour
        first, *rest = wanted
        sharding = x._sharding
        with native():
            if first in (sharding.total, -1) and math.prod(rest) == math.prod(x.shape[1:]) > 0:
                return wrap(x.reshape(sharding.own, *rest), sharding, 0)
    return _reshaped(x, [int(n) for n in wanted])


def _reshaped(x: ShardTensor, wanted: list[int]) -> ShardTensor:
    whole = shape_of(x)
    if -1 in wanted:
        rest = math.prod(n for n in wanted if n != -1)
        wanted = [n if n != -1 else (whole.numel() // rest if rest else 0) for n in wanted]
    if math.prod(wanted) != whole.numel():
        raise RuntimeError(f"shape '{wanted}' is invalid for input of shape {tuple(whole)}")
    dim, sharding = _row_dim(x, wanted)
    local = [sharding.own if d == dim else n for d, n in enumerate(wanted)]
    with native():
        return wrap(x.reshape(local), sharding, dim)


def _row_dim(x: ShardTensor, wanted: list[int]) -> tuple[int, Sharding]:
    """Which dim of the wanted shape holds the rows, and how they are divided there."""
    whole, old = shape_of(x), x._sharding
    before = math.prod(whole[: x._dim])
    places = [d for d in range(len(wanted)) if math.prod(wanted[:d]) == before]
    for d in places:
        if wanted[d] == old.total:
            return d, old
    for d in places:
        joined, parts = wanted[d], old.total
        if parts and joined % parts == 0:
            return d, _scaled(old, [n * (joined // parts) for n in old.sizes])
        if joined and parts % joined == 0:
            each = parts // joined
            if not any(n % each for n in old.sizes):
                return d, _scaled(old, [n // each for n in old.sizes])
    raise refuse("reshape", (x,), None, f"rows cannot be followed into {tuple(wanted)}")


def _scaled(old: Sharding, sizes: Sequence[int]) -> Sharding:
    return Sharding(old.domain, sizes)


def view_as(x: Any, other: Tensor) -> Any:
    """The shape of another tensor."""
    if x is other and called_from("torch/distributed/tensor/_api.py"):
        raise refuse("DTensor", (x,), None, DTENSOR)
    if type(x) is not ShardTensor:
        raise refuse("view_as", (x, other), None, "a plain tensor with a sharded shape")
    return _reshaped(x, list(shape_of(other) if type(other) is ShardTensor else other.shape))


def flatten(x: ShardTensor, start_dim: int = 0, end_dim: int = -1) -> ShardTensor:
    """Join a run of dims."""
    shape = list(shape_of(x))
    first, last = dim_of(start_dim, len(shape)), dim_of(end_dim, len(shape))
    return _reshaped(x, [*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :]])


def unflatten(x: ShardTensor, dim: int, sizes: Sequence[int]) -> ShardTensor:
    """Split one dim into several."""
    shape = list(shape_of(x))
    dim = dim_of(dim, len(shape))
    rest = -math.prod(sizes) if -1 in sizes else 0
    sizes = [n if n != -1 else shape[dim] // rest for n in sizes]
    return _reshaped(x, [*shape[:dim], *sizes, *shape[dim + 1 :]])


def squeeze(x: ShardTensor, dim: Any = None) -> ShardTensor:
    """Drop dims of size one, by the global shape; the sharded dim stays."""
    shape = shape_of(x)
    dims = range(len(shape)) if dim is None else (dim if isinstance(dim, (tuple, list)) else (dim,))
    gone = {d for d in (dim_of(d, len(shape)) for d in dims) if shape[d] == 1}
    if x._dim in gone:
        raise refuse("squeeze", (x,), None, "the sharded dim has one row; index it: x[0]")
    with native():
        return wrap(x.squeeze(tuple(gone)), x._sharding, x._dim - sum(d < x._dim for d in gone))


def unsqueeze(x: ShardTensor, dim: int) -> ShardTensor:
    """A new dim of size one."""
    dim = dim_of(dim, native_ndim(x) + 1)
    with native():
        return wrap(x.unsqueeze(dim), x._sharding, x._dim + (dim <= x._dim))


def expand(x: ShardTensor, *sizes: Any, **_: Any) -> ShardTensor:
    """Repeat dims of size one without a copy, new dims in front."""
    wanted = list(sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes)
    more = len(wanted) - native_ndim(x)
    at = x._dim + more
    if wanted[at] not in (-1, x._sharding.total):
        raise refuse("expand", (x,), None, f"the sharded dim cannot become {wanted[at]}")
    wanted[at] = -1
    with native():
        return wrap(x.expand(wanted), x._sharding, at)


def expand_as(x: Any, other: Tensor) -> Any:
    """Expand to the shape of another tensor."""
    if type(x) is ShardTensor:
        return expand(x, list(shape_of(other) if type(other) is ShardTensor else other.shape))
    return x + torch.zeros_like(other).to(x.dtype)


def repeat(x: ShardTensor, *sizes: Any) -> ShardTensor:
    """Copies along dims other than the sharded one."""
    times = list(sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes)
    more = len(times) - native_ndim(x)
    if more < 0 or times[x._dim + more] != 1:
        raise refuse("repeat", (x,), None, "copies along the sharded dim")
    with native():
        return wrap(x.repeat(times), x._sharding, x._dim + more)


def _on_other_dims(func: Callable[..., Any], at: int = 1, name: str = "dims") -> Rule:
    """Functions that act along some dims, which must not be the sharded one."""

    def _rule(x: ShardTensor, *args: Any, **kwargs: Any) -> Any:
        dims = kwargs.get(name, kwargs.get("dim", args[at - 1] if len(args) >= at else None))
        if len(args) > at and all(isinstance(a, int) for a in args):
            dims = args
        ndim = native_ndim(x)
        several = (dims,) if isinstance(dims, int) else dims
        if not several or x._dim in {dim_of(d, ndim) for d in several}:
            raise refuse(func, (x,), kwargs, "along the sharded dim it moves rows between ranks")
        with native():
            return wrap(func(x, *args, **kwargs), x._sharding, x._dim)

    return _rule


def cat(tensors: Sequence[Tensor], dim: int = 0, **kwargs: Any) -> Any:
    """Join tensors: along other dims row by row, along the sharded dim in the order given."""
    dim = kwargs.get("axis", dim)
    first = alike_or_rows(tensors, dim)
    ndim = native_ndim(first)
    dim = dim_of(dim, ndim)
    if dim == first._dim:
        return _cat_rows(tensors, dim)
    parts = [_part(x, first) for x in tensors]
    with native():
        return wrap(torch.cat(parts, dim), first._sharding, first._dim)


def alike_or_rows(tensors: Sequence[Tensor], dim: int) -> ShardTensor:
    """The first sharded one; sizes may differ where rows are joined."""
    first = sharded(tensors)[0]
    if dim_of(dim, native_ndim(first)) == first._dim:
        return first
    return require_same_sharding(torch.cat, tensors)


def _part(x: Tensor, first: ShardTensor) -> Tensor:
    """Own rows of one of the tensors to be joined."""
    if type(x) is ShardTensor:
        if x._dim != first._dim:
            raise refuse(torch.cat, (x, first), None, "sharded along different dims")
        return x
    if x.shape[first._dim] != first._sharding.total:
        raise refuse(torch.cat, (first,), None, f"a plain tensor of shape {tuple(x.shape)}")
    return own_rows(x, first._sharding, first._dim)


def _cat_rows(tensors: Sequence[Tensor], dim: int) -> Any:
    """Rows of all tensors, one tensor after the other, evenly spread as they were.

    Rows move, so that the result is in the order that torch.cat has. Plain rows, as a class token
    in front of points, stay whole on one rank.
    """
    first = sharded(tensors)[0]
    if any(x._dim != dim for x in sharded(tensors)):
        raise refuse(torch.cat, (tensors,), None, "sharded along different dims")
    tensors = _with_plain_rows(tensors, first._sharding.domain, dim)
    old = [x._sharding for x in sharded(tensors)]
    domain = old[0].domain
    sizes = [sum(s.sizes[r] for s in old) for r in range(domain.size)]
    known = any(s.origin is not None for s in old)
    parts, origins, start = [], [], 0
    for x, s in zip(sharded(tensors), old, strict=True):
        wanted = rows_between(sizes, start, start + s.total)
        rows = domain.redistribute(x.to_local().movedim(dim, 0), s.sizes, wanted)
        parts.append(rows.movedim(0, dim))
        if known:
            origins.append(domain.redistribute(s.sources(domain.device) + start, s.sizes, wanted))
        start += s.total
    origin = torch.cat(origins) if known else None
    return wrap(torch.cat(parts, dim), Sharding(domain, sizes, origin), dim)


def _with_plain_rows(tensors: Sequence[Tensor], domain: Domain, dim: int) -> list[Tensor]:
    """Plain tensors as rows of the first rank where they come first, else of the last."""
    out: list[Tensor] = []
    for x in tensors:
        if type(x) is not ShardTensor:
            at = domain.size - 1 if sharded(out) else 0
            sizes = [x.shape[dim] if r == at else 0 for r in range(domain.size)]
            x = wrap(x.narrow(dim, 0, sizes[domain.rank]), Sharding(domain, sizes), dim)
        out.append(x)
    return out


def rows_between(sizes: Sequence[int], first: int, last: int) -> list[int]:
    """How many of the rows first:last each rank has."""
    out, start = [], 0
    for n in sizes:
        out.append(max(0, min(last, start + n) - max(first, start)))
        start += n
    return out


def stack(tensors: Sequence[Tensor], dim: int = 0, **_: Any) -> Any:
    """Join along a new dim."""
    first = require_same_sharding(torch.stack, tensors)
    dim = dim_of(dim, native_ndim(first) + 1)
    parts = [_part(x, first) for x in tensors]
    with native():
        return wrap(torch.stack(parts, dim), first._sharding, first._dim + (dim <= first._dim))


def split(x: ShardTensor, split_size: Any, dim: int = 0) -> tuple[Any, ...]:
    """Pieces along a dim; along the sharded one each piece is sharded by the rows it has."""
    if isinstance(split_size, Tensor):
        raise refuse(torch.split, (x, split_size))
    dim = dim_of(dim, native_ndim(x))
    total = shape_of(x)[dim]
    if isinstance(split_size, int):
        full, rest = divmod(total, max(split_size, 1))
        split_size = [split_size] * full + [rest] * bool(rest or not full)
    return _pieces(x, split_size, dim)


def _pieces(x: ShardTensor, sizes: Sequence[int], dim: int) -> tuple[Any, ...]:
    out, start = [], 0
    for n in sizes:
        out.append(torch.narrow(x, dim, start, n))
        start += n
    return tuple(out)


def chunk(x: ShardTensor, chunks: int, dim: int = 0) -> tuple[Any, ...]:
    """Pieces of equal size but for the last."""
    dim = dim_of(dim, native_ndim(x))
    return split(x, max(1, -(-shape_of(x)[dim] // chunks)), dim)


def tensor_split(x: ShardTensor, parts: Any, dim: int = 0) -> tuple[Any, ...]:
    """Pieces whose sizes differ by one at most, or between given places."""
    dim = dim_of(dim, native_ndim(x))
    total = shape_of(x)[dim]
    if isinstance(parts, int):
        each, more = divmod(total, parts)
        return _pieces(x, [each + (i < more) for i in range(parts)], dim)
    cuts = [0, *(slice(int(p)).indices(total)[1] for p in parts), total]
    return _pieces(x, [b - a for a, b in itertools.pairwise(cuts)], dim)


def unbind(x: ShardTensor, dim: int = 0) -> tuple[Any, ...]:
    """Slices along a dim other than the sharded one."""
    dim = dim_of(dim, native_ndim(x))
    if dim == x._dim:
        raise refuse("iteration over sharded rows", (x,), None, "each row would be gathered")
    with native():
        return tuple(wrap(p, x._sharding, x._dim - (dim < x._dim)) for p in torch.unbind(x, dim))


def pad(x: ShardTensor, pad: Sequence[int], mode: str = "constant", value: Any = None) -> Any:
    """Padding of other dims."""
    padded = {native_ndim(x) - 1 - i // 2 for i, n in enumerate(pad) if n}
    if x._dim in padded:
        raise refuse(F.pad, (x,), None, "it pads the sharded dim")
    if mode != "constant" and x._dim >= native_ndim(x) - len(pad) // 2:
        raise refuse(F.pad, (x,), None, f"mode {mode!r}")
    with native():
        return wrap(F.pad(x, pad, mode, value), x._sharding, x._dim)


def triangle(func: Callable[..., Any]) -> Rule:
    """Tril and triu of matrices that are not sharded inside."""

    def _rule(x: ShardTensor, diagonal: int = 0) -> Any:
        if x._dim >= native_ndim(x) - 2:
            raise refuse(func, (x,), None, "the matrix itself is sharded")
        with native():
            return wrap(func(x, diagonal), x._sharding, x._dim)

    return _rule


def _both(name: str, rule: Rule) -> dict[Any, Rule]:
    return {f: rule for h in (torch, torch.Tensor, F) if callable(f := getattr(h, name, None))}


MOVING = ["transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "permute", "t", "adjoint"]
RULES: dict[Any, Rule] = {
    **{f: _moving(f) for n in MOVING for h in (torch, torch.Tensor) if (f := getattr(h, n, None))},
    **{a.__get__: _moving(a.__get__) for n in ("T", "mT", "H", "mH")
       if (a := getattr(torch.Tensor, n))},
    **_both("reshape", reshape), torch.Tensor.view: reshape, torch.Tensor.reshape_as: view_as,
    torch.Tensor.view_as: view_as, **_both("flatten", flatten), **_both("ravel", flatten),
    **_both("unflatten", unflatten), **_both("squeeze", squeeze), **_both("unsqueeze", unsqueeze),
    torch.Tensor.expand: expand, torch.Tensor.expand_as: expand_as,
    **_both("broadcast_to", expand), torch.Tensor.repeat: repeat, **_both("tile", repeat),
    **{f: _on_other_dims(f) for f in (torch.flip, torch.Tensor.flip)},
    **{f: _on_other_dims(f, 2) for f in (torch.roll, torch.Tensor.roll)},
    **{f: _on_other_dims(f, 2, "dim") for f in (torch.repeat_interleave,
                                                torch.Tensor.repeat_interleave)},
    **_both("cat", cat), **_both("concat", cat), **_both("concatenate", cat),
    **_both("stack", stack),
    **_both("split", split), torch.functional.split: split, **_both("split_with_sizes", split),
    **_both("chunk", chunk), **_both("tensor_split", tensor_split), **_both("unbind", unbind),
    **_both("pad", pad), torch._C._nn.pad: pad,
    **{f: triangle(f) for f in (torch.tril, torch.Tensor.tril, torch.triu, torch.Tensor.triu)},
}  # fmt: skip
