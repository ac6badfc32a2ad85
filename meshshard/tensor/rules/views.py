"""Rules of shapes: each finds the new place of the sharded dim, which may be merged or split."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from meshshard.comm import Domain
from meshshard.tensor._torch_private import called_by_dtensor, native
from meshshard.tensor.align import (
    global_shape,
    local_shape,
    narrow_to_owned,
    ndim_of,
    require_same_sharding,
)
from meshshard.tensor.rules.table import functions_named, named
from meshshard.tensor.shard_tensor import (
    Rule,
    ShardTensor,
    apply_local,
    normalize_dim,
    refuse,
    sharded_in,
    wrap,
)
from meshshard.tensor.sharding import Sharding

DTENSOR = (
    "tensor parallelism computes on owned rows: if the module treats rows independently, use "
    "by_own_rows(parallelize_module(module, ...))"
)
MARK = 7919  # size of the sharded dim of a meta tensor, which no other dim has


def apply_and_follow(
    func: Callable[..., Any], x: ShardTensor, args: Any, kwargs: Any
) -> ShardTensor:
    """Call a function that moves dims; a call on a meta tensor finds the new sharded dim."""
    with native():
        shape = [MARK if d == x._dim else 2 for d in range(x.ndim)]
        moved = func(torch.empty(shape, device="meta"), *args, **kwargs).shape
    return apply_local(func, x, args, kwargs, list(moved).index(MARK))


def _moving(func: Callable[..., Any]) -> Rule:
    """The rule of a function that only permutes dims."""

    def _rule(x: ShardTensor, *args: Any, **kwargs: Any) -> Any:
        return apply_and_follow(func, x, args, kwargs)

    return _rule


def reshape(x: ShardTensor, *shape: Any, **kwargs: Any) -> ShardTensor:
    """torch.reshape; the sharded dim may be merged with the dims after it, or split."""
    wanted = kwargs.get("shape", kwargs.get("size", shape))
    if len(wanted) == 1 and isinstance(wanted[0], torch.dtype):
        if wanted[0].itemsize != x.element_size() and x._dim == ndim_of(x) - 1:
            why = (
                f"{wanted[0]} has another itemsize, which would change the size of the sharded dim"
            )
            raise refuse("view", (x,), None, why)
        return apply_local(Tensor.view, x, (wanted[0],))
    wanted = wanted[0] if len(wanted) == 1 and not isinstance(wanted[0], int) else wanted
    if x._dim == 0 and len(wanted) > 1:  # the common case, with the least overhead
        first, *rest = wanted
        sharding = x._sharding
        with native():
            if first in (sharding.total, -1) and math.prod(rest) == math.prod(x.shape[1:]) > 0:
                return wrap(x.reshape(sharding.own, *rest), sharding, 0)
    return _reshaped(x, [int(n) for n in wanted])


def _reshaped(x: ShardTensor, wanted: list[int]) -> ShardTensor:
    whole = global_shape(x)
    if -1 in wanted:
        rest = math.prod(n for n in wanted if n != -1)
        wanted = [n if n != -1 else (whole.numel() // rest if rest else 0) for n in wanted]
    if math.prod(wanted) != whole.numel():
        raise RuntimeError(f"shape '{wanted}' is invalid for input of shape {tuple(whole)}")
    dim, sharding = _row_dim(x, wanted)
    local = [sharding.own if d == dim else n for d, n in enumerate(wanted)]
    with native():
        out = x.reshape(local)
        if x._sharding.own == 1 and _share_memory(out, x) and not _is_view(x, local, dim):
            out = out.clone()
        return wrap(out, sharding, dim)


def _is_view(x: ShardTensor, shape: Sequence[int], dim: int) -> bool:
    """Whether a reshape of several rows is a view; that of one row may be one on this rank only."""
    try:
        _two_rows(x).view([2 * n if d == dim else n for d, n in enumerate(shape)])
    except RuntimeError:
        return False
    return True


def _two_rows(x: ShardTensor) -> Tensor:
    """A tensor without data of two rows with the strides of `x`."""
    rows = [2 if d == x._dim else n for d, n in enumerate(local_shape(x))]
    with native():
        return torch.empty_strided(rows, x.stride(), device="meta")


def _share_memory(x: Tensor, y: Tensor) -> bool:
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


def is_contiguous(x: ShardTensor, **options: Any) -> bool:
    """As that of the local rows; one row or none count as several of their strides."""
    with native():
        rows = x if x._sharding.own > 1 else _two_rows(x)
        return rows.is_contiguous(**options)


def contiguous(x: ShardTensor, **options: Any) -> ShardTensor:
    """The tensor if it is contiguous, else a copy; identically on every rank."""
    if is_contiguous(x, **options):
        return x
    options.setdefault("memory_format", torch.contiguous_format)
    return apply_local(Tensor.clone, x, (), options)


def _row_dim(x: ShardTensor, wanted: list[int]) -> tuple[int, Sharding]:
    """The sharded dim of the wanted shape, and its sharding."""
    whole, old = global_shape(x), x._sharding
    before = math.prod(whole[: x._dim])
    candidates = [d for d in range(len(wanted)) if math.prod(wanted[:d]) == before]
    for d in candidates:
        if wanted[d] == old.total:
            return d, old
    for d in candidates:
        new, rows = wanted[d], old.total
        if rows and new % rows == 0:
            return d, Sharding(old.domain, [n * (new // rows) for n in old.sizes])
        if new and rows % new == 0:
            each = rows // new
            if not any(n % each for n in old.sizes):
                return d, Sharding(old.domain, [n // each for n in old.sizes])
    why = f"rows would be split between ranks: no dim of {tuple(wanted)} can be sharded"
    raise refuse("reshape", (x,), None, why)


def view_as(x: Any, other: Tensor) -> Any:
    """Tensor.view_as: a view with the shape of another tensor."""
    if x is other and called_by_dtensor():
        raise refuse("DTensor", (x,), None, DTENSOR)
    if type(x) is not ShardTensor:
        raise refuse(
            "view_as",
            (x, other),
            None,
            "a plain tensor cannot be viewed with the shape of a sharded one",
        )
    return _reshaped(x, list(_shape_of(other)))


def _shape_of(x: Tensor) -> torch.Size:
    return global_shape(x) if type(x) is ShardTensor else x.shape


def flatten(x: ShardTensor, start_dim: int = 0, end_dim: int = -1) -> ShardTensor:
    """Join consecutive dims."""
    shape = list(global_shape(x))
    first, last = normalize_dim(start_dim, len(shape)), normalize_dim(end_dim, len(shape))
    return _reshaped(x, [*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :]])


def unflatten(x: ShardTensor, dim: int, sizes: Sequence[int]) -> ShardTensor:
    """Split one dim into several."""
    shape = list(global_shape(x))
    dim = normalize_dim(dim, len(shape))
    rest = -math.prod(sizes) if -1 in sizes else 0
    sizes = [n if n != -1 else shape[dim] // rest for n in sizes]
    return _reshaped(x, [*shape[:dim], *sizes, *shape[dim + 1 :]])


def squeeze(x: ShardTensor, dim: Any = None) -> ShardTensor:
    """Remove dims whose global size is one, other than the sharded one."""
    shape = global_shape(x)
    dims = range(len(shape)) if dim is None else (dim if isinstance(dim, (tuple, list)) else (dim,))
    removed = {d for d in (normalize_dim(d, len(shape)) for d in dims) if shape[d] == 1}
    if x._dim in removed:
        why = f"the sharded dim has size 1: remove it with x.select({x._dim}, 0)"
        raise refuse("squeeze", (x,), None, why)
    return apply_local(
        Tensor.squeeze, x, (tuple(removed),), dim=x._dim - sum(d < x._dim for d in removed)
    )


def unsqueeze(x: ShardTensor, dim: int) -> ShardTensor:
    """Insert a dim of size one."""
    dim = normalize_dim(dim, ndim_of(x) + 1)
    return apply_local(torch.unsqueeze, x, (dim,), dim=x._dim + (dim <= x._dim))


def expand(x: ShardTensor, *sizes: Any, **_: Any) -> ShardTensor:
    """Repeat dims of size one without a copy; new dims come first."""
    wanted = list(sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes)
    at = x._dim + len(wanted) - ndim_of(x)
    if wanted[at] not in (-1, x._sharding.total):
        raise refuse("expand", (x,), None, f"the sharded dim cannot become {wanted[at]}")
    wanted[at] = -1
    return apply_local(Tensor.expand, x, (wanted,), dim=at)


def expand_as(x: Any, other: Tensor) -> Any:
    """Expand to the shape of another tensor."""
    if type(x) is ShardTensor:
        return expand(x, list(_shape_of(other)))
    return x + torch.zeros_like(other).to(x.dtype)


def repeat(x: ShardTensor, *sizes: Any) -> ShardTensor:
    """Copies along dims other than the sharded one."""
    times = list(sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes)
    more = len(times) - ndim_of(x)
    if more < 0 or times[x._dim + more] != 1:
        raise refuse("repeat", (x,), None, "it repeats rows along the sharded dim")
    return apply_local(Tensor.repeat, x, (times,), dim=x._dim + more)


def _along_other_dims(func: Callable[..., Any], at: int = 1, name: str = "dims") -> Rule:
    """The rule of a function along some dims, which must not include the sharded one.

    The dims are its argument number `at` (the tensor is 0), or its keyword argument `name`.
    """

    def _rule(x: ShardTensor, *args: Any, **kwargs: Any) -> Any:
        dims = kwargs.get(name, kwargs.get("dim", args[at - 1] if len(args) >= at else None))
        if len(args) > at and all(isinstance(a, int) for a in args):
            dims = args
        ndim = ndim_of(x)
        several = (dims,) if isinstance(dims, int) else dims
        if not several or x._dim in {normalize_dim(d, ndim) for d in several}:
            raise refuse(func, (x,), kwargs, "along the sharded dim it moves rows between ranks")
        return apply_local(func, x, args, kwargs)

    return _rule


def cat(tensors: Sequence[Tensor], dim: int = 0, **kwargs: Any) -> Any:
    """torch.cat; along the sharded dim, rows move between ranks to keep the order of torch."""
    dim = kwargs.get("axis", dim)
    tensors = [x for x in tensors if _shape_of(x) != (0,)] or tensors  # torch ignores them
    if not sharded_in(tensors):
        return torch.cat(tuple(tensors), dim)
    first = sharded_in(tensors)[0]
    dim = normalize_dim(dim, ndim_of(first))
    _require_same_shape(tensors, dim)
    if dim == first._dim:
        return _cat_rows(tensors, dim)
    require_same_sharding(torch.cat, tensors)
    parts = [_owned_part(x, first) for x in tensors]
    with native():
        return wrap(torch.cat(parts, dim), first._sharding, first._dim)


def _require_same_shape(tensors: Sequence[Tensor], dim: int) -> None:
    """Check the global shapes, so that all ranks raise.

    Raises:
        RuntimeError: the shapes differ in another dim than `dim`, as in torch.
    """
    shapes = [tuple(_shape_of(x)) for x in tensors]
    if len({(len(s), *s[:dim], *s[dim + 1 :]) for s in shapes}) > 1:
        raise RuntimeError(f"cat: expected the same shape except in dim {dim}, got {shapes}")


def _owned_part(x: Tensor, first: ShardTensor) -> Tensor:
    """Owned rows of one argument of `torch.cat` or `torch.stack`."""
    if type(x) is ShardTensor:
        if x._dim != first._dim:
            raise refuse(
                torch.cat, (x, first), None, "the tensors are sharded along different dims"
            )
        return x
    if x.shape[first._dim] != first._sharding.total:
        why = f"a plain tensor of shape {tuple(x.shape)} has another number of rows"
        raise refuse(torch.cat, (first,), None, why)
    return narrow_to_owned(x, first._sharding, first._dim)


def _cat_rows(tensors: Sequence[Tensor], dim: int) -> Any:
    """torch.cat along the sharded dim; a rank owns as many rows as of all tensors together.

    Rows move between ranks, so that the result has the order of torch.cat. Rows of a plain tensor,
    for example a class token before the points, count as rows of one rank.
    """
    found = sharded_in(tensors)
    if any(x._dim != dim for x in found):
        raise refuse(torch.cat, (tensors,), None, "the tensors are sharded along different dims")
    domain = found[0]._sharding.domain
    found = _with_plain_rows(tensors, domain, dim)
    old = [x._sharding for x in found]
    sizes = [sum(s.sizes[r] for s in old) for r in range(domain.size)]
    has_origin = any(s.origin is not None for s in old)
    parts, origins, start = [], [], 0
    for x, s in zip(found, old, strict=True):
        wanted = _rows_between(sizes, start, start + s.total)
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


def _rows_between(sizes: Sequence[int], first: int, last: int) -> list[int]:
    """How many of the rows first:last each rank owns."""
    out, start = [], 0
    for n in sizes:
        out.append(max(0, min(last, start + n) - max(first, start)))
        start += n
    return out


def stack(tensors: Sequence[Tensor], dim: int = 0, **_: Any) -> Any:
    """torch.stack along a new dim."""
    first = require_same_sharding(torch.stack, tensors)
    dim = normalize_dim(dim, ndim_of(first) + 1)
    parts = [_owned_part(x, first) for x in tensors]
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


def tensor_split(x: ShardTensor, parts: Any, dim: int = 0) -> tuple[Any, ...]:
    """torch.tensor_split, into a number of pieces or at given indices."""
    dim = normalize_dim(dim, ndim_of(x))
    total = global_shape(x)[dim]
    if isinstance(parts, int):
        each, more = divmod(total, parts)
        return _pieces(x, [each + (i < more) for i in range(parts)], dim)
    cuts = [0, *(slice(int(p)).indices(total)[1] for p in parts), total]
    return _pieces(x, [b - a for a, b in itertools.pairwise(cuts)], dim)


def unbind(x: ShardTensor, dim: int = 0) -> tuple[Any, ...]:
    """torch.unbind along a dim other than the sharded one."""
    dim = normalize_dim(dim, ndim_of(x))
    if dim == x._dim:
        why = "each row would be gathered separately"
        raise refuse("iteration over sharded rows", (x,), None, why)
    with native():
        return tuple(wrap(p, x._sharding, x._dim - (dim < x._dim)) for p in torch.unbind(x, dim))


def pad(x: ShardTensor, pad: Sequence[int], mode: str = "constant", value: Any = None) -> Any:
    """F.pad of dims other than the sharded one."""
    padded = {ndim_of(x) - 1 - i // 2 for i, n in enumerate(pad) if n}
    if x._dim in padded:
        raise refuse(F.pad, (x,), None, "it pads the sharded dim")
    if mode != "constant" and x._dim >= ndim_of(x) - len(pad) // 2:
        raise refuse(F.pad, (x,), None, f"mode {mode!r} reads the sharded dim")
    if x._sharding.own:
        return apply_local(F.pad, x, (pad, mode, value))
    with native():  # torch refuses to pad no rows in other modes: pad one, and drop it
        shape = [1 if d == x._dim else n for d, n in enumerate(x.shape)]
        one = torch.cat([x, x.new_zeros(shape)], x._dim)
        return wrap(F.pad(one, pad, mode, value).narrow(x._dim, 0, 0), x._sharding, x._dim)


def _triangle(func: Callable[..., Any]) -> Rule:
    """The rule of tril and triu; the diagonal of owned rows or columns is shifted."""

    def _rule(x: ShardTensor, diagonal: int = 0) -> Any:
        back = ndim_of(x) - x._dim
        shift = {1: -x._sharding.first, 2: x._sharding.first}.get(back, 0)
        with native():
            out = func(x, diagonal + shift)
        return x if out is x else wrap(out, x._sharding, x._dim)

    return _rule


MOVING = "transpose swapaxes swapdims movedim moveaxis permute t adjoint"
RULES: dict[Any, Rule] = {
    **{f: _moving(f) for f in functions_named(MOVING)},
    **{f: _moving(f) for f in (getattr(Tensor, n).__get__ for n in ("T", "mT", "H", "mH"))},
    **named({
        "contiguous": contiguous, "is_contiguous": is_contiguous,
        "reshape view": reshape, "reshape_as view_as": view_as,
        "flatten ravel": flatten, "unflatten": unflatten,
        "squeeze": squeeze, "unsqueeze": unsqueeze,
        "expand broadcast_to": expand, "expand_as": expand_as, "repeat tile": repeat,
        "cat concat concatenate": cat, "stack": stack,
        "split split_with_sizes": split, "chunk": chunk, "tensor_split": tensor_split,
        "unbind": unbind, "pad": pad,
    }),
    **{f: _along_other_dims(f) for f in functions_named("flip")},
    **{f: _along_other_dims(f, 2) for f in functions_named("roll")},
    **{f: _along_other_dims(f, 2, "dim") for f in functions_named("repeat_interleave")},
    **{f: _triangle(f) for f in functions_named("tril triu tril_ triu_")},
}  # fmt: skip
