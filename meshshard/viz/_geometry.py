"""Geometry of pictures: outer surfaces, clips, exploded shards, coarser meshes, cut lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from meshshard.mesh import Array, Mesh
from meshshard.mesh.cells import TRIANGLE
from meshshard.mesh.facets import facets, match
from meshshard.mesh.ragged import ranges
from meshshard.mesh.submesh import extract

__all__ = ["Drawing", "coarsened", "cut_lines", "drawing_of", "hull", "kept_by_clip"]


@dataclass(frozen=True, eq=False)
class Drawing:
    """Flat geometry that can be drawn: polygons, lines, or points alone.

    Attributes:
        mesh: without fields; every cell (or every point of a cloud) is drawn.
        rows: the row of the whole mesh that each of them shows.
        shard: the shard that each of them moves with.
    """

    mesh: Mesh
    rows: Array
    shard: Array

    def __len__(self) -> int:
        return len(self.rows)

    def some(self, of: Array) -> Drawing:
        """Some of its cells (points)."""
        mesh = self.mesh
        part = extract(mesh, of).mesh if mesh.n_cells else replace(mesh, points=mesh.points[of])
        return Drawing(part, self.rows[of], self.shard[of])

    def moved(self, shift: Array) -> Drawing:
        """Each shard moved by its row of `shift` (k, 3); points that shards share are doubled."""
        mesh = self.mesh
        if not mesh.n_cells:
            return replace(self, mesh=replace(mesh, points=mesh.points + shift[self.shard]))
        corner = np.repeat(self.shard.astype(np.int64), np.diff(mesh.offsets))
        key, ids = np.unique(corner * mesh.n_points + mesh.connectivity, return_inverse=True)
        shard, point = np.divmod(key, mesh.n_points)
        points = mesh.points[point] + shift[shard]
        return replace(self, mesh=replace(mesh, points=points, connectivity=ids))


def drawing_of(mesh: Mesh, rows: Array, shard: Array) -> Drawing:
    """Some cells of a mesh (points of a cloud); of solids the outer surface of each shard.

    Args:
        mesh: the whole.
        rows: which cells (points).
        shard: (len(rows),) the shard that each moves with; solids of different shards are closed
            between them. All zero closes them together.
    """
    if not mesh.n_cells:
        return Drawing(Mesh(points=mesh.points[rows]), rows, shard)
    bare = replace(mesh, point_fields={}, cell_fields={}, cell_origin=None, blocks=())
    if mesh.dim < 3:
        return Drawing(extract(bare, rows).mesh, rows, shard)
    return _joined([_hull_of(bare, rows[shard == s], int(s)) for s in np.unique(shard)])


def _hull_of(mesh: Mesh, rows: Array, shard: int) -> Drawing:
    surface, cells = hull(extract(mesh, rows).mesh)
    return Drawing(surface, rows[cells], np.full(len(cells), shard))


def hull(mesh: Mesh) -> tuple[Mesh, Array]:
    """The outer surface of solids, and the cell that each of its polygons belongs to."""
    from meshshard.io import from_pyvista, to_pyvista

    skin = to_pyvista(mesh).extract_surface(pass_cellid=True, pass_pointid=False, algorithm=None)
    surface = from_pyvista(skin, mesh.name)
    cells = np.asarray(surface.cell_fields["vtkOriginalCellIds"], np.int64)
    return replace(surface, cell_fields={}, point_fields={}), cells


def _joined(parts: Sequence[Drawing]) -> Drawing:
    """Several drawings as one."""
    points = np.cumsum([0, *(p.mesh.n_points for p in parts)])
    corners = np.cumsum([0, *(len(p.mesh.connectivity) for p in parts)])
    mesh = Mesh(
        points=np.concatenate([p.mesh.points for p in parts]),
        connectivity=np.concatenate(
            [p.mesh.connectivity + n for p, n in zip(parts, points, strict=False)]
        ),
        offsets=np.concatenate(
            [[0], *(p.mesh.offsets[1:] + n for p, n in zip(parts, corners, strict=False))]
        ),
        types=np.concatenate([p.mesh.types for p in parts]),
    )
    rows, shard = (np.concatenate([getattr(p, a) for p in parts]) for a in ("rows", "shard"))
    return Drawing(mesh, rows, shard)


def kept_by_clip(places: Array, clip: str) -> Array:
    """Rows on the side of the middle that `clip` keeps: "x" the lower half in x, "-x" the upper."""
    axis = "xyz".index(clip[-1])
    along = places[:, axis]
    middle = (along.min() + along.max()) / 2
    return np.flatnonzero(along >= middle if clip[0] == "-" else along <= middle)


def coarsened(drawing: Drawing, most: int) -> Drawing:
    """A drawing of at most `most` cells (points): no change where it has no more.

    Surfaces: points in the same box of a grid become one at their mean, triangles that collapse
    are dropped; every triangle left shows the cell it comes from. Others: every n-th is kept.
    """
    if len(drawing) <= most:
        return drawing
    if drawing.mesh.dim != 2:
        return drawing.some(np.linspace(0, len(drawing) - 1, most).astype(np.int64))
    triangles, cell = _fan(drawing.mesh)
    width = float(np.sqrt(drawing.mesh.areas().sum() * 2 / most))
    while True:
        found = _clustered(drawing.mesh.points, triangles, width)
        if len(found.rows) <= most:
            break
        width *= 1.3
    offsets = np.arange(len(found.rows) + 1, dtype=np.int64) * 3
    types = np.full(len(found.rows), TRIANGLE, np.uint8)
    mesh = Mesh(found.points, found.triangles.ravel(), offsets, types, name=drawing.mesh.name)
    rows = cell[found.rows]
    return Drawing(mesh, drawing.rows[rows], drawing.shard[rows])


class _Clustered(NamedTuple):
    points: Array
    triangles: Array
    rows: Array


def _fan(mesh: Mesh) -> tuple[Array, Array]:
    """Triangles (n, 3) about the first corner of every polygon, and their cells."""
    count = np.diff(mesh.offsets)
    cell = np.repeat(np.arange(mesh.n_cells), count - 2)
    second = ranges(mesh.offsets[:-1] + 1, mesh.offsets[1:] - 1)
    ids = mesh.connectivity
    return np.stack([ids[mesh.offsets[:-1]][cell], ids[second], ids[second + 1]], 1), cell


def _clustered(points: Array, triangles: Array, width: float) -> _Clustered:
    """Merge the points in each box of a grid of this width; the triangles that are left, once."""
    box = np.floor((points - points.min(axis=0)) / width).astype(np.int64)
    size = box.max(axis=0) + 1
    packed = (box[:, 0] * size[1] + box[:, 1]) * size[2] + box[:, 2]
    key, place = np.unique(packed, return_inverse=True)
    count = np.bincount(place)
    mean = np.stack([np.bincount(place, weights=c) / count for c in points.T], 1)
    corners = place[triangles]
    a, b, c = corners.T
    rows = np.flatnonzero((a != b) & (b != c) & (a != c))
    ordered = np.sort(corners[rows], axis=1)
    packed = (ordered[:, 0] * len(key) + ordered[:, 1]) * len(key) + ordered[:, 2]
    _, first = np.unique(packed, return_index=True)
    rows = rows[np.sort(first)]
    return _Clustered(mean.astype(points.dtype), corners[rows], rows)


def cut_lines(mesh: Mesh, label: Array) -> tuple[Array, Array]:
    """The edges of a surface between cells of different labels.

    Returns:
        (n, 2) point ids of their ends, and (n, 2) labels of the two sides.
    """
    if mesh.dim != 2:
        return np.zeros((0, 2), np.int64), np.zeros((0, 2), np.int64)
    found = match(facets(mesh), mesh.n_points)
    owner = found.facets.owner
    sides = label[np.stack([owner[found.first], owner[found.second]], 1)]
    cut = np.flatnonzero(sides[:, 0] != sides[:, 1])
    here = found.first[cut]
    ends = np.stack([found.facets.low[here], found.facets.tag[here]], 1).astype(np.int64)
    return ends, sides[cut]
