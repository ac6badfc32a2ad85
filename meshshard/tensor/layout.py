"""Layouts: the same elements, sharded along another dim, with other sizes or another shape."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from meshshard.tensor._torch_private import native
from meshshard.tensor.align import global_shape, narrow_to_owned, require_whole_domain
from meshshard.tensor.shard_tensor import ShardTensor, refuse, wrap
from meshshard.tensor.sharding import Sharding
from meshshard.tensor.take_rows import take_rows

__all__ = ["as_layout", "even_sizes", "rearranged", "reshard", "rows_between", "scaled_sizes"]


def even_sizes(rows: int, ranks: int) -> list[int]:
    """Sizes that differ by at most one."""
    ends = [rows * r // ranks for r in range(ranks + 1)]
    return [b - a for a, b in itertools.pairwise(ends)]


def scaled_sizes(old: Sharding, rows: int) -> list[int]:
    """Sizes of another number of rows in about the same proportion."""
    if not old.total:
        return even_sizes(rows, old.domain.size)
    ends = [end * rows // old.total for end in itertools.accumulate(old.sizes, initial=0)]
    return [b - a for a, b in itertools.pairwise(ends)]


def rows_between(sizes: Sequence[int], first: int, last: int) -> list[int]:
    """How many of the rows first:last every rank owns."""
    ends = itertools.accumulate(sizes, initial=0)
    return [max(0, min(last, b) - max(first, a)) for a, b in itertools.pairwise(ends)]


def reshard(x: ShardTensor, dim: int, sizes: Sequence[int] | None = None) -> ShardTensor:
    """The same tensor, sharded along another dim; by default with even sizes.

    Communication: as `rearranged`.
    """
    shape, domain = global_shape(x), x._sharding.domain
    new = Sharding(domain, sizes or even_sizes(shape[dim], domain.size))
    return x if dim == x._dim and new == x._sharding else rearranged(x, shape, dim, new)


def as_layout(x: Tensor, like: ShardTensor) -> ShardTensor:
    """A plain or sharded tensor, sharded as another with as many dims and rows.

    Communication: none for a plain tensor or one with this sharding; one all-to-all for one with
    other sizes; else as `rearranged`.

    Raises:
        NoShardRule: the tensors belong to different domains, or a plain one has other rows.
    """
    new, dim = like._sharding, like._dim
    if type(x) is not ShardTensor:
        if x.ndim <= dim or x.shape[dim] != new.total:
            why = f"a plain tensor has shape {tuple(x.shape)}, expected {new.total} rows, dim {dim}"
            raise refuse("redistribute", (like,), None, why)
        rows = narrow_to_owned(x, new, dim)
        return wrap(rows.view_as(rows), new, dim)
    if x._sharding.domain.group != new.domain.group:
        raise refuse("redistribute", (x, like), None, "the tensors belong to different domains")
    if x._dim != dim:
        return rearranged(x, global_shape(x), dim, new)
    return x if x._sharding == new else x.redistribute(new.sizes)


def rearranged(x: ShardTensor, shape: Sequence[int], dim: int, new: Sharding) -> ShardTensor:
    """The elements of a tensor in the order of torch.reshape, sharded along any dim of the shape.

    Communication: one all-to-all forward and backward; two more of counts and of numbers if a dim
    before the sharded one, of the tensor or of the shape, has a size other than 1.
    """
    old, whole = x._sharding, global_shape(x)
    require_whole_domain("a reshape that moves elements", (x,), old.domain)
    local = [new.own if d == dim else n for d, n in enumerate(shape)]
    before, inner = math.prod(whole[: x._dim]), math.prod(whole[x._dim + 1 :])
    new_before, new_inner = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
    if old.domain.size == 1 or not math.prod(shape):
        with native():
            return wrap(x.reshape(local), new, dim)
    block = math.gcd(inner, new_inner)
    n, m = inner // block, new_inner // block  # blocks in a row before and after
    have = Sharding(old.domain, [before * rows * n for rows in old.sizes])
    want = Sharding(old.domain, [new_before * rows * m for rows in new.sizes])
    with native():
        blocks = x.reshape(have.own, block)
        if before == new_before == 1:
            moved = old.domain.redistribute(blocks, have.sizes, want.sizes)
        else:
            own = torch.arange(new.first * m, (new.first + new.own) * m, device=x.device)
            batch = torch.arange(new_before, device=x.device)[:, None]
            numbers = _places((batch * (new.total * m) + own).flatten(), old, before, n)
            moved = take_rows(wrap(blocks, have, 0), numbers, want)
        return wrap(moved.reshape(local), new, dim)


def _places(blocks: Tensor, old: Sharding, before: int, n: int) -> Tensor:
    """Where blocks are if every rank has its own in order: numbers in order of the ranks.

    Args:
        blocks: numbers of blocks in the order of the whole tensor.
        old: of its rows.
        before: product of the sizes before the sharded dim.
        n: number of blocks in a row.
    """
    sizes = torch.tensor(old.sizes, device=blocks.device)
    row = blocks // n % old.total
    owner = old.owners(row)
    first, own = (sizes.cumsum(0) - sizes)[owner], sizes[owner]
    batch = blocks // (n * old.total)
    return (before * first + batch * own + row - first) * n + blocks % n
