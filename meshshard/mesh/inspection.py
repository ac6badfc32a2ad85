"""Inspection of a mesh: counts of irregularities, and welding of points at the same place."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import numpy as np

from meshshard.errors import MeshWarning, n_of
from meshshard.mesh.arrays import Array
from meshshard.mesh.facets import Facets, Matches, facets, match
from meshshard.mesh.mesh import Mesh, vector_area
from meshshard.mesh.ragged import gather_rows

__all__ = ["Inspection", "coincident", "inspect", "open_points", "weld", "weld_and_match"]


@dataclass(frozen=True)
class Inspection:
    """Irregularities of a mesh; each attribute is 0 or empty in a regular one.

    Attributes:
        orphans: number of points that no cell uses.
        welded: number of points merged with an earlier one at the same place.
        open: number of facets of one cell only: the boundary.
        shared: number of facets of more than two cells (non-manifold).
        turned: number of edges whose two cells have opposite winding.
        collapsed: ids of cells of zero area or with a repeated corner.
        copies: ids of cells with the same points as an earlier cell.
        coincident: number of points of a cloud at the place of an earlier one.
        apart: number of cells that share no facet with another, if they are most of several.
    """

    orphans: int = 0
    welded: int = 0
    open: int = 0
    shared: int = 0
    turned: int = 0
    collapsed: tuple[int, ...] = ()
    copies: tuple[int, ...] = ()
    coincident: int = 0
    apart: int = 0

    def findings(self, mesh: Mesh) -> list[str]:
        """One line per irregularity that affects training, with the name of the mesh."""
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
        if self.apart:
            facet = "face" if mesh.dim == 3 else "edge"
            lines.append(
                f"{self.apart:,} of {n_of(mesh.n_cells, 'cells')} share no {facet} with another: "
                "nothing connects them; merge the points of neighbors with --weld TOL"
            )
        return [f"{mesh.name}: {line}" for line in lines]


def inspect(mesh: Mesh, found: Matches | None = None) -> Inspection:
    """Count the irregularities of a mesh.

    Args:
        mesh: any checked mesh.
        found: the matches of its facets, if known.
    """
    if not mesh.n_cells:
        return Inspection(coincident=len(mesh.points) - len(np.unique(coincident(mesh.points))))
    found = match(facets(mesh), mesh.n_points) if found is None else found
    apart = np.ones(mesh.n_cells, bool)
    apart[found.facets.owner[np.concatenate([found.first, found.second])]] = False
    n_apart = int(apart.sum()) if mesh.dim > 1 and mesh.n_cells > 1 else 0
    used = np.zeros(mesh.n_points, bool)
    used[mesh.connectivity] = True
    return Inspection(
        orphans=int((~used).sum()),
        welded=mesh.n_welded,
        open=int(found.open.sum()),
        shared=found.shared,
        turned=_turned(found),
        collapsed=_collapsed(mesh, found.facets),
        copies=_copies(mesh, found),
        apart=n_apart if 2 * n_apart > mesh.n_cells else 0,
    )


def weld_and_match(mesh: Mesh) -> tuple[Mesh, Matches]:
    """Weld points at the same place if that connects cells, and match the facets of all cells.

    Only points of open facets are candidates: elsewhere cells are already connected, and the two
    layers of a thin mesh stay separate. A mesh that already has `weld` keeps it. Merged points and
    irregularities are reported as `MeshWarning`.

    Returns:
        The mesh, with `weld` set if points were merged, and its matches.
    """
    found = match(facets(mesh), mesh.n_points)
    if mesh.weld is None and found.open.any():
        merged = weld(mesh, candidates=open_points(mesh, found))
        again = found if merged is mesh else match(facets(merged), merged.n_points)
        if len(again.first) > len(found.first):
            _warn_welded(merged, len(again.first) - len(found.first))
            mesh, found = merged, again
    for line in inspect(mesh, found).findings(mesh):
        warnings.warn(line, MeshWarning, stacklevel=3)
    return mesh, found


def weld(mesh: Mesh, tolerance: float = 0.0, candidates: Array | None = None) -> Mesh:
    """Merge points at the same place for adjacency: sets `Mesh.weld`.

    Args:
        mesh: any mesh; its points and fields keep every row.
        tolerance: distance up to which points are merged (transitively), in units of the mesh;
            0 merges exactly equal coordinates only.
        candidates: ids of the points that may be merged; None for all.

    Returns:
        The mesh with `weld` set, or the mesh itself if no points coincide.
    """
    ids = np.arange(mesh.n_points) if candidates is None else candidates
    first = coincident(mesh.points[ids], tolerance)
    if (first == np.arange(len(ids))).all():
        return mesh
    to = np.arange(mesh.n_points)
    to[ids] = ids[first]
    return replace(mesh, weld=to)


def coincident(points: Array, tolerance: float = 0.0) -> Array:
    """(n,) row of the first point at the same place, for every point.

    Args:
        points: (n, 3) coordinates; -0 equals 0.
        tolerance: as for `weld`.
    """
    if tolerance > 0:
        return _first_of_groups(_close_groups(points, tolerance))
    places = np.ascontiguousarray(points, np.float64) + 0.0  # -0.0 becomes 0.0
    bits = places.view(np.uint64)
    keys = bits[:, 0] * np.uint64(0x9E3779B97F4A7C15)
    for axis in (1, 2):
        keys = (keys ^ (keys >> np.uint64(29)) ^ bits[:, axis]) * np.uint64(0xBF58476D1CE4E5B9)
    first = _first_of_groups(keys)
    if np.array_equal(bits[first], bits):
        return first
    return _first_of_groups(places.view(np.dtype((np.void, 24))).ravel())  # keys collided


def _first_of_groups(group: Array) -> Array:
    """(n,) first row with the same value, for every row."""
    _, first, inverse = np.unique(group, return_index=True, return_inverse=True)
    return np.asarray(first[inverse])


def _close_groups(points: Array, tolerance: float) -> Array:
    """Group number of every point; points within `tolerance` are in the same group."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components
    from scipy.spatial import cKDTree

    pairs = cKDTree(points).query_pairs(tolerance, output_type="ndarray")
    links = coo_array((np.ones(len(pairs)), (pairs[:, 0], pairs[:, 1])), shape=(len(points),) * 2)
    return np.asarray(connected_components(links, directed=False)[1])


def open_points(mesh: Mesh, found: Matches) -> Array:
    """Candidates for welding: points of open edges, or of cells with open faces."""
    listed = found.facets
    points = np.zeros(mesh.n_points, bool)
    if listed.forward is not None:
        points[listed.low[found.open]] = points[listed.tag[found.open]] = True
    else:
        cells = np.zeros(mesh.n_cells, bool)
        cells[listed.owner[found.open]] = True
        points[gather_rows(mesh.connectivity, mesh.offsets, np.flatnonzero(cells))[0]] = True
    return np.flatnonzero(points)


def _warn_welded(mesh: Mesh, n_joined: int) -> None:
    warnings.warn(
        f"{mesh.name}: {n_of(mesh.n_welded, 'exact duplicates')} of earlier points merged for "
        f"adjacency (all rows are kept), which joins cells along {n_joined} more facets",
        MeshWarning,
        stacklevel=4,
    )


def _turned(found: Matches) -> int:
    """Number of edges of exactly two cells that both traverse in the same direction."""
    forward = found.facets.forward
    if forward is None:
        return 0
    same = forward[found.first] == forward[found.second]
    if found.shared and same.any():
        uses = np.bincount(np.concatenate([found.first, found.second]), minlength=len(forward))
        same &= (uses[found.first] == 1) & (uses[found.second] == 1)
    return int(same.sum())


def _collapsed(mesh: Mesh, listed: Facets) -> tuple[int, ...]:
    """Ids of surface cells of zero area, or with two equal consecutive corners."""
    if listed.forward is None:
        return ()
    zero = np.zeros(mesh.n_cells, bool)
    for rows, corners in mesh.corner_groups():
        x, y, z = vector_area(corners).T
        zero[rows] = (x == 0) & (y == 0) & (z == 0)
    zero[listed.owner[listed.low == listed.tag]] = True
    return tuple(np.flatnonzero(zero).tolist())


def _copies(mesh: Mesh, found: Matches) -> tuple[int, ...]:
    """Ids of cells with the same points as an earlier cell.

    A copy shares every facet with its original. If no facet has three cells, only cells with the
    same neighbor across their first two facets are compared; otherwise all pairs of neighbors.
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
