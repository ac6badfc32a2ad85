"""swap_class: replace the class of a module by a subclass of it, in place, as FSDP2 does.

Parameters, state_dict, hooks and isinstance stay; copies and pickles work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["is_swapped", "swap_class"]

Factory = Callable[[type[Any]], type[Any]]
_subclasses: dict[tuple[Factory, type[Any]], type[Any]] = {}


def swap_class(module: nn.Module, factory: Factory) -> None:
    """Replace the class of a module by `factory(class)`, unless its class was swapped before."""
    if not is_swapped(module):
        module.__class__ = _subclass(factory, type(module))


def is_swapped(module: nn.Module) -> bool:
    """Whether the class of a module was swapped."""
    return hasattr(type(module), "_meshshard_of")


def _subclass(factory: Factory, cls: type[Any]) -> type[Any]:
    """The subclass, under the name of the class."""
    if (factory, cls) not in _subclasses:
        subclass = factory(cls)
        names = ("__name__", "__qualname__", "__module__", "__doc__")
        attributes = {name: getattr(cls, name) for name in names}
        attributes |= {"_meshshard_of": (factory, cls), "__reduce_ex__": _reduce}
        for name, value in attributes.items():
            setattr(subclass, name, value)
        _subclasses[factory, cls] = subclass
    return _subclasses[factory, cls]


def _reduce(module: Any, protocol: Any) -> Any:
    return _new, type(module)._meshshard_of, module.__getstate__()


def _new(factory: Factory, cls: type[Any]) -> Any:
    """A module without attributes, whose state is set next."""
    subclass: Any = _subclass(factory, cls)
    return subclass.__new__(subclass)
