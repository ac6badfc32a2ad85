"""Transport: what carries collectives between ranks; the base class is that of a single rank.

The others are torch.distributed (process_group.py) and threads of one process (threads.py).
Differences between backends (gloo, NCCL) belong there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

__all__ = ["Transport", "Work"]

T = TypeVar("T")


class Work(Protocol):
    """A collective that has been started, as in torch.distributed."""

    def wait(self) -> Any:
        """Block until it is done."""


class Transport:
    """Collectives without gradients, counts or error messages. On a single rank: the identity.

    Attributes:
        group: what the ranks share, None on a single rank; equal groups are the same ranks.
        rank: number of this rank.
        size: number of ranks.
    """

    group: Any = None
    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        """Reduce a contiguous tensor by "sum" or "max", in place (compiled code: a new tensor)."""
        del op
        return x

    def start_all_to_all(
        self, x: Tensor, send: Sequence[int], receive: Sequence[int]
    ) -> tuple[Tensor, Work | None]:
        """Send `send[r]` consecutive rows to every rank r, and receive `receive[r]` rows.

        Returns:
            The received rows, ordered by rank; and the work to wait for before they are used, None
            if they have arrived.
        """
        del send, receive
        return x, None

    def gather_objects(self, value: T) -> list[T]:
        """The picklable values of all ranks, by rank."""
        return [value]

    def shared_seed(self) -> int:
        """A seed from torch's default generator, the same on every rank.

        The generators of all processes advance identically, so that none communicates.
        """
        return int(torch.randint(2**62, ()))

    def close(self) -> None:
        """Free the resources of the backend, if it has any."""
