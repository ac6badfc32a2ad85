"""Attention of own rows: by a ring, by tokens or alone; one function with its own backward.

Where the keys are, decides: sharded keys go round to sharded queries (ring), meet replicated
queries where they are (tokens), replicated keys are met by own queries without a message.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from meshshard.comm import Domain
from meshshard.comm.ring import Block, Ring
from meshshard.tensor.attention.tiles import (
    DropoutKey,
    Tile,
    attend,
    attend_backward,
    finite,
    is_fast,
    merge,
    pieces,
    tile_columns,
    tile_rows,
)
from meshshard.tensor.shard_tensor import Sharding
from meshshard.tensor.tokens import reduce_tokens

__all__ = ["How", "attention", "composed"]


@dataclass(frozen=True)
class How:
    """What attention is besides queries, keys and values.

    Attributes:
        rows: of the queries; of one rank where they are replicated.
        columns: of the keys; of one rank where they are replicated.
        scale: factor of the products.
        causal: query i meets keys up to i, by global ids.
        mask: (batch or 1, heads or 1, own queries or 1, all keys or 1), bool or added.
        chance: dropout of weights.
    """

    rows: Sharding
    columns: Sharding
    scale: float
    causal: bool = False
    mask: Tensor | None = None
    chance: DropoutKey | None = None

    @property
    def by_tokens(self) -> bool:
        """Whether replicated queries meet sharded keys."""
        return self.rows.domain.size == 1 < self.columns.domain.size

    def ids(self) -> range:
        """Ids of own queries."""
        return range(self.rows.first, self.rows.first + self.rows.own)

    def tile(self, rows: slice, columns: slice, causal: bool, like: Tensor) -> Tile:
        """The tile of some own queries and some keys by id."""
        mask = self.mask
        if mask is not None:
            mask = mask if mask.shape[-2] == 1 else mask[..., rows, :]
            mask = mask if mask.shape[-1] == 1 else mask[..., columns]
        factor = None if self.chance is None else self.chance.factor(rows, columns, like)
        return Tile(self.scale, causal, mask, factor)


def attention(q: Tensor, k: Tensor, v: Tensor, how: How) -> Tensor:
    """Softmax of scaled products, times values, for own queries; (batch, heads, rows, width).

    Keys may have fewer heads, each then serves several of the queries'. Second derivatives gather
    all keys, and hold own queries x all keys.

    Communication: ring: ranks - 1 all-to-alls a block of 1,024 rows of keys and values forward,
    twice as many backward; tokens: two all-reduces (largest exponents; sums) forward, one backward.
    """
    out: Tensor = _Attention.apply(q, k, v, how)  # type: ignore[no-untyped-call]
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, how: How) -> Tensor:
        """Own queries against all keys."""
        out, lse = _forward(q, k, v, how)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.how = how
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of queries, keys and values."""
        q, k, v, out, lse = ctx.saved_tensors
        how, needed = ctx.how, ctx.needs_input_grad
        if torch.is_grad_enabled():  # its own derivative is wanted
            return (*_again((q, k, v), needed, how, grad), None)
        if how.by_tokens:
            grad = how.columns.domain.all_reduce(grad)
        return (*_backward(grad, (out, lse), (q, k, v), how), None)


def _forward(q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
    keys = _Keys(q, k, v, how)
    blocks = keys.blocks()
    wide = torch.promote_types(q.dtype, torch.float32)
    if keys.whole is not None:
        next(blocks)
        out, lse = (x.to(wide) for x in attend(q, k, v, keys.whole))
    else:
        b, h, n, _ = q.shape
        out = q.new_zeros((b, h, n, v.shape[-1]), dtype=wide)
        lse = q.new_full((b, h, n), -torch.inf, dtype=wide)
    for block in blocks:
        k_block, v_block = keys.unpacked(block)
        for rows, columns, tile in keys.tiles(block):
            more = attend(q[:, :, rows], k_block[:, :, columns], v_block[:, :, columns], tile)
            merge(out[:, :, rows], lse[:, :, rows], *more)
    if how.by_tokens:
        out, lse = _of_all_keys(out, lse, how.columns.domain)
    return out.to(q.dtype), lse


def _of_all_keys(out: Tensor, lse: Tensor, domain: Domain) -> tuple[Tensor, Tensor]:
    """Replicated queries: what every rank found among its own keys, merged."""
    top = finite(domain.all_reduce(lse, "max"))
    weight = torch.exp(lse - top)[..., None]
    sums = reduce_tokens(domain, torch.cat([out * weight, weight], -1))
    below = sums[..., -1:]
    out = torch.where(below > 0, sums[..., :-1] / below, 0.0)
    return out, top + torch.log(below[..., 0])


def _backward(
    grad: Tensor, found: tuple[Tensor, Tensor], given: tuple[Tensor, Tensor, Tensor], how: How
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = given
    out, lse = found[0], finite(found[1])
    keys = _Keys(q, k, v, how)
    blocks = keys.blocks()
    if keys.whole is not None:
        next(blocks)
        first = attend_backward(grad, (out, lse), q, k, v, keys.whole)
        dq, dk, dv = (x.to(lse.dtype) for x in first)
    else:
        dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))

    def _add(start: int, rows: Tensor) -> None:
        for into, more in zip((dk, dv), keys.split(rows), strict=True):
            into[:, :, start : start + len(rows)] += more

    for block in blocks:
        k_block, v_block = keys.unpacked(block)
        own = slice(block.start, block.stop)
        into = (dq, dk[:, :, own], dv[:, :, own])
        if block.rows is not None:
            grads = torch.zeros_like(block.rows, dtype=lse.dtype)
            into = (dq, *keys.split(grads))
        for rows, columns, tile in keys.tiles(block):
            r, c = (..., rows, slice(None)), (..., columns, slice(None))
            mine = out[r], lse[..., rows]
            parts = attend_backward(grad[r], mine, q[r], k_block[c], v_block[c], tile)
            for x, at, part in zip(into, (r, c, c), parts, strict=True):
                x[at] += keys.folded(part, x.shape[1])
        if block.rows is not None:
            keys.ring.give_back(block, grads, _add)
    keys.ring.finish(_add)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class _Keys:
    """Keys and values as rows (n, width) of blocks, and the tiles of own queries with them."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> None:
        self.q, self.k, self.v, self.how = q, k, v, how
        here = how.columns
        domain, sizes = (Domain(), (here.own,)) if how.by_tokens else (here.domain, here.sizes)
        self.first = here.first if how.by_tokens else 0
        self.ring = Ring(domain, sizes)
        self.groups = q.shape[1] // max(k.shape[1], 1)
        simple = how.mask is None and self.groups == 1
        self.large = simple and is_fast(q, v, how.chance is not None)
        self.whole = self._whole() if self.large else None

    def _whole(self) -> Tile | None:
        """The tile of all own queries and own keys, where they are one."""
        n, own = self.q.shape[2], self.how.columns
        columns = range(own.first, own.first + own.own)
        tiles = list(pieces(self.how.ids(), columns, self.how.causal))
        if len(tiles) != 1 or tiles[0][:2] != (slice(0, n), slice(0, own.own)):
            return None
        return Tile(self.how.scale, tiles[0][2])

    def blocks(self) -> Iterator[Block]:
        """All blocks of keys that this rank's queries meet, all own keys first where `whole` is."""
        for block in self.ring.blocks(self._take):
            first = block.first + self.first
            if block.rows is not None or self.whole is not None:
                yield replace(block, first=first)
                continue
            for start, stop in tile_columns(block.stop):  # own rows, all of them
                yield replace(block, start=start, stop=stop, first=first + start)

    def tiles(self, block: Block) -> Iterator[tuple[slice, slice, Tile]]:
        """Own rows, columns of the block, and the tile between them."""
        how, ids = self.how, self.how.ids()
        columns = range(block.first, block.first + block.stop - block.start)
        for run in tile_rows(self.q, len(columns), self.large):
            for r, c, causal in pieces(ids[run], columns, how.causal):
                rows = slice(run.start + r.start, run.start + r.stop)
                there = slice(columns.start + c.start, columns.start + c.stop)
                yield rows, c, how.tile(rows, there, causal, self.q)

    def _take(self, start: int, stop: int) -> Tensor:
        return _rows(self.k[:, :, start:stop], self.v[:, :, start:stop])

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows as keys and values, (batch, heads, n, width), in the same memory."""
        b, h = self.k.shape[:2]
        width = b * h * self.k.shape[-1]
        k = rows[:, :width].view(-1, b, h, self.k.shape[-1]).movedim(0, 2)
        v = rows[:, width:].view(-1, b, h, self.v.shape[-1]).movedim(0, 2)
        return k, v

    def unpacked(self, block: Block) -> tuple[Tensor, Tensor]:
        """Keys and values of a block, with as many heads as queries have."""
        own = slice(block.start, block.stop)
        k, v = self.k[:, :, own], self.v[:, :, own]
        if block.rows is not None:
            k, v = self.split(block.rows)
        if self.groups == 1:
            return k, v
        return k.repeat_interleave(self.groups, 1), v.repeat_interleave(self.groups, 1)

    def folded(self, x: Tensor, heads: int) -> Tensor:
        """Gradients of as many heads as queries have, as those of fewer."""
        b, _, n, width = x.shape
        return x if x.shape[1] == heads else x.reshape(b, heads, -1, n, width).sum(2)


def _rows(k: Tensor, v: Tensor) -> Tensor:
    flat = [x.movedim(2, 0).reshape(x.shape[2], _width(x)) for x in (k, v)]
    return torch.cat(flat, 1)


def _width(x: Tensor) -> int:
    return x.shape[0] * x.shape[1] * x.shape[3]


# ------------------------------------------------------------------------------ plain mathematics
def composed(q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
    """The same of differentiable operations, and the weights: (…, own queries, all keys).

    With replicated queries the weights are (…, queries, own keys).

    Communication: ring: two all-to-alls (all keys, all values) forward and backward; tokens: as
    `attention`.
    """
    if how.rows.domain.size > 1 and how.columns.domain.size > 1:
        k, v = (_all_rows(x, how.columns) for x in (k, v))
    columns = slice(how.columns.first, how.columns.first + k.shape[2]) if how.by_tokens else (
        slice(0, k.shape[2]))  # fmt: skip
    groups = q.shape[1] // max(k.shape[1], 1)
    if groups > 1:
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    tile = how.tile(slice(0, q.shape[2]), columns, False, q)
    scores = q @ k.mT * how.scale
    bias = tile.bias(q, k)
    scores = scores if bias is None else scores + bias
    if how.causal:
        met = _ids(how.ids(), q)[:, None] >= _ids(range(columns.start, columns.stop), q)
        scores = scores.masked_fill(~met, -torch.inf)
    return _softmax(scores, v, tile.factor, how)


def _softmax(scores: Tensor, v: Tensor, factor: Tensor | None, how: How) -> tuple[Tensor, Tensor]:
    """Output and weights, 0 where a query meets no key."""
    domain = how.columns.domain
    least = scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    top = torch.cat([scores.detach(), least], -1).amax(-1, keepdim=True)
    top = finite(domain.all_reduce(top, "max") if how.by_tokens else top)
    above = torch.exp(scores - top)
    dropped = above if factor is None else above * factor
    sums = torch.cat([dropped @ v, above.sum(-1, keepdim=True)], -1)
    sums = reduce_tokens(domain, sums) if how.by_tokens else sums
    below = torch.where(sums[..., -1:] > 0, sums[..., -1:], 1.0)
    return sums[..., :-1] / below, dropped / below


def _again(
    given: tuple[Tensor, ...], needed: tuple[bool, ...], how: How, grad: Tensor
) -> list[Tensor | None]:
    """Gradients that can be differentiated again."""
    aliases = [x.view_as(x) for x in given]  # one tensor may be queries and keys
    wanted = [x for x, need in zip(aliases, needed, strict=False) if need]
    out, _ = composed(aliases[0], aliases[1], aliases[2], how)
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
    return [next(found) if need else None for need in needed[:3]]


def _all_rows(x: Tensor, sharding: Sharding) -> Tensor:
    return sharding.domain.all_gather(x.movedim(2, 0), sharding.sizes).movedim(0, 2)


def _ids(ids: range, like: Tensor) -> Tensor:
    return torch.arange(ids.start, ids.stop, device=like.device)
