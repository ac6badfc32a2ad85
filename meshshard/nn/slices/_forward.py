"""Forward passes of a slice attention layer: two over the rows, and one over tokens between them.

There are two ways. With tiles, only the input is kept for the gradient, which `_backward` computes
tile by tile. Without, autograd records the operations: for few rows (there tiles take 1.5 times,
the modules themselves 1.0 to 1.2 times the CPU time of a training step, measured at 256 to 4,096
rows, C 128 and 256), under autocast, and for second derivatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from meshshard.nn.slices._backward import Backward, GradientSums, vjp
from meshshard.nn.slices._math import SliceLayer, Stage, deslice, slice_means
from meshshard.nn.slices._tiles import SliceSums, Tiling

__all__ = ["apply_layer", "apply_layer_in_place", "map_rows"]


def apply_layer(layer: SliceLayer, tiling: Tiling, x: Tensor) -> Tensor:
    """The layer on the rows (B, n, C) of this rank, differentiable to any order.

    Communication: one all-reduce of (B, H, G, D + 1) forward; backward one of (B, H, G, D), or
    (B, H, G, D + 1) without tiles. Where sums are added in order, an all-to-all in its place.
    """
    if not tiling.tile:
        return _recorded(layer, tiling, x)
    if not torch.is_grad_enabled():
        return _tiled(layer, tiling, x)[0]
    out: Tensor = _Tiled.apply(x, layer, tiling, *layer.tensors)  # type: ignore[no-untyped-call]
    return out


@torch.no_grad()
def apply_layer_in_place(layer: SliceLayer, tiling: Tiling, x: Tensor) -> Tensor:
    """The layer without gradients, in the memory of x unless its width changes.

    Communication: one all-reduce of (B, H, G, D + 1), or an all-to-all in order.
    """
    return _tiled(layer, tiling, x, in_place=True)[0]


def _recorded(layer: SliceLayer, tiling: Tiling, x: Tensor) -> Tensor:
    """The layer as operations that autograd records, shard by shard."""
    tiling = replace(tiling, tile=0)
    sums, tiles, weights = SliceSums(tiling), tiling.tiles(), []
    for shard, rows in tiles:
        w, f = layer.sliced(x[:, rows], rows)
        sums.add(shard, w, f)
        weights.append(w)
    tokens = layer.attention(slice_means(sums.total(), layer.eps, x.dtype))
    outs = [
        layer.output(x[:, rows], deslice(w, tokens))
        for (_, rows), w in zip(tiles, weights, strict=True)
    ]
    return torch.cat(outs, 1) if len(outs) > 1 else outs[0]


def _tiled(
    layer: SliceLayer, tiling: Tiling, x: Tensor, in_place: bool = False
) -> tuple[Tensor, Tensor, list[Tensor] | None]:
    """Output rows, sums over all rows of all ranks, and the weights if they are kept.

    The memory of the output first holds m, from which the weights are computed; in place there is
    no such memory, and m is computed again.
    """
    sums = SliceSums(tiling, weights=[] if tiling.keep_weights else None)
    fresh = x if in_place else torch.empty_like(x)
    m = None if in_place or tiling.keep_weights else fresh
    tiles = tiling.tiles()
    for shard, rows in tiles:
        sums.add(shard, *layer.sliced(x[:, rows], rows, None if m is None else m[:, rows]))
    total = sums.total()
    tokens = layer.attention(slice_means(total, layer.eps, x.dtype))
    out = fresh if layer.width == x.shape[2] else x.new_empty(*x.shape[:2], layer.width)
    for i, (_, rows) in enumerate(tiles):
        if sums.weights:
            desliced = deslice(sums.weights[i], tokens)
        else:
            again = layer.projected(x[:, rows]) if m is None else m[:, rows]
            desliced = layer.deslice(again, rows, tokens)
        layer.output(x[:, rows], desliced, out[:, rows])
    return out, total, sums.weights


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: SliceLayer, tiling: Tiling, *tensors: Tensor) -> Tensor:
        out, total, weights = _tiled(layer, tiling, x)
        ctx.save_for_backward(x, total, *tensors)
        ctx.layer, ctx.tiling, ctx.weights = layer, tiling, weights
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Tile by tile; through recorded operations where the gradient is differentiated again."""
        x, total, *tensors = ctx.saved_tensors
        layer, tiling = ctx.layer.with_tensors(tensors), ctx.tiling
        found: Sequence[Tensor | None]
        if torch.is_grad_enabled():
            out = _recorded(layer, tiling, x)
            found = vjp([out], [x, *tensors], [grad], create_graph=True)
        else:
            found = Backward(layer, tiling, x, total, ctx.weights).gradients(grad)
        return found[0], None, None, *found[1:]


# --------------------------------------------------------------------------- functions of each row
def map_rows(stage: Stage, tiling: Tiling, x: Tensor, summed: bool = False) -> Tensor:
    """A function of each row on the rows (B, n, C) of this rank, or the sum of its tiles' values.

    With tiles, only the input is kept for the gradient.

    Communication: none.
    """
    if not tiling.tile:
        return stage(x)  # type: ignore[no-any-return]
    out: Tensor = _MapRows.apply(x, stage, tiling, summed, *stage.tensors)  # type: ignore[no-untyped-call]
    return out


class _MapRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, stage: Stage, tiling: Tiling, summed: bool, *tensors: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, *tensors)
        ctx.stage, ctx.tiling, ctx.summed = stage, tiling, summed
        tiles = [rows for _, rows in tiling.tiles()]
        if summed:
            total: Tensor = reduce(torch.add, (stage(x[:, rows]) for rows in tiles))
            return total
        first: Tensor = stage(x[:, tiles[0]])
        out = first.new_empty(*x.shape[:2], first.shape[2])
        out[:, tiles[0]] = first
        for rows in tiles[1:]:
            out[:, rows] = stage(x[:, rows])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Tile by tile; recorded by autograd where the gradient is differentiated again."""
        x, *tensors = ctx.saved_tensors
        if torch.is_grad_enabled():
            out = ctx.stage.with_tensors(tensors)(x)
            found = vjp([out], [x, *tensors], [grad], create_graph=True)
            return found[0], None, None, None, *found[1:]
        leaves = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
        stage, sums = ctx.stage.with_tensors(leaves), GradientSums(leaves)
        gx = torch.empty_like(x) if x.requires_grad else None
        for _, rows in ctx.tiling.tiles():
            leaf = x[:, rows].detach().requires_grad_(x.requires_grad)
            with torch.enable_grad():
                out = stage(leaf)
            found = vjp([out], [leaf, *leaves], [grad if ctx.summed else grad[:, rows]])
            sums.add(found[1:])
            if gx is not None and found[0] is not None:
                gx[:, rows] = found[0]
        return gx, None, None, None, *sums.result()
