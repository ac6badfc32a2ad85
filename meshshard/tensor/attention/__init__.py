"""Attention whose queries or keys are sharded along the rows: a ring of blocks, or tokens."""

from meshshard.tensor.attention.ring_attention import (
    AttentionSpec,
    attention_with_weights,
    ring_attention,
)
from meshshard.tensor.attention.tiles import DropoutKey

__all__ = ["AttentionSpec", "DropoutKey", "attention_with_weights", "ring_attention"]
