"""Meshes from plain arrays: in memory, and point clouds from .npz, .npy, .csv and .pt."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from meshshard.errors import ReadError
from meshshard.io.dataset import Dataset
from meshshard.mesh import Array, Mesh
from meshshard.mesh.cells import POLYGON, QUAD, TRIANGLE
from meshshard.mesh.checks import check, warn
from meshshard.mesh.ragged import offsets_of

__all__ = ["from_arrays", "read_csv", "read_npy", "read_npz", "read_pt"]

NAMES = ("points", "pos", "coords", "xyz", "coordinates", "positions", "vertices")
AXES = (
    ("x", "y", "z"),
    ("points:0", "points:1", "points:2"),
    ("points_0", "points_1", "points_2"),
)

_NPZ_FAULTS = (
    ValueError, EOFError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


def from_arrays(
    points: Any,
    cells: Any = None,
    *,
    cell_fields: Mapping[str, Any] | None = None,
    point_fields: Mapping[str, Any] | None = None,
    name: str = "mesh",
) -> Mesh:
    """A checked surface or point cloud from arrays.

    Args:
        points: (n_points, 3) coordinates, or (n_points, 2) with z = 0.
        cells: (n_cells, k) point ids, a list of polygons, a tuple (offsets, connectivity) with
            n_cells + 1 offsets, or None for a cloud.
        cell_fields: arrays with a row for each cell, by name.
        point_fields: arrays with a row for each point, by name.
        name: what to call the mesh in messages.

    Raises:
        MeshError: the arrays contradict each other.
    """
    where = np.asarray(points)
    if where.ndim == 2 and where.shape[1] == 2:
        where = np.column_stack([where, np.zeros(len(where), where.dtype)])
    if where.dtype.kind != "f":
        where = where.astype(np.float64)
    connectivity, offsets = _runs(cells)
    counts = np.diff(offsets)
    types = np.select([counts == 3, counts == 4], [TRIANGLE, QUAD], POLYGON).astype(np.uint8)
    mesh = Mesh(
        points=where,
        connectivity=connectivity,
        offsets=offsets,
        types=types,
        cell_fields={key: np.asarray(values) for key, values in (cell_fields or {}).items()},
        point_fields={key: np.asarray(values) for key, values in (point_fields or {}).items()},
        name=name,
    )
    return check(mesh)


def _runs(cells: Any) -> tuple[Array, Array]:
    """Connectivity and offsets of cells in any of the forms that `from_arrays` takes."""
    if cells is None or len(cells) == 0:
        return np.zeros(0, np.int64), np.zeros(1, np.int64)
    if isinstance(cells, tuple):
        offsets, connectivity = (np.asarray(part) for part in cells)
        return connectivity, offsets.astype(np.int64, copy=False)
    if isinstance(cells, np.ndarray) and cells.ndim == 2:
        n, width = cells.shape
        return cells.reshape(-1), np.arange(n + 1, dtype=np.int64) * width
    counts = np.array([len(cell) for cell in cells])
    ids = np.fromiter(chain.from_iterable(cells), np.int64, int(counts.sum()))
    return ids, offsets_of(counts)


def cloud(arrays: Mapping[str, Array], path: Path) -> Dataset:
    """A point cloud from named arrays: one of them holds the points, those of n rows are fields.

    Args:
        arrays: any; points are (n, 3) or (n, 2), in which case z is 0.
        path: for messages.

    Raises:
        ReadError: no array can be the points.
    """
    lower = {name.lower(): name for name in arrays}
    key = next((lower[name] for name in NAMES if name in lower), None)
    shapes = ", ".join(f"{name} {values.shape}" for name, values in arrays.items())
    if key is None:
        raise ReadError(f"{path}: no array called {' or '.join(NAMES[:4])}; it has {shapes}")
    points = arrays[key]
    if points.ndim != 2 or points.shape[1] not in (2, 3) or points.dtype.kind not in "fiu":
        raise ReadError(
            f"{path}: '{key}' has the shape {points.shape} and type {points.dtype}, points must be "
            f"(n, 3) numbers; transpose it? All arrays: {shapes}"
        )
    if points.shape[1] == 2:
        points = np.column_stack([points, np.zeros(len(points), points.dtype)])
    fields = {}
    for name, values in arrays.items():
        if name == key:
            continue
        if values.ndim and len(values) == len(points) and values.dtype.kind in "fiub":
            fields[name] = values
        else:
            warn(
                f"{path}: array '{name}' {values.shape} {values.dtype} is no point field, left out"
            )
    return Dataset(np.ascontiguousarray(points), point_fields=fields)


def read_npz(path: Path) -> list[Dataset]:
    """The arrays of an .npz file as a cloud.

    Raises:
        ReadError: damaged, Python objects in it, or no points.
    """
    try:
        with path.open("rb") as file:  # numpy leaves it open where it is damaged
            loaded = np.load(file, allow_pickle=False)
            arrays = {"points": loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
        return [cloud(arrays, path)]
    except _NPZ_FAULTS as error:
        raise ReadError(f"{path}: damaged or not plain arrays: {_first_line(error)}") from None


def read_npy(path: Path) -> list[Dataset]:
    """The one array of an .npy file, (n, 3), as a cloud.

    Raises:
        ReadError: as for `read_npz`.
    """
    return read_npz(path)


def read_csv(path: Path) -> list[Dataset]:
    """Columns of a text table with a header line; x, y and z are the points.

    Raises:
        ReadError: no such columns, or a line that does not fit, named by its number.
    """
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        header = file.readline()
    mark = max(",;\t", key=header.count)
    names = [word.strip().strip("\"'") for word in header.split(mark)]
    lower = [name.lower() for name in names]
    axes = next((a for a in AXES if set(a[:2]) <= set(lower)), None)
    if axes is None:
        raise ReadError(f"{path}: no columns x, y, z in the header line: {', '.join(names)[:200]}")
    try:
        table = np.loadtxt(path, delimiter=mark, skiprows=1, ndmin=2, encoding="utf-8-sig")
    except (ValueError, OverflowError):
        raise ReadError(_bad_line(path, mark, names)) from None
    if table.size and table.shape[1] != len(names):
        raise ReadError(_bad_line(path, mark, names))
    columns = {name: np.ascontiguousarray(c) for name, c in zip(names, table.T, strict=False)}
    if len(columns) < len(names):
        warn(f"{path}: columns of the same name: only the last of each is kept")
    taken = [names[lower.index(axis)] for axis in axes if axis in lower]
    if not table.size:
        raise ReadError(f"{path}: empty: no points below the header line")
    points = np.column_stack([columns.pop(name) for name in taken])
    return [cloud({"points": points, **columns}, path)]


def _bad_line(path: Path, mark: str, names: list[str]) -> str:
    """Say which line of a table is not made of as many numbers as the header has names."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        for number, line in enumerate(file, 1):
            words = line.split("#")[0].strip().split(mark)
            if number > 1 and words != [""] and (fault := _fault(words, names, number)):
                return f"{path}: {fault}"
    return f"{path}: not a table of numbers"


def _fault(words: list[str], names: list[str], number: int) -> str:
    """What is wrong with the words of a line; empty where nothing is."""
    if len(words) != len(names):
        return f"line {number} has {len(words)} columns, the header {len(names)}"
    for name, word in zip(names, words, strict=True):
        if not _is_number(word):
            return f"line {number} (row {number - 1}): {name} = '{word[:40]}' is no number"
    return ""


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def read_pt(path: Path) -> list[Dataset]:
    """A dict of tensors, or one (n, 3) tensor, saved with torch.save.

    Raises:
        ReadError: torch is missing, the file is damaged or holds Python objects.
    """
    try:
        import torch
    except ImportError:
        raise ReadError(f"{path}: needs torch; pip install torch") from None
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises whatever its unpickler met
        raise ReadError(
            f"{path}: cannot be loaded: {_first_line(error)}; save a plain dict of tensors"
        ) from None
    if isinstance(loaded, torch.Tensor):
        loaded = {"points": loaded}
    if not isinstance(loaded, dict):
        raise ReadError(f"{path}: holds a {type(loaded).__name__}; save a dict of tensors")
    arrays = {
        str(name): (value.float() if value.dtype == torch.bfloat16 else value).detach().numpy()
        for name, value in loaded.items()
        if isinstance(value, torch.Tensor) and value.layout == torch.strided
    }
    return [cloud(arrays, path)]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
