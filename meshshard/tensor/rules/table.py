"""How the tables of rules are made: functions by name, row-wise rules, one table of all."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils._pytree import tree_map_only

from meshshard.tensor._torch_private import NN, ORIGINALS, native
from meshshard.tensor.layout import as_layout
from meshshard.tensor.moved import MOVED, is_moved
from meshshard.tensor.shard_tensor import Rule, ShardTensor, name_of, refuse, wrap
from meshshard.tensor.sharding import Sharding

CHECKED = """
cross diff linear_cross_entropy multinomial roll scatter_add scatter_add_
"""
HOMES = (torch, Tensor, F, torch.functional, torch.linalg, torch.special, NN, ORIGINALS)


def functions_named(names: str) -> list[Callable[..., Any]]:
    """All torch functions of these names, separated by blanks: torch.x, Tensor.x, F.x, …."""
    found = (
        getattr(home, name, None)
        for name in names.split()
        for home in ((Tensor,) if name.startswith("__") else HOMES)
    )
    return list(dict.fromkeys(f for f in found if callable(f)))


def named(rules: Mapping[str, Rule]) -> dict[Any, Rule]:
    """Rules by function from rules by names; blanks separate names that share a rule."""
    return {f: rule for names, rule in rules.items() for f in functions_named(names)}


def rowwise(func: Callable[..., Any]) -> Rule:
    """The rule of a function that is exact on local rows; its results are sharded as its input."""

    def _rule(x: Any, *args: Any, **kwargs: Any) -> Any:
        with native():
            out = func(x, *args, **kwargs)
        if type(x) is not ShardTensor or out is x:
            return out
        return wrap_all(out, x._sharding, x._dim)

    return _rule


def wrap_all(out: Any, sharding: Sharding, dim: int) -> Any:
    """Local tensors, alone or in a tuple, as sharded ones; another result as it is."""
    if isinstance(out, tuple):
        return type(out)([wrap(part, sharding, dim) for part in out])
    return wrap(out, sharding, dim) if isinstance(out, Tensor) else out


def int_list(value: Any) -> list[int]:
    """An int, or several, as a list."""
    return [value] if isinstance(value, int) else list(value)


def in_place(rule: Rule) -> Rule:
    """The rule of a function that changes its first argument, from that of the one that returns.

    Communication: that of `as_layout` if the result has other sizes or another sharded dim.

    Raises:
        RuntimeError: the result has another shape than the argument, as in torch.
        NoShardRule: the result is sharded, but the argument is plain.
    """

    def _rule(x: Any, *args: Any, **kwargs: Any) -> Any:
        out = rule(x.clone(), *args, **kwargs)
        if out.shape != x.shape:
            raise RuntimeError(f"output with shape {out.shape} doesn't match shape {x.shape}")
        if type(x) is ShardTensor:
            out = as_layout(out, x)
        elif type(out) is ShardTensor:
            why = "a plain tensor cannot be changed in place by a sharded one"
            raise refuse("an in-place function", (x, *args), kwargs, why)
        with native():
            x.copy_(out)
        return x

    return _rule


def one_table(families: Iterable[Mapping[Any, Rule]]) -> dict[Any, Rule]:
    """All rules in one table.

    Raises:
        ValueError: a function has a rule in two families.
    """
    table: dict[Any, Rule] = {}
    for family in families:
        if twice := table.keys() & family.keys():
            raise ValueError(f"{sorted(map(name_of, twice))} have a rule in two families")
        table.update(family)
    table |= {f: _checked(f, table[f]) for f in functions_named(CHECKED)}
    return {
        f: _not_of_moved(f, rule) if is_in_place(f) or has_inplace(f) else rule
        for f, rule in table.items()
    }


def _checked(func: Any, rule: Rule) -> Rule:
    """The rule of a function after torch has checked its arguments, on tensors without data.

    The rule itself may accept what torch does not, or notice it on some ranks only.
    """

    def _rule(*args: Any, **kwargs: Any) -> Any:
        # Autocast would change types, but not of these tensors.
        if not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
            given = tree_map_only(Tensor, _without_data, (args, kwargs))
            with native(), torch.no_grad(), contextlib.suppress(NotImplementedError):
                func(*given[0], **given[1])
        return rule(*args, **kwargs)

    return _rule


def _without_data(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


UNWRITTEN = {  # what they change is not the values
    "requires_grad_", "detach_", "squeeze_", "unsqueeze_", "t_", "transpose_", "swapaxes_",
    "swapdims_", "share_memory_",
}  # fmt: skip


def is_in_place(func: Any) -> bool:
    """Whether a function changes the values of its first argument, by its name."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or (bool(name[2] == "i") and name != "__invert__")
    return bool(name.endswith("_")) and name not in UNWRITTEN


def has_inplace(func: Any) -> bool:
    """Whether a function of `torch.nn.functional` has an argument `inplace`."""
    code = getattr(inspect.unwrap(func), "__code__", None) if callable(func) else None
    return code is not None and "inplace" in code.co_varnames[: code.co_argcount]


def _not_of_moved(func: Any, rule: Rule) -> Rule:
    """The rule of an in-place function, refused on what in torch would share memory."""
    at = list(inspect.signature(func).parameters).index("inplace") if has_inplace(func) else 0

    def _rule(x: Any, *args: Any, **kwargs: Any) -> Any:
        if not at or kwargs.get("inplace") or (len(args) >= at and args[at - 1]):
            for t in x if isinstance(x, (list, tuple)) else (x,):
                if type(t) is ShardTensor and is_moved(t):
                    raise refuse(func, (x, *args), kwargs, MOVED)
        return rule(x, *args, **kwargs)

    return _rule
