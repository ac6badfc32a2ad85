"""Voxels: which points of other ranks can be neighbors of own places, and only these, fetched.

Every rank tells which cells of one coarse grid it has points in. A rank whose places reach the
cells of another sends it small cells around these places, each with how far they look; the other
answers with its points that lie within. What is far away is never sent, and nothing is sent twice.
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

__all__ = ["Ghosts", "Rows", "fetch"]

BITS = 7  # of a coarse cell along an axis, at most
CELLS = 8192  # coarse cells that a rank tells of, about
STEP = 1.19  # between two ranges of how far places look
FINE = 3.0  # small cells in one look
NARROW = 2.0**-18  # of the box: nobody looks less far


class Rows(NamedTuple):
    """Own rows of a sharded cloud.

    Attributes:
        points: (n_own, d) finite float64.
        names: (n_own,) int64 by which ties are broken: rows in the source.
        ids: (n_own,) int64.
    """

    points: Array
    names: Array
    ids: Array


class Ghosts(NamedTuple):
    """Points of other ranks that own places need to look at.

    Attributes:
        rows: the points.
        places: rows of own places that any of them may be near to.
    """

    rows: Rows
    places: Array


class _Grid(NamedTuple):
    """Cells of one size over the box of all points and places, in up to three axes.

    Coordinates count from the low corner of the box: far from the origin they would lose digits.
    """

    low: Array
    size: float
    bits: int

    @property
    def box(self) -> float:
        """Longest side of the box."""
        return self.size * 2.0**self.bits

    @property
    def half(self) -> float:
        """From the center of a cell to its corner."""
        return self.corner(self.size)

    @property
    def side(self) -> float:
        """From the center of a cell to its sides, with what rounding may take."""
        return self.size / 2 + self.box * 1e-12

    def corner(self, size: float) -> float:
        """From the center of a cell of another size to its corner, with what rounding may take."""
        return size * math.sqrt(len(self.low)) / 2 + self.box * 1e-12

    def moved(self, points: Array) -> Array:
        """The axes of points, counted from the low corner."""
        return np.asarray(points[:, : len(self.low)] - self.low)

    def cells(self, points: Array) -> Array:
        """(n,) int64 cell of every point."""
        flat = np.zeros(len(points), np.int64)
        for axis in range(len(self.low)):
            cell = (points[:, axis] / self.size).astype(np.int64)
            flat = (flat << self.bits) | np.minimum(cell, (1 << self.bits) - 1)
        return flat

    def centers(self, cells: Array) -> Array:
        """(n, up to 3) center of every cell."""
        axes = len(self.low)
        shifts = self.bits * np.arange(axes)[::-1]
        index = (cells[:, None] >> shifts) & ((1 << self.bits) - 1)
        return np.asarray((index + 0.5) * self.size)


def fetch(domain: Domain, x: Rows, places: Array, reach: Array, k: int | None) -> Ghosts:
    """Points of other ranks that can be nearer to own places than what was found here.

    Args:
        domain: the ranks.
        x: own points.
        places: (n, d) own places, finite float64.
        reach: (n,) how far each looks; inf where fewer than k were found.
        k: how many each looks for, None for all within reach.

    Communication: two gathers of objects (the box; up to 8,192 cells a rank), two all-to-alls of
    counts, one of cells, one of points.
    """
    same = places is x.points
    grid = _grid(domain, [x.points] if same else [x.points, places])
    points = grid.moved(x.points)
    spots = points if same else grid.moved(places)
    cells = grid.cells(points)
    mine = _told_of(grid, cells)
    grid, told = _alike(grid, domain.share(mine))
    cells = cells if mine[0] == BITS == grid.bits else grid.cells(points)
    if k is not None and x.points.shape[1] <= 3:
        reach = np.minimum(reach, _bound(grid, told, spots, reach, k))
    wanted, asked = _wanted(domain, told, _Celled.of(grid, spots, cells if same else None), reach)
    looks = _route(domain, wanted)
    there = _Celled.of(grid, points, cells)
    send = [_within(there, look) for look in looks]
    came = np.concatenate(_route(domain, [_packed(x, rows) for rows in send]))
    theirs = np.ascontiguousarray(came[:, :-2]).view(np.float64)
    return Ghosts(Rows(theirs, came[:, -2], came[:, -1]), asked)


def _packed(x: Rows, rows: Array) -> Array:
    """(n, d + 2) points, names and ids as one table of integers."""
    return np.column_stack([x.points[rows].view(np.int64), x.names[rows], x.ids[rows]])


class _Celled(NamedTuple):
    """Points and the cells they are in.

    Attributes:
        grid: of these cells.
        points: (n, axes) counted from its low corner.
        centers: (n_cells, axes) of the cells that have any.
        cell: (n,) which of them each point is in.
    """

    grid: _Grid
    points: Array
    centers: Array
    cell: Array

    @staticmethod
    def of(grid: _Grid, points: Array, cells: Array | None) -> _Celled:
        """Points in their cells, which may be known already."""
        cells = grid.cells(points) if cells is None else cells
        number = np.zeros(1 << (grid.bits * len(grid.low)), np.int32)
        number[cells] = 1
        occupied = np.flatnonzero(number)
        number[occupied] = np.arange(len(occupied))
        return _Celled(grid, points, grid.centers(occupied), number[cells])

    def rows(self, near: Array) -> Array:
        """Rows of the points in some of the cells, cell by cell: a tree is asked faster so."""
        rows = np.flatnonzero(near[self.cell])
        return rows[np.argsort(self.cell[rows], kind="stable")]


def _grid(domain: Domain, clouds: list[Array]) -> _Grid:
    """The finest grid over everything that all ranks have."""
    own = [(_each(np.min, a), _each(np.max, a)) for a in clouds if len(a)]
    boxes = [box for boxes in domain.share(own) for box in boxes]
    low, high = np.min([a for a, _ in boxes], 0)[:3], np.max([b for _, b in boxes], 0)[:3]
    return _Grid(low, (float((high - low).max()) or 1.0) / (1 << BITS), BITS)


def _each(least: Any, points: Array) -> Array:
    """The least or most along every axis: faster than along the first dim of a narrow table."""
    return np.array([least(points[:, axis]) for axis in range(points.shape[1])])


def _told_of(grid: _Grid, cells: Array) -> tuple[int, Array, Array]:
    """What this rank tells of own points: how fine, cells, and how many are in each."""
    axes, bits = len(grid.low), grid.bits
    box = np.bincount(cells, minlength=1 << (bits * axes)).reshape((1 << bits,) * axes)
    while np.count_nonzero(box) > CELLS and bits > 1:
        bits -= 1
        box = box.reshape((1 << bits, 2) * axes).sum(tuple(range(1, 2 * axes, 2)))
    counts = box.reshape(-1)
    cells = np.flatnonzero(counts)
    return bits, cells, counts[cells]


def _coarser(grid: _Grid, cells: Array, counts: Array, levels: int) -> tuple[_Grid, Array, Array]:
    """Cells and counts on a coarser grid."""
    coarse = _Grid(grid.low, grid.size * 2.0**levels, grid.bits - levels)
    same, back = np.unique(coarse.cells(grid.centers(cells)), return_inverse=True)
    return coarse, same, np.bincount(back, counts, len(same)).astype(np.int64)


Told = list[tuple[Array, Array]]


def _alike(grid: _Grid, told: list[tuple[int, Array, Array]]) -> tuple[_Grid, Told]:
    """The coarsest grid that any rank proposes, and what all have in it."""
    bits = min(b for b, _, _ in told)
    out = []
    for finer, cells, counts in told:
        old = _Grid(grid.low, grid.size * 2.0 ** (grid.bits - finer), finer)
        out.append(_coarser(old, cells, counts, finer - bits)[1:])
    return _Grid(grid.low, grid.size * 2.0 ** (grid.bits - bits), bits), out


def _bound(grid: _Grid, told: Told, places: Array, reach: Array, k: int) -> Array:
    """How far at most the k-th other neighbor is, by the counts of coarse cells."""
    out = np.full(len(places), np.inf)
    poor = np.flatnonzero(reach > grid.size)
    cells, back = np.unique(np.concatenate([c for c, _ in told]), return_inverse=True)
    if not len(poor) or not len(cells):
        return out
    counts = np.bincount(back, np.concatenate([n for _, n in told]))
    tree = _tree(grid.centers(cells))
    width = min(k + 1, len(cells))
    answer: Any = tree.query(places[poor], width)
    away, near = (a.reshape(-1, width) for a in answer)
    enough = counts[near].cumsum(1) >= k + 1  # one of them may be the place itself
    first = away[np.arange(len(poor)), enough.argmax(1)]
    out[poor] = np.where(enough.any(1), widened(first + grid.half), np.inf)
    return out


def _wanted(domain: Domain, told: Told, places: _Celled, reach: Array) -> tuple[list[Array], Array]:
    """Small cells for each rank (center and how far they look), and the places in them."""
    grid = places.grid
    farthest = np.zeros(len(places.centers))
    np.maximum.at(farthest, places.cell, reach)
    out, asked = [], np.zeros(len(reach), bool)
    for rank, (theirs, _) in enumerate(told):
        rows = np.zeros(0, np.int64)
        if rank != domain.rank and len(theirs) and len(reach):
            tree = _tree(grid.centers(theirs))
            near = _beside(tree, places.centers, farthest + 2 * grid.side)
            rows = places.rows(near)
            rows = rows[_beside(tree, places.points[rows], reach[rows] + grid.side)]
        asked[rows] = True
        out.append(_looks(grid, places.points[rows], reach[rows]))
    return out, np.flatnonzero(asked)


def _looks(grid: _Grid, places: Array, reach: Array) -> Array:
    """(n, axes + 1) centers of small cells around places, and how far they look from there."""
    axes = len(grid.low)
    if np.isinf(reach).any():
        return np.append(np.zeros(axes), np.inf)[None]
    level = np.ceil(np.log(np.maximum(reach, grid.box * NARROW)) / np.log(STEP)).astype(np.int64)
    out = [np.zeros((0, axes + 1))]
    for one in np.unique(level):
        look = STEP ** float(one)
        size = look / FINE
        cell = (places[level == one] / size).astype(np.int64)
        keys = np.zeros(len(cell), np.int64)
        for axis in range(axes):
            keys = (keys << 21) | cell[:, axis]
        keys = np.unique(keys)
        index = (keys[:, None] >> (21 * np.arange(axes)[::-1])) & ((1 << 21) - 1)
        center = (index + 0.5) * size
        far = np.full(len(center), widened(look + grid.corner(size)))
        out.append(np.column_stack([center, far]))
    return np.concatenate(out)


def _within(there: _Celled, looks: Array) -> Array:
    """Rows of the points that any of the looks reaches."""
    if not len(looks) or not len(there.points):
        return np.zeros(0, np.int64)
    if np.isinf(looks[:, -1]).any():
        return np.arange(len(there.points))
    centers, far = looks[:, :-1], looks[:, -1]
    most = far.max()
    rows = there.rows(_beside(_tree(centers), there.centers, most + there.grid.side))
    # One more coordinate makes looks of all ranges alike: |p - c| <= far where
    # |(p, 0) - (c, sqrt(most^2 - far^2))| <= most. What rounding adds is more, never less.
    raised = np.column_stack([centers, np.sqrt(most**2 - far**2)])
    points = np.column_stack([there.points[rows], np.zeros(len(rows))])
    away = _tree(raised).query(points, distance_upper_bound=widened(most))[0]
    return np.sort(rows[away < np.inf])


def _beside(tree: cKDTree, points: Array, limit: Array | float) -> Array:
    """Which points have any of a tree within a limit along every axis: flat sides are exact so."""
    most = np.max(limit, initial=0.0)
    found = tree.query(points, p=np.inf, distance_upper_bound=widened(most))[0]
    return np.asarray((found <= limit) & (found < np.inf))


def _route(domain: Domain, parts: list[Array]) -> list[Array]:
    """Rows for every rank, and those from every rank."""
    rows = torch.from_numpy(np.ascontiguousarray(np.concatenate(parts))).to(domain.device)
    came, counts = domain.route(rows, [len(p) for p in parts])
    return np.split(came.cpu().numpy(), np.cumsum(counts)[:-1])


def _tree(points: Array) -> cKDTree:
    from scipy.spatial import cKDTree

    return cKDTree(points, balanced_tree=False)
