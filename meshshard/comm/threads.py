"""A transport between threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from meshshard.comm.matching import Call, call_of, raise_if_different
from meshshard.comm.transport import Transport
from meshshard.errors import DomainError, n_of

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
        self._lock = threading.Lock()
        self._calls = [0] * size  # collectives that each rank has entered
        self._ended: set[int] = set()

    def gather(self, rank: int, call: Call, value: T) -> list[T]:
        """The values of all ranks, by rank; not copied.

        Args:
            rank: this rank.
            call: the collective that this rank makes.
            value: the value of this rank.

        Raises:
            DomainError: on every rank, if another rank is in another collective or has ended.
        """
        self._enter(rank, call)
        self._slots[rank] = call, value
        self._barrier.wait()
        slots = list(self._slots)
        self._barrier.wait()
        raise_if_different({other: call for other, (call, _) in enumerate(slots)})
        return [value for _, value in slots]

    def end(self, rank: int) -> None:
        """Record that a rank makes no more collectives; ranks that wait for it raise."""
        with self._lock:
            self._ended.add(rank)
            if max(self._calls) > self._calls[rank]:
                self._barrier.abort()

    def _enter(self, rank: int, call: Call) -> None:
        with self._lock:
            self._calls[rank] += 1
            missing = [r for r in self._ended if self._calls[r] < self._calls[rank]]
        if missing:
            raise DomainError(
                f"rank {rank} is in {call}, but rank {missing[0]} has ended after "
                f"{n_of(self._calls[missing[0]], 'collectives')}"
            )

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
        call = call_of("all_reduce", op, tuple(x.shape), x.dtype)
        terms = torch.stack(self.group.gather(self.rank, call, x.clone()))
        return x.copy_(terms.sum(0) if op == "sum" else terms.amax(0))

    def start_all_to_all(
        self, x: Tensor, send: Sequence[int], receive: Sequence[int]
    ) -> tuple[Tensor, None]:
        """See `Transport`; the rows have arrived when it returns."""
        call = call_of("all_to_all", tuple(x.shape[1:]), x.dtype, send=send, receive=receive)
        sent = self.group.gather(self.rank, call, torch.split(x.clone(), list(send)))
        return torch.cat([parts[self.rank] for parts in sent]), None

    def gather_objects(self, value: T) -> list[T]:
        """See `Transport`; the values are not copied."""
        values: list[T] = self.group.gather(self.rank, call_of("gather_objects"), value)
        return values

    def shared_seed(self) -> int:
        """One draw by rank 0, as all threads share one default generator."""
        seed = super().shared_seed() if self.rank == 0 else 0
        return self.gather_objects(seed)[0]
