"""Random numbers that are hashes of a seed and ids: the same on any number of ranks."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["hash_uniform"]


def hash_uniform(seed: int, *ids: Tensor) -> Tensor:
    """Uniform numbers in [0, 1), float64, determined by a seed and int64 ids, which broadcast."""
    key = ids[0] + seed
    for more in ids[1:]:
        key = _mix(key) + more
    bits = _mix(_mix(key)) >> 11 & (2**53 - 1)
    return bits.to(torch.float64) * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014), on int64, which wraps around."""
    x = x + -7046029254386353131
    x = (x ^ _shift_right(x, 30)) * -4658895280553007687
    x = (x ^ _shift_right(x, 27)) * -7723592293110705685
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical, not arithmetic, shift."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
