"""METIS in a child process, so that a crash, a hang or Ctrl-C costs the child and nothing else.

The graph travels through an unlinked temporary file that the child maps, the labels come back the
same way: nothing is left behind, whoever is killed. This is the only file that imports pymetis,
and only the child does.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from meshshard.errors import PartitionError
from meshshard.mesh import Array
from meshshard.processes import die_with_parent, how_it_ended

__all__ = ["Options", "k_way", "mesh_to_dual", "serve"]

LONGEST = 1e6  # seconds that a poll can wait
MEMORY = Path("/dev/shm")  # a file in memory, where the system has one with room


class Options(NamedTuple):
    """What METIS may be told; names and meaning as in its manual (Karypis, version 5.1).

    Attributes:
        objective: "volume" (rows to communicate) or "cut" (edges cut).
        recursive: bisect recursively, which knows the objective "cut" only.
        ufactor: allowed imbalance in thousandths.
        seed: of the random number generator.
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
    """Labels (n,) int64 of a symmetric graph without loops, as METIS gives them: not yet verified.

    Args:
        indptr: (n + 1,) offsets of the rows.
        indices: neighbors, sorted within rows.
        parts: 2 or more, at most n.
        options: what METIS is told.
        weights: (n,) int64 loads, not negative.
        targets: (parts,) shares that sum to 1.
        timeout: seconds; by default two minutes and two more for every million nodes.

    Raises:
        PartitionError: METIS crashed, hung or refused; says how, and what to try.
    """
    n = len(indptr) - 1
    arrays = {"indptr": indptr, "indices": indices}
    if weights is not None:
        arrays["weights"] = weights
    job = {
        "call": "k_way",
        "parts": parts,
        "options": options._asdict(),
        "targets": None if targets is None else targets.tolist(),
        "results": {"labels": n},
    }
    limit = 120 * (1 + n / 1e6) if timeout is None else timeout
    return _in_child(job, arrays, limit, f"{n} nodes into {parts} parts")["labels"]


def mesh_to_dual(
    offsets: Array, connectivity: Array, n_points: int, common: int, most_edges: int
) -> tuple[Array, Array]:
    """Rows (indptr, indices) of the cells that share at least `common` points, by METIS itself.

    For simplices this is adjacency by facet. Slower than one sort on shuffled numberings (METIS
    walks from point to point), and it tells nothing about open or shared facets: kept as a second
    opinion. `most_edges` bounds the answer, as many as there are facets.

    Raises:
        PartitionError: METIS does not export the call here, crashed or hung.
    """
    job = {
        "call": "mesh_to_dual",
        "n_points": n_points,
        "common": common,
        "results": {"indptr": len(offsets), "indices": most_edges},
    }
    arrays = {"offsets": offsets, "connectivity": connectivity}
    limit = 120 * (1 + len(offsets) / 1e6)
    out = _in_child(job, arrays, limit, f"the dual of {len(offsets) - 1} cells")
    return out["indptr"], out["indices"][: out["indptr"][-1]].astype(np.int32)


def _in_child(
    job: dict[str, Any], arrays: dict[str, Array], timeout: float, what: str
) -> dict[str, Array]:
    """Run one job in a child and fetch its results."""
    size = 8 * (sum(len(a) for a in arrays.values()) + sum(job["results"].values()))
    with _scratch(size) as file:
        _fill(file, arrays, size)
        job["arrays"] = {name: len(a) for name, a in arrays.items()}
        program = (  # by the same paths as here: a json.py where the user stands is not ours
            f"import sys; sys.path[:] = {sys.path!r}; "
            "from meshshard.partitioning.metis_child import serve; serve(*sys.argv[1:])"
        )
        command = [sys.executable, "-c", program, str(file.fileno()), json.dumps(job)]
        code, said = _run(command, file.fileno(), timeout, what)
        if code:
            raise PartitionError(
                f"METIS {how_it_ended(code, said)} on {what}; "
                "try Metis(recursive=True), another seed, or method=Morton()"
            )
        results = _map(file.fileno(), {**job["arrays"], **job["results"]})
        return {name: np.array(results[name]) for name in job["results"]}


def _run(command: list[str], descriptor: int, timeout: float, what: str) -> tuple[int, bytes]:
    """Exit code and words of a child that never outlives this call.

    Ctrl-C and SIGTERM wait until there is a child to stop.
    """
    held = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
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
                signal.pthread_sigmask(signal.SIG_SETMASK, held)
                said, _ = child.communicate(timeout=min(timeout, LONGEST))
            finally:
                child.kill()
                child.wait()  # after Ctrl-C, leaving its block would not
    except subprocess.TimeoutExpired:
        raise PartitionError(
            f"METIS did not finish {what} in {timeout:g} s and was stopped; "
            "give Metis(timeout=…) more, or take method=Morton()"
        ) from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
    return child.returncode, said


def _fill(file: IO[bytes], arrays: dict[str, Array], size: int) -> None:
    """Write arrays one after the other, and room for the results."""
    try:
        for array in arrays.values():
            np.ascontiguousarray(array, dtype=np.int64).tofile(file)
        os.posix_fallocate(file.fileno(), 0, size)  # a full disk is met here, not by a crash
    except OSError as error:
        raise PartitionError(
            f"METIS needs a temporary file of {size / 1e6:.0f} MB ({error}); "
            "make room, or set TMPDIR to a disk that has some"
        ) from None


def _scratch(size: int) -> IO[bytes]:
    """An unlinked file of its own, in memory where there is room for twice its size."""
    room = 0
    if os.access(MEMORY, os.W_OK):
        status = os.statvfs(MEMORY)
        room = status.f_bavail * status.f_frsize
    return tempfile.TemporaryFile(dir=MEMORY if room > 2 * size else None, buffering=0)


def _map(descriptor: int, lengths: dict[str, int]) -> dict[str, Array]:
    """int64 arrays that lie one after the other in a file, mapped."""
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
    """What the child does: map, call, write back.

    Args:
        descriptor: number of the open file that holds the arrays.
        text: the job, as JSON.
    """
    die_with_parent()
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # METIS raises SIGTERM to report its errors
    job = json.loads(text)
    mapped = _map(int(descriptor), {**job["arrays"], **job["results"]})
    mapped = {name: np.asarray(a) for name, a in mapped.items()}
    call = {"k_way": _call_k_way, "mesh_to_dual": _call_mesh_to_dual}[job["call"]]
    call(mapped, job)


def _call_k_way(mapped: dict[str, Array], job: dict[str, Any]) -> None:
    import pymetis

    options = Options(**job["options"])
    volume = options.objective == "volume" and not options.recursive
    told: dict[str, int] = {"ufactor": options.ufactor, "seed": options.seed}
    if volume:
        told["objtype"] = 1
    if options.contiguous:
        told["contig"] = 1
    _, labels = pymetis.part_graph(
        job["parts"],
        pymetis.CSRAdjacency(mapped["indptr"], mapped["indices"]),
        vweights=mapped.get("weights"),
        tpwgts=job["targets"],
        recursive=options.recursive,
        options=pymetis.Options(**told),
    )
    mapped["labels"][:] = labels


def _call_mesh_to_dual(mapped: dict[str, Array], job: dict[str, Any]) -> None:
    """METIS_MeshToDual from the library that pymetis carries, where it exports it."""
    import pymetis._internal as carrier

    library = ctypes.CDLL(carrier.__file__)
    if not hasattr(library, "METIS_MeshToDual"):
        raise SystemExit("this build of pymetis does not export METIS_MeshToDual")
    integer, pointer = ctypes.c_int64, ctypes.POINTER(ctypes.c_int64)
    rows, columns = pointer(), pointer()
    offsets = mapped["offsets"]
    numbers = [len(offsets) - 1, job["n_points"], job["common"], 0]
    cells, points, common, base = (ctypes.byref(integer(v)) for v in numbers)
    in_file = [mapped[a].ctypes.data_as(pointer) for a in ("offsets", "connectivity")]
    out = (ctypes.byref(rows), ctypes.byref(columns))
    status = library.METIS_MeshToDual(cells, points, *in_file, common, base, *out)
    if status != 1:
        raise SystemExit(f"METIS_MeshToDual answered {status}")
    indptr = np.ctypeslib.as_array(rows, (len(offsets),))
    mapped["indptr"][:] = indptr
    count = int(indptr[-1])
    mapped["indices"][:count] = np.ctypeslib.as_array(columns, (count,)) if count else 0
