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
from meshshard.tensor.tokens import merged, merged_in_order

__all__ = [
    "FEW",
    "Layer",
    "Piece",
    "Run",
    "Sums",
    "collected",
    "means",
    "only_answer",
    "same",
    "summed",
    "wide",
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
        slices: (z, m, rows, wanted) to weights (B, n, H, G) and, where wanted, values (B, n, H, D).
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

    def made_of(self, x: Tensor) -> Tensor:
        """What the weights of rows are made of: (B, n, C)."""
        return self.into(self.norm(x))  # type: ignore[no-any-return]

    def weights(self, m: Tensor, rows: slice) -> Tensor:
        """Weights (B, n, H, G) alone."""
        return self.slices(None, m, rows, False)[0]  # type: ignore[no-any-return]

    def sliced(self, x: Tensor, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Weights, values, and what the weights are made of."""
        z = self.norm(x)
        m = self.into(z)
        w, f = self.slices(z, m, rows, True)
        return w, f, m

    def ended(self, x: Tensor, w: Tensor, answers: Tensor) -> Tensor:
        """Output rows, given their weights and what the slices answer."""
        answer: Tensor = self.out(collected(w, answers))
        if self.after.function is only_answer:
            return answer
        h, u = self.after(x, answer)
        y: Tensor = self.end(u)
        return y if h is None else y + h

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

    def merged(self, parts: Sequence[Tensor]) -> Tensor:
        """Sums over all rows, of sums over own shards."""
        if self.counts is None:
            return merged(self.domain, parts[0])
        return merged_in_order(self.domain, torch.stack(list(parts)), self.counts)


@dataclass
class Sums:
    """Sums of own shards under way, and the weights that are kept."""

    run: Run
    parts: dict[int, Tensor] = field(default_factory=dict)
    kept: list[Tensor] | None = None

    def add(self, shard: int, w: Tensor, f: Tensor) -> None:
        """One more tile: weights (B, n, H, G), values (B, n, H, D)."""
        sums = summed(w, f)
        self.parts[shard] = self.parts[shard] + sums if shard in self.parts else sums
        if self.kept is not None:
            self.kept.append(w)

    def total(self) -> Tensor:
        """(B, H, G, D + 1) over all rows of all ranks."""
        return self.run.merged([self.parts[k] for k in range(len(self.run.shards))])


def summed(w: Tensor, f: Tensor) -> Tensor:
    """(B, H, G, D + 1) values in each slice summed over rows, and beside them the weights."""
    tokens = torch.matmul(w.permute(0, 2, 3, 1), f.permute(0, 2, 1, 3)).to(wide(f.dtype))
    return torch.cat([tokens, w.sum(1, dtype=wide(w.dtype))[..., None]], -1)


def only_answer(x: Tensor, answer: Tensor) -> tuple[None, Tensor]:
    """What follows an attention that is not part of a block: nothing."""
    return None, answer


def same(x: Tensor) -> Tensor:
    """No norm."""
    return x


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums over many rows are kept in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def means(total: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """(B, H, G, D) of the values in each slice, of their sums beside those of the weights."""
    return (total[..., :-1] / (total[..., -1:] + eps)).to(dtype)


def collected(w: Tensor, answers: Tensor) -> Tensor:
    """What each row collects from the slices, heads side by side: (B, n, H * D)."""
    return torch.matmul(w.transpose(1, 2), answers).transpose(1, 2).flatten(2)
