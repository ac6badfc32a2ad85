"""Pools of forked gloo ranks. A job is a module-level function that every rank runs."""

import datetime
import multiprocessing as mp
import sys
import tempfile
import traceback
from multiprocessing.connection import wait
from pathlib import Path

TIMEOUT = 60  # seconds that a rank waits for the others: generous, machines are shared


def serve(rank, size, store, pipe, timeout):
    """The process of one rank: run jobs until it receives None."""
    import torch
    import torch.distributed as dist

    from meshshard.comm.matching import matching_of
    from meshshard.comm.process_group import ProcessGroupTransport

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size,
        timeout=datetime.timedelta(seconds=timeout),
    )  # fmt: skip
    # Ranks wait before every collective, so that a test of different ones leaves the group usable.
    matching_of(dist.group.WORLD, ProcessGroupTransport(None)._gather).waited = sys.maxsize
    while (job := pipe.recv()) is not None:
        function, args = job
        torch.manual_seed(0)
        try:
            pipe.send((None, function(*args)))
        except BaseException:
            pipe.send((traceback.format_exc(), None))


class Ranks:
    """A pool of gloo ranks. If one raises, all are ended, and the next job starts new ones."""

    def __init__(self, size, timeout=TIMEOUT):
        self.size, self.timeout = size, timeout
        self.pipes, self.processes = [], []

    def start(self):
        context = mp.get_context("fork")
        store = Path(tempfile.mkdtemp()) / "store"
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(
                target=serve, args=(rank, self.size, store, there, self.timeout), daemon=True
            )
            process.start()
            self.pipes.append(here)
            self.processes.append(process)

    def stop(self):
        for process in self.processes:
            process.kill()
            process.join()
        self.pipes, self.processes = [], []

    def run(self, function, *args):
        """Call a function on every rank; what it returned, by rank.

        Raises:
            AssertionError: with the traceback of the first rank that raised.
        """
        self._send(function, args)
        results, left = {}, {pipe: rank for rank, pipe in enumerate(self.pipes)}
        while left:
            for pipe in wait(list(left)):
                error, value = pipe.recv()
                rank = left.pop(pipe)
                if error:
                    self.stop()
                    raise AssertionError(f"rank {rank}:\n{error}")
                results[rank] = value
        return [results[rank] for rank in range(self.size)]

    def _send(self, function, args):
        """Send a job to all ranks; start new ones if an earlier test has left a dead one."""
        if not all(process.is_alive() for process in self.processes):
            self.stop()
        if not self.processes:
            self.start()
        for pipe in self.pipes:
            pipe.send((function, args))

    def failures(self, function, *args):
        """Last line of the traceback of every rank, None if it did not raise; ends the pool."""
        self._send(function, args)
        errors = []
        for pipe in self.pipes:
            try:
                error, _ = pipe.recv()
            except EOFError:
                error = "died"
            errors.append(error and error.strip().splitlines()[-1])
        self.stop()
        return errors
