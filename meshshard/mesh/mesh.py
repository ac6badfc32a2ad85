"""Mesh: points, cells of one dimension, fields; and the geometry of cells in plain numpy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from meshshard.errors import MeshError, n_of
from meshshard.mesh.cells import CELL_TYPES, POLYGON, QUAD, TRIANGLE

__all__ = ["Faces", "Mesh", "vector_area"]

Array = npt.NDArray[Any]
CHUNK = 1 << 15  # cells a chunk: its gathered corners stay in the cache


class Faces(NamedTuple):
    """Faces of polyhedra, listed cell by cell (int64).

    Attributes:
        cell_offsets: (n_cells + 1,) faces of cell i are cell_offsets[i]:cell_offsets[i + 1].
        offsets: (n_faces + 1,) corners of face f are offsets[f]:offsets[f + 1].
        connectivity: point ids, wound outward.
    """

    cell_offsets: Array
    offsets: Array
    connectivity: Array


_CORNERS = np.zeros(256, np.int64)  # corners of the cell types that have nodes beyond them
for _number, _cell in CELL_TYPES.items():
    _CORNERS[_number] = _cell.n_corners


@dataclass(frozen=True, eq=False)
class Mesh:
    """A surface, a volume, a set of curves (cells of one dimension) or a point cloud (no cells).

    Never changed in place; the arrays are the file's own wherever that is possible.

    Attributes:
        points: (n_points, 3) float32 or float64, in the units of the file.
        connectivity: point ids of all cells, one after the other.
        offsets: (n_cells + 1,) int64; cell i is connectivity[offsets[i]:offsets[i + 1]].
        types: (n_cells,) uint8, VTK cell types, all of dimension `dim`.
        faces: the faces of the polyhedra, where there are any.
        point_fields: arrays with a row for each point, by name.
        cell_fields: arrays with a row for each cell, by name.
        cell_origin: (n_cells,) row of each cell in the file, None where it is the row here
            (cells of lower dimension and ghosts are left out, strips are cut into triangles).
        weld: (n_points,) the first point at the same place, None where points are not merged.
            Only neighborhood looks through it; points and fields keep every row of the file.
        blocks: names of the blocks of a composite file; the cell field "block" counts into it.
        name: what to call the mesh in messages, usually the file's name.
    """

    points: Array
    connectivity: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    offsets: Array = field(default_factory=lambda: np.zeros(1, np.int64))
    types: Array = field(default_factory=lambda: np.zeros(0, np.uint8))
    faces: Faces | None = None
    point_fields: Mapping[str, Array] = field(default_factory=dict)
    cell_fields: Mapping[str, Array] = field(default_factory=dict)
    cell_origin: Array | None = None
    weld: Array | None = None
    blocks: tuple[str, ...] = ()
    name: str = "mesh"

    @property
    def n_points(self) -> int:
        """Number of points."""
        return len(self.points)

    @property
    def n_cells(self) -> int:
        """Number of cells; 0 for a point cloud."""
        return len(self.types)

    @cached_property
    def dim(self) -> int:
        """Dimension of the cells: 3 volume, 2 surface, 1 curves, 0 point cloud."""
        present = np.flatnonzero(np.bincount(self.types))
        return max((CELL_TYPES[int(t)].dim for t in present), default=0)

    @property
    def kind(self) -> str:
        """The word for it: volume, surface, curves or point cloud."""
        return ("point cloud", "curves", "surface", "volume")[self.dim]

    @cached_property
    def offset(self) -> Array:
        """(3,) float64 center to subtract before a cast to float32; zero unless far from it.

        Points at 1e7 with a body of 0.5 keep five distinct places in float32. Where the center is
        more than 100 times as far away as the body is large, positions for models are taken
        relative to it. The points themselves are never moved.
        """
        if not self.n_points:
            return np.zeros(3)
        low, high = (np.asarray(f(self.points, axis=0), np.float64) for f in (np.min, np.max))
        center, extent = (low + high) / 2, float((high - low).max())
        far = extent > 0 and np.abs(center).max() > 100 * extent
        return center if far else np.zeros(3)

    def with_fields(
        self, *, cell: Mapping[str, Array] | None = None, point: Mapping[str, Array] | None = None
    ) -> Mesh:
        """A copy with further fields; an array of the same name is replaced."""
        return replace(
            self,
            cell_fields={**self.cell_fields, **(cell or {})},
            point_fields={**self.point_fields, **(point or {})},
        )

    def __repr__(self) -> str:
        """One line: what it is and how large."""
        counts = f"{n_of(self.n_points, 'points')}, {n_of(self.n_cells, 'cells')}"
        return f"Mesh({self.name}: {self.kind}, {counts})"

    def _repr_html_(self) -> str:
        """A small table for a notebook: size, cells by type, bounds, fields with their ranges."""
        rows = [("points", f"{self.n_points:,} ({self.points.dtype})")]
        rows += [("cells", _counted(self))] if self.n_cells else []
        if self.n_points:
            low, high = self.points.min(axis=0), self.points.max(axis=0)
            rows += [(x, f"{a:.6g} … {b:.6g}") for x, a, b in zip("xyz", low, high, strict=True)]
        for on, fields in (("cell", self.cell_fields), ("point", self.point_fields)):
            rows += [(f"{on} {name}", _described(values)) for name, values in fields.items()]
        body = "".join(
            f"<tr><th style='text-align:left'>{escape(a)}</th>"
            f"<td style='text-align:left'>{escape(b)}</td></tr>"
            for a, b in rows
        )
        return f"<b>{escape(self.name)}</b>: {self.kind}<table>{body}</table>"

    def centers(self) -> Array:
        """(n_cells, 3) float64 mean of each cell's points, relative to `offset`."""
        out = np.empty((self.n_cells, 3))
        for rows, ids, starts in self._chunks():
            count = np.diff(np.append(starts, len(ids)))
            corners = self.points.take(ids, axis=0)
            for axis in range(3):
                column = corners[:, axis].astype(np.float64) - self.offset[axis]
                out[rows, axis] = np.add.reduceat(column, starts) / count
        return out

    def positions(self, on: str) -> Array:
        """(n, 3) float64 place of every entity, "cells" or "points", relative to `offset`."""
        if on == "cells":
            return self.centers()
        return np.asarray(self.points, np.float64) - self.offset

    def area_vectors(self) -> Array:
        """(n_cells, 3) float64 area times normal of each surface cell, by the stored winding.

        Half the sum of the cross products of consecutive corners about the first one: exact for
        flat polygons, the standard vector area for warped ones. OpenFOAM stores boundary faces
        with normals out of the fluid, into the body; negate them for the body's own outside.

        Raises:
            MeshError: the mesh is not a surface.
        """
        if self.dim != 2:
            raise MeshError(f"{self.name}: areas need a surface, this is a {self.kind}")
        out = np.empty((self.n_cells, 3))
        for rows, corners in self.corner_groups():
            out[rows] = vector_area([c.astype(np.float64) for c in corners])
        return out

    def corner_groups(self) -> Iterator[tuple[Array, list[Array]]]:
        """Surface cells in groups of as many corners: their rows (m,), and each corner (m, 3)."""
        for rows, ids, starts in self._chunks():
            count = self._corner_counts(rows, np.diff(np.append(starts, len(ids))))
            for n in np.flatnonzero(np.bincount(count)):
                of = np.flatnonzero(count == n)
                first = starts[of]
                yield of + rows.start, [self.points.take(ids[first + i], axis=0) for i in range(n)]

    def areas(self) -> Array:
        """(n_cells,) float64 area of each surface cell."""
        return np.asarray(np.linalg.norm(self.area_vectors(), axis=1))

    def normals(self) -> Array:
        """(n_cells, 3) float64 unit normals by the stored winding (see `area_vectors`).

        A cell of zero area has the normal zero.
        """
        area = self.area_vectors()
        length = np.linalg.norm(area, axis=1, keepdims=True)
        np.divide(area, length, out=area, where=length > 0)
        return area

    def _corner_counts(self, rows: slice, count: Array) -> Array:
        """Corners of the cells in `rows`, which have `count` points: fewer on curved cells."""
        fixed = _CORNERS[self.types[rows]]
        return np.where(fixed > 0, fixed, count)

    def _chunks(self) -> Iterator[tuple[slice, Array, Array]]:
        """Runs of cells: their rows, their point ids, the start of each cell among these."""
        for first in range(0, self.n_cells, CHUNK):
            last = min(first + CHUNK, self.n_cells)
            bounds = self.offsets[first : last + 1]
            yield (
                slice(first, last),
                self.connectivity[bounds[0] : bounds[-1]],
                bounds[:-1] - bounds[0],
            )


def _counted(mesh: Mesh) -> str:
    """Cells by type; polygons by their corners."""
    types, corners = mesh.types, np.diff(mesh.offsets)
    for n, like in ((3, TRIANGLE), (4, QUAD)):
        types = np.where((types == POLYGON) & (corners == n), np.uint8(like), types)
    most = f" (up to {corners[types == POLYGON].max(initial=0)} corners)"
    found = np.bincount(types)
    return ", ".join(
        f"{found[t]:,} {CELL_TYPES[int(t)].name}" + (most if t == POLYGON else "")
        for t in np.argsort(-found)[: np.count_nonzero(found)]
    )


def _described(values: Array) -> str:
    """Type, width and range of a field in a few words."""
    width = int(np.prod(values.shape[1:], dtype=int))
    text = f"{values.dtype}" + (f" × {width}" if width != 1 else "")
    real = values[np.isfinite(values)] if values.dtype.kind == "f" else values.ravel()
    if real.size:
        text += f", {real.min():.6g} … {real.max():.6g}"
    lost = values.size - real.size
    return text + (f", {lost:,} not finite" if lost else "")


def vector_area(corners: list[Array]) -> Array:
    """Vector area (m, 3) of m polygons, given each of their n corners as (m, 3).

    Two diagonals do for a quad, one more spoke for every further corner.
    """
    if len(corners) == 4:
        return _cross(corners[2] - corners[0], corners[3] - corners[1]) / 2
    spokes = [c - corners[0] for c in corners[1:]]
    total = np.zeros_like(corners[0])
    for a, b in itertools.pairwise(spokes):
        total += _cross(a, b)
    return total / 2


def _cross(a: Array, b: Array) -> Array:
    """Cross products of rows, a third of the time of numpy's for many short vectors."""
    out = np.empty_like(a)
    for i, j, k in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
        out[:, i] = a[:, j] * b[:, k] - a[:, k] * b[:, j]
    return out
