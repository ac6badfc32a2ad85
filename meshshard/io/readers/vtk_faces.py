"""Faces of polyhedra: from and to the two ways in which VTK stores them."""

from __future__ import annotations

import numpy as np

from meshshard.errors import ReadError
from meshshard.mesh import Array, Faces
from meshshard.mesh.cells import POLYHEDRON
from meshshard.mesh.ragged import gather_rows, offsets_of, ranges

__all__ = ["face_stream", "faces_of_stream", "listed_faces"]


def faces_of_stream(stream: Array, ends: Array, name: str) -> Faces | None:
    """Faces from VTK's face stream [n faces, n points, ids, …] a polyhedron.

    All polyhedra are walked at once, face by face.

    Args:
        stream: int64, the polyhedra one after the other.
        ends: (n_cells,) where each ends in the stream, -1 for cells that are no polyhedra.
        name: for messages.

    Raises:
        ReadError: the stream and its ends do not fit.
    """
    poly = np.flatnonzero(ends >= 0)
    if not len(poly):
        return None
    stops = ends[poly].astype(np.int64)
    starts = np.concatenate([[0], stops[:-1]])
    _fits((starts < stops) & (stops <= len(stream)), poly, name)
    n_faces = stream[starts].astype(np.int64)
    _fits((n_faces >= 0) & (n_faces < stops - starts), poly, name)
    first = offsets_of(n_faces)
    where, at, rows = np.empty(first[-1], np.int64), starts + 1, np.arange(len(poly))
    face = 0
    while len(rows := rows[n_faces[rows] > face]):
        _fits(at[rows] < stops[rows], poly[rows], name)
        size = stream[at[rows]]
        _fits((size >= 0) & (size < stops[rows] - at[rows]), poly[rows], name)
        where[first[rows] + face] = at[rows]
        at[rows] += size + 1
        face += 1
    _fits(at == stops, poly, name)
    counts = np.zeros(len(ends), np.int64)
    counts[poly] = n_faces
    sizes = stream[where]
    ids = stream[ranges(where + 1, where + 1 + sizes)]
    return Faces(offsets_of(counts), offsets_of(sizes), ids)


def _fits(right: Array, cells: Array, name: str) -> None:
    if not right.all():
        raise ReadError(
            f"{name}: the face stream of cell {cells[np.argmin(right)]} is damaged: "
            "its counts do not fit its face offsets"
        )


def listed_faces(of: Array, per_cell: Array, offsets: Array, ids: Array, name: str) -> Faces:
    """Faces from VTK 9.4's arrays, in which the cells list their faces in any order.

    Args:
        of: faces of all cells, one cell after the other.
        per_cell: (n_cells + 1,) offsets into `of`.
        offsets: (n_faces + 1,) offsets into `ids`.
        ids: point ids of the faces.
        name: for messages.

    Raises:
        ReadError: a face that does not exist, or offsets that do not fit.
    """
    n, counts = len(offsets) - 1, np.diff(offsets)
    if len(of) and (of.min() < 0 or of.max() >= n):
        raise ReadError(f"{name}: a polyhedron names a face outside 0..{n - 1}")
    if (counts < 0).any() or offsets[-1] != len(ids):
        raise ReadError(f"{name}: face offsets do not fit the face connectivity")
    if len(of) == n and np.array_equal(of, np.arange(n)):
        return Faces(per_cell, offsets, ids)
    corners, out = gather_rows(ids, offsets, of)
    return Faces(per_cell, out, corners)


def face_stream(faces: Faces, types: Array) -> tuple[Array, Array]:
    """VTK's face stream [n faces, n points, ids, …] of the polyhedra, and where each ends.

    Args:
        faces: of all cells.
        types: (n_cells,) VTK cell types.

    Returns:
        The stream, and (n_cells,) ends in it, -1 for cells that are no polyhedra.
    """
    n_faces, n_corners = np.diff(faces.cell_offsets), np.diff(faces.offsets)
    poly = types == POLYHEDRON
    cell_of = np.repeat(np.arange(len(types)), n_faces)
    before = np.cumsum(poly)  # counts of faces that come before: one a polyhedron
    starts = offsets_of(n_corners + 1)
    ends = starts[faces.cell_offsets[1:]] + before
    stream = np.empty(starts[-1] + int(poly.sum()), np.int64)
    stream[(starts[faces.cell_offsets[:-1]] + before - 1)[poly]] = n_faces[poly]
    at = starts[:-1] + before[cell_of]
    stream[at] = n_corners
    stream[ranges(at + 1, at + 1 + n_corners)] = faces.connectivity
    return stream, np.where(poly, ends, -1)
