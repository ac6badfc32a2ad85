"""cached_on: values derived from a graph, computed once and kept as long as the graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from meshshard.tensor import ShardGraph

__all__ = ["cached_on"]

T = TypeVar("T")
_cache: WeakKeyDictionary[ShardGraph, dict[Hashable, Any]] = WeakKeyDictionary()


def cached_on(graph: ShardGraph, key: Hashable, make: Callable[[], T]) -> T:
    """The value under `key` in the cache of a graph; `make()` computes it at the first call."""
    values = _cache.setdefault(graph, {})
    if key not in values:
        values[key] = make()
    value: T = values[key]
    return value
