"""Cells as VTK stores them: sections of PolyData, structured grids, and faces of polyhedra."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from meshshard.errors import ReadError
from meshshard.mesh import Array, Faces
from meshshard.mesh.cells import (
    HEXAHEDRON,
    LINE,
    POLY_LINE,
    POLY_VERTEX,
    POLYGON,
    POLYHEDRON,
    QUAD,
    STRIP,
    VERTEX,
)
from meshshard.mesh.ragged import gather_rows, no_rows, offsets_of, ranges

__all__ = [
    "MAX_IMPLICIT_POINTS",
    "SECTIONS",
    "face_stream",
    "faces_of_stream",
    "lattice",
    "listed_faces",
    "polydata_cells",
    "structured_cells",
]

MAX_IMPLICIT_POINTS = 1 << 20  # of a structured grid without any array
SECTIONS: Mapping[str, Callable[[Array], Array]] = {  # of PolyData: cell types from point counts
    "Verts": lambda n: np.where(n == 1, VERTEX, POLY_VERTEX),
    "Lines": lambda n: np.where(n == 2, LINE, POLY_LINE),
    "Polys": lambda n: np.full(len(n), POLYGON),
    "Strips": lambda n: np.full(len(n), STRIP),
}


def polydata_cells(cells: Mapping[str, tuple[Array, Array]]) -> tuple[Array, Array, Array]:
    """Connectivity, offsets and types of the cells of PolyData, in the order of its cell data.

    Args:
        cells: connectivity and offsets of the sections, by the names in `SECTIONS`; sections may
            be missing.
    """
    full = [(name, *cells[name]) for name in SECTIONS if name in cells and len(cells[name][1]) > 1]
    if not full:
        return *no_rows(), np.zeros(0, np.uint8)
    counts = [np.diff(offsets) for _, _, offsets in full]
    types = [
        SECTIONS[name](n).astype(np.uint8) for (name, _, _), n in zip(full, counts, strict=True)
    ]
    if len(full) == 1:
        _, connectivity, offsets = full[0]
        return connectivity, offsets, types[0]
    joined = np.concatenate([ids for _, ids, _ in full])
    return joined, offsets_of(np.concatenate(counts)), np.concatenate(types)


def lattice(axes: Sequence[Array]) -> Array:
    """(n, 3) points of a rectilinear grid with coordinates `axes` (x, y, z); x varies fastest."""
    z, y, x = np.meshgrid(*axes[::-1], indexing="ij")
    return np.column_stack([x.ravel(), y.ravel(), z.ravel()])


def structured_cells(shape: Sequence[int]) -> tuple[Array, Array, Array]:
    """Connectivity, offsets and types of a structured grid of `shape` points; x varies fastest."""
    stride = np.cumprod([1, *shape[:2]])
    axes = [a for a in range(3) if shape[a] > 1]
    corners = np.zeros(1, np.int64)
    for place, axis in enumerate(axes):
        step = corners + stride[axis]
        corners = np.concatenate([corners, step[::-1] if place == 1 else step])
    base = np.zeros(1 if axes else 0, np.int64)
    for axis in axes[::-1]:
        base = (base[:, None] + np.arange(shape[axis] - 1) * stride[axis]).ravel()
    cell = (VERTEX, LINE, QUAD, HEXAHEDRON)[len(axes)]
    connectivity = (base[:, None] + corners).ravel()
    return (
        connectivity,
        np.arange(len(base) + 1, dtype=np.int64) * len(corners),
        np.full(len(base), cell, np.uint8),
    )


def faces_of_stream(stream: Array, ends: Array, name: str) -> Faces | None:
    """Faces from VTK's face stream: [n_faces, n_points, ids, n_points, ids, …] per polyhedron.

    The first faces of all polyhedra are found at once, then all second ones, and so on.

    Args:
        stream: int64, concatenated over all polyhedra.
        ends: (n_cells,) end of each polyhedron in the stream, -1 for other cells.
        name: name of the file in messages.

    Raises:
        ReadError: the stream and its ends do not fit.
    """
    poly = np.flatnonzero(ends >= 0)
    if not len(poly):
        return None
    stops = ends[poly].astype(np.int64)
    starts = np.append(0, stops[:-1])
    _check_fit((starts < stops) & (stops <= len(stream)), poly, name)
    n_faces = stream[starts].astype(np.int64)
    _check_fit((n_faces >= 0) & (n_faces < stops - starts), poly, name)
    first = offsets_of(n_faces)
    where, at, rows = np.empty(first[-1], np.int64), starts + 1, np.arange(len(poly))
    face = 0
    while len(rows := rows[n_faces[rows] > face]):
        _check_fit(at[rows] < stops[rows], poly[rows], name)
        size = stream[at[rows]]
        _check_fit((size >= 0) & (size < stops[rows] - at[rows]), poly[rows], name)
        where[first[rows] + face] = at[rows]
        at[rows] += size + 1
        face += 1
    _check_fit(at == stops, poly, name)
    counts = np.zeros(len(ends), np.int64)
    counts[poly] = n_faces
    sizes = stream[where]
    ids = stream[ranges(where + 1, where + 1 + sizes)]
    return Faces(offsets_of(counts), offsets_of(sizes), ids)


def _check_fit(right: Array, cells: Array, name: str) -> None:
    if not right.all():
        raise ReadError(
            f"{name}: the face stream of cell {cells[np.argmin(right)]} is damaged: "
            "its counts do not fit its face offsets"
        )


def listed_faces(of: Array, per_cell: Array, offsets: Array, ids: Array, name: str) -> Faces:
    """Faces from the arrays of VTK 9.4 and later, in which cells refer to faces by number.

    Args:
        of: faces of all cells, cell by cell.
        per_cell: (n_cells + 1,) offsets into `of`.
        offsets: (n_faces + 1,) offsets into `ids`.
        ids: point ids of the faces.
        name: name of the file in messages.

    Raises:
        ReadError: a face does not exist, or the offsets do not fit.
    """
    n, counts = len(offsets) - 1, np.diff(offsets)
    if len(of) and (of.min() < 0 or of.max() >= n):
        raise ReadError(f"{name}: a polyhedron refers to a face outside 0..{n - 1}")
    if (counts < 0).any() or offsets[-1] != len(ids):
        raise ReadError(f"{name}: face offsets do not fit the face connectivity")
    if len(of) == n and np.array_equal(of, np.arange(n)):
        return Faces(per_cell, offsets, ids)
    corners, out = gather_rows(ids, offsets, of)
    return Faces(per_cell, out, corners)


def face_stream(faces: Faces, types: Array) -> tuple[Array, Array]:
    """VTK's face stream of the polyhedra (see `faces_of_stream`).

    Args:
        faces: faces of all cells.
        types: (n_cells,) VTK cell types.

    Returns:
        The stream, and the end of each polyhedron in it (n_cells,), -1 for other cells.
    """
    n_faces, n_corners = np.diff(faces.cell_offsets), np.diff(faces.offsets)
    poly = types == POLYHEDRON
    cell_of = np.repeat(np.arange(len(types)), n_faces)
    before = np.cumsum(poly)  # entries n_faces up to and including this cell
    starts = offsets_of(n_corners + 1)
    ends = starts[faces.cell_offsets[1:]] + before
    stream = np.empty(starts[-1] + int(poly.sum()), np.int64)
    stream[(starts[faces.cell_offsets[:-1]] + before - 1)[poly]] = n_faces[poly]
    at = starts[:-1] + before[cell_of]
    stream[at] = n_corners
    stream[ranges(at + 1, at + 1 + n_corners)] = faces.connectivity
    return stream, np.where(poly, ends, -1)
