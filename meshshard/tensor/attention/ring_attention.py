"""Attention of owned rows: by a ring, by tokens or locally; one function with its own backward.

Sharded queries and sharded keys: blocks of keys and values go round the ranks (ring). Replicated
queries and sharded keys: every rank reduces its owned keys, and the results are merged (tokens).
Sharded queries and replicated keys: local, without communication.
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
    causal_parts,
    has_flash_kernel,
    merge,
    tile_columns,
    tile_rows,
    zero_if_empty,
)
from meshshard.tensor.sharding import Sharding
from meshshard.tensor.tokens import reduce_tokens

__all__ = ["AttentionSpec", "attention_with_weights", "ring_attention"]


@dataclass(frozen=True)
class AttentionSpec:
    """All arguments of attention but queries, keys and values.

    Attributes:
        queries: how the queries are divided; the sharding of one rank if they are replicated.
        keys: how the keys are divided; the sharding of one rank if they are replicated.
        scale: factor of the scores.
        causal: query i attends to keys up to i, by global ids.
        mask: (batch or 1, heads or 1, owned queries or 1, all keys or 1), bool or added to scores.
        dropout: dropout of weights.
    """

    queries: Sharding
    keys: Sharding
    scale: float
    causal: bool = False
    mask: Tensor | None = None
    dropout: DropoutKey | None = None

    @property
    def by_tokens(self) -> bool:
        """Whether queries are replicated and keys are sharded."""
        return self.queries.domain.size == 1 < self.keys.domain.size

    def query_ids(self) -> range:
        """Ids of owned queries."""
        return range(self.queries.first, self.queries.first + self.queries.own)

    def tile(self, rows: slice, columns: slice, causal: bool, like: Tensor) -> Tile:
        """The tile of some owned queries (rows) and some keys by id (columns)."""
        mask = self.mask
        if mask is not None:
            mask = mask if mask.shape[-2] == 1 else mask[..., rows, :]
            mask = mask if mask.shape[-1] == 1 else mask[..., columns]
        factor = None if self.dropout is None else self.dropout.factor(rows, columns, like)
        return Tile(self.scale, causal, mask, factor)


def ring_attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Attention of owned queries to all keys: softmax(q k^T scale) v, (batch, heads, rows, width).

    Keys may have fewer heads than queries (grouped-query attention). Second derivatives gather all
    keys and hold scores of owned queries x all keys.

    Communication: ring: ranks - 1 all-to-alls a block of 1,024 rows of keys and values forward,
    twice as many backward; tokens: two all-reduces (largest exponents; sums) forward, one backward.
    """
    out: Tensor = _RingAttention.apply(q, k, v, spec)  # type: ignore[no-untyped-call]
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        out, lse = _forward(q, k, v, spec)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.spec = spec
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        spec, needed = ctx.spec, ctx.needs_input_grad
        if torch.is_grad_enabled():  # create_graph=True
            return (*_differentiable_backward((q, k, v), needed, spec, grad), None)
        if spec.by_tokens:
            grad = spec.keys.domain.all_reduce(grad)
        return (*_backward(grad, (out, lse), (q, k, v), spec), None)


def _forward(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    keys = _KeyBlocks(q, k, v, spec)
    blocks = keys.blocks()
    wide = torch.promote_types(q.dtype, torch.float32)
    if keys.owned_tile is not None:
        next(blocks)
        out, lse = (x.to(wide) for x in attend(q, k, v, keys.owned_tile))
    else:
        b, h, n, _ = q.shape
        out = q.new_zeros((b, h, n, v.shape[-1]), dtype=wide)
        lse = q.new_full((b, h, n), -torch.inf, dtype=wide)
    for block in blocks:
        k_block, v_block = keys.keys_and_values(block)
        for rows, columns, tile in keys.tiles(block):
            more = attend(q[:, :, rows], k_block[:, :, columns], v_block[:, :, columns], tile)
            merge(out[:, :, rows], lse[:, :, rows], *more)
    if spec.by_tokens:
        out, lse = _merge_ranks(out, lse, spec.keys.domain)
    return out.to(q.dtype), lse


def _merge_ranks(out: Tensor, lse: Tensor, domain: Domain) -> tuple[Tensor, Tensor]:
    """Replicated queries: the results of all ranks, each for its owned keys, merged."""
    top = zero_if_empty(domain.all_reduce(lse, "max"))
    weight = torch.exp(lse - top)[..., None]
    sums = reduce_tokens(domain, torch.cat([out * weight, weight], -1))
    denominator = sums[..., -1:]
    out = torch.where(denominator > 0, sums[..., :-1] / denominator, 0.0)
    return out, top + torch.log(denominator[..., 0])


def _backward(
    grad: Tensor,
    found: tuple[Tensor, Tensor],
    given: tuple[Tensor, Tensor, Tensor],
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = given
    out, lse = found[0], zero_if_empty(found[1])
    keys = _KeyBlocks(q, k, v, spec)
    blocks = keys.blocks()
    if keys.owned_tile is not None:
        next(blocks)
        first = attend_backward(grad, (out, lse), q, k, v, keys.owned_tile)
        dq, dk, dv = (x.to(lse.dtype) for x in first)
    else:
        dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))

    def _add(start: int, rows: Tensor) -> None:
        for into, more in zip((dk, dv), keys.split(rows), strict=True):
            into[:, :, start : start + len(rows)] += more

    for block in blocks:
        k_block, v_block = keys.keys_and_values(block)
        owned = slice(block.start, block.stop)
        into = (dq, dk[:, :, owned], dv[:, :, owned])
        if block.rows is not None:
            grads = torch.zeros_like(block.rows, dtype=lse.dtype)
            into = (dq, *keys.split(grads))
        for rows, columns, tile in keys.tiles(block):
            r, c = (..., rows, slice(None)), (..., columns, slice(None))
            mine = out[r], lse[..., rows]
            parts = attend_backward(grad[r], mine, q[r], k_block[c], v_block[c], tile)
            for x, at, part in zip(into, (r, c, c), parts, strict=True):
                x[at] += _sum_over_groups(part, x.shape[1])
        if block.rows is not None:
            keys.ring.give_back(block, grads, _add)
    keys.ring.finish(_add)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class _KeyBlocks:
    """Keys and values of all ranks in blocks, and the tiles of owned queries with them."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> None:
        self.q, self.k, self.v, self.spec = q, k, v, spec
        sharding = spec.keys
        domain, sizes = sharding.domain, sharding.sizes
        if spec.by_tokens:  # owned keys only
            domain, sizes = Domain(), (sharding.own,)
        self.first = sharding.first if spec.by_tokens else 0
        self.ring = Ring(domain, sizes)
        self.groups = q.shape[1] // max(k.shape[1], 1)
        simple = spec.mask is None and self.groups == 1
        self.flash = simple and has_flash_kernel(q, v, spec.dropout is not None)
        self.owned_tile = self._owned_tile() if self.flash else None

    def _owned_tile(self) -> Tile | None:
        """The tile of all owned queries and owned keys, if one tile covers them."""
        n, keys = self.q.shape[2], self.spec.keys
        columns = range(keys.first, keys.first + keys.own)
        parts = list(causal_parts(self.spec.query_ids(), columns, self.spec.causal))
        if len(parts) != 1 or parts[0][:2] != (slice(0, n), slice(0, keys.own)):
            return None
        return Tile(self.spec.scale, parts[0][2])

    def blocks(self) -> Iterator[Block]:
        """The blocks of all keys; if there is an `owned_tile`, the first has all owned keys."""
        for block in self.ring.blocks(self._take):
            first = block.first + self.first
            if block.rows is not None or self.owned_tile is not None:
                yield replace(block, first=first)
                continue
            for start, stop in tile_columns(block.stop):  # the block has all owned rows
                yield replace(block, start=start, stop=stop, first=first + start)

    def tiles(self, block: Block) -> Iterator[tuple[slice, slice, Tile]]:
        """Owned queries, keys of the block, and the tile of both."""
        spec, ids = self.spec, self.spec.query_ids()
        columns = range(block.first, block.first + block.stop - block.start)
        for run in tile_rows(self.q, len(columns), self.flash):
            for r, c, causal in causal_parts(ids[run], columns, spec.causal):
                rows = slice(run.start + r.start, run.start + r.stop)
                key_ids = slice(columns.start + c.start, columns.start + c.stop)
                yield rows, c, spec.tile(rows, key_ids, causal, self.q)

    def _take(self, start: int, stop: int) -> Tensor:
        return _rows(self.k[:, :, start:stop], self.v[:, :, start:stop])

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows as keys and values, (batch, heads, n, width), in the same memory."""
        b, h = self.k.shape[:2]
        width = b * h * self.k.shape[-1]
        k = rows[:, :width].view(-1, b, h, self.k.shape[-1]).movedim(0, 2)
        v = rows[:, width:].view(-1, b, h, self.v.shape[-1]).movedim(0, 2)
        return k, v

    def keys_and_values(self, block: Block) -> tuple[Tensor, Tensor]:
        """Keys and values of a block, repeated to the number of heads of the queries."""
        owned = slice(block.start, block.stop)
        k, v = self.k[:, :, owned], self.v[:, :, owned]
        if block.rows is not None:
            k, v = self.split(block.rows)
        if self.groups == 1:
            return k, v
        return k.repeat_interleave(self.groups, 1), v.repeat_interleave(self.groups, 1)


def _sum_over_groups(x: Tensor, heads: int) -> Tensor:
    """Gradients of keys or values, added over the query heads that share a head."""
    b, _, n, width = x.shape
    return x if x.shape[1] == heads else x.reshape(b, heads, -1, n, width).sum(2)


def _rows(k: Tensor, v: Tensor) -> Tensor:
    flat = [x.movedim(2, 0).reshape(x.shape[2], _width(x)) for x in (k, v)]
    return torch.cat(flat, 1)


def _width(x: Tensor) -> int:
    return x.shape[0] * x.shape[1] * x.shape[3]


# ------------------------------------------------------------------------ differentiable operations
def attention_with_weights(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """As `ring_attention`, by differentiable operations, and the weights.

    The weights are (…, owned queries, all keys), or (…, queries, owned keys) if the queries are
    replicated.

    Communication: ring: two all-to-alls (all keys, all values) forward and backward; tokens: as
    `ring_attention`.
    """
    if spec.queries.domain.size > 1 and spec.keys.domain.size > 1:
        k, v = (_all_rows(x, spec.keys) for x in (k, v))
    first = spec.keys.first if spec.by_tokens else 0
    columns = slice(first, first + k.shape[2])
    groups = q.shape[1] // max(k.shape[1], 1)
    if groups > 1:
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    tile = spec.tile(slice(0, q.shape[2]), columns, False, q)
    scores = q @ k.mT * spec.scale
    bias = tile.bias(q, k)
    scores = scores if bias is None else scores + bias
    if spec.causal:
        allowed = _ids(spec.query_ids(), q)[:, None] >= _ids(range(columns.start, columns.stop), q)
        scores = scores.masked_fill(~allowed, -torch.inf)
    return _softmax(scores, v, tile.factor, spec)


def _softmax(
    scores: Tensor, v: Tensor, factor: Tensor | None, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Output and weights; 0 for a query that attends to no key."""
    domain = spec.keys.domain
    lowest = scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    top = torch.cat([scores.detach(), lowest], -1).amax(-1, keepdim=True)
    top = zero_if_empty(domain.all_reduce(top, "max") if spec.by_tokens else top)
    powers = torch.exp(scores - top)
    dropped = powers if factor is None else powers * factor
    sums = torch.cat([dropped @ v, powers.sum(-1, keepdim=True)], -1)
    sums = reduce_tokens(domain, sums) if spec.by_tokens else sums
    denominator = torch.where(sums[..., -1:] > 0, sums[..., -1:], 1.0)
    return sums[..., :-1] / denominator, dropped / denominator


def _differentiable_backward(
    given: tuple[Tensor, ...], needed: tuple[bool, ...], spec: AttentionSpec, grad: Tensor
) -> list[Tensor | None]:
    """Gradients that can be differentiated again."""
    aliases = [x.view_as(x) for x in given]  # queries and keys may be the same tensor
    wanted = [x for x, need in zip(aliases, needed, strict=False) if need]
    out, _ = attention_with_weights(aliases[0], aliases[1], aliases[2], spec)
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
    return [next(found) if need else None for need in needed[:3]]


def _all_rows(x: Tensor, sharding: Sharding) -> Tensor:
    return sharding.domain.all_gather(x.movedim(2, 0), sharding.sizes).movedim(0, 2)


def _ids(ids: range, like: Tensor) -> Tensor:
    return torch.arange(ids.start, ids.stop, device=like.device)
