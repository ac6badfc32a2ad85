"""once: a property that is computed at its first access, also by simulated ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["once"]

T = TypeVar("T")


class once(Generic[T]):  # noqa: N801 - a decorator
    """As functools.cached_property, for properties that call collectives.

    That of Python 3.11 holds one lock for all objects while it computes, so simulated ranks, which
    are threads, would wait for each other forever.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> T:
        if instance is None:
            return self  # type: ignore[return-value]
        value: T = self._compute(instance)
        instance.__dict__[self._name] = value  # found before this, which has no __set__
        return value
