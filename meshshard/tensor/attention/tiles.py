"""Tiles: attention of some queries to some keys, which add up to that of all to all.

A tile gives its output and the logarithm of the sum of its exponentials; tiles are merged by these
(Milakov and Gimelshein 2018; Rabe and Staats 2021). Backward computes a tile again from the log-sum
of all tiles (Dao et al. 2022), so no matrix of all pairs is ever whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from meshshard.tensor.rules.random import hash_uniform

__all__ = [
    "DropoutKey",
    "Tile",
    "attend",
    "attend_backward",
    "finite",
    "is_fast",
    "merge",
    "pieces",
    "tile_columns",
    "tile_rows",
]

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
FLASH_ROWS = 2048  # queries a call of the kernel
COLUMNS = 1024  # keys of a tile where plain mathematics holds its scores
PAIRS = 2**22  # that plain mathematics holds at once


@dataclass(frozen=True)
class DropoutKey:
    """Dropout of weights, keyed by both rows in the source, so by no partition.

    Attributes:
        seed: of one call.
        p: probability that a weight is dropped.
        rows: (n_queries,) row in the source of own queries.
        columns: (n_keys,) row in the source of all keys.
    """

    seed: int
    p: float
    rows: Tensor
    columns: Tensor

    def factor(self, rows: slice, columns: slice, like: Tensor) -> Tensor:
        """What weights of shape (batch, heads, rows, columns) are multiplied by."""
        layers = torch.arange(like.shape[0] * like.shape[1], device=like.device)
        layers = layers.view(*like.shape[:2], 1, 1)
        draw = hash_uniform(self.seed, self.rows[rows, None], self.columns[None, columns], layers)
        wide = torch.promote_types(like.dtype, torch.float32)
        return (draw >= self.p).to(wide) / (1 - self.p if self.p < 1 else 1)


@dataclass(frozen=True)
class Tile:
    """What a tile of scores is besides queries and keys.

    Attributes:
        scale: factor of the products.
        causal: query i meets keys up to i, both counted within the tile.
        mask: (batch or 1, heads or 1, queries or 1, keys or 1), bool (true: meets) or added.
        factor: (batch, heads, queries, keys) of the weights, for dropout.
    """

    scale: float
    causal: bool = False
    mask: Tensor | None = None
    factor: Tensor | None = None

    def bias(self, q: Tensor, k: Tensor) -> Tensor | None:
        """The mask as numbers to add, of full size in queries and keys."""
        if self.mask is None:
            return None
        mask = self.mask
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
        return mask.to(q.dtype).expand(*mask.shape[:2], q.shape[-2], k.shape[-2])


def is_fast(q: Tensor, v: Tensor, dropped: bool) -> bool:
    """Whether torch's kernel takes it: on a CPU, without dropout, widths alike."""
    return not dropped and q.is_cpu and q.shape[-1] == v.shape[-1]


def attend(q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    """Output (batch, heads, queries, width) and log-sum-exp (batch, heads, queries) of a tile."""
    if is_fast(q, v, tile.factor is not None):
        bias = tile.bias(q, k)
        out, lse = _flash(q, k, v, 0.0, tile.causal, attn_mask=bias, scale=tile.scale)
        if bias is not None:  # the kernel says 0 where a query meets no key
            lse = lse.masked_fill((bias == -torch.inf).all(-1), -torch.inf)
        return out, lse
    scores = _scores(q, k, tile)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - finite(lse)[..., None])
    weights = weights if tile.factor is None else weights * tile.factor
    return weights @ v.to(weights.dtype), lse


def attend_backward(
    grad: Tensor, found: tuple[Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, tile: Tile
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a tile's queries, keys and values.

    Args:
        grad: of the output of all tiles.
        found: output and log-sum-exp of all tiles, the latter finite.
        q: queries of the tile.
        k: keys of the tile.
        v: values of the tile.
        tile: as it was forward.
    """
    out, lse = found
    if is_fast(q, v, tile.factor is not None):
        bias = tile.bias(q, k)
        dq, dk, dv = _flash_backward(
            grad, q, k, v, out, lse, 0.0, tile.causal, attn_mask=bias, scale=tile.scale
        )
        return dq, dk, dv
    weights = torch.exp(_scores(q, k, tile) - lse[..., None])
    grad, out, q, k, v = (x.to(weights.dtype) for x in (grad, out, q, k, v))
    apart = grad @ v.mT
    if tile.factor is not None:
        apart = apart * tile.factor
    apart = (apart - (grad * out).sum(-1, keepdim=True)) * weights * tile.scale
    weights = weights if tile.factor is None else weights * tile.factor
    return apart @ k, apart.mT @ q, weights.mT @ grad


def _scores(q: Tensor, k: Tensor, tile: Tile) -> Tensor:
    """Scaled products with the mask, in float32 at least."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ k.to(wide).mT * tile.scale
    bias = tile.bias(q, k)
    if bias is not None:
        scores = scores + bias
    if tile.causal:
        met = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~met, -torch.inf)
    return scores


def finite(lse: Tensor) -> Tensor:
    """Log-sums with 0 for those of nothing, which stand in a difference of exponents."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Add a tile to others of the same queries, in place."""
    top = torch.logaddexp(lse, more_lse.to(lse.dtype))
    safe = finite(top)
    out.mul_(torch.exp(lse - safe)[..., None])
    out.add_(more * torch.exp(more_lse - safe)[..., None])
    lse.copy_(top)


def pieces(rows: range, columns: range, causal: bool) -> Iterator[tuple[slice, slice, bool]]:
    """Which rows of a tile meet which columns, as full tiles and as causal ones.

    Args:
        rows: ids of the queries.
        columns: ids of the keys.
        causal: whether query i meets keys up to i alone.
    """
    if not len(rows) or not len(columns):
        return
    if not causal:
        yield slice(0, len(rows)), slice(0, len(columns)), False
        return
    before = min(max(rows.start - columns.start, 0), len(columns))
    if before:
        yield slice(0, len(rows)), slice(0, before), False
    skip = max(columns.start - rows.start, 0)
    n = min(len(rows) - skip, len(columns) - before)
    if n > 0:
        yield slice(skip, len(rows)), slice(before, before + n), True


def tile_rows(q: Tensor, n_keys: int, large: bool) -> Iterator[slice]:
    """Queries in runs: large ones for the kernel, which holds no scores, or those of few pairs."""
    n = q.shape[-2]
    each = FLASH_ROWS if large else max(16, PAIRS // max(1, q.shape[0] * q.shape[1] * n_keys))
    for start in range(0, n, each):
        yield slice(start, min(start + each, n))


def tile_columns(n: int) -> Iterator[tuple[int, int]]:
    """Keys in runs, each from one to before another, for plain mathematics."""
    for start in range(0, n, COLUMNS):
        yield start, min(start + COLUMNS, n)
