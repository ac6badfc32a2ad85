"""How the rows of one rank are divided into tiles, and sums over tiles, shards and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from meshshard.comm import Domain
from meshshard.nn.slices._math import slice_sums
from meshshard.tensor import Sharding
from meshshard.tensor.tokens import reduce_tokens, reduce_tokens_in_order

__all__ = ["FEW", "SliceSums", "Tiling"]

FEW = 4096  # rows of the largest rank up to which tiles do not pay: benchmarks/slices.py, step


@dataclass(frozen=True)
class Tiling:
    """Where and how a layer runs.

    Attributes:
        domain: the ranks.
        shards: rows of this rank's shards, in order; no tile crosses from one shard to the next.
        counts: number of shards of every rank, where sums are added shard by shard in order; else
            None.
        tile: rows of a tile; 0 for operations recorded by autograd, on all rows of a shard at once.
        keep_weights: whether the weights of the slices are kept for the second pass and backward.
    """

    domain: Domain
    shards: tuple[int, ...]
    counts: tuple[int, ...] | None = None
    tile: int = 512
    keep_weights: bool = False

    @classmethod
    def of(cls, sharding: Sharding, tile: int, keep_weights: bool, deterministic: bool) -> Tiling:
        """Tiles for rows sharded in this way; tile 0 where rows are few, on every rank or none."""
        most = sharding.total if deterministic else max(sharding.sizes)
        tiled = most > FEW and not torch.is_autocast_enabled(sharding.domain.device.type)
        counts = tuple(map(len, sharding.shards)) if deterministic else None
        shards = sharding.shards[sharding.domain.rank] if deterministic else (sharding.own,)
        return cls(sharding.domain, shards, counts, tile if tiled else 0, keep_weights)

    def tiles(self) -> list[tuple[int, slice]]:
        """Shard and rows of every tile; an empty shard has one, to take part in the graph."""
        ends = [0]
        for n in self.shards:
            ends.append(ends[-1] + n)
        return [
            (shard, slice(a, min(a + (self.tile or end), end)))
            for shard, (first, end) in enumerate(pairwise(ends))
            for a in range(first, max(end, first + 1), self.tile or max(end, 1))
        ]

    def reduce(self, sums: Sequence[Tensor]) -> Tensor:
        """Sums over all rows of all ranks, from the sums over each shard of this rank."""
        if self.counts is None:
            return reduce_tokens(self.domain, sums[0])
        return reduce_tokens_in_order(self.domain, torch.stack(list(sums)), self.counts)


@dataclass
class SliceSums:
    """Sums over the tiles so far, for each shard of this rank; and the weights that are kept."""

    tiling: Tiling
    sums: dict[int, Tensor] = field(default_factory=dict)
    weights: list[Tensor] | None = None

    def add(self, shard: int, w: Tensor, f: Tensor) -> None:
        """Add a tile: weights (B, H, n, G), values (B, H, n, D)."""
        sums = slice_sums(w, f)
        self.sums[shard] = self.sums[shard] + sums if shard in self.sums else sums
        if self.weights is not None:
            self.weights.append(w)

    def total(self) -> Tensor:
        """(B, H, G, D + 1) over all rows of all ranks."""
        return self.tiling.reduce([self.sums[shard] for shard in range(len(self.tiling.shards))])
