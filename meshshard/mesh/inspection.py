"""Inspection: what deserves a look in a mesh, and the merging of points that its cells need."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import numpy as np

from meshshard.errors import MeshWarning, n_of
from meshshard.mesh.arrays import Array
from meshshard.mesh.facets import Facets, Matches, facets, match
from meshshard.mesh.mesh import Mesh, vector_area
from meshshard.mesh.ragged import ranges

__all__ = ["Inspection", "coincident", "glue", "inspect", "open_points", "weld"]


@dataclass(frozen=True)
class Inspection:
    """Counts of what was found; each attribute is 0 or empty in a mesh without surprises.

    Attributes:
        orphans: points that no cell uses.
        welded: points merged with an earlier one at the same place.
        open: facets that one cell has: the border of a surface, the boundary of a volume.
        shared: facets of more than two cells.
        turned: edges whose two cells are wound against each other.
        collapsed: cells of zero area or with a point twice in a row (ids).
        copies: cells with the same corners as an earlier one (ids).
        coincident: points of a cloud at the place of an earlier one.
    """

    orphans: int = 0
    welded: int = 0
    open: int = 0
    shared: int = 0
    turned: int = 0
    collapsed: tuple[int, ...] = ()
    copies: tuple[int, ...] = ()
    coincident: int = 0

    def findings(self, mesh: Mesh) -> list[str]:
        """One line for everything that a user should know before training on it."""
        lines = []
        if self.orphans:
            lines.append(
                f"{n_of(self.orphans, 'points')} unused (orphans); kept, without neighbors"
            )
        if self.collapsed:
            lines.append(
                f"{n_of(len(self.collapsed), 'cells')} of zero area (degenerate or collapsed): "
                f"{_some(self.collapsed)}; kept, with normals of zero"
            )
        if self.copies:
            lines.append(
                f"{n_of(len(self.copies), 'cells')} equal to earlier ones (duplicates): "
                f"{_some(self.copies)}; kept, counted twice in sums"
            )
        if self.turned:
            lines.append(
                f"{n_of(self.turned, 'edges')} between cells of opposite winding: normals flip "
                "there; orient the cells before using normals or forces"
            )
        if self.coincident:
            lines.append(
                f"{n_of(self.coincident, 'points')} coincident with others (duplicates): their "
                "nearest neighbors are at distance zero"
            )
        return [f"{mesh.name}: {line}" for line in lines]


def inspect(mesh: Mesh, found: Matches | None = None) -> Inspection:
    """Look a mesh over; the matches of its facets may be passed where they are known."""
    if not mesh.n_cells:
        return Inspection(coincident=len(mesh.points) - len(np.unique(coincident(mesh.points))))
    found = match(facets(mesh), mesh.n_points) if found is None else found
    used = np.zeros(mesh.n_points, bool)
    used[mesh.connectivity] = True
    welded = 0
    if mesh.weld is not None:
        welded = int((mesh.weld != np.arange(mesh.n_points)).sum())
    return Inspection(
        orphans=int((~used).sum()),
        welded=welded,
        open=int(found.open.sum()),
        shared=found.shared,
        turned=_turned(found),
        collapsed=_collapsed(mesh, found.facets),
        copies=_copies(mesh, found),
    )


def glue(mesh: Mesh) -> tuple[Mesh, Matches]:
    """The matches of all facets, once points at one place are merged where that glues cells.

    Only points on open facets are looked at: where cells are glued already there is nothing to
    merge, and the layers of a thin mesh stay apart. A mesh that has a weld map keeps it. What is
    merged or deserves a look is said in a warning.
    """
    found = match(facets(mesh), mesh.n_points)
    if mesh.weld is None and found.open.any():
        merged = weld(mesh, candidates=open_points(mesh, found))
        again = found if merged is mesh else match(facets(merged), merged.n_points)
        if len(again.first) > len(found.first):
            _say(merged, len(again.first) - len(found.first))
            mesh, found = merged, again
    for line in inspect(mesh, found).findings(mesh):
        warnings.warn(line, MeshWarning, stacklevel=3)
    return mesh, found


def weld(mesh: Mesh, tolerance: float = 0.0, candidates: Array | None = None) -> Mesh:
    """The mesh with a map that merges points at one place, for neighborhood only.

    Args:
        mesh: its points and fields keep every row.
        tolerance: distance up to which points are one place (chains merge), in the mesh's units;
            0 for exactly equal coordinates.
        candidates: ids of the points to look at, all by default.

    Returns:
        The mesh with `weld` set where anything is merged, else the mesh itself.
    """
    ids = np.arange(mesh.n_points) if candidates is None else candidates
    first = coincident(mesh.points[ids], tolerance)
    if (first == np.arange(len(ids))).all():
        return mesh
    to = np.arange(mesh.n_points)
    to[ids] = ids[first]
    return replace(mesh, weld=to)


def coincident(points: Array, tolerance: float = 0.0) -> Array:
    """(n,) row of the first point at the same place, for every point."""
    n = len(points)
    if tolerance > 0:
        return _first_of_groups(_close_groups(points, tolerance), n)
    points = points + 0.0  # -0.0 is the place of 0.0
    order = np.lexsort(tuple(points[:, axis] for axis in range(points.shape[1])))
    new = np.ones(n, bool)
    new[1:] = (points[order[1:]] != points[order[:-1]]).any(axis=1)
    group = np.empty(n, np.int64)
    group[order] = np.cumsum(new) - 1
    return _first_of_groups(group, n)


def _first_of_groups(group: Array, n: int) -> Array:
    first = np.full(n, n, np.int64)
    np.minimum.at(first, group, np.arange(n))
    return first[group]


def _close_groups(points: Array, tolerance: float) -> Array:
    """Group number of every point; points closer than `tolerance` are in one group."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components
    from scipy.spatial import cKDTree

    pairs = cKDTree(points).query_pairs(tolerance, output_type="ndarray")
    links = coo_array((np.ones(len(pairs)), (pairs[:, 0], pairs[:, 1])), shape=(len(points),) * 2)
    return np.asarray(connected_components(links, directed=False)[1])


def open_points(mesh: Mesh, found: Matches) -> Array:
    """Points that could glue a mesh further: of open edges, of the cells with open faces."""
    listed = found.facets
    points = np.zeros(mesh.n_points, bool)
    if listed.forward is not None:
        points[listed.low[found.open]] = points[listed.tag[found.open]] = True
    else:
        cells = np.zeros(mesh.n_cells, bool)
        cells[listed.owner[found.open]] = True
        starts, stops = mesh.offsets[:-1][cells], mesh.offsets[1:][cells]
        points[mesh.connectivity[ranges(starts, stops)]] = True
    return np.flatnonzero(points)


def _say(mesh: Mesh, glued: int) -> None:
    assert mesh.weld is not None
    merged = int((mesh.weld != np.arange(mesh.n_points)).sum())
    warnings.warn(
        f"{mesh.name}: {n_of(merged, 'exact duplicates')} of earlier points merged for "
        f"neighborhood (by a map, rows stay), which joins cells along {glued} more facets",
        MeshWarning,
        stacklevel=4,
    )


def _turned(found: Matches) -> int:
    """Edges of exactly two cells that both run through in the same direction."""
    forward = found.facets.forward
    if forward is None:
        return 0
    same = forward[found.first] == forward[found.second]
    if found.shared and same.any():
        uses = np.bincount(np.concatenate([found.first, found.second]), minlength=len(forward))
        same &= (uses[found.first] == 1) & (uses[found.second] == 1)
    return int(same.sum())


def _collapsed(mesh: Mesh, listed: Facets) -> tuple[int, ...]:
    """Surface cells of zero area, or with the same point twice in a row."""
    if listed.forward is None:
        return ()
    zero = np.zeros(mesh.n_cells, bool)
    for rows, corners in mesh.corner_groups():
        x, y, z = vector_area(corners).T
        zero[rows] = (x == 0) & (y == 0) & (z == 0)
    zero[listed.owner[listed.low == listed.tag]] = True
    return tuple(np.flatnonzero(zero).tolist())


def _copies(mesh: Mesh, found: Matches) -> tuple[int, ...]:
    """Cells with the same points as an earlier one.

    A copy shares every facet with its original. Where no facet has three cells, the first two
    facets of a copy lead to the same cell, which few cells do; else all pairs are looked at.
    """
    offsets, owner = found.facets.offsets, found.facets.owner
    if found.shared:
        a, b = owner[found.first], owner[found.second]
    else:
        first = offsets[:-1]
        second = np.minimum(first + 1, offsets[1:] - 1)
        a = np.flatnonzero((found.twin[first] == found.twin[second]) & (found.twin[first] >= 0))
        b = found.twin[first[a]]
    pairs = np.unique(np.stack([np.minimum(a, b), np.maximum(a, b)]), axis=1).T
    return tuple(sorted({int(j) for i, j in pairs if i != j and _same_points(mesh, i, j)}))


def _same_points(mesh: Mesh, i: int, j: int) -> bool:
    ids = [mesh.connectivity[mesh.offsets[c] : mesh.offsets[c + 1]] for c in (i, j)]
    if mesh.weld is not None:
        ids = [mesh.weld[c] for c in ids]
    return np.array_equal(np.sort(ids[0]), np.sort(ids[1]))


def _some(ids: tuple[int, ...]) -> str:
    return ", ".join(map(str, ids[:5])) + (" …" if len(ids) > 5 else "")
