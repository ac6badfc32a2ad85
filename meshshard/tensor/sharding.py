"""Sharding: how the rows of a tensor are divided over the ranks of a domain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshshard.comm import Domain
from meshshard.errors import MeshshardError, n_of

__all__ = ["Sharding"]


class Sharding:
    """How rows are divided: the domain, and the number of rows that each of its ranks owns.

    Two shardings are equal if their ranks and sizes are.

    Attributes:
        domain: the ranks.
        sizes: number of rows of each rank: the sharding shapes.
        total: number of rows of all ranks.
        first: id of this rank's first row.
        own: number of rows of this rank.
        origin: (n_owned,) int64 row in the source of every owned row, which keys random numbers;
            None where ids are rows in the source.
        shards: for every rank the sizes of its shards, in order; by default one shard a rank.

    Raises:
        MeshshardError: the number of sizes is not the number of ranks, a size is negative, or the
            shards do not add up to the sizes.
    """

    __slots__ = ("domain", "first", "origin", "own", "shards", "sizes", "total")

    def __init__(
        self,
        domain: Domain,
        sizes: Sequence[int],
        origin: Tensor | None = None,
        shards: Sequence[Sequence[int]] | None = None,
    ) -> None:
        if len(sizes) != domain.size:
            raise MeshshardError(
                f"Sharding: expected one size for each of {n_of(domain.size, 'ranks')}, got "
                f"{n_of(len(sizes), 'sizes')}"
            )
        self.domain = domain
        self.sizes = tuple(int(n) for n in sizes)
        if min(self.sizes) < 0:
            raise MeshshardError(f"Sharding: sizes must be 0 or more, got {self.sizes}")
        self.total = sum(self.sizes)
        self.first = domain.offset(self.sizes)
        self.own = self.sizes[domain.rank]
        self.origin = origin
        self.shards = tuple(map(tuple, shards or [(n,) for n in self.sizes]))
        if tuple(map(sum, self.shards)) != self.sizes:
            raise MeshshardError(
                f"Sharding: shards of each rank must add up to sizes {self.sizes}, got "
                f"{self.shards}"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharding:
        """The same sharding, which is constant."""
        return self

    def rows(self, device: torch.device | None = None) -> Tensor:
        """(n_owned,) int64 global row of every owned row."""
        return torch.arange(self.first, self.first + self.own, device=device)

    def owners(self, rows: Tensor) -> Tensor:
        """The rank that owns each of some global rows."""
        ends = torch.tensor(self.sizes, device=rows.device).cumsum(0)
        return torch.searchsorted(ends, rows.contiguous(), right=True)

    def sources(self, device: torch.device | None = None) -> Tensor:
        """(n_owned,) int64 row in the source of every owned row."""
        if self.origin is None:
            return self.rows(device)
        return self.origin.to(device or self.origin.device)

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Sharding)
            and self.domain.group == other.domain.group
            and self.sizes == other.sizes
        )

    def __hash__(self) -> int:
        return hash(self.sizes)

    def __repr__(self) -> str:
        return f"sizes {self.sizes}"
