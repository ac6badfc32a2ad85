"""Functions that are compositions of functions with exact rules, as in PyTorch's own code."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from meshshard.tensor._torch_private import VF, native
from meshshard.tensor.align import narrow_to_owned
from meshshard.tensor.autocast import in_float32
from meshshard.tensor.layout import as_layout, even_sizes, rearranged, reshard
from meshshard.tensor.rules.table import functions_named, in_place, named
from meshshard.tensor.shard_tensor import Rule, Sharded, ShardTensor, refuse, sharded_in, wrap
from meshshard.tensor.sharding import Sharding
from meshshard.tensor.take_rows import take_rows

broadcast_shapes: Any = torch.broadcast_shapes  # these have no types
_torch_broadcast_tensors: Any = torch.broadcast_tensors
atleast_1d: Any = torch.atleast_1d
atleast_2d: Any = torch.atleast_2d


# ---------------------------------------------------------------------------------- joining, shapes
def _at_least(ndim: int) -> Rule:
    """The rule of atleast_1d, atleast_2d or atleast_3d, of one tensor, several or a list."""

    def _one(x: Sharded) -> Any:
        if x.ndim < 2 <= ndim:
            x = x.reshape(1, -1)
        return x.unsqueeze(-1) if x.ndim < ndim else x.reshape(-1) if not x.ndim else x

    def _rule(*tensors: Any) -> Any:
        if len(tensors) == 1 and isinstance(tensors[0], Tensor):
            return _one(tensors[0])
        return tuple(map(_one, tensors[0] if len(tensors) == 1 else tensors))

    return _rule


def hstack(tensors: Sequence[Tensor]) -> Any:
    """torch.hstack."""
    every = atleast_1d(*tensors) if len(tensors) > 1 else (atleast_1d(tensors[0]),)
    return torch.cat(every, 0 if every[0].ndim == 1 else 1)


def _stacked(at_least: Callable[..., Any], dim: int) -> Rule:
    """The rule of vstack or dstack."""
    return lambda tensors: torch.cat([at_least(x) for x in tensors], dim)


def column_stack(tensors: Sequence[Tensor]) -> Any:
    """torch.column_stack."""
    return torch.cat([x.reshape(-1, 1) if x.ndim < 2 else x for x in tensors], 1)


def _split_along(split: Callable[..., Any], dim: int) -> Rule:
    """The rule of hsplit, vsplit or dsplit, into equal pieces or at indices."""

    def _rule(x: Any, parts: Any = None, **kwargs: Any) -> Any:
        parts = kwargs.get("sections", kwargs.get("indices", parts))
        along = 0 if x.ndim == 1 and dim == 1 else dim
        split(torch.empty(x.shape, device="meta"), parts)  # raises as in torch
        return torch.tensor_split(x, parts, along)

    return _rule


def broadcast_tensors(*tensors: Any) -> Any:
    """torch.broadcast_tensors; a plain tensor is sharded as the first sharded one."""
    shape: Any = broadcast_shapes(*(x.shape for x in tensors))
    first = next(x for x in tensors if type(x) is ShardTensor).expand(shape)
    if type(first) is not ShardTensor:
        return [x.expand(shape) for x in tensors]
    return [
        x.expand(shape) if type(x) is ShardTensor else as_layout(x.expand(shape), first)
        for x in tensors
    ]


def one_sharded(tensors: Sequence[Any]) -> list[Any]:
    """The tensors with all but the first sharded one gathered, as the result repeats them.

    Communication: one all-to-all for each of the others.
    """
    first = next(i for i, x in enumerate(tensors) if type(x) is ShardTensor)
    return [
        x.gather() if type(x) is ShardTensor and i != first else x for i, x in enumerate(tensors)
    ]


def meshgrid(*tensors: Any, indexing: str | None = None) -> Any:
    """torch.meshgrid; sharded along the dim of the first sharded tensor.

    Communication: one all-to-all for each other sharded tensor.
    """
    given = list(tensors[0]) if isinstance(tensors[0], (list, tuple)) else list(tensors)
    swap = indexing == "xy" and len(given) > 1
    if swap:
        given[:2] = given[1::-1]
    n = len(given)
    views = [
        x.reshape([-1 if d == i else 1 for d in range(n)]) for i, x in enumerate(one_sharded(given))
    ]
    grids = list(_torch_broadcast_tensors(*views))
    if swap:
        grids[:2] = grids[1::-1]
    return tuple(grids)


def cartesian_prod(*tensors: Any) -> Any:
    """torch.cartesian_prod; see `meshgrid`."""
    if len(tensors) == 1:
        return tensors[0]
    return torch.stack([torch.flatten(g) for g in torch.meshgrid(*tensors, indexing="ij")], -1)


def block_diag(*tensors: Any) -> Any:
    """torch.block_diag: blocks padded to all columns, one below the other."""
    blocks = [atleast_2d(x) for x in tensors]
    columns = [x.shape[1] for x in blocks]
    dtype = functools.reduce(torch.promote_types, [x.dtype for x in blocks])
    wide = [
        F.pad(x.to(dtype), (sum(columns[:i]), sum(columns[i + 1 :]))) for i, x in enumerate(blocks)
    ]
    first = sharded_in(wide)[0]
    return torch.cat([_along_dim_of(x, first) for x in wide], 0)


def _along_dim_of(x: Any, first: ShardTensor) -> Any:
    """A tensor whose rows fit those of the first along a dim other than the first dim."""
    if type(x) is not ShardTensor or first._dim:
        return as_layout(x, first) if first._dim else x
    return reshard(x, 0)


def diag(x: Sharded, diagonal: int = 0) -> Any:
    """torch.diag."""
    if x.ndim not in (1, 2):
        raise RuntimeError(f"diag(): Supports 1D or 2D tensors. Got {x.ndim}D")
    return torch.diagonal(x, diagonal).clone() if x.ndim == 2 else torch.diag_embed(x, diagonal)


def diag_embed(x: Sharded, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    """torch.diag_embed: zeros with the diagonal set; a sharded diagonal gives sharded rows."""
    torch.diag_embed(torch.empty(x.shape, device="meta"), offset, dim1, dim2)  # raises as in torch
    n = x.shape[-1] + abs(offset)
    rows = F.pad(x, (max(0, -offset), max(0, offset)))
    zeros = torch.zeros_like(rows).unsqueeze(-1).repeat(*[1] * x.ndim, n)
    return torch.diagonal_scatter(zeros, x, offset, -2, -1).movedim((-2, -1), (dim1, dim2))


def _scatter_into(part_of: Callable[..., Any]) -> Rule:
    """The rule of a function that copies a tensor into a view of a clone of another.

    Communication: if the tensor is sharded in another way than the view, that of `as_layout`.
    """

    def _rule(x: Any, src: Any, *args: Any, **kwargs: Any) -> Any:
        whole = x.clone() if type(x) is ShardTensor else _sharded_as(x, src)
        part = part_of(whole, *args, **kwargs)
        if part_of is _row:
            src = src.unsqueeze(args[0] if args else kwargs["dim"])
        if src.shape != part.shape:
            raise RuntimeError(f"expected src of shape {tuple(part.shape)}, got {tuple(src.shape)}")
        with native():
            part.copy_(as_layout(src, part))
        return whole

    return _rule


def _sharded_as(x: Tensor, src: ShardTensor) -> ShardTensor:
    """A plain tensor, sharded along its largest dim over the ranks of another."""
    dim = max(range(x.ndim), key=lambda d: x.shape[d])
    domain = src._sharding.domain
    sharding = Sharding(domain, even_sizes(x.shape[dim], domain.size))
    return wrap(narrow_to_owned(x, sharding, dim).clone(), sharding, dim)


def _row(x: Any, dim: int, index: int) -> Any:
    """A view of one row, with its dim."""
    return torch.narrow(x, dim, index + x.shape[dim] * (index < 0), 1)


def slice_of(x: Sharded, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    """The operator aten::slice, a view."""
    return x[(*[slice(None)] * (dim % x.ndim), slice(start, end, step))]


def _copy(view: Any) -> Rule:
    """The rule of a view_copy function: what the view returns, cloned."""

    def _rule(*args: Any, **kwargs: Any) -> Any:
        out = view(*args, **kwargs)
        return out.clone() if isinstance(out, Tensor) else tuple(o.clone() for o in out)

    return _rule


def rot90(x: Sharded, k: int = 1, dims: Sequence[int] = (0, 1)) -> Any:
    """torch.rot90."""
    torch.rot90(torch.empty(x.shape, device="meta"), k, tuple(dims))  # raises as in torch
    a, b = dims
    turned = {0: torch.clone, 2: lambda y: torch.flip(y, (a, b))}
    turned[1] = lambda y: torch.flip(torch.transpose(y, a, b), (a,))
    turned[3] = lambda y: torch.flip(torch.transpose(y, a, b), (b,))
    return turned[k % 4](x)


def sum_to_size(x: Sharded, *size: Any) -> Any:
    """Tensor.sum_to_size."""
    wanted = list(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
    more, shape = x.ndim - len(wanted), list(x.shape)
    summed = [d for d, n in enumerate(shape) if d < more or (wanted[d - more] == 1 != n)]
    if more < 0 or any(wanted[d - more] != n for d, n in enumerate(shape) if d not in summed):
        raise RuntimeError(f"size {wanted} is not expandable to size {shape}")
    return x.sum(summed, keepdim=True).reshape(wanted) if summed else x


def trace(x: Sharded) -> Tensor:
    """torch.trace."""
    torch.trace(torch.empty(x.shape, device="meta"))  # raises as in torch
    return torch.diagonal(in_float32(x, "cpu")).sum()


def masked_scatter(x: Any, mask: Any, source: Any) -> Any:
    """torch.masked_scatter: the elements of the source in order, where the mask is true.

    Communication: one gather of objects; that of `rearranged` unless the first dim is sharded.
    """
    x, mask = _torch_broadcast_tensors(x, mask)
    flat: Any = torch.flatten(x)
    chosen = torch.flatten(mask)
    first = flat if type(flat) is ShardTensor else chosen if type(chosen) is ShardTensor else None
    if first is None:  # only the source is sharded
        return masked_scatter(_sharded_as(x, source), mask, source)
    flat, chosen = as_layout(flat, first).clone(), as_layout(chosen, first)
    sharding = first._sharding
    with native():
        counts = sharding.domain.share(int(chosen.sum()))
    if sum(counts) > source.numel():
        raise RuntimeError("masked_scatter: expected the source to have an element for each True")
    wanted = Sharding(sharding.domain, counts)
    rows = wanted.rows(flat.device)
    values = torch.flatten(source)
    values = take_rows(values, rows, wanted) if type(values) is ShardTensor else values[rows]
    with native():
        flat.masked_scatter_(chosen, values)
    like = x if type(x) is ShardTensor else mask
    return rearranged(flat, like.shape, like._dim, like._sharding)


def new_empty_strided(x: Sharded, size: Any, stride: Any, **options: Any) -> Any:
    """Tensor.new_empty_strided; sharded where new_empty is."""
    out = x.new_empty(size, **options)
    with native():
        out_ = out.new_empty_strided(out.shape, stride, **options)
    return wrap(out_, out._sharding, out._dim) if type(out) is ShardTensor else out_


def _refused(func: Callable[..., Any], why: str) -> Rule:
    def _rule(*args: Any, **kwargs: Any) -> Any:
        raise refuse(func, args, kwargs, why)

    return _rule


COPIES = """
alias detach diagonal expand narrow permute select slice split split_with_sizes squeeze t transpose
unbind unfold unsqueeze view view_as_real view_as_complex
"""
VIEWS: dict[str, Any] = {
    "alias": torch.clone, "expand": Tensor.expand, "slice": slice_of, "unfold": Tensor.unfold,
    "view": Tensor.reshape,
}  # fmt: skip
STRIDES = "the strides are those of the owned rows: index the tensor, or use reshape"
REFUSED = {
    "as_strided_copy as_strided_scatter as_strided_": STRIDES,
    "resize_as_": "its memory holds the owned rows: make a new tensor",
    "combinations": "it makes all pairs of rows",
}
LISTS = {"meshgrid": meshgrid, **{f"atleast_{n}d": _at_least(n) for n in (1, 2, 3)}}
RULES: dict[Any, Rule] = {
    **named(
        {
            **LISTS,
            "hstack": hstack,
            "vstack row_stack": _stacked(torch.atleast_2d, 0),
            "dstack": _stacked(torch.atleast_3d, 2),
            "column_stack": column_stack,
            "hsplit": _split_along(torch.hsplit, 1),
            "vsplit": _split_along(torch.vsplit, 0),
            "dsplit": _split_along(torch.dsplit, 2),
            "broadcast_tensors": broadcast_tensors,
            "cartesian_prod": cartesian_prod,
            "block_diag": block_diag,
            "diag": diag,
            "diag_embed": diag_embed,
            "trace": trace,
            "diagflat": lambda x, offset=0: torch.diag_embed(torch.flatten(x), offset),
            "diagonal_scatter": _scatter_into(torch.diagonal),
            "select_scatter": _scatter_into(_row),
            "slice_scatter": _scatter_into(slice_of),
            "masked_scatter": masked_scatter,
            "masked_scatter_": in_place(masked_scatter),
            "fliplr": lambda x: torch.flip(x, (1,)),
            "flipud": lambda x: torch.flip(x, (0,)),
            "rot90": rot90,
            "sum_to_size": sum_to_size,
            "new_empty_strided": new_empty_strided,
        }
    ),
    **{getattr(VF, name): rule for name, rule in LISTS.items()},
    **{
        f: _copy(VIEWS.get(n, getattr(torch, n, None)))
        for n in COPIES.split()
        for f in functions_named(f"{n}_copy")
    },
    torch.ops.aten.slice.Tensor: slice_of,
    **{f: _refused(f, why) for names, why in REFUSED.items() for f in functions_named(names)},
    torch.as_strided: _refused(torch.as_strided, STRIDES),
}
