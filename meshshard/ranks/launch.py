"""Launch: run a script on several ranks of this machine, reachable from this machine only."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from meshshard.errors import printable
from meshshard.processes import how_it_ended, loopback_interface

__all__ = ["launch"]

LOOPBACK = "127.0.0.1"
INTERVAL = 0.05  # seconds between two checks of the processes
SETTLE = 1.0  # seconds in which a rank that was killed is found, after another has reported
GRACE = 10.0  # seconds that a rank has to end before it is killed
GUARD = 'while read -r group; do groups="$groups -$group"; done; kill -s KILL -- $groups'


class Failure(NamedTuple):
    """Why a rank failed, and the exit code of its script."""

    rank: int
    code: int
    reason: str


def launch(ranks: int, words: Sequence[str]) -> int:
    """Run a script on `ranks` processes, and wait for them.

    Ranks find each other as under torchrun (`env://`), but the store and gloo listen on the
    loopback interface only. If a rank fails, the others are ended, and why it failed is the last
    line on standard error. No rank and no child of a rank outlives this function or this process,
    however it ends, unless the child has a session of its own.

    Args:
        ranks: number of processes.
        words: `script.py` or `-m module`, and its arguments.

    Returns:
        The exit code: 0 if all ranks succeeded, else that of the first that failed, 128 + n if a
        signal n killed it.
    """
    with _exit_on(signal.SIGTERM, signal.SIGHUP), contextlib.closing(_Ranks()) as started:
        started.start(ranks, words)
        failure = started.wait()
    if failure is None:
        return 0
    sys.stderr.write(f"error: rank {failure.rank}: {printable(failure.reason)}\n")
    return failure.code


class _Ranks:
    """The processes of the ranks, a pipe on which they report why they fail, and their guard.

    The guard is a shell that reads the process groups of the ranks, and kills them when its input
    ends: if this process is killed, the kernel ends the ranks, but not their children.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._reported: dict[int, Failure] = {}  # in the order of the reports
        groups, self._groups = os.pipe()
        shell = ["/bin/sh", "-c", GUARD]
        self._guard = subprocess.Popen(
            shell, stdin=groups, stderr=subprocess.DEVNULL, start_new_session=True
        )
        os.close(groups)

    def start(self, ranks: int, words: Sequence[str]) -> None:
        """Start the processes, then host the store through which they find each other."""
        listener = socket.create_server((LOOPBACK, 0), backlog=max(128, ranks))
        port = listener.getsockname()[1]
        command = [sys.executable, "-m", "meshshard.ranks.run_script"]
        for rank in range(ranks):
            process = subprocess.Popen(
                [*command, str(self._writer), str(os.getpid()), *words],
                env=_environment(rank, ranks, port),
                pass_fds=[self._writer],
                start_new_session=True,  # signals of the terminal come here only
            )
            self._processes.append(process)
            os.write(self._groups, b"%d\n" % process.pid)
        from meshshard.comm.process_group import host_store  # torch, while the ranks load it too

        self._store = host_store(listener)

    def wait(self) -> Failure | None:
        """Wait until all ranks have succeeded, or one has failed."""
        while any(_exit_code(process) != 0 for process in self._processes):
            if self._first_failure() is not None:
                time.sleep(SETTLE)
                return self._first_failure()
            select.select([self._reader], [], [], INTERVAL)
        return None

    def _first_failure(self) -> Failure | None:
        """The first failure so far.

        A rank that was killed cannot report, but others that fail for that reason do, as its
        connections close before the kernel says that it has ended. So it precedes their reports.
        """
        self._read_reports()
        reported = next(iter(self._reported.values()), None)
        codes = {rank: _exit_code(process) for rank, process in enumerate(self._processes)}
        self._read_reports()  # those of ranks that have ended meanwhile
        for rank, code in codes.items():
            if code and rank not in self._reported:
                return Failure(rank, code if code > 0 else 128 - code, how_it_ended(code, b""))
        return reported

    def _read_reports(self) -> None:
        with contextlib.suppress(BlockingIOError):
            lines = os.read(self._reader, 1 << 16)  # all that a pipe can hold
            for line in lines.decode(errors="replace").splitlines():
                rank, code, reason = line.split(" ", 2)
                self._reported.setdefault(int(rank), Failure(int(rank), int(code), reason))

    def close(self) -> None:
        """End all ranks: by SIGTERM, then by SIGKILL with all processes of their groups.

        Ranks that have reported a failure are ending, and get no SIGTERM.
        """
        try:
            for rank, process in enumerate(self._processes):
                if rank not in self._reported:
                    _signal(process, signal.SIGTERM)
            deadline = time.monotonic() + GRACE
            while time.monotonic() < deadline and None in map(_exit_code, self._processes):
                time.sleep(INTERVAL)
        finally:
            self._guard.kill()  # before the numbers of the groups are free
            self._guard.wait()
            for process in self._processes:
                _signal(process, signal.SIGKILL)
                process.wait()
            os.close(self._reader)
            os.close(self._writer)
            os.close(self._groups)


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The variables of `env://`; sockets on the loopback interface, unless the user chose one."""
    return {
        "GLOO_SOCKET_IFNAME": loopback_interface(),
        "NCCL_SOCKET_IFNAME": loopback_interface(),
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 connects to the store, and hosts none
    }


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """Its exit code, negative for a signal; None while it runs.

    The process is not reaped, so that no other gets its number before `close`.
    """
    if process.returncode is not None:
        return process.returncode
    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a rank and to its children."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # they have ended
        os.killpg(process.pid, number)


@contextlib.contextmanager
def _exit_on(*numbers: signal.Signals) -> Iterator[None]:
    """Context manager: raise SystemExit on these signals, so that clean-up runs.

    Signals that are ignored, as SIGHUP under nohup, stay ignored.
    """

    def _raise(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    replaced = [n for n in numbers if signal.getsignal(n) is signal.SIG_DFL]
    for number in replaced:
        signal.signal(number, _raise)
    try:
        yield
    finally:
        for number in replaced:
            signal.signal(number, signal.SIG_DFL)
