"""METIS in a child process, so that a crash, a hang or Ctrl-C ends the child only.

The graph is passed in an unlinked temporary file that the child maps, and the labels are returned
in it: nothing is left on the disk, even if either process is killed. This is the only file that
imports pymetis, and only the child process does.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from meshshard.errors import PartitionError
from meshshard.mesh import Array
from meshshard.processes import die_with_parent, how_it_ended

__all__ = ["Options", "k_way", "serve"]

LONGEST = 1e6  # seconds, the longest timeout of poll()
MEMORY = Path("/dev/shm")  # files in memory, if the system has it and there is room


class Options(NamedTuple):
    """Options of METIS; names and meaning as in its manual (Karypis, version 5.1).

    Attributes:
        objective: "volume" (total communication volume) or "cut" (edge cut).
        recursive: recursive bisection, which supports the objective "cut" only.
        ufactor: allowed imbalance in thousandths.
        seed: seed of the random number generator.
        contiguous: ask for connected parts.
    """

    objective: str = "volume"
    recursive: bool = False
    ufactor: int = 5
    seed: int = 0
    contiguous: bool = False


def k_way(
    indptr: Array,
    indices: Array,
    parts: int,
    options: Options,
    *,
    weights: Array | None = None,
    targets: Array | None = None,
    timeout: float | None = None,
) -> Array:
    """Labels (n,) int64 of a symmetric graph without self-loops; they are not verified here.

    Args:
        indptr: (n + 1,) CSR offsets of the rows.
        indices: neighbors, sorted within rows.
        parts: 2 or more, at most n.
        options: options of METIS.
        weights: (n,) int64 vertex weights, 0 or more.
        targets: (parts,) target weight of every part; they sum to 1.
        timeout: seconds; two minutes plus two for every million nodes if None.

    Raises:
        PartitionError: METIS crashed, timed out or reported an error; says how, and what to try.
    """
    n = len(indptr) - 1
    arrays = {"indptr": indptr, "indices": indices}
    if weights is not None:
        arrays["weights"] = weights
    size = 8 * (sum(len(a) for a in arrays.values()) + n)
    limit = 120 * (1 + n / 1e6) if timeout is None else timeout
    what = f"{n} nodes into {parts} parts"
    with _scratch(size) as file:
        _fill(file, arrays, size)
        lengths = {**{name: len(a) for name, a in arrays.items()}, "labels": n}
        shares = None if targets is None else targets.tolist()
        job = [parts, options, shares, lengths]
        program = (  # the child searches the same paths: a json.py in the directory is not imported
            f"import sys; sys.path[:] = {sys.path!r}; "
            "from meshshard.partitioning.metis_child import serve; serve(*sys.argv[1:])"
        )
        command = [sys.executable, "-c", program, str(file.fileno()), json.dumps(job)]
        code, output = _run(command, file.fileno(), limit, what)
        if code:
            raise PartitionError(
                f"METIS {how_it_ended(code, output)} on {what}; "
                "try Metis(recursive=True), another seed, or method=Morton()"
            )
        return np.array(_map(file.fileno(), lengths)["labels"])


def _run(command: list[str], descriptor: int, timeout: float, what: str) -> tuple[int, bytes]:
    """Exit code and output of a child process that never outlives this call.

    SIGINT and SIGTERM are blocked until the child exists, so that it is always stopped.
    """
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
    try:
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[descriptor],
            start_new_session=True,
        ) as child:
            try:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
                output, _ = child.communicate(timeout=min(timeout, LONGEST))
            finally:
                child.kill()
                child.wait()  # Popen.__exit__ does not wait after KeyboardInterrupt
    except subprocess.TimeoutExpired:
        raise PartitionError(
            f"METIS did not finish {what} in {timeout:g} s and was stopped; "
            "pass a larger Metis(timeout=…), or use method=Morton()"
        ) from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return child.returncode, output


def _fill(file: IO[bytes], arrays: dict[str, Array], size: int) -> None:
    """Write the arrays one after the other as int64, and reserve space for the labels."""
    try:
        for array in arrays.values():
            np.ascontiguousarray(array, dtype=np.int64).tofile(file)
        os.posix_fallocate(
            file.fileno(), 0, size
        )  # a full disk is an error here, not a SIGBUS later
    except OSError as error:
        raise PartitionError(
            f"METIS needs a temporary file of {size / 1e6:.0f} MB ({error}); "
            "free some space, or set TMPDIR to a disk that has some"
        ) from None


def _scratch(size: int) -> IO[bytes]:
    """An unlinked temporary file, in memory if there is room for twice its size."""
    room = 0
    if os.access(MEMORY, os.W_OK):
        status = os.statvfs(MEMORY)
        room = status.f_bavail * status.f_frsize
    return tempfile.TemporaryFile(dir=MEMORY if room > 2 * size else None, buffering=0)


def _map(descriptor: int, lengths: dict[str, int]) -> dict[str, Array]:
    """Map int64 arrays that are stored one after the other in a file."""
    out, start = {}, 0
    with open(descriptor, "r+b", closefd=False) as file:
        for name, length in lengths.items():
            out[name] = (
                np.memmap(file, np.int64, "r+", 8 * start, (length,))
                if length
                else np.zeros(0, np.int64)
            )
            start += length
    return out


def serve(descriptor: str, text: str) -> None:
    """Entry point of the child process: map the arrays, call METIS, write the labels.

    Args:
        descriptor: number of the open file that holds the arrays.
        text: the job, as JSON.
    """
    die_with_parent()
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # METIS raises SIGTERM to report its errors
    import pymetis

    parts, given, targets, lengths = json.loads(text)
    mapped = {name: np.asarray(a) for name, a in _map(int(descriptor), lengths).items()}
    options = Options(*given)
    settings = {"ufactor": options.ufactor, "seed": options.seed}
    if options.objective == "volume" and not options.recursive:
        settings["objtype"] = 1
    if options.contiguous:
        settings["contig"] = 1
    _, labels = pymetis.part_graph(
        parts,
        pymetis.CSRAdjacency(mapped["indptr"], mapped["indices"]),
        vweights=mapped.get("weights"),
        tpwgts=targets,
        recursive=options.recursive,
        options=pymetis.Options(**settings),
    )
    mapped["labels"][:] = labels
