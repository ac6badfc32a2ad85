"""What must hold before anything walks over a mesh, and what deserves a word: plain numpy.

Ids, offsets and arities are proved here, once, so that no later code (or library in C) meets an id
outside the points. Everything names the cell, the point or the array.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from meshshard.errors import MeshError, MeshWarning, n_of
from meshshard.mesh.arrays import Array
from meshshard.mesh.cells import CELL_TYPES, POLYHEDRON
from meshshard.mesh.mesh import Faces, Mesh

__all__ = [
    "STRIP",
    "check",
    "check_cells",
    "check_points",
    "dimensions",
    "kinds",
    "type_name",
    "warn",
    "warn_fields",
]

EMPTY, STRIP, PIXEL, VOXEL = 0, 6, 8, 11  # VTK types that files have and a Mesh does not
CHUNK = 1 << 20  # values a pass, so that the masks stay in the cache


def warn(message: str) -> None:
    """Say what deserves a look, to be filtered as `MeshWarning`."""
    warnings.warn(message, MeshWarning, stacklevel=3)


def _type_tables() -> tuple[Array, Array, Array]:
    """Of every VTK type number: dimension (-1 unknown), exact and least number of points."""
    dim, exact, least = np.full(256, -1), np.zeros(256, np.int64), np.zeros(256, np.int64)
    for number, cell in CELL_TYPES.items():
        dim[number], exact[number], least[number] = cell.dim, cell.n_points, cell.least
    for number, its_dim, n, fewest in ((0, 0, 0, 0), (6, 2, 0, 3), (8, 2, 4, 1), (11, 3, 8, 1)):
        dim[number], exact[number], least[number] = its_dim, n, fewest
    return dim, exact, least


_DIM, _EXACT, _LEAST = _type_tables()
_NAMES = {EMPTY: "empty cell", STRIP: "triangle strip", PIXEL: "pixel", VOXEL: "voxel"}


def dimensions(types: Array) -> Array:
    """Dimension of each VTK cell type, -1 where it is unknown; same shape as `types`."""
    return np.asarray(_DIM[types])


def kinds(types: Array) -> list[int]:
    """The VTK cell types that are present, ascending."""
    if len(types) and types.min() == types.max():  # one kind: no table of millions
        return [int(types[0])]
    return [int(kind) for kind in np.flatnonzero(np.bincount(types, minlength=1))]


def type_name(number: int) -> str:
    """Word for a VTK cell type."""
    cell = CELL_TYPES.get(number)
    return cell.name if cell else _NAMES.get(number, f"type {number}")


def check(mesh: Mesh) -> Mesh:
    """Prove that a mesh does not contradict itself; warn about fields that are not finite.

    Args:
        mesh: any mesh.

    Returns:
        The same mesh.

    Raises:
        MeshError: ids out of range, bad offsets, wrong arities, arrays of the wrong length, or
            coordinates that are not finite.
    """
    if mesh.points.ndim != 2 or mesh.points.shape[1:] != (3,):
        raise MeshError(f"{mesh.name}: points must be (n, 3), these are {mesh.points.shape}")
    check_cells(mesh, mesh.n_points, mesh.name)
    if len({int(_DIM[kind]) for kind in kinds(mesh.types)}) > 1:
        raise MeshError(f"{mesh.name}: cells of several dimensions; keep one")
    check_points(mesh.points, mesh.name)
    for kind, fields, n in (
        ("point", mesh.point_fields, mesh.n_points),
        ("cell", mesh.cell_fields, mesh.n_cells),
    ):
        for field, values in fields.items():
            if len(values) != n:
                raise MeshError(
                    f"{mesh.name}: {kind} field '{field}' has {n_of(len(values), 'rows')} for "
                    f"{n_of(n, f'{kind}s')}"
                )
    warn_fields(mesh)
    return mesh


def check_cells(cells: Any, n_points: int, name: str) -> None:
    """Prove the cells of a mesh or a data set: offsets, known types, arities, ids, faces.

    Args:
        cells: anything with connectivity, offsets (n + 1,), types (n,) and faces.
        n_points: number of points that ids may name.
        name: what to call it in messages.

    Raises:
        MeshError: at the first contradiction.
    """
    connectivity, offsets, types = cells.connectivity, cells.offsets, cells.types
    _check_offsets(offsets, len(connectivity), len(types), f"{name}: cell")
    _check_arities(np.diff(offsets), types, name)
    _check_ids(connectivity, offsets, n_points, f"{name}: cell")
    _check_faces(cells.faces, types, n_points, name)


def _check_offsets(offsets: Array, length: int, n: int, what: str) -> None:
    """Offsets start at 0, never fall and end at the length of the connectivity."""
    if len(offsets) != n + 1 or offsets[0] != 0:
        raise MeshError(f"{what} offsets must be {n + 1} numbers from 0, got {len(offsets)}")
    falls = np.flatnonzero(offsets[1:] < offsets[:-1])
    if len(falls):
        raise MeshError(f"{what} {falls[0]}: its offset {offsets[falls[0] + 1]} goes backwards")
    if offsets[-1] != length:
        at = int(np.argmax(offsets > length)) - 1 if offsets[-1] > length else n - 1
        raise MeshError(
            f"{what} {at}: offset {offsets[at + 1]} does not fit the connectivity, "
            f"which has {length} entries"
        )


def _check_arities(counts: Array, types: Array, name: str) -> None:
    """Every type is known and every cell has as many points as its type wants."""
    present = kinds(types)
    for kind in present:
        mine = counts if len(present) == 1 else counts[types == kind]
        most = _EXACT[kind] or mine.max()
        if _DIM[kind] >= 0 and mine.min() >= max(_EXACT[kind], _LEAST[kind]) and mine.max() <= most:
            continue
        wrong = np.ones(len(counts), bool) if _DIM[kind] < 0 else counts < _LEAST[kind]
        if _EXACT[kind]:
            wrong = counts != _EXACT[kind]
        cell = int(np.argmax(wrong & (types == kind)))
        if _DIM[kind] < 0:
            raise MeshError(f"{name}: VTK cell type {kind} of cell {cell} is not supported")
        need = _EXACT[kind] or f"at least {_LEAST[kind]}"
        raise MeshError(
            f"{name}: cell {cell} is a {type_name(kind)} with "
            f"{n_of(counts[cell], 'points')}, needs {need}"
        )


def _check_ids(connectivity: Array, offsets: Array, n_points: int, what: str) -> None:
    """Every id names a point."""
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
    """Polyhedra have faces, and these are sound."""
    poly = np.flatnonzero(types == POLYHEDRON)
    if faces is None:
        if len(poly):
            raise MeshError(
                f"{name}: cell {poly[0]} is a polyhedron without faces; write the file again with "
                "its face arrays (VTK 9.3 loses those of VTK 9.4 and later)"
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
    """Prove that all coordinates (n, 3) are finite.

    Raises:
        MeshError: with the count and the first ids.
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
    """Count the values of each float field that are NaN or infinite, and say so."""
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
    """Masks of finite values with the row they start at; only those that are not all true."""
    step = max(1, CHUNK // max(1, values[:1].size))
    for first in range(0, len(values), step):
        ok = np.isfinite(values[first : first + step])
        if not ok.all():
            yield first, ok
