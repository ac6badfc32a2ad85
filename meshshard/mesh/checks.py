"""Checks of a mesh: everything that later code relies on is verified here, in plain NumPy.

Ids, offsets and numbers of points are verified once, so that no later code, C libraries included,
meets an id outside the points. Every message names the cell, the point or the array.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from meshshard.errors import MeshError, MeshWarning, n_of
from meshshard.mesh.arrays import Array
from meshshard.mesh.cells import POLYHEDRON, cell_type, type_name, types_present
from meshshard.mesh.mesh import Faces, Mesh

__all__ = [
    "check",
    "check_cells",
    "check_names",
    "check_points",
    "is_count",
    "is_positive",
    "is_unicode",
    "warn",
    "warn_fields",
]

CHUNK = 1 << 20  # values per pass, so that the masks stay in cache


def warn(message: str) -> None:
    """Warn with the category `MeshWarning`."""
    warnings.warn(message, MeshWarning, stacklevel=3)


def check(mesh: Mesh) -> Mesh:
    """Verify that a mesh is consistent; warn about fields with values that are not finite.

    Args:
        mesh: any mesh.

    Returns:
        The same mesh.

    Raises:
        MeshError: ids out of range, bad offsets, a wrong number of points in a cell, arrays of
            the wrong length, or coordinates that are not finite.
    """
    if mesh.points.ndim != 2 or mesh.points.shape[1:] != (3,):
        raise MeshError(f"{mesh.name}: points must be (n, 3), got {mesh.points.shape}")
    check_cells(mesh, mesh.n_points, mesh.name)
    dims = {cell.dim for number in types_present(mesh.types) if (cell := cell_type(number))}
    if len(dims) > 1:
        raise MeshError(f"{mesh.name}: cells have several dimensions {sorted(dims)}; keep one")
    check_points(mesh.points, mesh.name)
    check_names(mesh)
    warn_fields(mesh)
    return mesh


def is_positive(value: Any, kinds: Any = (int, float, np.number)) -> bool:
    """Whether a value is a number above 0."""
    return isinstance(value, kinds) and bool(value > 0)


def is_count(value: Any) -> bool:
    """Whether a value is an integer above 0."""
    return is_positive(value, (int, np.integer))


def is_unicode(name: str) -> bool:
    """Whether a name has no lone surrogates, which no file can hold."""
    return name.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in name)


def check_names(mesh: Mesh) -> None:
    """Verify that the names of all fields can be written.

    Raises:
        MeshError: one has a lone surrogate.
    """
    for kind, fields in (("cell", mesh.cell_fields), ("point", mesh.point_fields)):
        for field in fields:
            if not is_unicode(field):
                raise MeshError(f"{mesh.name}: {kind} field {field!r}: no Unicode name; rename it")


def check_cells(cells: Any, n_points: int, name: str) -> None:
    """Verify the cells of a Mesh or a Dataset: offsets, types, numbers of points, ids, faces.

    Args:
        cells: any object with connectivity, offsets (n + 1,), types (n,) and faces.
        n_points: number of points; ids must be below it.
        name: name of the mesh in messages.

    Raises:
        MeshError: at the first inconsistency.
    """
    connectivity, offsets, types = cells.connectivity, cells.offsets, cells.types
    _check_offsets(offsets, len(connectivity), len(types), f"{name}: cell")
    _check_counts(np.diff(offsets), types, name)
    _check_ids(connectivity, offsets, n_points, f"{name}: cell")
    _check_faces(cells.faces, types, n_points, name)


def _check_offsets(offsets: Array, length: int, n: int, what: str) -> None:
    """Offsets start at 0, never decrease and end at the length of the connectivity."""
    if len(offsets) != n + 1 or offsets[0] != 0:
        raise MeshError(f"{what} offsets must be {n + 1} numbers from 0, got {len(offsets)}")
    falls = np.flatnonzero(offsets[1:] < offsets[:-1])
    if len(falls):
        raise MeshError(
            f"{what} {falls[0]}: offset {offsets[falls[0] + 1]} goes backwards, "
            f"the one before is {offsets[falls[0]]}"
        )
    if offsets[-1] != length:
        at = int(np.argmax(offsets > length)) - 1 if offsets[-1] > length else n - 1
        raise MeshError(
            f"{what} {at}: offset {offsets[at + 1]} does not fit the connectivity, "
            f"which has {length} entries"
        )


def _check_counts(counts: Array, types: Array, name: str) -> None:
    """Every type is known and every cell has as many points as its type needs."""
    present = types_present(types)
    for number in present:
        cell = cell_type(number)
        if cell is None:
            first = int(np.argmax(types == number))
            raise MeshError(
                f"{name}: VTK cell type {number} of cell {first} is not supported; convert the "
                "cells to linear ones, in ParaView with the filter Tessellate"
            )
        of_type = counts if len(present) == 1 else counts[types == number]
        least, most = cell.n_points or cell.least, cell.n_points or of_type.max()
        if of_type.min() >= least and of_type.max() <= most:
            continue
        wrong = (types == number) & ((counts < least) | (counts > most))
        first = int(np.argmax(wrong))
        raise MeshError(
            f"{name}: cell {first} is a {type_name(number)} with "
            f"{n_of(counts[first], 'points')}, needs {cell.n_points or f'at least {cell.least}'}"
        )


def _check_ids(connectivity: Array, offsets: Array, n_points: int, what: str) -> None:
    """Every id is a row of the points."""
    if not len(connectivity):
        return
    if connectivity.min() >= 0 and connectivity.max() < n_points:
        return
    at = int(np.argmax((connectivity < 0) | (connectivity >= n_points)))
    cell = int(np.searchsorted(offsets, at, side="right")) - 1
    raise MeshError(
        f"{what} {cell} refers to point {connectivity[at]}, out of range: "
        f"the mesh has {n_of(n_points, 'points')}, counted from 0"
    )


def _check_faces(faces: Faces | None, types: Array, n_points: int, name: str) -> None:
    """Every polyhedron has faces, and their offsets and ids are valid."""
    poly = np.flatnonzero(types == POLYHEDRON)
    if faces is None:
        if len(poly):
            raise MeshError(
                f"{name}: cell {poly[0]} is a polyhedron without faces; write the file again with "
                "its face arrays (VTK 9.3 drops those that VTK 9.4 and later write)"
            )
        return
    n_faces = len(faces.offsets) - 1
    _check_offsets(faces.cell_offsets, n_faces, len(types), f"{name}: faces of cell")
    _check_offsets(faces.offsets, len(faces.connectivity), n_faces, f"{name}: face")
    _check_ids(faces.connectivity, faces.offsets, n_points, f"{name}: face")
    thin = np.flatnonzero(np.diff(faces.offsets) < 3)
    if len(thin):
        raise MeshError(f"{name}: face {thin[0]} has fewer than 3 points")
    few = poly[np.diff(faces.cell_offsets)[poly] < 4]
    if len(few):
        raise MeshError(f"{name}: cell {few[0]} is a polyhedron with fewer than 4 faces")


def check_points(points: Array, name: str) -> None:
    """Verify that all coordinates (n, 3) are finite.

    Raises:
        MeshError: some are not; names how many and the first ids.
    """
    bad = [np.flatnonzero(~ok.all(axis=1)) + first for first, ok in _finite(points)]
    ids = np.concatenate(bad) if bad else np.zeros(0, np.int64)
    if len(ids):
        first = ", ".join(map(str, ids[:5])) + (", …" if len(ids) > 5 else "")
        raise MeshError(
            f"{name}: {n_of(len(ids), 'points')} not finite (NaN or infinite): ids {first}; "
            "remove or repair"
        )


def warn_fields(mesh: Mesh) -> None:
    """Warn about float fields with NaN or infinite values, with the count of each."""
    for kind, fields in (("cell", mesh.cell_fields), ("point", mesh.point_fields)):
        for field, n_nan, n_inf in _not_finite(fields):
            warn(f"{mesh.name}: {kind} field '{field}' has {n_nan} NaN and {n_inf} infinite values")


def _not_finite(fields: Mapping[str, Array]) -> Iterator[tuple[str, int, int]]:
    """Fields with NaN or infinite values, and how many of each."""
    for field, values in fields.items():
        if values.dtype.kind not in "fc":
            continue
        bad = sum(ok.size - np.count_nonzero(ok) for _, ok in _finite(values))
        if bad:
            n_nan = int(np.count_nonzero(np.isnan(values)))
            yield field, n_nan, int(bad) - n_nan


def _finite(values: Array) -> Iterator[tuple[int, Array]]:
    """First row and `isfinite` mask of each chunk of rows that has values that are not finite."""
    step = max(1, CHUNK // max(1, values[:1].size))
    for first in range(0, len(values), step):
        ok = np.isfinite(values[first : first + step])
        if not ok.all():
            yield first, ok
