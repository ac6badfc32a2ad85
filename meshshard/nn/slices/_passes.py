"""Passes: a layer of slice attention as two passes over tiles of rows around a stage of tokens.

It is differentiated tile by tile, so that of N rows only the input is kept; or run as ordinary
operations of autograd where that is better: few rows, mixed precision, second derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from meshshard.nn.slices._backward import Backward, Gradients, vjp
from meshshard.nn.slices._layer import Layer, Piece, Run, Sums, collected, means

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
        layer.ended(x[:, rows], collected(w, answers))
        for (_, rows), w in zip(tiles, sums.kept, strict=True)
    ]
    return torch.cat(outs, 1) if len(outs) > 1 else outs[0]


def _forward(layer: Layer, run: Run, x: Tensor, kept: list[Tensor] | None) -> tuple[Tensor, Tensor]:
    """Output rows and the sums over all rows; the weights go into `kept`.

    The output's memory first holds what the weights are made of, where these are not kept.
    """
    sums, middle = Sums(run, kept=kept), torch.empty_like(x)
    for shard, rows in run.tiles():
        room = middle[:, rows] if kept is None else None
        sums.add(shard, *layer.sliced(x[:, rows], rows, room))
    total = sums.total()
    answers = layer.tokens(means(total, layer.eps, x.dtype))
    out = middle if layer.width == x.shape[2] else x.new_empty(*x.shape[:2], layer.width)
    _pass(_End(layer, answers, kept, middle), None, run, x, out)
    return out, total


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
    hidden = x.new_empty(*x.shape[:2], layers[0].into.tensors[0].shape[1])
    sums = _pass(partial(_first, first), layers[0], run, x, hidden)
    for ending, beginning in zip(layers, [*layers[1:], None], strict=True):
        answers = ending.tokens(means(sums.total(), ending.eps, hidden.dtype))
        fits = ending.width == hidden.shape[2]
        out = hidden if fits else hidden.new_empty(*hidden.shape[:2], ending.width)
        sums = _pass(_End(ending, answers, sums.kept), beginning, run, hidden, out)
        hidden = out
    return hidden


def _pass(
    end: Callable[[Tensor, int, slice, Tensor], Any],
    beginning: Layer | None,
    run: Run,
    x: Tensor,
    out: Tensor,
) -> Sums:
    """All rows, of which `end` makes what is written to `out`, and the sums for the next layer."""
    sums = Sums(run, kept=[] if run.keep else None)
    for i, (shard, rows) in enumerate(run.tiles()):
        y = out[:, rows]
        end(x[:, rows], i, rows, y)
        if beginning is not None:
            sums.add(shard, *beginning.sliced(y, rows))
    return sums


def _first(first: Piece, tile: Tensor, i: int, rows: slice, room: Tensor) -> None:
    room.copy_(first(tile))


@dataclass(frozen=True)
class _End:
    """What a layer makes of tiles, given their weights, or what they are made of, or neither."""

    layer: Layer
    answers: Tensor
    kept: list[Tensor] | None
    middle: Tensor | None = None

    def __call__(self, tile: Tensor, i: int, rows: slice, room: Tensor) -> None:
        """Output rows of a tile, written to `room`."""
        if self.kept:
            gathered = collected(self.kept[i], self.answers)
        else:
            m = self.layer.made_of(tile) if self.middle is None else self.middle[:, rows]
            gathered = self.layer.collected(m, rows, self.answers)
        self.layer.ended(tile, gathered, room)
