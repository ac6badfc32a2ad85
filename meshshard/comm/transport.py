"""Transport: the protocol of what carries collectives between ranks.

Implemented by torch.distributed (process_group.py), by threads of one process (threads.py) and by
one rank without others. Differences between backends (gloo, NCCL) belong in an implementation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

__all__ = ["SingleRank", "Transport", "Work"]

T = TypeVar("T")


class Work(Protocol):
    """A collective that has been started, as in torch.distributed."""

    def wait(self) -> Any:
        """Block until it is done."""


class Transport(Protocol):
    """Collectives between ranks: outside of autograd, not counted, with the backend's errors.

    Attributes:
        group: what the ranks share; equal groups are the same ranks.
        rank: number of this rank.
        size: number of ranks.
    """

    group: Any
    rank: int
    size: int

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        """Reduce a contiguous tensor by "sum" or "max", in place (compiled code: a new tensor)."""

    def start_all_to_all(
        self, x: Tensor, send: Sequence[int], receive: Sequence[int]
    ) -> tuple[Tensor, Work | None]:
        """Send `send[r]` consecutive rows to every rank r.

        Returns:
            The received rows, ordered by rank; and the work to wait for before they are used, None
            if they have arrived.
        """

    def gather_objects(self, value: T) -> list[T]:
        """The picklable values of all ranks, by rank."""

    def shared_seed(self) -> int:
        """A seed from the default generator, the same on every rank."""

    def close(self) -> None:
        """Free the resources of the backend."""


class SingleRank:
    """One rank without others: every collective is the identity."""

    group = None
    rank = 0
    size = 1

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        """The tensor itself."""
        del op
        return x

    def start_all_to_all(
        self, x: Tensor, send: Sequence[int], receive: Sequence[int]
    ) -> tuple[Tensor, None]:
        """The rows themselves."""
        del send, receive
        return x, None

    def gather_objects(self, value: T) -> list[T]:
        """The one value."""
        return [value]

    def shared_seed(self) -> int:
        """A seed from the default generator."""
        return draw_seed()

    def close(self) -> None:
        """There are no resources to free."""


def draw_seed() -> int:
    """A seed from torch's default generator, which it advances."""
    return int(torch.randint(2**62, ()))
