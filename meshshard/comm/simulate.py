"""`simulate` runs ranks as threads of one process, for checks and experiments."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from meshshard.comm.domain import Domain
from meshshard.comm.threads import ThreadGroup, ThreadTransport
from meshshard.errors import DomainError

__all__ = ["simulate"]

T = TypeVar("T")


def simulate(size: int, job: Callable[[Domain], T], device: torch.device | str = "cpu") -> list[T]:
    """Run a job on several ranks, each a thread of this process.

    Results and traffic are those of separate processes; time and memory are not. All threads share
    torch's default generator: draw numbers that must be equal on all ranks from a separate
    `torch.Generator` in each job.

    Args:
        size: number of ranks; with 1, the job runs in the calling thread, on `Domain()`.
        job: called with the domain of each rank; must not modify objects shared by the ranks.
        device: of all domains.

    Returns:
        The result of the job on each rank, in rank order.

    Raises:
        DomainError: a rank failed (it names the first one, and why), or `size` is less than 1. With
            one rank, the exception of the job is raised as it is.
    """
    if size < 1:
        raise DomainError(f"simulate: {size} ranks; pass 1 or more")
    if size == 1:
        return [job(Domain(device=device))]
    group = ThreadGroup(size)
    results: list[Any] = [None] * size

    def _run(rank: int) -> None:
        try:
            results[rank] = job(Domain(ThreadTransport(group, rank), device))
        except BaseException as error:
            group.fail(rank, error)
        finally:
            group.end(rank)

    threads = [threading.Thread(target=_run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if group.failure is not None:
        rank, error = group.failure
        raise DomainError(f"simulated rank {rank}: {error}") from error
    return results
