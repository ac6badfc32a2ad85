"""eval_mode: call a module in evaluation mode and leave no trace of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

__all__ = ["differ", "eval_mode"]


@contextlib.contextmanager
def eval_mode(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Context manager: evaluation mode without gradients.

    On exit, the mode of every submodule and the state of the random generators are restored.

    Args:
        module: the module, whose submodules may be in different modes.
        device: whose random generator is restored besides the CPU's.
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


def differ(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors differ by more than rounding: sqrt(eps) of the largest value of `a`."""
    if not a.numel():
        return False
    tolerance = 0.0
    if a.is_floating_point():
        tolerance = torch.finfo(a.dtype).eps ** 0.5 * float(a.nan_to_num().abs().max())
    return not torch.allclose(a, b, rtol=0.0, atol=tolerance, equal_nan=True)
