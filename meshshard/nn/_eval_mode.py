"""Evaluated: a module in evaluation for a moment, of which nothing is left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

__all__ = ["differ", "evaluated"]


@contextlib.contextmanager
def evaluated(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Within it, evaluation without gradients; modes and random numbers are then what they were.

    Args:
        module: whose modules may be in different modes.
        device: where it draws, besides the CPU.
    """
    training = {each: each.training for each in module.modules()}
    devices = [device] if device.type == "cuda" else []
    try:
        module.eval()
        with torch.no_grad(), torch.random.fork_rng(devices):
            yield
    finally:
        for each, was in training.items():
            each.training = was


def differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two results of the same numbers are farther apart than rounding makes them."""
    if not a.numel():
        return False
    far = 0.0
    if a.is_floating_point():
        far = torch.finfo(a.dtype).eps ** 0.5 * float(a.nan_to_num().abs().max())
    return not torch.allclose(a, b, rtol=0.0, atol=far, equal_nan=True)
