"""Attention through a few latents, at a cost linear in the number of rows.

Plain attention needs no layer of this package: nn.MultiheadAttention, nn.TransformerEncoderLayer
and F.scaled_dot_product_attention accept ShardTensors, also with a few replicated queries to
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
    """Low-rank attention of rows to rows through learned latents, separate in each head.

    The latents attend to all rows, then each row attends to the latents, with its key as the query.

    Source: Puri et al., FLARE: Fast Low-rank Attention Routing Engine (2025).

    Args:
        width: width of a row.
        heads: number of heads, a divisor of the width.
        latents: number of latents in each head.

    Communication: forward two all-reduces, of (heads, latents) and of (heads, latents, width /
    heads + 1) numbers; backward one, of (heads, latents, width / heads).

    Raises:
        MeshshardError: heads do not divide the width.
    """

    def __init__(self, width: int, heads: int = 8, latents: int = 64) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise MeshshardError(
                f"Bottleneck: {heads} heads do not divide a width of {width}; take a divisor"
            )
        self.heads = heads
        self.latents = nn.Parameter(torch.empty(heads, latents, width // heads))
        nn.init.normal_(self.latents, std=0.1)
        self.keys = nn.Linear(width, width)
        self.values = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        """Attention of all rows to all rows.

        Args:
            x: (…, n, width), sharded by rows or plain.

        Returns:
            (…, n, width), sharded or plain like x.
        """
        keys, values = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(-3, -2)
            for layer in (self.keys, self.values)
        )
        found = F.scaled_dot_product_attention(self.latents, keys, values, scale=1.0)
        back = F.scaled_dot_product_attention(keys, self.latents, found, scale=1.0)
        return self.out(back.transpose(-3, -2).flatten(-2))
