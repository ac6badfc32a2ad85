"""Rules of writes by number: index_add, put, scatter and their relatives, in any sharding.

Numbers and values go to the owners of the rows, in the order of the numbers, so the last of several
values counts, as in torch. A plain target is divided, written to and gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshshard.tensor._torch_private import native
from meshshard.tensor.align import ndim_of
from meshshard.tensor.elements import (
    checked,
    element_numbers,
    flat_elements,
    is_aligned,
    renumbered,
    require_fits,
    sharded_if_long,
    to_owners,
    unflat,
)
from meshshard.tensor.layout import as_layout, even_sizes, reshard
from meshshard.tensor.rules.table import functions_named, in_place
from meshshard.tensor.shard_tensor import Rule, ShardTensor, normalize_dim, sharded_in, wrap
from meshshard.tensor.sharding import Sharding

Write = Callable[[Tensor, Tensor, Tensor], Tensor]  # local rows, their numbers, the values


def copy_rows(x: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """The write of index_copy."""
    return x.index_copy(0, rows, values.to(x.dtype))


def add_rows(x: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """The write of index_add."""
    return x.index_add(0, rows, values.to(x.dtype))


def write(x: Any, index: Tensor, values: Any, op: Write) -> ShardTensor:
    """Rows of a tensor that is sharded along dim 0, changed by values at row numbers.

    Args:
        x: its rows.
        index: numbers in range, plain or sharded.
        values: a number, or a tensor that broadcasts to (*index.shape, *x.shape[1:]).
        op: how owned rows change.

    Communication: that of `to_owners`, that of `as_layout` for values of another layout.
    """
    with native():
        rest = tuple(x.shape[1:])
    if not isinstance(values, Tensor):
        values = torch.as_tensor(values, dtype=x.dtype, device=x.device)
    wanted = (*index.shape, *rest)
    if tuple(values.shape) != wanted:
        while ndim_of(values) > len(wanted) and values.shape[0] == 1:
            values = values[0] if type(values) is not ShardTensor else values.squeeze(0)
        values = values.expand(wanted)
    index, values = _laid_out(index, values)
    with native():
        local = index.reshape(-1).view(-1)
        flat = values.reshape(len(local), *rest)
    numbers: Any = wrap(local, index._sharding, 0) if type(index) is ShardTensor else local
    rows, (mine,) = to_owners(x._sharding, numbers, [flat])
    with native():
        return wrap(op(x, rows, mine), x._sharding, 0)


def _laid_out(index: Any, values: Any) -> tuple[Any, Any]:
    """Numbers and their values with one layout.

    Communication: that of `as_layout` and `reshard`, where the layouts differ.
    """
    if type(values) is ShardTensor and type(index) is not ShardTensor:
        if not index.ndim:
            return index, values.gather()
        if values._dim >= index.ndim:
            values = reshard(values, 0)
        return as_layout(index, values), values
    if type(index) is ShardTensor:
        values = as_layout(values, index)
    return index, values


def write_elements(x: ShardTensor, numbers: Tensor, values: Any, op: Write) -> ShardTensor:
    """Elements changed by values at element numbers.

    Communication: that of `write`.
    """
    return unflat(write(flat_elements(x), numbers, values, op), x)


def on_plain(x: Tensor, dim: int, given: Any, call: Callable[[ShardTensor], Any]) -> Tensor:
    """A write to a plain target: divided along a dim, written to and gathered.

    Communication: that of the write, and one all-to-all of the target.
    """
    first = sharded_in([*given, *(a for g in given if isinstance(g, tuple) for a in g)])[0]
    domain = first._sharding.domain
    scalar = x.ndim == 0
    x = x.reshape(1) if scalar else x
    dim = normalize_dim(dim, x.ndim)
    new = Sharding(domain, even_sizes(x.shape[dim], domain.size))
    with native():
        part = x.narrow(dim, new.first, new.own)
    whole: Tensor = call(wrap(part, new, dim)).gather()
    return whole.reshape(()) if scalar else whole


# ------------------------------------------------------------------------------- index_add, put, …
def _index_rule(func: Callable[..., Any]) -> Rule:
    """The rule of index_add, index_copy, index_fill or index_reduce.

    Communication: along the sharded dim that of `write`; else one all-to-all if the index or the
    source has another sharding.
    """

    def _rule(x: Any, dim: int, index: Any, source: Any = None, *args: Any, **kwargs: Any) -> Any:
        source = kwargs.pop("value", kwargs.pop("source", source))
        if type(x) is not ShardTensor:
            given = (index, source)
            return on_plain(x, dim, given, lambda y: _rule(y, dim, index, source, *args, **kwargs))
        dim = normalize_dim(dim, ndim_of(x))
        index = index if ndim_of(index) else index.reshape(1)
        index = checked(index, x.shape[dim], negative=func is Tensor.index_fill)
        tensor = isinstance(source, Tensor) and ndim_of(source) > 0
        shape = torch.Size((*x.shape[:dim], len(index), *x.shape[dim + 1 :]))
        if tensor and source.shape != shape:
            raise RuntimeError(f"{func.__name__}: expected source {shape}, got {source.shape}")
        if dim != x._dim:
            rows = index.gather() if type(index) is ShardTensor else index
            source = as_layout(source, x) if tensor else source
            with native():
                return wrap(func(x, dim, rows, source, *args, **kwargs), x._sharding, x._dim)
        if func is Tensor.index_fill:  # a number, which may be a tensor without dims
            fill: Write = lambda y, rows, _: y.index_fill(0, rows, source)  # noqa: E731
            return write(x.movedim(dim, 0), index, 0, fill).movedim(0, dim)
        op = _write_of(func, args, kwargs)
        values = source.movedim(dim, 0) if tensor else source
        moved: Any = x.movedim(dim, 0)
        return write(moved, index, values, op).movedim(0, dim)

    return _rule


def _write_of(func: Callable[..., Any], args: Any, kwargs: Any) -> Write:
    """The write of a function of a tensor, a dim, numbers and values."""
    return lambda x, rows, values: func(x, 0, rows, values, *args, **kwargs)


def put(x: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    """Tensor.put: elements by their index in the flattened tensor.

    Communication: that of `write`.
    """
    if type(x) is not ShardTensor:
        flat = torch.flatten(x)
        out = on_plain(flat, 0, (index, source), lambda y: put(y, index, source, accumulate))
        return out.reshape(x.shape)
    if index.shape.numel() != source.shape.numel():
        raise RuntimeError("put(): expected source and index to have the same number of elements")
    index = checked(torch.flatten(index), x.shape.numel())
    op = add_rows if accumulate else copy_rows
    return write_elements(x, renumbered(x, index), torch.flatten(source), op)


# --------------------------------------------------------------------------------------- scatter
def scattered(func: Callable[..., Any]) -> Rule:
    """The rule of scatter, scatter_add or scatter_reduce.

    Communication: none along a dim other than the sharded one if index and source have the rows of
    `x`; else that of `write`.
    """

    def _rule(x: Any, dim: int, index: Any, src: Any = None, *args: Any, **kwargs: Any) -> Any:
        src = kwargs.pop("value", kwargs.pop("src", src))
        if type(x) is not ShardTensor:
            given = (index, src)
            return on_plain(x, dim, given, lambda y: _rule(y, dim, index, src, *args, **kwargs))
        dim = normalize_dim(dim, ndim_of(x))
        if not index.shape.numel():
            return x.clone()
        require_fits(func, x, dim, index, src)
        index = checked(index, x.shape[dim], negative=False)
        index = sharded_if_long(index, x._sharding, x._dim)
        if isinstance(src, Tensor):
            for d, n in enumerate(index.shape):
                src = src if src.shape[d] == n else src.narrow(d, 0, n)
        if dim != x._dim and is_aligned(index, x):
            src = as_layout(src, x) if isinstance(src, Tensor) else src
            with native():
                return wrap(func(x, dim, index, src, *args, **kwargs), x._sharding, x._dim)
        numbers = element_numbers(x, dim, index)
        return write_elements(x, numbers, src, _write_of(func, args, kwargs))

    return _rule


WRITES: dict[str, Rule] = {
    **{
        name: _index_rule(getattr(Tensor, name))
        for name in ("index_add", "index_copy", "index_fill", "index_reduce")
    },
    "put": put,
    "scatter": scattered(Tensor.scatter),
}
RULES: dict[Any, Rule] = {
    **{f: rule for name, rule in WRITES.items() for f in functions_named(name)},
    **{f: in_place(rule) for name, rule in WRITES.items() for f in functions_named(f"{name}_")},
}
