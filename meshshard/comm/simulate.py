"""Simulate: many ranks as threads of one process, for checks and for trying things out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from meshshard.comm.domain import Domain
from meshshard.comm.threads import ThreadGroup
from meshshard.errors import DomainError

__all__ = ["simulate"]

T = TypeVar("T")


def simulate(size: int, job: Callable[[Domain], T]) -> list[T]:
    """What a job returns on every one of some ranks, each a thread of this process.

    The same code as on processes, as to results and traffic; not as to time or memory. Replicated
    random draws are one sequence for all threads: draw from generators of your own.

    Args:
        size: number of ranks; one is an ordinary domain without others.
        job: called with the domain of each rank; what it changes must be its own.

    Raises:
        DomainError: naming the first rank that failed, and why; or no rank at all.
    """
    if size < 1:
        raise DomainError(f"simulate: {size} ranks; take 1 or more")
    if size == 1:
        return [job(Domain())]
    meeting = ThreadGroup(size)
    results: list[Any] = [None] * size

    def _rank(number: int) -> None:
        try:
            results[number] = job(_Simulated(meeting, number))
        except BaseException as error:
            meeting.fail(number, error)

    threads = [threading.Thread(target=_rank, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if meeting.failed is not None:
        number, error = meeting.failed
        raise DomainError(f"simulated rank {number}: {error}") from error
    return results


class _Simulated(Domain):
    """A rank of a meeting."""

    def __init__(self, meeting: ThreadGroup, rank: int) -> None:
        super().__init__()
        self.group = meeting
        self.rank, self.size = rank, meeting.size

    def shared_seed(self) -> int:
        """The first rank's."""
        mine = super().shared_seed() if self.rank == 0 else 0
        return int(self.group.swap(self.rank, mine)[0])
