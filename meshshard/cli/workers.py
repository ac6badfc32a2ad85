"""Workers: call one function for many files, in processes or on a Dask cluster.

If a worker crashes, only its file fails.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

from meshshard.errors import StoreError
from meshshard.processes import die_with_parent

__all__ = ["on_dask", "on_processes"]

Task = Callable[..., dict[str, Any]]
Result = tuple[str, dict[str, Any] | str]


def on_processes(task: Task, folders: Mapping[str, Path], job: Any, jobs: int) -> Iterator[Result]:
    """Call the task for each file in a separate process, `jobs` at a time.

    Args:
        task: called as task(path, folder, job).
        folders: the folder of each path.
        job: options of the task.
        jobs: number of processes at a time.

    Yields:
        The path, and the outcome of the task, or why it has none.
    """
    from multiprocessing import get_context
    from multiprocessing.connection import Connection, wait
    from multiprocessing.process import BaseProcess

    context = get_context("spawn")
    todo = list(folders)
    running: dict[Connection, tuple[str, BaseProcess]] = {}
    try:
        while todo or running:
            while todo and len(running) < jobs:
                path = todo.pop(0)
                ours, theirs = context.Pipe(duplex=False)
                work = (task, theirs, path, str(folders[path]), job)
                running[ours] = path, context.Process(target=_work, args=work, daemon=True)
                running[ours][1].start()
                theirs.close()
            for ready in [r for r in wait(list(running)) if isinstance(r, Connection)]:
                path, process = running[ready]
                answer = _answer(ready, process)
                del running[ready]
                yield path, answer
    finally:  # stopped early: end the processes that are still running
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.join(2)
            process.kill()


def _work(task: Task, answer: Any, path: str, folder: str, job: Any) -> None:
    """Entry point of a process; it ends with the parent process, which handles Ctrl-C."""
    parent = parent_process()
    die_with_parent(parent.pid if parent else None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    answer.send(task(path, folder, job))


def _answer(answer: Any, process: Any) -> dict[str, Any] | str:
    """The outcome that a process has sent, or how the process ended."""
    try:
        outcome: dict[str, Any] = answer.recv()
    except (EOFError, OSError):
        process.join()
        code = process.exitcode
        how = f"by signal {-code}, out of memory?" if code < 0 else f"with exit code {code}"
        return f"its process ended ({how})"
    finally:
        answer.close()
    process.join()
    return outcome


def on_dask(task: Task, folders: Mapping[str, Path], job: Any, address: str) -> Iterator[Result]:
    """Call the task for each file on a Dask cluster whose workers see the same file system.

    Args:
        task: called as task(path, folder, job) with absolute paths.
        folders: the folder of each path.
        job: options of the task.
        address: address of the scheduler.

    Yields:
        The path, and the outcome of the task, or why it has none.

    Raises:
        StoreError: Dask is not installed, or the scheduler does not answer.
    """
    try:
        from distributed import Client, as_completed
    except ImportError:
        raise StoreError("--dask needs Dask: pip install 'meshshard[dask]'") from None
    try:
        client = Client(address, timeout=10)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, AssertionError) as error:  # AssertionError for a bad address
        raise StoreError(f"no Dask scheduler answers at {address} ({error})") from None
    with client:
        futures = {
            client.submit(task, str(Path(path).absolute()), str(folder.absolute()), job,
                          pure=False): path
            for path, folder in folders.items()
        }  # fmt: skip
        for future in as_completed(futures):  # type: ignore[no-untyped-call]
            if future.status == "finished":
                yield futures[future], future.result()
                continue
            why = future.exception() if future.status == "error" else future.status
            yield futures[future], " ".join(f"its Dask worker failed: {why}".split())
