"""A transport between threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from meshshard.comm.transport import Transport

__all__ = ["ThreadGroup", "ThreadTransport"]

T = TypeVar("T")


class ThreadGroup:
    """What the threads share: one slot for each rank, and a barrier.

    Attributes:
        size: number of threads.
        failure: rank and error of the first thread that failed, None if none did.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.failure: tuple[int, BaseException] | None = None
        self._slots: list[Any] = [None] * size
        self._barrier = threading.Barrier(size)

    def gather(self, rank: int, value: T) -> list[T]:
        """The values of all ranks, by rank; not copied."""
        self._slots[rank] = value
        self._barrier.wait()
        values = list(self._slots)
        self._barrier.wait()
        return values

    def fail(self, rank: int, error: BaseException) -> None:
        """Record the first error, and raise BrokenBarrierError in the threads that wait."""
        if self.failure is None:
            self.failure = rank, error
        self._barrier.abort()


class ThreadTransport(Transport):
    """The collectives of one rank of a thread group."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.group = group
        self.rank = rank
        self.size = group.size

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        """See `Transport`; a sum adds in the order of the ranks."""
        terms = torch.stack(self.group.gather(self.rank, x.clone()))
        return x.copy_(terms.sum(0) if op == "sum" else terms.amax(0))

    def start_all_to_all(
        self, x: Tensor, send: Sequence[int], receive: Sequence[int]
    ) -> tuple[Tensor, None]:
        """See `Transport`; the rows have arrived when it returns."""
        del receive
        sent = self.group.gather(self.rank, torch.split(x.clone(), list(send)))
        return torch.cat([parts[self.rank] for parts in sent]), None

    def gather_objects(self, value: T) -> list[T]:
        """See `Transport`; the values are not copied."""
        values: list[T] = self.group.gather(self.rank, value)
        return values

    def shared_seed(self) -> int:
        """One draw by rank 0, as all threads share one default generator."""
        seed = super().shared_seed() if self.rank == 0 else 0
        return self.gather_objects(seed)[0]
