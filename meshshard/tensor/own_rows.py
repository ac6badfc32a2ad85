"""Modules that see own rows: what torch has made parallel along another axis of the ranks."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from meshshard.tensor.shard_tensor import Sharding, ShardTensor

__all__ = ["by_own_rows"]

M = TypeVar("M", bound=nn.Module)


def by_own_rows(module: M) -> M:
    """Let a module that treats rows alone see own rows, and give sharded ones back; in place.

    For what `parallelize_module` has divided along another axis (tensor parallelism): its weights
    are DTensors, which know nothing of uneven rows. Names and parameters stay. A module that
    couples rows would be wrong so, and only what is in it can tell: give it an MLP, a linear layer.

    Args:
        module: takes a tensor of rows first, sharded along dim 0, and returns one of as many.

    Raises:
        MeshshardError: from the module, where its output has not as many rows as its input.
    """
    given: list[tuple[Sharding, int] | None] = []

    def _rows(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = args[0]
        if not isinstance(x, ShardTensor):
            given.append(None)
            return args
        given.append((x.sharding, x.sharded_dim))
        return (x.to_local(), *args[1:])

    def _sharded(_: nn.Module, args: Any, out: Any) -> Any:
        kept = given.pop()
        if kept is None or out is None:  # None: the module has raised
            return out
        return ShardTensor.from_local(out, *kept)

    module.register_forward_pre_hook(_rows, prepend=True)
    module.register_forward_hook(_sharded, always_call=True)
    return module
