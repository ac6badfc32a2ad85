"""Groups: a job on several gloo ranks, each a fresh process with one thread; time and memory there.

A job is a function at module level. Memory is the peak of the resident set above what it was after
imports: Linux keeps that peak for each process and lets it be set back.
"""

import contextlib
import datetime
import multiprocessing
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Call = Callable[[], Any]


def on_ranks(size: int, job: Callable[..., Any], *given: Any, limit: float = 500) -> list[Any]:
    """What a job returns on every rank, by rank.

    Raises:
        SystemExit: a rank raised, died or took longer than the limit.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes, ranks = [], []
        for rank in range(size):
            here, there = context.Pipe()
            given_rank = (rank, size, Path(folder, "store"), there, job, given)
            process = context.Process(target=_serve, args=given_rank, daemon=True)
            process.start()
            there.close()
            pipes.append(here)
            ranks.append(process)
        try:
            return [_answer(pipe, job, limit) for pipe in pipes]
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _serve(
    rank: int, size: int, store: Path, pipe: Connection, job: Callable[..., Any], given: Any
) -> None:
    try:
        join(rank, size, store)
        pipe.send((None, job(*given)))
        pipe.recv()  # no rank leaves while others may still talk to it
    except EOFError:
        pass
    except BaseException:
        pipe.send((traceback.format_exc(), None))


def join(rank: int, size: int, store: Path, seconds: float = 120) -> None:
    """Become a rank of a gloo group, with one thread."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    patience = datetime.timedelta(seconds=seconds)
    if size > 1:
        address = f"file://{store}"
        dist.init_process_group(
            "gloo", init_method=address, rank=rank, world_size=size, timeout=patience
        )


def _answer(pipe: Connection, job: Callable[..., Any], limit: float) -> Any:
    if not pipe.poll(limit):
        raise SystemExit(f"{job.__name__} took more than {limit} s")
    try:
        error, value = pipe.recv()
    except EOFError:
        raise SystemExit(f"a rank of {job.__name__} died; see above") from None
    if error:
        raise SystemExit(error)
    return value


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Environment variables for the processes started within."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# ----------------------------------------------------------------------------------------- measures
def in_turn(
    rounds: int, loops: int, calls: Sequence[Call], clock: Callable[[], float] = time.thread_time
) -> list[list[float]]:
    """Microseconds a call, one list for each round: A B C, A B C, ..."""
    return [[_one(call, loops, clock) for call in calls] for _ in range(rounds)]


def _one(call: Call, loops: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(loops):
        call()
    return (clock() - start) / loops * 1e6


def timed_together(rounds: int, calls: Sequence[Call]) -> list[list[float]]:
    """Milliseconds of each call in turn, of the slowest rank; all start together.

    Every other round goes backwards, so that none always finds what another has left in caches.
    """
    import torch
    import torch.distributed as dist

    table = []
    for i in range(rounds):
        times = [0.0] * len(calls)
        for j in range(len(calls))[:: 1 if i % 2 else -1]:
            dist.barrier()
            start = time.perf_counter()
            calls[j]()
            times[j] = time.perf_counter() - start
        slowest = torch.tensor(times, dtype=torch.float64) * 1e3
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        table.append(slowest.tolist())
    return table


def columns(rounds: Sequence[Sequence[float]]) -> list[float]:
    """Medians of what was measured in turn."""
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def above(call: Call) -> tuple[float, Any]:
    """MiB that a call needs at most above what the process has, and what it returned."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    value = call()
    return (_status("VmHWM") - before) / 1024, value


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])
