"""Meshes from arrays in memory, and point clouds from .npz, .npy, .csv and .pt files."""

from __future__ import annotations

import math
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np

from meshshard.errors import MeshError, ReadError, n_of
from meshshard.io.dataset import Dataset
from meshshard.mesh import Array, Mesh
from meshshard.mesh.cells import POLYGON, QUAD, TRIANGLE
from meshshard.mesh.checks import check, warn
from meshshard.mesh.ragged import no_rows, offsets_of

__all__ = ["from_arrays", "read_csv", "read_npz", "read_pt", "tensor_values"]

NAMES = ("points", "pos", "coords", "xyz", "coordinates", "positions", "vertices")
AXES = (
    ("x", "y", "z"),
    ("points:0", "points:1", "points:2"),
    ("points_0", "points_1", "points_2"),
)

EXPANDED = 1 << 20  # bytes of a tensor whose rows share memory that need not be in the file
_NPZ_ERRORS = (
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
            n_cells + 1 offsets, or None for a point cloud.
        cell_fields: arrays with a row for each cell, by name.
        point_fields: arrays with a row for each point, by name.
        name: name of the mesh in messages.

    Raises:
        MeshError: the arrays are inconsistent.
    """
    coordinates = _with_z(_values(points, f"{name}: points"))
    if coordinates.dtype.kind != "f":
        coordinates = coordinates.astype(np.float64)
    connectivity, offsets = _cells(cells)
    if len(connectivity) and connectivity.dtype.kind not in "iu":
        raise MeshError(
            f"{name}: cells are {connectivity.dtype}; convert the point ids to integers"
        )
    counts = np.diff(offsets)
    types = np.select([counts == 3, counts == 4], [TRIANGLE, QUAD], POLYGON).astype(np.uint8)
    mesh = Mesh(
        points=coordinates,
        connectivity=connectivity,
        offsets=offsets,
        types=types,
        cell_fields=_fields(cell_fields, f"{name}: cell"),
        point_fields=_fields(point_fields, f"{name}: point"),
        name=name,
    )
    return check(mesh)


def _fields(fields: Mapping[str, Any] | None, what: str) -> dict[str, Array]:
    return {key: _values(item, f"{what} field {key!r}") for key, item in (fields or {}).items()}


def _values(item: Any, what: str) -> Array:
    """An array of at least one dimension, none of whose values is masked."""
    if np.ma.is_masked(item):
        n_masked = int(np.ma.getmaskarray(item).sum())
        raise MeshError(f"{what}: {n_of(n_masked, 'values')} masked; replace with .filled(…)")
    values = np.asarray(item)
    if not values.ndim:
        raise MeshError(f"{what}: a single value; give an array with a row for each")
    return values


def _cells(cells: Any) -> tuple[Array, Array]:
    """Connectivity and offsets of cells in any form that `from_arrays` accepts."""
    if cells is None or len(cells) == 0:
        return no_rows()
    if isinstance(cells, tuple):
        offsets, connectivity = map(np.asarray, cells)
        return connectivity, offsets.astype(np.int64, copy=False)
    if isinstance(cells, np.ndarray) and cells.ndim == 2:
        n, width = cells.shape
        return cells.reshape(-1), np.arange(n + 1, dtype=np.int64) * width
    counts = np.array([len(cell) for cell in cells])
    return np.array(list(chain.from_iterable(cells))), offsets_of(counts)


def _with_z(points: Array) -> Array:
    """Points (n, 2) with z = 0 added; others as they are."""
    if points.ndim != 2 or points.shape[1] != 2:
        return points
    return np.column_stack([points, np.zeros(len(points), points.dtype)])


def cloud(arrays: Mapping[str, Array], path: Path) -> Dataset:
    """A point cloud from named arrays: one holds the points, others with as many rows are fields.

    Args:
        arrays: the arrays by name; points are (n, 3), or (n, 2) with z = 0.
        path: the file, for messages.

    Raises:
        ReadError: no array holds points.
    """
    lower = {name.lower(): name for name in arrays}
    key = next((lower[name] for name in NAMES if name in lower), None)
    shapes = ", ".join(f"{name} {values.shape}" for name, values in arrays.items())
    if key is None:
        raise ReadError(f"{path}: no array is called {' or '.join(NAMES[:4])}; it has {shapes}")
    points = arrays[key]
    if points.ndim != 2 or points.shape[1] not in (2, 3) or points.dtype.kind not in "fiu":
        raise ReadError(
            f"{path}: '{key}' has the shape {points.shape} and type {points.dtype}, points must be "
            f"(n, 3) numbers; is it transposed? All arrays: {shapes}"
        )
    points = _with_z(points)
    fields = {}
    for name, values in arrays.items():
        if name == key:
            continue
        if values.ndim and len(values) == len(points) and values.dtype.kind in "fiub":
            fields[name] = values
        else:
            shape = f"{values.shape} {values.dtype}"
            warn(f"{path}: array '{name}' {shape} is left out: it is not a point field")
    return Dataset(np.ascontiguousarray(points), point_fields=fields)


def read_npz(path: Path) -> list[Dataset]:
    """The arrays of an .npz file, or the (n, 3) array of an .npy file, as a point cloud.

    Headers are read first: an array that is not a field, or is not as large as it declares, is
    never decompressed.

    Raises:
        ReadError: the file is damaged, holds Python objects, or has no points.
    """
    try:
        with path.open("rb") as file:
            if not zipfile.is_zipfile(file):
                file.seek(0)
                _declared(file, path.stat().st_size)
                file.seek(0)
                return [cloud({"points": np.lib.format.read_array(file)}, path)]
            with zipfile.ZipFile(file) as archive:
                return [cloud(_members(archive), path)]
    except _NPZ_ERRORS as error:
        raise ReadError(f"{path}: damaged or not plain arrays: {_first_line(error)}") from None


def _members(archive: zipfile.ZipFile) -> dict[str, Array]:
    """The arrays of an archive; those that cannot be fields only with their shapes and dtypes."""
    arrays = {}
    for member in archive.infolist():
        with archive.open(member) as file:
            arrays[member.filename.removesuffix(".npy")] = _declared(file, member.file_size)
    n_rows = {len(a) for name, a in arrays.items() if name.lower() in NAMES and a.ndim}
    for name, values in arrays.items():
        if values.ndim and len(values) in n_rows and values.dtype.kind in "fiub":
            with archive.open(f"{name}.npy") as file:
                arrays[name] = np.lib.format.read_array(file)
    return arrays


def _declared(file: IO[bytes], size: int) -> Array:
    """An array of the shape and dtype in an .npy header, without memory of its own.

    Raises:
        ValueError: it does not fit the size of the file, or holds Python objects.
    """
    version = np.lib.format.read_magic(file)
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in read:
        raise ValueError(f"version {version} of the .npy format")
    shape, _, dtype = read[version](file)
    n_bytes = math.prod(shape) * dtype.itemsize
    if dtype.hasobject or min(shape, default=0) < 0 or file.tell() + n_bytes != size:
        held = "Python objects" if dtype.hasobject else f"{size - file.tell()} bytes"
        raise ValueError(f"an array declares {shape} {dtype}, the file holds {held}")
    return np.broadcast_to(np.zeros((), dtype), shape)


def read_csv(path: Path) -> list[Dataset]:
    """A point cloud from a text table with a header line; the columns x, y and z are the points.

    Raises:
        ReadError: these columns are missing, or a line does not fit; names the line.
    """
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        header = file.readline()
    mark = max(",;\t", key=header.count)
    names = [word.strip().strip("\"'") for word in header.split(mark)]
    lower = [name.lower() for name in names]
    axes = next((a for a in AXES if set(a[:2]) <= set(lower)), None)
    if axes is None:
        raise ReadError(f"{path}: no columns x, y, z in its header line: {', '.join(names)[:200]}")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "loadtxt: input contained no data")
            table = np.loadtxt(path, delimiter=mark, skiprows=1, ndmin=2, encoding="utf-8-sig")
    except (ValueError, OverflowError):
        raise ReadError(_damage(path, mark, names)) from None
    if table.size and table.shape[1] != len(names):
        raise ReadError(_damage(path, mark, names))
    if not table.size:
        raise ReadError(f"{path}: empty: no points below the header line")
    ids = [name for name, c in zip(names, table.T, strict=True) if _were_large_integers(c)]
    if ids:
        warn(f"{path}: {', '.join(ids)}: integers from 2^53 on are rounded; use .npz")
    columns = {name: np.ascontiguousarray(c) for name, c in zip(names, table.T, strict=False)}
    if len(columns) < len(names):
        warn(f"{path}: several columns have the same name; the last of each is kept")
    taken = [names[lower.index(axis)] for axis in axes if axis in lower]
    points = np.column_stack([columns.pop(name) for name in taken])
    return [cloud({"points": points, **columns}, path)]


def _were_large_integers(values: Array) -> bool:
    return float(np.abs(values).max()) >= 2**53 and bool((values == np.rint(values)).all())


def _damage(path: Path, mark: str, names: list[str]) -> str:
    """Message about the first line of a table that is not one number per column."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        for number, line in enumerate(file, 1):
            words = line.split("#")[0].strip().split(mark)
            if number > 1 and words != [""] and (problem := _problem(words, names, number)):
                return f"{path}: {problem}"
    return f"{path}: not a table of numbers"


def _problem(words: list[str], names: list[str], number: int) -> str:
    """What is wrong with the words of a line; empty if they are right."""
    if len(words) != len(names):
        return f"line {number} has {len(words)} columns, the header {len(names)}"
    for name, word in zip(names, words, strict=True):
        if not _is_number(word):
            return f"line {number} (row {number - 1}): {name} = '{word[:40]}' is not a number"
    return ""


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def read_pt(path: Path) -> list[Dataset]:
    """A point cloud from a dict of tensors, or one (n, 3) tensor, saved with torch.save.

    Raises:
        ReadError: torch is not installed, or the file is damaged or holds Python objects.
    """
    try:
        import torch
    except ImportError:
        raise ReadError(f"{path}: needs torch; pip install torch") from None
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if any(member.compress_type for member in archive.infolist()):
                raise ReadError(f"{path}: compressed, torch.save never compresses; save it again")
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch may raise any error of its unpickler
        raise ReadError(
            f"{path}: cannot be loaded: {_first_line(error)}; save a plain dict of tensors"
        ) from None
    if isinstance(loaded, torch.Tensor):
        loaded = {"points": loaded}
    if not isinstance(loaded, dict):
        raise ReadError(f"{path}: holds a {type(loaded).__name__}; save a dict of tensors")
    tensors = {str(key): item for key, item in loaded.items() if isinstance(item, torch.Tensor)}
    for name, value in tensors.items():
        dense = value.layout == torch.strided and not value.is_meta
        if dense and value.nbytes > 2 * path.stat().st_size + EXPANDED:
            shape = tuple(value.shape)
            raise ReadError(f"{path}: '{name}' {shape} is expanded; save it with .contiguous()")
    try:
        return [cloud({key: tensor_values(item, repr(key)) for key, item in tensors.items()}, path)]
    except TypeError as error:
        raise ReadError(f"{path}: {error}") from None


def tensor_values(tensor: Any, name: str) -> Array:
    """The values of a torch tensor on any device; bfloat16 as float32.

    Args:
        tensor: the tensor.
        name: its name in messages.

    Raises:
        TypeError: NumPy has no such type, or the values are sparse, nested or missing.
    """
    tensor = tensor.detach()
    if str(tensor.dtype) == "torch.bfloat16":
        tensor = tensor.float()
    try:
        return np.asarray(tensor.cpu().resolve_conj().resolve_neg().numpy())
    except (TypeError, RuntimeError):  # NotImplementedError is a RuntimeError
        kind = f"{tensor.dtype}, {tensor.layout}, on {tensor.device.type}"
        raise TypeError(
            f"{name} is not a plain array ({kind}); make it a dense float tensor"
        ) from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
