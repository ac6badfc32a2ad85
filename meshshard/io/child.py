"""Readers written in C++ run in a child process: what kills or stops them must not kill us.

The child gets the names of two files on its command line and writes plain arrays to the second.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from meshshard.errors import MeshshardError, ReadError
from meshshard.io.dataset import Dataset
from meshshard.mesh import Faces
from meshshard.mesh.checks import warn
from meshshard.processes import die_with_parent, how_it_ended

__all__ = ["read_in_child", "serve"]

PATIENCE = 100.0  # seconds for any file
RATE = 1e5  # bytes a second that the slowest ascii reader does
ARRAYS = ("points", "connectivity", "offsets", "types")  # of a Dataset, as are these
FIELDS = ("point_fields", "cell_fields")


def read_in_child(path: Path, time: float | None = None) -> list[Dataset]:
    """The leaves of a file, read by `meshshard.io.files.serve_foreign` in a child process.

    Args:
        path: the file.
        time: the step to take.

    Raises:
        ReadError: the child says so, ends by a signal, or takes too long.
    """
    limit = PATIENCE + path.stat().st_size / RATE
    with TemporaryDirectory(prefix="meshshard-") as folder:
        out = Path(folder) / "leaves.npz"
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            "from meshshard.io.files import serve_foreign; serve_foreign(*sys.argv[1:])"
        )
        command = [sys.executable, "-c", code, str(path), str(out), json.dumps(time)]
        try:
            done = subprocess.run(command, capture_output=True, timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            raise ReadError(f"{path}: its reader did not end within {limit:.0f} s") from None
        if done.returncode or not out.exists():
            ended = how_it_ended(done.returncode, done.stderr)
            raise ReadError(f"{path}: its reader {ended}; is the file damaged?")
        return _unpack(out)


def serve(read: Callable[[], list[Dataset]], out: Path) -> None:
    """In the child: read, and write the leaves, or what went wrong, to a file."""
    die_with_parent()
    leaves: list[Dataset] = []
    fault = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            leaves = read()
        except MeshshardError as error:
            fault = str(error)
    said = [str(w.message) for w in caught]
    _pack(leaves, {"fault": fault, "said": said}, out)


def _pack(leaves: list[Dataset], note: dict[str, Any], out: Path) -> None:
    arrays: dict[str, Any] = {}
    notes: list[dict[str, Any]] = []
    for i, leaf in enumerate(leaves):
        for key in ARRAYS:
            arrays[f"{i}.{key}"] = getattr(leaf, key)
        for key in Faces._fields if leaf.faces is not None else ():
            arrays[f"{i}.faces.{key}"] = getattr(leaf.faces, key)
        for kind in FIELDS:
            for j, values in enumerate(getattr(leaf, kind).values()):
                arrays[f"{i}.{kind}.{j}"] = values
        notes.append(
            {
                "block": leaf.block,
                "faces": leaf.faces is not None,
                **{kind: list(getattr(leaf, kind)) for kind in FIELDS},
            }
        )
    np.savez(out, note=np.array(json.dumps({**note, "leaves": notes})), **arrays)


def _unpack(out: Path) -> list[Dataset]:
    with np.load(out, allow_pickle=False) as file:
        note = json.loads(str(file["note"]))
        for message in note["said"]:
            warn(message)
        if note["fault"]:
            raise ReadError(note["fault"])
        return [_leaf(file, i, its) for i, its in enumerate(note["leaves"])]


def _leaf(file: Any, i: int, note: dict[str, Any]) -> Dataset:
    arrays: dict[str, Any] = {key: file[f"{i}.{key}"] for key in ARRAYS}
    fields: dict[str, Any] = {
        kind: {name: file[f"{i}.{kind}.{j}"] for j, name in enumerate(note[kind])}
        for kind in FIELDS
    }
    faces = [file[f"{i}.faces.{key}"] for key in Faces._fields] if note["faces"] else None
    return Dataset(
        **arrays, **fields, faces=None if faces is None else Faces(*faces), block=note["block"]
    )
