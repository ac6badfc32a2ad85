"""ThreadGroup: collectives between threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["ThreadGroup"]

T = TypeVar("T")


class ThreadGroup:
    """Where the threads hand over what they send; it stands where a process group is."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.failed: tuple[int, BaseException] | None = None
        self._table: list[Any] = [None] * size
        self._barrier = threading.Barrier(size)

    def swap(self, rank: int, value: T) -> list[T]:
        """Everybody's value, by rank."""
        self._table[rank] = value
        self._barrier.wait()
        found = list(self._table)
        self._barrier.wait()
        return found

    def fail(self, rank: int, error: BaseException) -> None:
        """Let the others stop waiting; the first error is kept."""
        if self.failed is None:
            self.failed = rank, error
        self._barrier.abort()

    def all_reduce(self, rank: int, x: Tensor, op: str) -> Tensor:
        """In place, in the order of the ranks."""
        every = torch.stack(self.swap(rank, x.clone()))
        return x.copy_(every.sum(0) if op == "sum" else every.amax(0))

    def all_to_all(self, rank: int, x: Tensor, send: Sequence[int]) -> Tensor:
        """Runs of rows from every rank, by rank."""
        return torch.cat([parts[rank] for parts in self.swap(rank, torch.split(x, list(send)))])
