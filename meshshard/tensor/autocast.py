"""Autocast: dtypes that torch chooses for a function that a rule makes of others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["in_float32", "plus_bias"]


def in_float32(x: Any, *devices: str) -> Any:
    """A tensor of half precision in float32 if autocast is on, as it calls some functions in torch.

    Args:
        x: the tensor; any other value is returned.
        devices: where autocast does so; by default on all.
    """
    if not isinstance(x, Tensor) or x.dtype not in (torch.float16, torch.bfloat16):
        return x
    kind = x.device.type
    casts = torch.is_autocast_enabled(kind) and kind in (devices or (kind,))
    return x.to(torch.float32) if casts else x


def plus_bias(product: Tensor, bias: Any) -> Any:
    """A product and its bias, which autocast gives the dtype of the product."""
    if bias is None:
        return product
    cast = torch.is_autocast_enabled(bias.device.type)
    return product + (bias.to(product.dtype) if cast else bias)
