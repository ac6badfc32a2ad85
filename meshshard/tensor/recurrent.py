"""Rules of recurrent layers whose sequences lie within rows: what a row went through, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshshard.tensor.align import native_ndim
from meshshard.tensor.core import Rule, Sharding, ShardTensor, native, refuse, wrap

__all__ = ["RULES"]


def _recurrent(func: Callable[..., Any]) -> Rule:
    """A stack of layers over (row, step, width), or over (step, row, width) with the rows sharded.

    States are (layer, row, width): sharded ones are divided as the rows are, plain ones whole.
    """

    def _rule(x: Any, state: Any, weights: Any, *options: Any) -> Any:
        if type(x) is not ShardTensor or not isinstance(options[0], bool):
            raise refuse(func, (x, state), None, "of packed sequences, or plain rows")
        _, _, dropout, training, _, batch_first = options
        at = 0 if batch_first else 1
        if native_ndim(x) != 3 or x._dim != at:
            why = f"rows must be dim {at}: along the sharded dim one step follows another"
            raise refuse(func, (x,), None, why)
        if dropout and training:
            why = "dropout between its layers is not keyed by rows: set dropout=0, or eval()"
            raise refuse(func, (x,), None, why)
        sharding = x._sharding
        with native():
            kept = _own(state, sharding) if isinstance(state, Tensor) else [
                _own(s, sharding) for s in state
            ]  # fmt: skip
            out, *states = func(x, kept, weights, *options)
        return wrap(out, sharding, at), *(wrap(s, sharding, 1) for s in states)

    return _rule


def _own(state: Tensor, sharding: Sharding) -> Tensor:
    """Own rows of a state (layer, row, width)."""
    if type(state) is not ShardTensor:
        return state.narrow(1, sharding.first, sharding.own)
    if state._dim != 1 or state._sharding != sharding:
        raise refuse("a recurrent layer", (state,), None, "its state is not divided as its rows")
    return state


RULES: dict[Any, Rule] = {
    f: _recurrent(f)
    for f in (torch._VF.lstm, torch._VF.gru, torch._VF.rnn_tanh, torch._VF.rnn_relu)
}
