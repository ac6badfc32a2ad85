"""Copies that in torch would be views: a reshape whose elements move between ranks.

A write into a view reaches the tensor, and the other way round; here it would not. So while both
exist, in-place functions refuse either, and all that shares memory with them.
"""

from __future__ import annotations

from threading import Lock
from typing import TypeVar

from torch import Tensor

from meshshard.tensor._torch_private import StorageWeakRef, native

__all__ = ["MOVED", "is_moved", "moved_from"]

MOVED = (
    "its elements moved between ranks in a reshape, whose result is not a view here: change a "
    "clone, or delete the result first"
)
T = TypeVar("T", bound=Tensor)
_pairs: list[tuple[StorageWeakRef, StorageWeakRef]] = []  # memory of a tensor and of its copy
_lock = Lock()


def moved_from(x: Tensor, out: T) -> T:
    """The copy `out` of `x`, which in torch may be a view of it.

    Ranks could not agree on whether it is one: the strides of a rank without rows do not show it.
    """
    with _lock:
        _forget()
        _pairs.append((_memory(x), _memory(out)))
    return out


def is_moved(x: Tensor) -> bool:
    """Whether `x`, or what shares its memory, is such a copy or has one that exists."""
    if not _pairs:
        return False
    memory = _memory(x)
    with _lock:
        _forget()
        return any(memory in pair for pair in _pairs)


def _forget() -> None:
    """Remove the pairs of which one no longer exists."""
    _pairs[:] = [pair for pair in _pairs if not any(map(StorageWeakRef.expired, pair))]


def _memory(x: Tensor) -> StorageWeakRef:
    with native():
        return StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]
