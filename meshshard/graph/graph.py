"""Directed graphs in CSR form, made from the cells of a mesh or from points."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from meshshard.errors import MeshError
from meshshard.graph.neighbors import NeighborIndex, finite, rank_in_row
from meshshard.mesh import Array, Mesh
from meshshard.mesh.checks import is_count, is_positive
from meshshard.mesh.facets import Matches, edges, facets, match
from meshshard.mesh.ragged import offsets_of

if TYPE_CHECKING:
    from scipy.sparse import csr_array

__all__ = ["Graph", "cell_graph", "cuthill_mckee", "knn_graph", "point_graph", "radius_graph"]

BLOCK = 1 << 16  # edges renumbered at once, to bound memory


@dataclass(frozen=True, eq=False)
class Graph:
    """A directed graph in CSR form; row i lists the sources of the edges into node i.

    The order of the edges in a row is kept, so serial and sharded runs aggregate in the same order.

    Attributes:
        indptr: (n_nodes + 1,) int64; the in-edges of node i are indptr[i]:indptr[i + 1].
        indices: (n_edges,) int32 or int64 source node of every edge.
        symmetric: True if every edge is known to have its reverse.
        weights: (n_nodes,) load of each node; None for 1 each.
        positions: (n_nodes, 3) positions of the nodes, for geometric methods and pictures.
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
        """The graph with every edge in both directions, without self-loops and duplicates."""
        if self.symmetric:
            return self
        indptr, indices = _rows_of_pairs(self.destinations(), self.indices, self.n_nodes)
        return replace(self, indptr=indptr, indices=indices, symmetric=True)

    def permuted(self, origin: Array) -> Graph:
        """The graph whose row i is row origin[i] of this one, with its edges in the same order."""
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
        """Check offsets, ids and symmetry, and return the graph itself.

        Raises:
            MeshError: offsets or ids are invalid, or `symmetric` is True and an edge has no
                reverse; names the first such row or edge.
        """
        if self.indptr.ndim != 1 or len(self.indptr) < 1 or self.indptr[0] != 0:
            raise MeshError("graph: indptr must be a 1-D array that starts at 0")
        decreases = np.flatnonzero(np.diff(self.indptr) < 0)
        if len(decreases):
            raise MeshError(
                f"graph: indptr decreases after row {decreases[0]}; offsets must not decrease"
            )
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
        """Check that every edge has its reverse, equally often."""
        a, b = self.destinations().astype(np.uint64), self.indices.astype(np.uint64)
        forward, reverse = ((x << np.uint64(32)) | y for x, y in ((a, b), (b, a)))
        forward.sort()
        reverse.sort()
        unmatched = np.flatnonzero(forward != reverse)
        if len(unmatched):
            key = int(min(forward[unmatched[0]], reverse[unmatched[0]]))
            raise MeshError(
                f"graph: has symmetric=True, but nodes {key >> 32} and {key & 0xFFFFFFFF} are "
                "linked in one direction only; pass symmetric=False"
            )


def cell_graph(mesh: Mesh, found: Matches | None = None) -> Graph:
    """The dual graph of a mesh: cells as nodes, linked if they share a facet.

    Facets are faces of volumes, edges of surfaces and end points of curves. Rows are sorted and
    have no duplicates and self-loops.

    Args:
        mesh: the mesh.
        found: result of `match` for its facets; computed if None.
    """
    found = match(facets(mesh), mesh.n_points) if found is None else found
    owner = found.facets.owner
    if found.shared:
        pairs = owner[found.first], owner[found.second]
        return Graph(*_rows_of_pairs(*pairs, mesh.n_cells), symmetric=True)
    # Each facet gives at most one edge, and facets are ordered by cell: rows need no sort by cell.
    unmatched = (found.twin < 0) | (found.twin == owner)
    n_unmatched = np.bincount(owner[unmatched], minlength=mesh.n_cells)
    indptr = found.facets.offsets.copy()
    indptr[1:] -= np.cumsum(n_unmatched)
    return Graph(*_sorted_rows(indptr, found.twin[~unmatched]), symmetric=True)


def point_graph(mesh: Mesh) -> Graph:
    """Points as nodes, linked by the edges of the cells.

    Welded points (`mesh.weld`) are linked to the point that they are merged into.
    """
    a, b = edges(mesh)
    if mesh.weld is not None:
        copies = np.flatnonzero(mesh.weld != np.arange(mesh.n_points))
        a, b = np.concatenate([a, copies]), np.concatenate([b, mesh.weld[copies]])
    return Graph(*_rows_of_pairs(a, b, mesh.n_points), symmetric=True)


def knn_graph(points: Array, k: int) -> Graph:
    """Exact k-nearest-neighbor graph: each point has edges from its k nearest other points.

    Args:
        points: (n, d) finite coordinates; distances are computed in float64.
        k: neighbors per point; n - 1 if there are fewer other points.

    Returns:
        A directed graph without self-loops. Rows are ordered by distance, and ties by id.
        Coincident points are neighbors.

    Raises:
        MeshError: points are not finite, or `k` is not an integer above 0.
    """
    if not is_count(k):
        raise MeshError(f"k is {k!r}; expected the number of neighbors, at least 1")
    points = finite(points)
    n, k = len(points), min(k, len(points) - 1)
    if k < 1:
        return Graph(np.zeros(n + 1, np.int64), np.zeros(0, np.int32), symmetric=n < 2)
    nearest, _ = NeighborIndex(points, k).nearest(k)
    return Graph(np.arange(0, n * k + 1, k, dtype=np.int64), nearest.ravel())


def radius_graph(points: Array, radius: float, max_neighbors: int | None = None) -> Graph:
    """Radius graph: each point has edges from the other points within `radius`.

    Args:
        points: (n, d) finite coordinates; distances are computed in float64.
        radius: largest distance, in the units of the points.
        max_neighbors: keep only so many nearest neighbors of each point; all if None.

    Returns:
        A directed graph without self-loops, symmetric unless `max_neighbors` is given. Rows are
        ordered by distance, and ties by id.

    Raises:
        MeshError: points are not finite, `radius` is not a positive number, or there are 2^31 edges
            or more.
    """
    if not is_positive(radius):
        raise MeshError(f"radius is {radius!r}; expected a distance above 0")
    points = finite(points)
    n = len(points)
    index = NeighborIndex(points)
    total = int(np.minimum(index.count(radius) - 1, max_neighbors or n).sum())
    if total >= 2**31:
        raise MeshError(
            f"radius {radius:g} gives {total} edges, at most {2**31 - 1} are supported; "
            "use a smaller radius or max_neighbors"
        )
    kept: list[Array] = [np.zeros(0, np.int32 if n < 2**31 else np.int64)]
    degree = np.zeros(n, np.int64)
    for at, to, _ in index.ball(radius):
        keep = rank_in_row(at) < (max_neighbors or n)
        kept.append(to[keep])
        degree += np.bincount(at[keep], minlength=n)
    return Graph(offsets_of(degree), np.concatenate(kept), symmetric=max_neighbors is None)


def cuthill_mckee(graph: Graph) -> Array:
    """(n,) int64 position of every node in the reverse Cuthill-McKee order."""
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
    """CSR rows of the undirected graph with the edges (a[i], b[i]).

    Rows are sorted and have no self-loops and duplicates. Each pair is packed into a 64-bit key,
    so that one sort orders rows and columns.
    """
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
    """A square csr_array of ones.

    Offsets are cast to the dtype of the indices, because scipy would otherwise copy the indices.
    """
    from scipy.sparse import csr_array

    n = len(indptr) - 1
    offsets = indptr.astype(indices.dtype) if len(indices) < 2**31 else indptr
    ones = np.broadcast_to(np.int8(1), len(indices))
    return csr_array((ones, indices, offsets), shape=(n, n))


def _sorted_rows(indptr: Array, indices: Array) -> tuple[Array, Array]:
    """Rows sorted by id, without duplicates; may sort `indices` in place."""
    rows = scipy_rows(indptr, indices)
    rows.data = np.ones(len(indices), np.int8)  # scipy writes to it; a broadcast array is read-only
    rows.sort_indices()
    indices = rows.indices.astype(indices.dtype, copy=False)
    double = np.zeros(len(indices), bool)
    double[1:] = indices[1:] == indices[:-1]
    starts = indptr[:-1][np.diff(indptr) > 0]
    double[starts] = False
    if double.any():
        kept = offsets_of(~double)
        indptr, indices = kept[indptr], indices[~double]
    return indptr, indices
