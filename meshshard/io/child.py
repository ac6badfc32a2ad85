"""Reading in a child process: a crash or a hang of VTK or meshio does not end this process.

The child gets the path of the file and an open temporary file, to which it writes plain arrays.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np

from meshshard.errors import MeshshardError, ReadError
from meshshard.io.dataset import Dataset
from meshshard.mesh import Faces
from meshshard.mesh.checks import warn
from meshshard.processes import die_with_parent, how_it_ended

__all__ = ["read_in_child", "serve"]

TIME_LIMIT = 100.0  # seconds for any file
RATE = 1e5  # bytes per second of the slowest ascii reader
ARRAYS = ("points", "connectivity", "offsets", "types")  # attributes of a Dataset
FIELDS = ("point_fields", "cell_fields")


def read_in_child(path: Path, time: float | None = None) -> list[Dataset]:
    """The data sets of a file, read by `foreign.serve_foreign` in a child process.

    Args:
        path: the file.
        time: the time step to read.

    Raises:
        ReadError: the child cannot read the file, is killed by a signal, or takes too long.
    """
    limit = TIME_LIMIT + path.stat().st_size / RATE
    with TemporaryFile() as out:  # without a name: nothing is left if this process is killed
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            "from meshshard.io.foreign import serve_foreign; serve_foreign(*sys.argv[1:])"
        )
        descriptor = out.fileno()
        command = [sys.executable, "-c", code, str(path), str(descriptor), json.dumps(time)]
        try:
            done = subprocess.run(
                command, capture_output=True, timeout=limit, check=False, pass_fds=[descriptor]
            )
        except subprocess.TimeoutExpired:
            raise ReadError(
                f"{path}: its reader did not end within {limit:.0f} s; is the file damaged?"
            ) from None
        if done.returncode or not os.fstat(descriptor).st_size:
            ended = how_it_ended(done.returncode, done.stderr)
            raise ReadError(f"{path}: its reader {ended}; is the file damaged?")
        out.seek(0)
        datasets = _unpack(out)
    if printed := (done.stdout + done.stderr).decode(errors="replace").split():
        warn(f"{path}: its reader printed: {' '.join(printed)[:300]}")
    return datasets


def serve(read: Callable[[], list[Dataset]], descriptor: int) -> None:
    """In the child: call `read`, and write its data sets, warnings and error to an open file."""
    die_with_parent()
    datasets: list[Dataset] = []
    failure = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            datasets = read()
        except MeshshardError as error:
            failure = str(error)
        except MemoryError:
            failure = "too large for the memory of this machine"
    header = {"error": failure, "warnings": [str(w.message) for w in caught]}
    with os.fdopen(descriptor, "wb") as out:
        _pack(datasets, header, out)


def _pack(datasets: list[Dataset], header: dict[str, Any], out: IO[bytes]) -> None:
    arrays: dict[str, Any] = {}
    headers: list[dict[str, Any]] = []
    for i, dataset in enumerate(datasets):
        for key in ARRAYS:
            arrays[f"{i}.{key}"] = getattr(dataset, key)
        for key in Faces._fields if dataset.faces is not None else ():
            arrays[f"{i}.faces.{key}"] = getattr(dataset.faces, key)
        for kind in FIELDS:
            for j, values in enumerate(getattr(dataset, kind).values()):
                arrays[f"{i}.{kind}.{j}"] = values
        names = {kind: list(getattr(dataset, kind)) for kind in FIELDS}
        headers.append({"block": dataset.block, "faces": dataset.faces is not None, **names})
    np.savez(out, header=np.array(json.dumps({**header, "datasets": headers})), **arrays)


def _unpack(out: IO[bytes]) -> list[Dataset]:
    with np.load(out, allow_pickle=False) as file:
        header = json.loads(str(file["header"]))
        if header["error"]:
            raise ReadError(header["error"])
        for message in header["warnings"]:
            warn(message)
        return [_dataset(file, i, own) for i, own in enumerate(header["datasets"])]


def _dataset(file: Any, i: int, header: dict[str, Any]) -> Dataset:
    arrays: dict[str, Any] = {key: file[f"{i}.{key}"] for key in ARRAYS}
    if header["faces"]:
        arrays["faces"] = Faces(*(file[f"{i}.faces.{key}"] for key in Faces._fields))
    for kind in FIELDS:
        arrays[kind] = {name: file[f"{i}.{kind}.{j}"] for j, name in enumerate(header[kind])}
    return Dataset(**arrays, block=header["block"])
