"""Graph: who reads from whom, as directed compressed rows; made from a mesh or from points."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from meshshard.errors import MeshError
from meshshard.graph.neighbors import Cloud, finite, rank_in_row
from meshshard.mesh import Array, Mesh
from meshshard.mesh.facets import Matches, edges, facets, match

if TYPE_CHECKING:
    from scipy.sparse import csr_array

__all__ = ["Graph", "cell_graph", "cuthill_mckee", "knn_graph", "point_graph", "radius_graph"]

BLOCK = 1 << 16  # ids renumbered at once


@dataclass(frozen=True, eq=False)
class Graph:
    """A directed graph in compressed rows: row i lists the sources of the edges into node i.

    The order of a row is part of the graph: aggregation in that order is what serial and sharded
    runs have in common.

    Attributes:
        indptr: (n_nodes + 1,) int64; in-edges of node i are indptr[i]:indptr[i + 1].
        indices: (n_edges,) int32 or int64, the source node of every edge.
        symmetric: every edge has its reverse; known by construction, never assumed.
        weights: (n_nodes,) load of each node, None for one each.
        positions: (n_nodes, 3) places of the nodes, for the methods that cut by geometry.
    """

    indptr: Array
    indices: Array
    symmetric: bool = False
    weights: Array | None = None
    positions: Array | None = None

    @property
    def n_nodes(self) -> int:
        """Number of nodes."""
        return len(self.indptr) - 1

    @property
    def n_edges(self) -> int:
        """Number of directed edges."""
        return len(self.indices)

    def destinations(self) -> Array:
        """(n_edges,) destination node of every edge."""
        nodes = np.arange(self.n_nodes, dtype=self.indices.dtype)
        return np.repeat(nodes, np.diff(self.indptr))

    def symmetrized(self) -> Graph:
        """The graph with every edge in both directions, rows sorted, no loops, no doubles."""
        if self.symmetric:
            return self
        indptr, indices = _rows_of_pairs(self.destinations(), self.indices, self.n_nodes)
        return replace(self, indptr=indptr, indices=indices, symmetric=True)

    def permuted(self, origin: Array) -> Graph:
        """The graph with row i taken from row origin[i]; rows keep the order of their edges."""
        n = self.n_nodes
        place = np.empty(n, self.indices.dtype)
        place[origin] = np.arange(n, dtype=place.dtype)
        rows = scipy_rows(self.indptr, self.indices)[origin]
        sources = rows.indices.astype(self.indices.dtype, copy=False)
        for first in range(0, len(sources), BLOCK):  # in place: no second array of all edges
            block = sources[first : first + BLOCK]
            block[:] = place[block]
        return Graph(
            rows.indptr.astype(np.int64, copy=False),
            sources,
            self.symmetric,
            None if self.weights is None else self.weights[origin],
            None if self.positions is None else self.positions[origin],
        )

    def check(self) -> Graph:
        """The graph itself, once its rows and ids are proved to be in range.

        Raises:
            MeshError: naming the first row or edge that is wrong, or has no reverse where the
                graph is called symmetric.
        """
        if self.indptr.ndim != 1 or len(self.indptr) < 1 or self.indptr[0] != 0:
            raise MeshError("graph: indptr must be one row of offsets that starts at 0")
        falls = np.flatnonzero(np.diff(self.indptr) < 0)
        if len(falls):
            raise MeshError(f"graph: indptr falls after row {falls[0]}; offsets must not decrease")
        if self.indptr[-1] != self.n_edges:
            raise MeshError(
                f"graph: indptr ends at {self.indptr[-1]}, but there are {self.n_edges} edges"
            )
        bad = np.flatnonzero((self.indices < 0) | (self.indices >= self.n_nodes))
        if len(bad):
            raise MeshError(
                f"graph: edge {bad[0]} comes from node {self.indices[bad[0]]}, "
                f"but nodes are 0 to {self.n_nodes - 1}"
            )
        if self.symmetric:
            self._check_symmetry()
        return self

    def _check_symmetry(self) -> None:
        """Every edge has its reverse, as often as it is there."""
        a, b = self.destinations().astype(np.uint64), self.indices.astype(np.uint64)
        there, back = ((x << np.uint64(32)) | y for x, y in ((a, b), (b, a)))
        there.sort()
        back.sort()
        lonely = np.flatnonzero(there != back)
        if len(lonely):
            key = int(min(there[lonely[0]], back[lonely[0]]))
            raise MeshError(
                f"graph: is called symmetric, but nodes {key >> 32} and {key & 0xFFFFFFFF} are "
                "linked one way only; leave out symmetric=True"
            )


def cell_graph(mesh: Mesh, found: Matches | None = None) -> Graph:
    """Cells as nodes, linked where they share a facet: an edge, a face, an end point.

    Rows are sorted; pairs that share several facets are linked once; a cell is never linked to
    itself. The matches of the facets may be passed where they are known.
    """
    found = match(facets(mesh), mesh.n_points) if found is None else found
    owner = found.facets.owner
    if found.shared:
        pairs = owner[found.first], owner[found.second]
        return Graph(*_rows_of_pairs(*pairs, mesh.n_cells), symmetric=True)
    # Every facet has one twin at most: the table by facet is already ordered by cell.
    alone = (found.twin < 0) | (found.twin == owner)
    lost = np.bincount(owner[alone], minlength=mesh.n_cells)
    indptr = found.facets.offsets.copy()
    indptr[1:] -= np.cumsum(lost)
    return Graph(*_sorted_rows(indptr, found.twin[~alone]), symmetric=True)


def point_graph(mesh: Mesh) -> Graph:
    """Points as nodes, linked along the edges of the cells (of their faces, for volumes).

    Points that the weld map merges are linked to the one they are merged with.
    """
    a, b = edges(mesh)
    if mesh.weld is not None:
        copies = np.flatnonzero(mesh.weld != np.arange(mesh.n_points))
        a, b = np.concatenate([a, copies]), np.concatenate([b, mesh.weld[copies]])
    return Graph(*_rows_of_pairs(a, b, mesh.n_points), symmetric=True)


def knn_graph(points: Array, k: int) -> Graph:
    """Each point hears its k nearest others; ties go by distance, then by id.

    Args:
        points: (n, d) finite coordinates; compared in float64.
        k: neighbors of each point; n - 1 where that is fewer.

    Returns:
        A directed graph; rows are ordered by (distance, id). A point is never its own neighbor,
        points at the same place are.
    """
    points = finite(points)
    n, k = len(points), min(k, len(points) - 1)
    if k < 1:
        return Graph(np.zeros(n + 1, np.int64), np.zeros(0, np.int32), symmetric=n < 2)
    nearest, _ = Cloud(points, k).nearest(k)
    return Graph(np.arange(0, n * k + 1, k, dtype=np.int64), nearest.ravel())


def radius_graph(points: Array, radius: float, max_neighbors: int | None = None) -> Graph:
    """Each point hears all others within `radius`, the nearest `max_neighbors` of them.

    Rows are ordered by (distance, id).

    Raises:
        MeshError: the edges would not fit into 2^31; take a smaller radius or a limit.
    """
    points = finite(points)
    n = len(points)
    cloud = Cloud(points)
    total = int(np.minimum(cloud.count(radius) - 1, max_neighbors or n).sum())
    if total >= 2**31:
        raise MeshError(
            f"radius {radius:g} gives {total} edges; take a smaller radius or max_neighbors"
        )
    kept: list[Array] = [np.zeros(0, np.int32 if n < 2**31 else np.int64)]
    degree = np.zeros(n, np.int64)
    for at, to, _ in cloud.ball(radius):
        keep = rank_in_row(at) < (max_neighbors or n)
        kept.append(to[keep])
        degree += np.bincount(at[keep], minlength=n)
    indptr = np.concatenate([[0], np.cumsum(degree)])
    return Graph(indptr, np.concatenate(kept), symmetric=max_neighbors is None)


def cuthill_mckee(graph: Graph) -> Array:
    """(n,) place of every node in the reverse Cuthill-McKee order: neighbors lie close."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import reverse_cuthill_mckee

    whole = graph.symmetrized()
    n = whole.n_nodes
    ones = np.ones(whole.n_edges, np.int8)
    matrix = csr_array((ones, whole.indices, whole.indptr), shape=(n, n))
    place = np.empty(n, np.int64)
    place[reverse_cuthill_mckee(matrix, symmetric_mode=True)] = np.arange(n)
    return place


def _rows_of_pairs(a: Array, b: Array, n: int) -> tuple[Array, Array]:
    """Sorted symmetric rows from pairs, without loops and doubles, by one sort of packed pairs."""
    keys = np.empty(2 * len(a), np.uint64)
    for half, row, column in ((keys[: len(a)], a, b), (keys[len(a) :], b, a)):
        half[:] = row
        half <<= np.uint64(32)
        half |= column.astype(np.uint64)
    keys.sort()
    keep = np.ones(len(keys), bool)
    keep[1:] = keys[1:] != keys[:-1]
    keep &= (keys >> np.uint64(32)) != (keys & np.uint64(0xFFFFFFFF))
    keys = keys[keep]
    indices = (keys & np.uint64(0xFFFFFFFF)).astype(np.int32)
    keys >>= np.uint64(32)
    indptr = np.searchsorted(keys, np.arange(n + 1, dtype=np.uint64)).astype(np.int64)
    return indptr, indices


def scipy_rows(indptr: Array, indices: Array) -> csr_array:
    """Square rows for scipy, which copies all ids unless offsets are of the same type."""
    from scipy.sparse import csr_array

    n = len(indptr) - 1
    offsets = indptr.astype(indices.dtype) if len(indices) < 2**31 else indptr
    nothing = np.broadcast_to(np.int8(1), len(indices))
    return csr_array((nothing, indices, offsets), shape=(n, n))


def _sorted_rows(indptr: Array, indices: Array) -> tuple[Array, Array]:
    """Rows sorted by id, doubles dropped; `indices` is sorted in place where scipy can."""
    rows = scipy_rows(indptr, indices)
    rows.data = np.ones(len(indices), np.int8)  # sorted along, so it cannot be the same byte
    rows.sort_indices()
    indices = rows.indices.astype(indices.dtype, copy=False)
    double = np.zeros(len(indices), bool)
    double[1:] = indices[1:] == indices[:-1]
    starts = indptr[:-1][np.diff(indptr) > 0]
    double[starts] = False
    if double.any():
        kept = np.concatenate([[0], np.cumsum(~double)])
        indptr, indices = kept[indptr], indices[~double]
    return indptr, indices
