"""Attention through a few latents, whose cost grows with the rows and not with their pairs.

Plain attention needs nothing of this package: nn.MultiheadAttention, nn.TransformerEncoderLayer and
F.scaled_dot_product_attention take ShardTensors as they are, also from few replicated queries to
sharded points and back (perceivers, supernodes, cross-attention to geometry).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from meshshard.errors import MeshshardError

__all__ = ["Bottleneck"]


class Bottleneck(nn.Module):
    """Rows to learned latents and back, every head with latents of its own (FLARE).

    Latents attend to all rows, then every row attends to the latents with its own key as the query:
    two calls of attention, which is of low rank between rows. Puri et al., FLARE: Fast Low-rank
    Attention Routing Engine (2025).

    Args:
        width: of the rows.
        heads: number of heads, which divides the width.
        latents: number of latents a head.

    Communication: two all-reduces forward, of (heads, latents) and of (heads, latents, width /
    heads + 1) numbers; one backward, of (heads, latents, width / heads).

    Raises:
        MeshshardError: heads do not divide the width.
    """

    def __init__(self, width: int, heads: int = 8, latents: int = 64) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise MeshshardError(f"Bottleneck: {heads} heads do not divide a width of {width}")
        self.heads = heads
        self.latents = nn.Parameter(torch.empty(heads, latents, width // heads))
        nn.init.normal_(self.latents, std=0.1)
        self.keys = nn.Linear(width, width)
        self.values = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        """(…, rows, width) to the same, sharded alike."""
        keys, values = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(-3, -2)
            for layer in (self.keys, self.values)
        )
        found = F.scaled_dot_product_attention(self.latents, keys, values, scale=1.0)
        back = F.scaled_dot_product_attention(keys, self.latents, found, scale=1.0)
        return self.out(back.transpose(-3, -2).flatten(-2))
