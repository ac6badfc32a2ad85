"""Point clouds from arrays: .npz, .npy, .csv and .pt."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meshshard._checks import warn
from meshshard._datasets import Dataset
from meshshard.errors import ReadError

__all__ = ["read_csv", "read_npy", "read_npz", "read_pt"]

Array = npt.NDArray[Any]
NAMES = ("points", "pos", "coords", "xyz", "coordinates", "positions", "vertices")
AXES = (("x", "y", "z"), ("points:0", "points:1", "points:2"), ("points_0", "points_1", "points_2"))


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
        with np.load(path, allow_pickle=False) as file:
            if isinstance(file, np.ndarray):
                return [cloud({"points": file}, path)]
            return [cloud({name: file[name] for name in file.files}, path)]
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
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
            if number == 1 or words == [""]:
                continue
            if len(words) != len(names):
                return f"{path}: line {number} has {len(words)} columns, the header {len(names)}"
            for name, word in zip(names, words, strict=True):
                if not _is_number(word):
                    return f"{path}: line {number} (row {number - 1}): {name} = '{word[:40]}' is no number"
    return f"{path}: not a table of numbers"


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
