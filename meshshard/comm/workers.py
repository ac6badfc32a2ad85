"""Workers: domains in processes that are not ranks, such as the workers of a DataLoader.

Workers get objects by fork or by pickling, and send results to their rank by pickling. There, what
holds a domain keeps its rows and sizes, and gets its process group back on the rank. In a worker
every collective raises, because the process group belongs to the rank.

Other pickles are refused: a domain that is loaded in another run has other ranks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar
from weakref import ref

import torch.distributed as dist
from torch import Tensor

from meshshard.comm.transport import Transport, Work
from meshshard.errors import DomainError

__all__ = ["WorkerTransport", "inherited", "not_a_rank", "send_to_workers"]

T = TypeVar("T")
REMEDY = (
    "this process is not a rank but was started by one (a DataLoader worker?): call collectives on "
    "the ranks, and load shards there, with num_workers=0"
)
_inherited: list[Any] = []  # weak reference to the process group that a fork has copied


class WorkerTransport(Transport):
    """The ranks as seen from a process that is none of them: every collective raises."""

    def __init__(self, group: str, rank: int, size: int) -> None:
        self.group, self.rank, self.size = group, rank, size

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        """Refuse."""
        raise not_a_rank()

    def start_all_to_all(
        self, x: Tensor, send: Sequence[int], receive: Sequence[int]
    ) -> tuple[Tensor, Work | None]:
        """Refuse."""
        raise not_a_rank()

    def gather_objects(self, value: T) -> list[T]:
        """Refuse."""
        raise not_a_rank()


def not_a_rank() -> DomainError:
    """The error of a collective in a process that is not a rank."""
    return DomainError(REMEDY)


def inherited() -> bool:
    """Whether this process is a fork of a rank, so that the process group is not its own."""
    return bool(_inherited) and _inherited[0]() is dist.group.WORLD


def send_to_workers(kind: type[Any], reduce: Any) -> None:
    """Send objects of a class to workers and back, by what `reduce` returns, as in pickle."""
    ForkingPickler.register(kind, reduce)


def _note_fork() -> None:
    _inherited[:] = [ref(dist.group.WORLD)] if dist.is_initialized() else []


os.register_at_fork(after_in_child=_note_fork)
