"""Drawing: geometry of a picture: outer surfaces, clips, exploded shards, coarser meshes, lines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshshard.mesh import Array, Mesh
from meshshard.mesh.facets import facets, match
from meshshard.mesh.submesh import extract

__all__ = ["Drawing", "coarsened", "cut_lines", "drawing_of", "pieces_of", "slice_of"]


@dataclass(frozen=True, eq=False)
class Drawing:
    """Polygons, lines or points that are drawn as they are.

    Attributes:
        mesh: without fields; every cell (every point of a cloud) is drawn.
        rows: (n,) row of the whole mesh that each drawn cell shows.
        shard: (n,) shard of each drawn cell.
    """

    mesh: Mesh
    rows: Array
    shard: Array

    def __len__(self) -> int:
        return len(self.rows)

    def subset(self, of: Array) -> Drawing:
        """The drawn cells (points) at these indices."""
        mesh = self.mesh
        part = extract(mesh, of).mesh if mesh.n_cells else replace(mesh, points=mesh.points[of])
        return Drawing(part, self.rows[of], self.shard[of])

    def moved(self, shift: Array) -> Drawing:
        """Each shard moved by its row of `shift` (k, 3); shards no longer share points."""
        mesh = self.mesh
        if not mesh.n_cells:
            return replace(self, mesh=replace(mesh, points=mesh.points + shift[self.shard]))
        corner = np.repeat(self.shard.astype(np.int64), np.diff(mesh.offsets))
        key, ids = np.unique(corner * mesh.n_points + mesh.connectivity, return_inverse=True)
        shard, point = np.divmod(key, mesh.n_points)
        points = mesh.points[point] + shift[shard]
        return replace(self, mesh=replace(mesh, points=points, connectivity=ids))


def drawing_of(mesh: Mesh, rows: Array, shard: Array) -> Drawing:
    """Drawing of some cells of a mesh (points of a cloud); solids become their outer surface.

    Args:
        mesh: the whole mesh.
        rows: (n,) cells (points) to draw.
        shard: (n,) shard of each. Each shard of a solid gets a closed surface; all zero gives
            one surface around all cells.
    """
    if not mesh.n_cells:
        return Drawing(Mesh(points=mesh.points[rows]), rows, shard)
    bare = replace(mesh, point_fields={}, cell_fields={}, cell_origin=None, blocks=())
    if mesh.dim < 3:
        return Drawing(extract(bare, rows).mesh, rows, shard)
    import pyvista

    groups = [np.flatnonzero(shard == s) for s in np.unique(shard)]
    surfaces = [_outer_surface(extract(bare, rows[group]).mesh, group) for group in groups]
    return _from_polydata(pyvista.merge(surfaces, merge_points=False), rows, shard)


def _outer_surface(solid: Mesh, index: Array) -> Any:
    """Outer surface of solid cells as PolyData; cell data "index" holds the cell's `index`."""
    from meshshard.io import to_pyvista

    shown = to_pyvista(solid)
    shown.cell_data["index"] = index
    return shown.extract_surface(pass_cellid=False, pass_pointid=False, algorithm=None)


def _from_polydata(surface: Any, rows: Array, shard: Array) -> Drawing:
    """Drawing of PolyData, whose cell data "index" selects from `rows` and `shard`."""
    from meshshard.io import from_pyvista

    mesh = from_pyvista(surface)
    index = mesh.cell_fields["index"].astype(np.int64)
    bare = replace(mesh, cell_fields={}, point_fields={})
    return Drawing(bare, rows[index], shard[index])


def slice_of(mesh: Mesh, axis: int, value: float) -> Drawing:
    """The polygons in which a plane cuts the cells of a solid; every `shard` is 0."""
    from meshshard.io import to_pyvista

    bare = replace(mesh, point_fields={}, cell_fields={}, cell_origin=None, blocks=())
    shown = to_pyvista(bare)
    shown.cell_data["index"] = np.arange(mesh.n_cells)
    origin = np.zeros(3)
    origin[axis] = value
    cut = shown.slice(normal=np.eye(3)[axis], origin=origin)
    if not cut.n_cells:
        return Drawing(Mesh(points=np.zeros((0, 3))), *np.zeros((2, 0), np.int64))
    rows = np.arange(mesh.n_cells)
    return _from_polydata(cut, rows, np.zeros(mesh.n_cells, np.int64))


def coarsened(drawing: Drawing, max_cells: int) -> Drawing:
    """The same drawing with at most `max_cells` cells (points).

    Surfaces: the points in each box of a grid are merged at their mean, and triangles that
    collapse are dropped; each triangle left keeps the row of its cell. Lines and clouds: every
    n-th cell (point) is kept.
    """
    if len(drawing) <= max_cells:
        return drawing
    if drawing.mesh.dim != 2:
        return drawing.subset(np.linspace(0, len(drawing) - 1, max_cells).astype(np.int64))
    from meshshard.io import to_pyvista

    surface = to_pyvista(drawing.mesh)
    surface.cell_data["index"] = np.arange(len(drawing), dtype=np.float64)  # VTK makes ints float32
    triangles = surface.extract_surface(pass_cellid=False, algorithm=None).triangulate()
    width = np.sqrt(2 * triangles.area / max_cells)
    while (merged := _clustered(triangles, width)).n_cells > max_cells:
        width *= 1.3
    return _from_polydata(merged, drawing.rows, drawing.shard)


def _clustered(triangles: Any, width: float) -> Any:
    """PolyData with the points in each box of a grid of this width merged."""
    import pyvista
    from vtkmodules.vtkFiltersCore import vtkBinnedDecimation

    merge = vtkBinnedDecimation()
    merge.SetInputData(triangles)
    merge.AutoAdjustNumberOfDivisionsOff()
    merge.SetNumberOfDivisions(
        *np.ceil(np.maximum(triangles.bounds_size, width) / width).astype(int)
    )
    merge.SetPointGenerationModeToBinAverages()
    merge.ProducePointDataOff()
    merge.ProduceCellDataOn()
    merge.Update()
    return pyvista.wrap(merge.GetOutput())


def cut_lines(mesh: Mesh, label: Array) -> tuple[Array, Array]:
    """Edges of a surface between cells with different labels.

    Returns:
        (n, 2) point ids of the ends, and (n, 2) labels of the two sides.
    """
    if mesh.dim != 2:
        return np.zeros((0, 2), np.int64), np.zeros((0, 2), np.int64)
    found = match(facets(mesh), mesh.n_points)
    owner = found.facets.owner
    sides = label[np.stack([owner[found.first], owner[found.second]], 1)]
    cut = np.flatnonzero(sides[:, 0] != sides[:, 1])
    facet = found.first[cut]
    ends = np.stack([found.facets.low[facet], found.facets.tag[facet]], 1).astype(np.int64)
    return ends, sides[cut]


def pieces_of(drawing: Drawing) -> tuple[Array, Array]:
    """Connected pieces of the shards of a drawing; points and lines have one for each shard.

    Returns:
        (n,) piece of each drawn cell, and the shard of each piece.
    """
    if drawing.mesh.dim != 2:
        used, numbers = np.unique(drawing.shard, return_inverse=True)
        return numbers, used
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    found = match(facets(drawing.mesh), drawing.mesh.n_points)
    pairs = found.facets.owner[found.first], found.facets.owner[found.second]
    same = drawing.shard[pairs[0]] == drawing.shard[pairs[1]]
    n = len(drawing)
    links = coo_array((np.ones(same.sum()), (pairs[0][same], pairs[1][same])), shape=(n, n))
    count, piece = connected_components(links, directed=False)
    shards = np.zeros(count, np.int64)
    shards[piece] = drawing.shard
    return piece, shards
