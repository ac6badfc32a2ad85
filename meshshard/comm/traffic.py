"""Traffic: what a rank has sent, by kind of collective."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

__all__ = ["Count", "Traffic"]


class Count(NamedTuple):
    """Number of calls, and the rows and bytes that this rank sent in them."""

    calls: int = 0
    rows: int = 0
    bytes: int = 0


@dataclass
class Traffic:
    """Counts by kind (exchange, accumulate, all_reduce, …), forward and backward together."""

    counts: dict[str, Count] = field(default_factory=dict)

    def add(self, kind: str, sent: torch.Tensor) -> None:
        """Count one call that sends a tensor."""
        calls, rows, size = self.counts.get(kind, Count())
        more = sent.shape[0] if sent.ndim else 1
        self.counts[kind] = Count(calls + 1, rows + more, size + sent.numel() * sent.element_size())

    def total(self) -> Count:
        """The sum over all kinds."""
        columns = zip(*self.counts.values(), strict=True) if self.counts else ((0,), (0,), (0,))
        return Count(*(sum(c) for c in columns))
