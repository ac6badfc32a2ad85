"""Rules of recurrent layers whose sequences lie within rows: what a row went through, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshshard.tensor.align import native_ndim, own_rows
from meshshard.tensor.shard_tensor import Rule, Sharding, ShardTensor, native, refuse, wrap

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
            out, *states = func(x, _own(func, state, sharding, 1), weights, *options)
        return wrap(out, sharding, at), *(wrap(s, sharding, 1) for s in states)

    return _rule


def _cell(func: Callable[..., Any]) -> Rule:
    """One step of (row, width), from states (row, width)."""

    def _rule(x: Any, state: Any, *weights: Any) -> Any:
        if type(x) is not ShardTensor or native_ndim(x) != 2 or x._dim != 0:
            raise refuse(func, (x, state), None, "give (rows, width), sharded by rows")
        sharding = x._sharding
        with native():
            out = func(x, _own(func, state, sharding, 0), *weights)
        if isinstance(out, Tensor):
            return wrap(out, sharding, 0)
        return tuple(wrap(s, sharding, 0) for s in out)

    return _rule


def _own(func: Any, state: Any, sharding: Sharding, dim: int) -> Any:
    """Own rows of a state, or of the two that an LSTM has."""
    if not isinstance(state, Tensor):
        return [_own(func, s, sharding, dim) for s in state]
    if type(state) is ShardTensor:
        if state._dim != dim or state._sharding != sharding:
            raise refuse(func, (state,), None, "its state is not divided as its rows")
        return state
    if state.shape[dim] != sharding.total:
        raise refuse(func, (), None, f"a state of {state.shape[dim]} rows for {sharding.total}")
    return own_rows(state, sharding, dim)


RULES: dict[Any, Rule] = {
    **{
        f: _recurrent(f)
        for f in (torch._VF.lstm, torch._VF.gru, torch._VF.rnn_tanh, torch._VF.rnn_relu)
    },
    **{
        f: _cell(f)
        for f in (torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell)
    },
}
