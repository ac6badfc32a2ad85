"""Rules of recurrent layers: the sequence of every row is on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshshard.tensor._torch_private import native
from meshshard.tensor.align import narrow_to_owned, ndim_of
from meshshard.tensor.shard_tensor import Rule, ShardTensor, refuse, wrap
from meshshard.tensor.sharding import Sharding


def _recurrent(func: Callable[..., Any]) -> Rule:
    """The rule of layers on (rows, steps, width) or (steps, rows, width), sharded by rows.

    States are (layers, rows, width): sharded as the rows, or plain with all rows.
    """

    def _rule(x: Any, state: Any, weights: Any, *options: Any) -> Any:
        if type(x) is not ShardTensor or not isinstance(options[0], bool):
            raise refuse(func, (x, state), None, "its input is a packed sequence or a plain tensor")
        _, _, dropout, training, _, batch_first = options
        at = 0 if batch_first else 1
        if ndim_of(x) != 3 or x._dim != at:
            why = f"the input must have three dims and be sharded along dim {at}, not by steps"
            raise refuse(func, (x,), None, why)
        if dropout and training:
            why = "dropout between its layers depends on the partition: set dropout=0, or eval()"
            raise refuse(func, (x,), None, why)
        sharding = x._sharding
        with native():
            out, *states = func(x, _owned(func, state, sharding, 1), weights, *options)
        return wrap(out, sharding, at), *(wrap(s, sharding, 1) for s in states)

    return _rule


def _cell(func: Callable[..., Any]) -> Rule:
    """The rule of one step on (rows, width), with states (rows, width)."""

    def _rule(x: Any, state: Any, *weights: Any) -> Any:
        if type(x) is not ShardTensor or ndim_of(x) != 2 or x._dim != 0:
            raise refuse(func, (x, state), None, "expected an input (rows, width) sharded by rows")
        sharding = x._sharding
        with native():
            out = func(x, _owned(func, state, sharding, 0), *weights)
        if isinstance(out, Tensor):
            return wrap(out, sharding, 0)
        return tuple(wrap(s, sharding, 0) for s in out)

    return _rule


def _owned(func: Any, state: Any, sharding: Sharding, dim: int) -> Any:
    """Owned rows of a state, or of the two states of an LSTM."""
    if not isinstance(state, Tensor):
        return [_owned(func, s, sharding, dim) for s in state]
    if type(state) is ShardTensor:
        if state._dim != dim or state._sharding != sharding:
            raise refuse(func, (state,), None, "its state and its input have different shardings")
        return state
    if state.shape[dim] != sharding.total:
        why = f"its plain state has {state.shape[dim]} rows, expected {sharding.total}"
        raise refuse(func, (), None, why)
    return narrow_to_owned(state, sharding, dim)


RULES: dict[Any, Rule] = {
    **{f: _recurrent(f) for f in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)},
    **{
        f: _cell(f)
        for f in (torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell)
    },
}
