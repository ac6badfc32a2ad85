"""Modules on owned rows: for what torch has made parallel along another axis of the ranks."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from meshshard.tensor.shard_tensor import ShardTensor
from meshshard.tensor.sharding import Sharding

__all__ = ["by_own_rows"]

M = TypeVar("M", bound=nn.Module)


def by_own_rows(module: M) -> M:
    """Make a row-wise module take local rows and return sharded ones; in place.

    Use it for modules that `parallelize_module` has divided along another axis (tensor
    parallelism): their weights are DTensors, which do not support uneven rows. Names and parameters
    do not change. The module must treat rows independently, as a linear layer or an MLP does; this
    is not checked, and the result of one that couples rows is wrong.

    Args:
        module: takes a tensor that is sharded along dim 0 first, and returns one with as many rows.

    Raises:
        MeshshardError: when the module is called, if its output has another number of rows than its
            input.
    """
    inputs: list[tuple[Sharding, int] | None] = []

    def _unwrap(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = args[0]
        if not isinstance(x, ShardTensor):
            inputs.append(None)
            return args
        inputs.append((x.sharding, x.sharded_dim))
        return (x.to_local(), *args[1:])

    def _wrap(_: nn.Module, args: Any, out: Any) -> Any:
        given = inputs.pop()
        if given is None or out is None:  # out is None if the module has raised
            return out
        return ShardTensor.from_local(out, *given)

    module.register_forward_pre_hook(_unwrap, prepend=True)
    module.register_forward_hook(_wrap, always_call=True)
    return module
