"""Rules of reads by number: index_select, gather, take and tables, in any sharding."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from meshshard.tensor._torch_private import native
from meshshard.tensor.align import global_shape, ndim_of
from meshshard.tensor.elements import (
    checked,
    element_numbers,
    flat_elements,
    is_aligned,
    renumbered,
    require_fits,
    rows_at,
    sharded_if_long,
)
from meshshard.tensor.plain_edges import check_plain_edges
from meshshard.tensor.rules.table import functions_named, named
from meshshard.tensor.shard_tensor import (
    Rule,
    Sharded,
    ShardTensor,
    apply_local,
    normalize_dim,
    refuse,
    wrap,
)


def rows_of(x: Sharded, dim: int, index: Tensor) -> Any:
    """Rows along the sharded dim; the index may have several dims, which replace that dim.

    Communication: that of `checked`, `check_plain_edges`, `sharded_if_long` and `rows_at`.
    """
    ndim = ndim_of(index)
    if type(index) is not ShardTensor:
        check_plain_edges(x, index)
    index = sharded_if_long(checked(index, x.shape[dim]), x._sharding)
    moved: Any = x.movedim(dim, 0)
    out = rows_at(moved, index)
    return out.movedim(tuple(range(ndim)), tuple(range(dim, dim + ndim)))


def index_select(x: Any, dim: int, index: Any) -> Any:
    """torch.index_select.

    Rows selected by sharded row numbers are sharded as these; by as many plain row numbers as there
    are rows (a permutation), sharded as `x`; by other plain row numbers, replicated.

    Communication: along the sharded dim that of `rows_of`; else one all-to-all of a sharded index.
    """
    dim = normalize_dim(dim, ndim_of(x))
    if ndim_of(index) > 1:
        raise IndexError("index_select(): Index is supposed to be a vector")
    if ndim_of(index) == 0:
        index = index.reshape(1)
    if type(x) is not ShardTensor:
        index = checked(index, x.shape[dim], negative=False)
        with native():
            return wrap(torch.index_select(x, dim, index), index._sharding, dim)
    if dim == x._dim:
        return rows_of(x, dim, checked(index, x.shape[dim], negative=False))
    index = index.gather() if type(index) is ShardTensor else index
    return apply_local(torch.index_select, x, (dim, checked(index, x.shape[dim], False)))


def gather(x: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    """torch.gather; the result is sharded as the index.

    A plain index with as many rows as `x` is sharded as `x`; the result of another is replicated.

    Communication: none along another dim if the index has the rows of `x`; else that of `rows_at`.
    """
    dim = normalize_dim(dim, ndim_of(x))
    if ndim_of(x) and ndim_of(index) and index.shape.numel():
        require_fits(torch.gather, x, dim, index)
    if ndim_of(index) != ndim_of(x):  # the index is empty, or one of them has no dim
        return x.new_empty(index.shape) + x.sum() * 0 if 0 in index.shape else x.expand(index.shape)
    index = checked(index, x.shape[dim] if ndim_of(x) else 1, negative=False)
    if type(x) is not ShardTensor:
        return _gather_plain(x, dim, index)
    index = sharded_if_long(index, x._sharding, x._dim)
    if dim != x._dim and is_aligned(index, x):
        return apply_local(torch.gather, x, (dim, index))
    return rows_at(flat_elements(x), element_numbers(x, dim, index))


def _gather_plain(x: Tensor, dim: int, index: ShardTensor) -> ShardTensor:
    """Gather from a plain tensor, by a sharded index."""
    at, sharding = index._dim, index._sharding
    with native():
        if dim != at:
            x = x.narrow(at, sharding.first, sharding.own)
        return wrap(torch.gather(x, dim, index), sharding, at)


def take_along_dim(x: Any, indices: Any, dim: Any = None) -> Any:
    """torch.take_along_dim: gather after broadcasting; without a dim, of flattened tensors.

    Communication: that of `checked` and of `gather`.
    """
    if dim is None:
        return gather(torch.flatten(x), 0, torch.flatten(checked(indices, x.shape.numel())))
    if ndim_of(x) != ndim_of(indices):
        raise RuntimeError("take_along_dim(): input and indices should have the same dims")
    dim = normalize_dim(dim, ndim_of(x))
    indices = checked(indices, x.shape[dim])
    shape = list(torch.broadcast_shapes(_without(x, dim), _without(indices, dim)))  # type: ignore[no-untyped-call]
    x_shape, index_shape = list(shape), list(shape)
    x_shape[dim], index_shape[dim] = x.shape[dim], indices.shape[dim]
    return gather(_expanded(x, x_shape), dim, _expanded(indices, index_shape))


def _without(x: Any, dim: int) -> list[int]:
    return [1 if d == dim else n for d, n in enumerate(x.shape)]


def _expanded(x: Any, shape: list[int]) -> Any:
    return x if list(x.shape) == shape else x.expand(shape)


def take(x: Any, index: Any) -> Any:
    """torch.take: elements by their index in the flattened tensor; sharded as the index.

    Those of a plain index are replicated.

    Communication: that of `checked` and of `rows_at`.
    """
    index = checked(index, x.shape.numel())
    if type(x) is not ShardTensor:
        with native():
            return wrap(torch.take(x, index), index._sharding, index._dim)
    return rows_at(flat_elements(x), renumbered(x, index))


def embedding(x: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
    """F.embedding of sharded indices in a plain table, or of any indices in a sharded table.

    Communication: none for a plain table; that of `rows_of` if its rows are sharded; one all-to-all
    of sharded indices if its columns are.
    """
    names = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")
    given = dict(zip(names, args, strict=False)) | kwargs
    if given.get("max_norm") is not None or given.get("scale_grad_by_freq"):
        why = "max_norm and scale_grad_by_freq depend on the indices of all rows"
        raise refuse(F.embedding, (x, weight), None, why)
    if type(weight) is not ShardTensor:
        return apply_local(F.embedding, x, (weight, *args), kwargs)
    padding, n = given.get("padding_idx"), weight.shape[0]
    if weight._dim != 0:
        x = x.gather() if type(x) is ShardTensor else x
        with native():
            return wrap(F.embedding(x, weight, padding), weight._sharding, x.ndim)
    out = rows_of(weight, 0, checked(x, n, negative=False))
    if padding is None:
        return out
    return torch.where((x == padding % n)[..., None], out.detach(), out)


def one_hot(x: ShardTensor, num_classes: int = -1) -> ShardTensor:
    """F.one_hot; by default with the global number of classes.

    Communication: one all-reduce.
    """
    if num_classes >= 0:
        return apply_local(F.one_hot, checked(x, num_classes, False), (num_classes,))  # type: ignore[arg-type]
    if not global_shape(x).numel():
        raise RuntimeError("Can not infer total number of classes from empty tensor.")
    return apply_local(F.one_hot, x, (int(torch.amax(x)) + 1,))


RULES: dict[Any, Rule] = {
    **dict.fromkeys(functions_named("gather"), gather),
    **named({
        "index_select": index_select,
        "take_along_dim": take_along_dim,
        "take": take,
        "embedding": embedding,
        "one_hot": one_hot,
    }),
}  # fmt: skip
