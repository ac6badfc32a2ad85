"""What a layer of slice attention is made of, and how its rows are run through.

A layer is written as pure functions of rows; rows go tile by tile, and tiles stay within a shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from meshshard.comm import Domain
from meshshard.tensor import Sharding
from meshshard.tensor.rules.reductions import wide
from meshshard.tensor.tokens import reduce_tokens, reduce_tokens_in_order

__all__ = [
    "FEW",
    "Layer",
    "Piece",
    "Run",
    "Sums",
    "by_heads",
    "collected",
    "linear",
    "means",
    "only_answer",
    "same",
    "summed",
]

FEW = 4096  # rows of the largest rank up to which tiles do not pay: benchmarks/slices.py, step


@dataclass(frozen=True)
class Piece:
    """A pure function with its last arguments: tensors that want gradients."""

    function: Callable[..., Any]
    tensors: tuple[Tensor, ...] = ()

    def __call__(self, *given: Any) -> Any:
        """Its value."""
        return self.function(*given, *self.tensors)


@dataclass(frozen=True)
class Layer:
    """What is to be done with rows x (B, n, C), H heads of width D, G slices.

    Attributes:
        norm: x to what attention sees of it, z.
        into: linear, z to what the weights are made of, m.
        slices: (z, m, rows, wanted) to weights (B, H, n, G) and, where wanted, values (B, H, n, D);
            its function's `collected` is (m, rows, answers) to what rows collect, (B, n, C).
        tokens: (B, H, G, D) means of the values, weighted, to what the slices answer.
        out: linear, the answers that a row collects to one answer.
        after: (x, answer) to what is added at the end, or None, and what the end is made of;
            `only_answer` where nothing follows.
        end: linear.
        eps: added to the sums of the weights.
    """

    norm: Piece
    into: Piece
    slices: Piece
    tokens: Piece
    out: Piece
    after: Piece
    end: Piece
    eps: float

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All of them, in their order."""
        return self.norm, self.into, self.slices, self.tokens, self.out, self.after, self.end

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Everything besides the rows that a gradient may flow to."""
        return tuple(t for piece in self.pieces for t in piece.tensors)

    @property
    def width(self) -> int:
        """Of an output row."""
        last = self.out if self.after.function is only_answer else self.end
        return len(last.tensors[0])

    def made_of(self, x: Tensor, room: Tensor | None = None) -> Tensor:
        """What the weights of rows are made of: (B, n, C)."""
        return linear(self.into, self.norm(x), room)

    def weights(self, m: Tensor, rows: slice) -> Tensor:
        """Weights (B, H, n, G) alone."""
        return self.slices(None, m, rows, False)[0]  # type: ignore[no-any-return]

    def sliced(self, x: Tensor, rows: slice, room: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights and values; what the weights are made of is written to `room`."""
        z = self.norm(x)
        return self.slices(z, linear(self.into, z, room), rows, True)  # type: ignore[no-any-return]

    def collected(self, m: Tensor, rows: slice, answers: Tensor) -> Tensor:
        """What rows collect from the slices, (B, n, C), of what their weights are made of."""
        slices: Any = self.slices
        return slices.function.collected(m, rows, answers, *slices.tensors)  # type: ignore[no-any-return]

    def ended(self, x: Tensor, gathered: Tensor, room: Tensor | None = None) -> Tensor:
        """Output rows, given what they collect from the slices; written to `room`."""
        if self.after.function is only_answer:
            return linear(self.out, gathered, room)
        h, u = self.after(x, self.out(gathered))
        y = linear(self.end, u, room)
        return y if h is None else y + h if room is None else y.add_(h)

    def on(self, tensors: Sequence[Tensor]) -> Layer:
        """The same functions with other tensors."""
        left = iter(tensors)
        names = [f.name for f in fields(self)][:-1]
        pairs = zip(names, self.pieces, strict=True)
        made = {n: replace(p, tensors=tuple(next(left) for _ in p.tensors)) for n, p in pairs}
        return replace(self, **made)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Run:
    """Where and how a layer runs.

    Attributes:
        domain: the ranks.
        shards: rows of this rank's shards, in order: a tile does not cross from one to the next.
        counts: shards of every rank, where tokens are added shard by shard in order; else None.
        tile: rows of a tile; 0 for ordinary operations of autograd on all rows.
        keep: whether the weights of the slices are kept from one pass to the next.
    """

    domain: Domain
    shards: tuple[int, ...]
    counts: tuple[int, ...] | None = None
    tile: int = 512
    keep: bool = False

    @classmethod
    def of(cls, sharding: Sharding, tile: int, keep: bool, ordered: bool) -> Run:
        """For rows so divided; ordinary operations where they are few, alike on every rank."""
        most = sharding.total if ordered else max(sharding.sizes)  # in order: alike on any ranks
        tiled = most > FEW and not torch.is_autocast_enabled(sharding.domain.device.type)
        counts = tuple(map(len, sharding.shards)) if ordered else None
        shards = sharding.shards[sharding.domain.rank] if ordered else (sharding.own,)
        return cls(sharding.domain, shards, counts, tile if tiled else 0, keep)

    def tiles(self) -> list[tuple[int, slice]]:
        """Shard and rows of every tile; an empty shard has one, for its place in the graph."""
        ends = [0]
        for n in self.shards:
            ends.append(ends[-1] + n)
        return [
            (k, slice(a, min(a + (self.tile or b), b)))
            for k, (first, b) in enumerate(pairwise(ends))
            for a in range(first, max(b, first + 1), self.tile or max(b, 1))
        ]

    def reduce_tokens(self, parts: Sequence[Tensor]) -> Tensor:
        """Sums over all rows, of sums over own shards."""
        if self.counts is None:
            return reduce_tokens(self.domain, parts[0])
        return reduce_tokens_in_order(self.domain, torch.stack(list(parts)), self.counts)


@dataclass
class Sums:
    """Sums of own shards under way, and the weights that are kept."""

    run: Run
    parts: dict[int, Tensor] = field(default_factory=dict)
    kept: list[Tensor] | None = None

    def add(self, shard: int, w: Tensor, f: Tensor) -> None:
        """One more tile: weights (B, H, n, G), values (B, H, n, D)."""
        sums = summed(w, f)
        self.parts[shard] = self.parts[shard] + sums if shard in self.parts else sums
        if self.kept is not None:
            self.kept.append(w)

    def total(self) -> Tensor:
        """(B, H, G, D + 1) over all rows of all ranks."""
        return self.run.reduce_tokens([self.parts[k] for k in range(len(self.run.shards))])


def linear(piece: Piece, x: Tensor, room: Tensor | None = None) -> Tensor:
    """A linear piece of rows; written to `room` where there is some, without a gradient."""
    if room is None:
        return piece(x)  # type: ignore[no-any-return]
    weight, bias = piece.tensors
    for to, rows in zip(room, x, strict=True):
        torch.addmm(bias, rows, weight.t(), out=to)
    return room


def summed(w: Tensor, f: Tensor) -> Tensor:
    """(B, H, G, D + 1) values in each slice summed over rows, and beside them the weights."""
    tokens = torch.matmul(w.transpose(-1, -2), f).to(wide(f.dtype))
    return torch.cat([tokens, w.sum(-2, dtype=wide(w.dtype))[..., None]], -1)


def only_answer(x: Tensor, answer: Tensor) -> tuple[None, Tensor]:
    """What follows an attention that is not part of a block: nothing."""
    return None, answer


def same(x: Tensor) -> Tensor:
    """No norm."""
    return x


def means(total: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """(B, H, G, D) of the values in each slice, of their sums beside those of the weights."""
    return (total[..., :-1] / (total[..., -1:] + eps)).to(dtype)


def by_heads(x: Tensor, heads: int) -> Tensor:
    """Rows (B, n, H * D) as (B, H, n, D)."""
    return x.view(*x.shape[:2], heads, x.shape[2] // heads).transpose(1, 2)


def collected(w: Tensor, answers: Tensor) -> Tensor:
    """What each row collects from the slices, heads side by side: (B, n, H * D)."""
    return torch.matmul(w, answers).transpose(1, 2).flatten(2)
