"""Tiles: attention of some queries to some keys, and how tiles are merged.

A tile has its output and its log-sum-exp, by which tiles are merged (Milakov and Gimelshein 2018;
Rabe and Staats 2021). Backward recomputes a tile from the log-sum-exp of all tiles (Dao et al.
2022), so the matrix of all pairs is never stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from meshshard.tensor._torch_private import FLASH, FLASH_BACKWARD
from meshshard.tensor.keyed_random import hash_uniform

FLASH_ROWS = 2048  # queries in a call of the flash kernel
COLUMNS = 1024  # keys of a tile without the kernel
PAIRS = 2**22  # scores that are stored at once without the kernel


@dataclass(frozen=True)
class DropoutKey:
    """Dropout of weights, keyed by the rows of query and key in the source.

    The mask does not depend on the partition.

    Attributes:
        seed: seed of one call.
        p: probability that a weight is dropped.
        rows: (n_queries,) row in the source of owned queries.
        columns: (n_keys,) row in the source of all keys.
    """

    seed: int
    p: float
    rows: Tensor
    columns: Tensor

    def factor(self, rows: slice, columns: slice, like: Tensor) -> Tensor:
        """The factor of weights, (batch, heads, rows, columns): 0 if dropped, else 1 / (1 - p)."""
        layers = torch.arange(like.shape[0] * like.shape[1], device=like.device)
        layers = layers.view(*like.shape[:2], 1, 1)
        draw = hash_uniform(self.seed, self.rows[rows, None], self.columns[None, columns], layers)
        wide = torch.promote_types(like.dtype, torch.float32)
        return (draw >= self.p).to(wide) / (1 - self.p if self.p < 1 else 1)


@dataclass(frozen=True)
class Tile:
    """All arguments of a tile but queries, keys and values.

    Attributes:
        scale: factor of the scores.
        causal: query i attends to keys up to i, both counted within the tile.
        mask: (batch or 1, heads or 1, queries or 1, keys or 1), bool (true: attends) or added to
            the scores.
        factor: (batch, heads, queries, keys) factor of the weights, for dropout.
    """

    scale: float
    causal: bool = False
    mask: Tensor | None = None
    factor: Tensor | None = None

    def bias(self, q: Tensor, k: Tensor) -> Tensor | None:
        """The mask as numbers to add to scores, expanded in queries and keys."""
        if self.mask is None:
            return None
        mask = self.mask
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
        return mask.to(q.dtype).expand(*mask.shape[:2], q.shape[-2], k.shape[-2])


def has_flash_kernel(q: Tensor, v: Tensor, dropped: bool) -> bool:
    """Whether torch's flash kernel supports it: on a CPU, without dropout, with equal widths."""
    return not dropped and q.is_cpu and q.shape[-1] == v.shape[-1]


def _for_kernel(x: Tensor) -> Tensor:
    """The same rows with adjacent features and without overlap, which the flash kernel assumes."""
    dense = x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1]
    return x if dense else x.contiguous()


def attend(q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    """Output (batch, heads, queries, width) and log-sum-exp (batch, heads, queries) of a tile."""
    if has_flash_kernel(q, v, tile.factor is not None):
        bias = tile.bias(q, k)
        q, k, v = (_for_kernel(x) for x in (q, k, v))
        out, lse = FLASH(q, k, v, 0.0, tile.causal, attn_mask=bias, scale=tile.scale)
        if bias is not None:  # the kernel returns 0 for a query that attends to no key
            lse = lse.masked_fill((bias == -torch.inf).all(-1), -torch.inf)
        return out, lse
    scores = _scores(q, k, tile)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - zero_if_empty(lse)[..., None])
    weights = weights if tile.factor is None else weights * tile.factor
    return weights @ v.to(weights.dtype), lse


def attend_backward(
    grad: Tensor, found: tuple[Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, tile: Tile
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a tile's queries, keys and values.

    Args:
        grad: gradient of the output.
        found: output and finite log-sum-exp of all tiles.
        q: queries of the tile.
        k: keys of the tile.
        v: values of the tile.
        tile: the same as in forward.
    """
    out, lse = found
    if has_flash_kernel(q, v, tile.factor is not None):
        bias = tile.bias(q, k)
        grad, out, q, k, v = (_for_kernel(x) for x in (grad, out, q, k, v))
        dq, dk, dv = FLASH_BACKWARD(
            grad, q, k, v, out, lse, 0.0, tile.causal, attn_mask=bias, scale=tile.scale
        )
        return dq, dk, dv
    weights = torch.exp(_scores(q, k, tile) - lse[..., None])
    grad, out, q, k, v = (x.to(weights.dtype) for x in (grad, out, q, k, v))
    dweights = grad @ v.mT
    if tile.factor is not None:
        dweights = dweights * tile.factor
    dscores = (dweights - (grad * out).sum(-1, keepdim=True)) * weights * tile.scale
    weights = weights if tile.factor is None else weights * tile.factor
    return dscores @ k, dscores.mT @ q, weights.mT @ grad


def _scores(q: Tensor, k: Tensor, tile: Tile) -> Tensor:
    """Masked scores, in float32 at least."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ k.to(wide).mT * tile.scale
    bias = tile.bias(q, k)
    if bias is not None:
        scores = scores + bias
    if tile.causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~allowed, -torch.inf)
    return scores


def zero_if_empty(lse: Tensor) -> Tensor:
    """Log-sum-exp with 0 instead of -inf, the value of an empty sum, to be subtracted safely."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Merge a tile into the result of others with the same queries, in place."""
    top = torch.logaddexp(lse, more_lse.to(lse.dtype))
    safe = zero_if_empty(top)
    out.mul_(torch.exp(lse - safe)[..., None])
    out.add_(more * torch.exp(more_lse - safe)[..., None])
    lse.copy_(top)


def causal_parts(rows: range, columns: range, causal: bool) -> Iterator[tuple[slice, slice, bool]]:
    """The parts of a tile with any attention, and whether each is causal within itself.

    Args:
        rows: ids of the queries.
        columns: ids of the keys.
        causal: whether query i attends to keys up to i only.
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


def tile_rows(q: Tensor, n_keys: int, flash: bool) -> Iterator[slice]:
    """Consecutive queries: `FLASH_ROWS` for the flash kernel, else as many as make `PAIRS`."""
    n = q.shape[-2]
    each = FLASH_ROWS if flash else max(16, PAIRS // max(1, q.shape[0] * q.shape[1] * n_keys))
    for start in range(0, n, each):
        yield slice(start, min(start + each, n))


def tile_columns(n: int) -> Iterator[tuple[int, int]]:
    """Consecutive keys, from start to before stop, without the flash kernel."""
    for start in range(0, n, COLUMNS):
        yield start, min(start + COLUMNS, n)
