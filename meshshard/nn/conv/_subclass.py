"""Subclass: a module made one of a subclass of its own class, in place, as FSDP2 does.

Parameters, state_dict, hooks and isinstance stay; copies and pickles work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["is_changed", "swap_class"]

Factory = Callable[[type[Any]], type[Any]]


def swap_class(module: nn.Module, factory: Factory) -> None:
    """Make a module one of the class that the factory makes of its class; once only."""
    if not is_changed(module):
        module.__class__ = _made(factory, type(module))


def is_changed(module: nn.Module) -> bool:
    """Whether this has been done to a module."""
    return hasattr(type(module), "_meshshard_of")


_classes: dict[tuple[Factory, type[Any]], type[Any]] = {}


def _made(factory: Factory, cls: type[Any]) -> type[Any]:
    """The subclass, which goes by the name of the class."""
    if (factory, cls) not in _classes:
        made = factory(cls)
        names = ("__name__", "__qualname__", "__module__", "__doc__")
        given = {name: getattr(cls, name) for name in names}
        given |= {"_meshshard_of": (factory, cls), "__reduce_ex__": _reduced}
        for name, value in given.items():
            setattr(made, name, value)
        _classes[factory, cls] = made
    return _classes[factory, cls]


def _reduced(module: Any, protocol: Any) -> Any:
    """What copies and pickles keep of a module."""
    return _empty, type(module)._meshshard_of, module.__getstate__()


def _empty(factory: Factory, cls: type[Any]) -> Any:
    """A module without attributes yet."""
    made: Any = _made(factory, cls)
    return made.__new__(made)
