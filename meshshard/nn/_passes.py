"""Passes: a layer of slice attention as two passes over tiles of rows around a stage of tokens.

It is differentiated tile by tile, so that of N rows only the input is kept; or run as ordinary
operations of autograd where that is better: few rows, mixed precision, second derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from meshshard.nn._backward import Backward, Gradients, vjp
from meshshard.nn._slices import Layer, Piece, Run, Sums, means

__all__ = ["apply", "by_rows", "infer"]


def apply(layer: Layer, run: Run, x: Tensor) -> Tensor:
    """The layer on own rows (B, n, C), differentiable to any order.

    Communication: one all-reduce of (B, H, G, D + 1) forward; backward one of (B, H, G, D), or
    (B, H, G, D + 1) without tiles. Where tokens are added in order, an all-to-all in its place.
    """
    if not run.tile:
        return _ordinary(layer, run, x)
    if not torch.is_grad_enabled():
        return _forward(layer, run, x, [] if run.keep else None)[0]
    out: Tensor = _Tiled.apply(x, layer, run, *layer.tensors)  # type: ignore[no-untyped-call]
    return out


def _ordinary(layer: Layer, run: Run, x: Tensor) -> Tensor:
    run = replace(run, tile=0)
    sums, tiles = Sums(run, kept=[]), run.tiles()
    for shard, rows in tiles:
        sums.add(shard, *layer.sliced(x[:, rows], rows)[:2])
    answers = layer.tokens(means(sums.total(), layer.eps, x.dtype))
    assert sums.kept is not None
    outs = [
        layer.ended(x[:, rows], w, answers) for (_, rows), w in zip(tiles, sums.kept, strict=True)
    ]
    return torch.cat(outs, 1) if len(outs) > 1 else outs[0]


def _forward(layer: Layer, run: Run, x: Tensor, kept: list[Tensor] | None) -> tuple[Tensor, Tensor]:
    """Output rows and the sums over all rows; the weights go into `kept`.

    The output's memory first holds what the weights are made of, where these are not kept.
    """
    sums, out = Sums(run, kept=kept), torch.empty_like(x)
    for shard, rows in run.tiles():
        w, f, middle = layer.sliced(x[:, rows], rows)
        sums.add(shard, w, f)
        if kept is None:
            out[:, rows] = middle
    total = sums.total()
    end = partial(_ended, layer, layer.tokens(means(total, layer.eps, x.dtype)), kept, out)
    return _pass(end, None, run, x, out)[0], total


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Layer, run: Run, *tensors: Tensor) -> Tensor:
        """The value."""
        kept: list[Tensor] | None = [] if run.keep else None
        out, total = _forward(layer, run, x, kept)
        ctx.save_for_backward(x, total, *tensors)
        ctx.layer, ctx.run, ctx.kept = layer, run, kept
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """The gradient, tile by tile; by ordinary operations where it is differentiated again."""
        x, total, *tensors = ctx.saved_tensors
        layer, run = ctx.layer.on(tensors), ctx.run
        found: Sequence[Tensor | None]
        if torch.is_grad_enabled():
            found = vjp([_ordinary(layer, run, x)], [x, *tensors], [grad], create_graph=True)
        else:
            found = Backward(layer, run, x, total, ctx.kept).gradients(grad)
        return found[0], None, None, *found[1:]


# --------------------------------------------------------------------------------------- rows alone
def by_rows(piece: Piece, run: Run, x: Tensor, summed: bool = False) -> Tensor:
    """A function of rows alone, or the sum of one over own rows; only the input is kept.

    Communication: none.
    """
    if not run.tile:
        return piece(x)  # type: ignore[no-any-return]
    out: Tensor = _ByRows.apply(x, piece, run, summed, *piece.tensors)  # type: ignore[no-untyped-call]
    return out


class _ByRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, piece: Piece, run: Run, summed: bool, *tensors: Tensor
    ) -> Tensor:
        """The value."""
        ctx.save_for_backward(x, *tensors)
        ctx.piece, ctx.run, ctx.summed = piece, run, summed
        outs = (piece(x[:, rows]) for _, rows in run.tiles())
        return reduce(torch.add, outs) if summed else torch.cat(list(outs), 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """The gradient, tile by tile."""
        x, *tensors = ctx.saved_tensors
        if torch.is_grad_enabled():
            out = replace(ctx.piece, tensors=tuple(tensors))(x)
            found = vjp([out], [x, *tensors], [grad], create_graph=True)
            return found[0], None, None, None, *found[1:]
        leaves = tuple(t.detach().requires_grad_(t.requires_grad) for t in tensors)
        piece, sums = replace(ctx.piece, tensors=leaves), Gradients(leaves)
        gx = torch.empty_like(x) if x.requires_grad else None
        for _, rows in ctx.run.tiles():
            leaf = x[:, rows].detach().requires_grad_(x.requires_grad)
            with torch.enable_grad():
                out = piece(leaf)
            found = vjp([out], [leaf, *leaves], [grad if ctx.summed else grad[:, rows]])
            sums.add(found[1:])
            if gx is not None and found[0] is not None:
                gx[:, rows] = found[0]
        return gx, None, None, None, *sums.result()


# ---------------------------------------------------------------------------------- a whole model
@torch.no_grad()
def infer(first: Piece, layers: Sequence[Layer], run: Run, x: Tensor) -> Tensor:
    """All layers in one pass more than there are: each tile ends one and begins the next.

    Only the hidden rows (B, n, C) are kept.

    Communication: one all-reduce of (B, H, G, D + 1) a layer, or an all-to-all in order.
    """
    hidden, sums = _pass(lambda tile, i, rows: first(tile), layers[0], run, x)
    for ending, beginning in zip(layers, [*layers[1:], None], strict=True):
        answers = ending.tokens(means(sums.total(), ending.eps, hidden.dtype))
        end = partial(_ended, ending, answers, sums.kept, None)
        hidden, sums = _pass(end, beginning, run, hidden, hidden)
    return hidden


def _pass(
    end: Callable[[Tensor, int, slice], Tensor],
    beginning: Layer | None,
    run: Run,
    x: Tensor,
    into: Tensor | None = None,
) -> tuple[Tensor, Sums]:
    """What `end` makes of all rows, `into` where it fits, and the sums for the next layer."""
    sums = Sums(run, kept=[] if run.keep else None)
    for i, (shard, rows) in enumerate(run.tiles()):
        y = end(x[:, rows], i, rows)
        if i == 0 and (into is None or into.shape[2:] != y.shape[2:]):
            into = y.new_empty((*x.shape[:2], *y.shape[2:]))
        assert into is not None
        into[:, rows] = y
        if beginning is not None:
            sums.add(shard, *beginning.sliced(y, rows)[:2])
    assert into is not None
    return into, sums


def _ended(
    layer: Layer,
    answers: Tensor,
    kept: list[Tensor] | None,
    middle: Tensor | None,
    tile: Tensor,
    i: int,
    rows: slice,
) -> Tensor:
    """What a layer makes of one tile, given its weights, or what they are made of, or neither."""
    if kept:
        return layer.ended(tile, kept[i], answers)
    m = layer.made_of(tile) if middle is None else middle[:, rows]
    return layer.ended(tile, layer.weights(m, rows), answers)
