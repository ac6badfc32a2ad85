"""Submeshes: extract a piece of a mesh, and assemble pieces into the mesh again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from meshshard.errors import MeshError
from meshshard.mesh.arrays import Array
from meshshard.mesh.mesh import Faces, Mesh
from meshshard.mesh.ragged import gather_rows, offsets_of, ranges, scatter_rows

__all__ = ["Piece", "assemble", "extract"]


class Piece(NamedTuple):
    """A part of a mesh, and the rows of its cells and points in the whole mesh.

    Attributes:
        mesh: the part; its ids are local.
        cells: (n_cells,) row of each of its cells in the whole mesh.
        points: (n_points,) row of each of its points in the whole mesh.
    """

    mesh: Mesh
    cells: Array
    points: Array


def extract(mesh: Mesh, cells: Array, points: Array | None = None) -> Piece:
    """Extract cells, in the given order, with their points and the fields of both.

    Args:
        mesh: the whole mesh.
        cells: rows of the cells.
        points: rows of points that come first, in that order, whether cells use them or not. The
            other points of the cells follow, ascending.
    """
    ids, offsets = gather_rows(mesh.connectivity, mesh.offsets, cells)
    faces = None if mesh.faces is None else mesh.faces.take(cells)
    rows = _needed(mesh.n_points, [ids] if faces is None else [ids, faces.connectivity], points)
    place = np.empty(mesh.n_points, np.int32 if mesh.n_points < 2**31 else np.int64)
    place[rows] = np.arange(len(rows), dtype=place.dtype)
    piece = Mesh(
        points=mesh.points.take(rows, axis=0),
        connectivity=place[ids],
        offsets=offsets,
        types=mesh.types[cells],
        faces=None if faces is None else faces._replace(connectivity=place[faces.connectivity]),
        point_fields={name: a.take(rows, axis=0) for name, a in mesh.point_fields.items()},
        cell_fields={name: a.take(cells, axis=0) for name, a in mesh.cell_fields.items()},
        cell_origin=None if mesh.cell_origin is None else mesh.cell_origin[cells],
        blocks=mesh.blocks,
        name=mesh.name,
    )
    return Piece(piece, np.asarray(cells), rows)


def assemble(pieces: Sequence[Piece], n_cells: int, n_points: int, name: str = "mesh") -> Mesh:
    """Assemble the whole mesh from pieces: the inverse of `extract`.

    Args:
        pieces: together they hold every cell once, and every point at least once.
        n_cells: number of cells of the whole mesh.
        n_points: number of points of the whole mesh.
        name: name of the mesh.

    Raises:
        MeshError: a row is missing, a cell is in two pieces, or the pieces have different fields.
    """
    _check_cover(pieces, n_cells, n_points, name)
    first = pieces[0].mesh
    points = np.empty((n_points, 3), first.points.dtype)
    types = np.zeros(n_cells, np.uint8)
    origin = None if first.cell_origin is None else np.empty(n_cells, np.int64)
    for piece, cells, rows in pieces:
        points[rows] = piece.points
        types[cells] = piece.types
        if origin is not None and piece.cell_origin is not None:
            origin[cells] = piece.cell_origin
    connectivity, offsets = scatter_rows(
        [(p.cells, p.mesh.offsets) for p in pieces],
        (p.points[p.mesh.connectivity] for p in pieces),
        n_cells,
    )
    return Mesh(
        points=points,
        connectivity=connectivity,
        offsets=offsets,
        types=types,
        faces=_assemble_faces(pieces, n_cells),
        point_fields=_fields([(p.mesh.point_fields, p.points) for p in pieces], n_points, name),
        cell_fields=_fields([(p.mesh.cell_fields, p.cells) for p in pieces], n_cells, name),
        cell_origin=origin,
        blocks=first.blocks,
        name=name,
    )


def _needed(n_points: int, used: list[Array], first: Array | None) -> Array:
    """Rows of points: `first`, then the other points in use, ascending."""
    wanted = np.zeros(n_points, bool)
    for ids in used:
        wanted[ids] = True
    if first is None:
        return np.flatnonzero(wanted)
    wanted[first] = False
    return np.concatenate([first, np.flatnonzero(wanted)])


def _check_cover(pieces: Sequence[Piece], n_cells: int, n_points: int, name: str) -> None:
    """Every cell is in one piece, every point in at least one."""
    held = np.zeros(n_cells, np.int64)
    seen = np.zeros(n_points, bool)
    for piece in pieces:
        np.add.at(held, piece.cells, 1)
        seen[piece.points] = True
    wrong = np.flatnonzero(held != 1)
    if len(wrong):
        raise MeshError(f"{name}: cell {wrong[0]} is in {held[wrong[0]]} pieces, must be in one")
    if not seen.all():
        raise MeshError(f"{name}: point {np.flatnonzero(~seen)[0]} is in no piece")


def _fields(parts: list[tuple[Mapping[str, Array], Array]], n: int, name: str) -> dict[str, Array]:
    """Fields of the whole mesh from those of the pieces."""
    out: dict[str, Array] = {}
    for fields, rows in parts:
        if out.keys() != fields.keys() and parts[0][0] is not fields:
            raise MeshError(f"{name}: pieces have different fields: {set(out) ^ set(fields)}")
        for field, values in fields.items():
            whole = out.setdefault(field, np.empty((n, *values.shape[1:]), values.dtype))
            whole[rows] = values
    return out


def _assemble_faces(pieces: Sequence[Piece], n_cells: int) -> Faces | None:
    """Faces of all polyhedra, cell by cell."""
    parts = [(p, p.mesh.faces) for p in pieces if p.mesh.faces is not None]
    if not parts:
        return None
    per_cell = np.zeros(n_cells, np.int64)
    for piece, faces in parts:
        per_cell[piece.cells] = np.diff(faces.cell_offsets)
    cell_offsets = offsets_of(per_cell)
    starts, stops = cell_offsets[:-1], cell_offsets[1:]
    connectivity, offsets = scatter_rows(
        [(ranges(starts[p.cells], stops[p.cells]), f.offsets) for p, f in parts],
        (p.points[f.connectivity] for p, f in parts),
        int(cell_offsets[-1]),
    )
    return Faces(cell_offsets, offsets, connectivity)
