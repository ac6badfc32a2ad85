"""Voxels: fetch those points of other ranks that can be neighbors of queries on this rank.

Every rank announces which cells of one coarse grid hold its points. A rank whose queries reach
cells of another rank sends it range queries: centers of small cells around these queries, each with
a radius. The other rank returns its points within these ranges, each point once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from meshshard.comm import Domain
from meshshard.graph.neighbors import widened
from meshshard.mesh import Array

if TYPE_CHECKING:
    from scipy.spatial import cKDTree

__all__ = ["Candidates", "Rows", "fetch_candidates"]

BITS = 7  # most bits of the index of a coarse cell along an axis
CELLS = 8192  # most coarse cells that a rank announces
STEP = 1.19  # ratio of two successive radii of range queries
FINE = 3.0  # small cells per radius of a range query
NARROW = 2.0**-18  # smallest radius of a range query, as a share of the box


class Rows(NamedTuple):
    """Points of a sharded cloud on one rank.

    Attributes:
        points: (n, d) finite float64.
        keys: (n,) int64 rows in the source, which break ties.
        ids: (n,) int64 global ids.
    """

    points: Array
    keys: Array
    ids: Array


class Candidates(NamedTuple):
    """Points of other ranks that can be neighbors of queries on this rank.

    Attributes:
        rows: the points.
        queries: (n,) rows of the queries that may have neighbors among them.
    """

    rows: Rows
    queries: Array


class _Grid(NamedTuple):
    """Cubic cells in the box of all points and queries, along up to three axes.

    Coordinates are relative to the low corner of the box: absolute ones lose digits far from the
    origin.
    """

    low: Array
    size: float
    bits: int

    @property
    def box(self) -> float:
        """Side of the box."""
        return self.size * 2.0**self.bits

    @property
    def rounding(self) -> float:
        """Bound on the rounding errors of coordinates."""
        return self.box * 1e-12

    @property
    def half_side(self) -> float:
        """Distance from the center of a cell to its faces, plus the rounding error."""
        return self.size / 2 + self.rounding

    def half_diagonal(self, size: float) -> float:
        """Distance from the center to a corner of a cell of this size, plus the rounding error."""
        return size * math.sqrt(len(self.low)) / 2 + self.rounding

    def relative(self, points: Array) -> Array:
        """(n, axes) coordinates relative to the low corner."""
        return np.asarray(points[:, : len(self.low)] - self.low)

    def cells(self, points: Array) -> Array:
        """(n,) int64 cell of every point, given relative coordinates."""
        flat = np.zeros(len(points), np.int64)
        for axis in range(len(self.low)):
            cell = (points[:, axis] / self.size).astype(np.int64)
            flat = (flat << self.bits) | np.minimum(cell, (1 << self.bits) - 1)
        return flat

    def centers(self, cells: Array) -> Array:
        """(n, axes) center of every cell, relative to the low corner."""
        return (_unpacked(cells, len(self.low), self.bits) + 0.5) * self.size

    def coarser(self, bits: int) -> _Grid:
        """The grid with this many bits per axis in the same box."""
        return _Grid(self.low, self.size * 2.0 ** (self.bits - bits), bits)


def fetch_candidates(
    domain: Domain, x: Rows, queries: Array, radius: Array, k: int | None
) -> Candidates:
    """Fetch points of other ranks that can be nearer to local queries than those found locally.

    Args:
        domain: the ranks.
        x: points of this rank.
        queries: (n, d) query points of this rank, finite float64.
        radius: (n,) search radius of each query; inf where fewer than k were found.
        k: neighbors of each query, None for all within the radius.

    Communication: two gathers of objects (the box; up to 8,192 cells per rank), two all-to-alls of
    counts, one of range queries, one of points.
    """
    same = queries is x.points
    finest = _common_box(domain, [x.points] if same else [x.points, queries])
    points = finest.relative(x.points)
    relative_queries = points if same else finest.relative(queries)
    cells = finest.cells(points)
    own = _occupied_cells(finest, cells)
    grid, occupied = _common_grid(finest, domain.share(own))
    cells = cells if own[0] == BITS == grid.bits else grid.cells(points)
    if k is not None and x.points.shape[1] <= 3:
        radius = np.minimum(
            radius, _kth_distance_bound(grid, occupied, relative_queries, radius, k)
        )
    binned_queries = _Binned.of(grid, relative_queries, cells if same else None)
    ranges, rows = _ranges_for_ranks(domain, occupied, binned_queries, radius)
    received = _all_to_all(domain, ranges)
    binned_points = _Binned.of(grid, points, cells)
    sent = [_packed(x, _rows_in_range(binned_points, each)) for each in received]
    fetched = np.concatenate(_all_to_all(domain, sent))
    positions = np.ascontiguousarray(fetched[:, :-2]).view(np.float64)
    return Candidates(Rows(positions, fetched[:, -2], fetched[:, -1]), rows)


def _packed(x: Rows, rows: Array) -> Array:
    """(n, d + 2) points, keys and ids as one table of integers."""
    return np.column_stack([x.points[rows].view(np.int64), x.keys[rows], x.ids[rows]])


class _Binned(NamedTuple):
    """Points and the cells that they are in.

    Attributes:
        grid: the grid.
        points: (n, axes) relative to the low corner of the grid.
        centers: (n_cells, axes) of the cells that hold points.
        cell: (n,) index into `centers` of every point.
    """

    grid: _Grid
    points: Array
    centers: Array
    cell: Array

    @staticmethod
    def of(grid: _Grid, points: Array, cells: Array | None) -> _Binned:
        """Bin points; their cells are computed if None."""
        cells = grid.cells(points) if cells is None else cells
        index = np.zeros(1 << (grid.bits * len(grid.low)), np.int32)
        index[cells] = 1
        occupied = np.flatnonzero(index)
        index[occupied] = np.arange(len(occupied))
        return _Binned(grid, points, grid.centers(occupied), index[cells])

    def rows(self, chosen: Array) -> Array:
        """Rows of the points in chosen cells, cell by cell: a tree query is faster in this order.

        Args:
            chosen: (n_cells,) bool.
        """
        rows = np.flatnonzero(chosen[self.cell])
        return rows[np.argsort(self.cell[rows], kind="stable")]


# ------------------------------------------------------------------------------- the coarse grid
def _common_box(domain: Domain, clouds: list[Array]) -> _Grid:
    """The finest grid, over the points and queries of all ranks."""
    own = [(_along_axes(np.min, a), _along_axes(np.max, a)) for a in clouds if len(a)]
    boxes = [box for boxes in domain.share(own) for box in boxes]
    low, high = np.min([a for a, _ in boxes], 0)[:3], np.max([b for _, b in boxes], 0)[:3]
    return _Grid(low, (float((high - low).max()) or 1.0) / (1 << BITS), BITS)


def _along_axes(reduction: Any, points: Array) -> Array:
    """Minimum or maximum of each coordinate; faster than `axis=0` on a table of few columns."""
    return np.array([reduction(points[:, axis]) for axis in range(points.shape[1])])


Counts = list[tuple[Array, Array]]  # of every rank: occupied cells, points in each


def _occupied_cells(grid: _Grid, cells: Array) -> tuple[int, Array, Array]:
    """Bits per axis, at most `CELLS` occupied cells, and the number of points in each."""
    axes, bits = len(grid.low), grid.bits
    box = np.bincount(cells, minlength=1 << (bits * axes)).reshape((1 << bits,) * axes)
    while np.count_nonzero(box) > CELLS and bits > 1:
        bits -= 1
        box = box.reshape((1 << bits, 2) * axes).sum(tuple(range(1, 2 * axes, 2)))
    counts = box.reshape(-1)
    cells = np.flatnonzero(counts)
    return bits, cells, counts[cells]


def _common_grid(finest: _Grid, announced: list[tuple[int, Array, Array]]) -> tuple[_Grid, Counts]:
    """The coarsest grid that any rank announced, and every rank's occupied cells in it."""
    grid = finest.coarser(min(bits for bits, _, _ in announced))
    occupied = []
    for bits, cells, counts in announced:
        coarse = grid.cells(finest.coarser(bits).centers(cells))
        distinct, inverse = np.unique(coarse, return_inverse=True)
        n_points = np.bincount(inverse, counts, len(distinct)).astype(np.int64)
        occupied.append((distinct, n_points))
    return grid, occupied


def _kth_distance_bound(
    grid: _Grid, occupied: Counts, queries: Array, radius: Array, k: int
) -> Array:
    """(n,) upper bound on the distance to the k-th neighbor, from the number of points in cells."""
    out = np.full(len(queries), np.inf)
    wide = np.flatnonzero(radius > grid.size)
    cells, back = np.unique(np.concatenate([c for c, _ in occupied]), return_inverse=True)
    if not len(wide) or not len(cells):
        return out
    counts = np.bincount(back, np.concatenate([n for _, n in occupied]))
    tree = _tree(grid.centers(cells))
    width = min(k + 1, len(cells))
    answer: Any = tree.query(queries[wide], width)
    distance, near = (a.reshape(-1, width) for a in answer)
    enough = counts[near].cumsum(1) >= k + 1  # one of them may be the query itself
    first = distance[np.arange(len(wide)), enough.argmax(1)]
    bound = widened(first + grid.half_diagonal(grid.size))
    out[wide] = np.where(enough.any(1), bound, np.inf)
    return out


# -------------------------------------------------------------------------------- range queries
def _ranges_for_ranks(
    domain: Domain, occupied: Counts, queries: _Binned, radius: Array
) -> tuple[list[Array], Array]:
    """Range queries for each rank, and the rows of the queries that they cover."""
    grid = queries.grid
    largest = np.zeros(len(queries.centers))
    np.maximum.at(largest, queries.cell, radius)
    out, asked = [], np.zeros(len(radius), bool)
    for rank, (cells, _) in enumerate(occupied):
        rows = np.zeros(0, np.int64)
        if rank != domain.rank and len(cells) and len(radius):
            tree = _tree(grid.centers(cells))
            rows = queries.rows(_within_box(tree, queries.centers, largest + 2 * grid.half_side))
            rows = rows[_within_box(tree, queries.points[rows], radius[rows] + grid.half_side)]
        asked[rows] = True
        out.append(_range_queries(grid, queries.points[rows], radius[rows]))
    return out, np.flatnonzero(asked)


def _range_queries(grid: _Grid, queries: Array, radius: Array) -> Array:
    """(n, axes + 1) centers of small cells around queries, and the radius to search from there."""
    axes = len(grid.low)
    if np.isinf(radius).any():
        return np.append(np.zeros(axes), np.inf)[None]
    level = np.ceil(np.log(np.maximum(radius, grid.box * NARROW)) / np.log(STEP)).astype(np.int64)
    out = [np.zeros((0, axes + 1))]
    for one in np.unique(level):
        widest = STEP ** float(one)
        size = widest / FINE
        cell = (queries[level == one] / size).astype(np.int64)
        keys = np.zeros(len(cell), np.int64)
        for axis in range(axes):
            keys = (keys << 21) | cell[:, axis]
        center = (_unpacked(np.unique(keys), axes, 21) + 0.5) * size
        search = np.full(len(center), widened(widest + grid.half_diagonal(size)))
        out.append(np.column_stack([center, search]))
    return np.concatenate(out)


def _rows_in_range(binned: _Binned, ranges: Array) -> Array:
    """Rows of the points within any of the ranges, ascending."""
    if not len(ranges) or not len(binned.points):
        return np.zeros(0, np.int64)
    if np.isinf(ranges[:, -1]).any():
        return np.arange(len(binned.points))
    centers, radius = ranges[:, :-1], ranges[:, -1]
    largest = radius.max()
    rows = binned.rows(_within_box(_tree(centers), binned.centers, largest + binned.grid.half_side))
    # One more coordinate gives all ranges the same radius: |p - c| <= r where
    # |(p, 0) - (c, sqrt(R^2 - r^2))| <= R. Rounding can add points, never lose one.
    raised = np.column_stack([centers, np.sqrt(largest**2 - radius**2)])
    points = np.column_stack([binned.points[rows], np.zeros(len(rows))])
    distance = _tree(raised).query(points, distance_upper_bound=widened(largest))[0]
    return np.sort(rows[distance < np.inf])


def _within_box(tree: cKDTree, points: Array, limit: Array | float) -> Array:
    """Whether each point is within a limit, along every axis, of some point of the tree."""
    largest = np.max(limit, initial=0.0)
    found = tree.query(points, p=np.inf, distance_upper_bound=widened(largest))[0]
    return np.asarray((found <= limit) & (found < np.inf))


def _all_to_all(domain: Domain, parts: list[Array]) -> list[Array]:
    """Send a table of rows to every rank; return the tables received from every rank."""
    rows = torch.from_numpy(np.ascontiguousarray(np.concatenate(parts))).to(domain.device)
    received, counts = domain.route(rows, [len(p) for p in parts])
    return np.split(received.cpu().numpy(), np.cumsum(counts)[:-1])


def _unpacked(cells: Array, axes: int, bits: int) -> Array:
    """(n, axes) index along every axis, from cells that pack `bits` bits per axis."""
    return np.asarray((cells[:, None] >> (bits * np.arange(axes)[::-1])) & ((1 << bits) - 1))


def _tree(points: Array) -> cKDTree:
    from scipy.spatial import cKDTree

    return cKDTree(points, balanced_tree=False)
