"""Exact nearest neighbors by a k-d tree; ties are broken by key."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from meshshard.errors import MeshError, n_of
from meshshard.graph.morton import morton_order
from meshshard.mesh import Array

__all__ = ["NeighborIndex", "Pairs", "finite", "rank_in_row", "squared_length", "widened"]

QUERY_BLOCK = 1 << 16  # queries answered at once: bounds the memory of neighbor tables
PAIR_BLOCK = 1 << 22  # pairs found at once
LARGE = 1e150  # larger coordinates overflow when squared
TINY = 1e-160  # squares of smaller distances are denormal


class Pairs(NamedTuple):
    """Pairs of a query and a point near it, ordered by query, distance, key.

    Attributes:
        at: (n_pairs,) row of the query.
        to: (n_pairs,) row of the point.
        squares: (n_pairs,) squared distance, summed in the order of the coordinates.
    """

    at: Array
    to: Array
    squares: Array


class NeighborIndex:
    """A k-d tree of points, for nearest-neighbor and range queries with exact ties.

    `nearest` asks along a Z-curve, which is two to four times as fast.

    Attributes:
        points: (n, d) finite float64.
        keys: (n,) int64; of points at the same distance the lowest key comes first.
    """

    def __init__(
        self,
        points: Array,
        max_k: int | None = None,
        keys: Array | None = None,
        workers: int = 1,
    ) -> None:
        """Build the tree.

        Args:
            points: (n, d) finite float64.
            max_k: largest k that will be queried, n if None. If more than that many points
                coincide, only those with the lowest keys can be neighbors, and the others are left
                out: a tree full of coincident points would be a single leaf.
            keys: (n,) int64; row numbers if None.
            workers: threads that search.
        """
        from scipy.spatial import cKDTree

        self.points = points
        self.keys = np.arange(len(points)) if keys is None else keys
        self._workers = workers
        max_k = len(points) if max_k is None else max_k
        self._order, self._surplus = _without_surplus(points, max_k, self.keys)
        self._along = points[self._order]
        self._tree = cKDTree(self._along, leafsize=16, balanced_tree=False)

    def nearest(
        self, k: int, queries: Array | None = None, within: float = np.inf
    ) -> tuple[Array, Array]:
        """The k nearest points of each query, ordered by distance, then key.

        Args:
            k: at most `max_k`.
            queries: (m, d) finite float64. If None, the points themselves: a point is then not its
                own neighbor, coincident points are.
            within: largest distance of a neighbor.

        Returns:
            (m, k) rows, -1 if there are fewer; and (m,) distance of the k-th neighbor up to
            rounding, inf if there are fewer.
        """
        from concurrent.futures import ThreadPoolExecutor

        to_self = queries is None
        queries = self.points if queries is None else queries
        n, m = len(self._order), len(queries)
        found = np.full((m, k), -1, np.int32 if n < 2**31 else np.int64)
        reach = np.full(m, np.inf)
        if n and k:
            sequence = self._order if to_self else morton_order(queries[:, :3])
            jobs = [(rows, to_self) for rows in _blocks(sequence)]
            jobs += [(rows, False) for rows in _blocks(self._surplus)] if to_self else []

            def _one(job: tuple[Array, bool]) -> None:
                rows, in_tree = job
                itself = rows if in_tree else None
                found[rows], reach[rows] = self._nearest(queries[rows], k, within, itself)

            with ThreadPoolExecutor(self._workers) as threads:
                list(threads.map(_one, jobs))
        return found, reach

    def count(self, within: float, queries: Array | None = None) -> Array:
        """(m,) number of points within a distance of each query, itself included."""
        queries = self.points if queries is None else queries
        counts = self._tree.query_ball_point(
            queries, widened(within), return_length=True, workers=self._workers
        )
        return np.asarray(counts, np.int64).reshape(len(queries))

    def ball(self, within: float, queries: Array | None = None) -> Iterator[Pairs]:
        """All points within a distance of each query, in blocks of queries."""
        to_self = queries is None
        queries = self.points if queries is None else queries
        for first, last in _runs_of_at_most(self.count(within, queries), PAIR_BLOCK):
            rows = np.arange(first, last)
            pairs = self._ball(queries[rows], widened(within), rows if to_self else None)
            keep = pairs.squares <= within**2
            yield Pairs(first + pairs.at[keep], pairs.to[keep], pairs.squares[keep])

    def _nearest(
        self, queries: Array, k: int, within: float, itself: Array | None
    ) -> tuple[Array, Array]:
        """As `nearest`, for one block of queries.

        The tree returns up to two more than k: the point itself, and one that shows whether the
        k-th is tied. Distances that are equal up to rounding are compared exactly afterwards.
        """
        width = min(k + 1 + (itself is not None), len(self._order))
        answer: Any = self._tree.query(queries, width, distance_upper_bound=widened(within))
        distance, found = (a.reshape(-1, width) for a in answer)
        missing = found == len(self._order)
        to = self._order[np.where(missing, 0, found)] if missing.any() else self._order[found]
        if missing.any():
            to[missing] = -1
        if itself is not None:
            distance, to = _without(itself, distance, to)
        close = distance[:, 1:] <= widened(distance[:, :-1])
        close &= distance[:, 1:] < np.inf
        unclear = close.any(axis=1)
        if within < np.inf:
            last = distance[:, :k]
            unclear |= ((last < np.inf) & (widened(last) >= within)).any(axis=1)
        self._settle(queries, to, np.flatnonzero(unclear), (k, within, itself))
        out = np.full((len(to), k), -1, to.dtype)
        filled = min(k, to.shape[1])
        out[:, :filled] = to[:, :filled]
        full = out[:, -1] >= 0
        return out, np.where(full, distance[:, k - 1] if filled == k else np.inf, np.inf)

    def _settle(
        self, queries: Array, to: Array, rows: Array, of: tuple[int, float, Array | None]
    ) -> None:
        """Replace neighbors with distances equal up to rounding by the exact ones; in place."""
        k, within, itself = of
        if not len(rows):
            return
        near = to[rows]
        squares = squared_length(queries[rows][:, None] - self.points[near])
        squares[near < 0] = np.inf
        by = np.lexsort((self.keys[near], squares))
        near, squares = np.take_along_axis(near, by, 1), np.take_along_axis(squares, by, 1)
        near[squares > within**2] = -1
        to[rows] = near
        if to.shape[1] <= k:
            return
        last = np.sqrt(squares[:, k - 1])
        tied = np.flatnonzero((squares[:, k] < np.inf) & (np.sqrt(squares[:, k]) <= widened(last)))
        for some in np.array_split(tied, max(1, len(tied) * k // QUERY_BLOCK)):
            if len(some):
                at = rows[some]
                itself_at = None if itself is None else itself[at]
                pairs = self._ball(queries[at], widened(last[some]), itself_at)
                keep = (rank_in_row(pairs.at) < k) & (pairs.squares <= within**2)
                rank = rank_in_row(pairs.at)[keep]
                to[at] = -1
                to[at[pairs.at[keep]], rank] = pairs.to[keep]

    def _ball(self, queries: Array, reach: Array | float, itself: Array | None) -> Pairs:
        """All points within `reach` of each query, except the query itself."""
        lists: Any = self._tree.query_ball_point(queries, reach, workers=self._workers)
        at = np.repeat(np.arange(len(queries)), [len(f) for f in lists])
        flat = np.fromiter(itertools.chain.from_iterable(lists), np.int64, len(at))
        to = self._order[flat]
        if itself is not None:
            other = to != itself[at]
            at, to = at[other], to[other]
        squares = squared_length(queries[at] - self.points[to])
        by = np.lexsort((self.keys[to], squares, at))
        return Pairs(at[by], to[by], squares[by])


def finite(points: Array) -> Array:
    """Points as float64.

    Raises:
        MeshError: naming the rows that are not finite, or too large to be squared.
    """
    points = np.asarray(points, np.float64)
    near = np.abs(points) < LARGE
    if not near.all():
        bad = np.flatnonzero(~near.all(axis=1))
        large = np.isfinite(points[bad]).all()
        what = f"not below {LARGE:g}" if large else "not finite"
        raise MeshError(
            f"{n_of(len(bad), 'points')} {what}: ids {bad[:5].tolist()}; "
            f"{'rescale' if large else 'remove'} them"
        )
    return points


def rank_in_row(rows: Array) -> Array:
    """Position of each entry within its run of equal values in `rows` (sorted)."""
    new = np.ones(len(rows), bool)
    new[1:] = rows[1:] != rows[:-1]
    start = np.flatnonzero(new)
    return np.asarray(np.arange(len(rows)) - np.repeat(start, np.diff(np.append(start, len(rows)))))


def squared_length(difference: Array) -> Array:
    """Squared length along the last axis, summed in a fixed order."""
    total = np.zeros(difference.shape[:-1])
    for axis in range(difference.shape[-1]):
        total += difference[..., axis] * difference[..., axis]
    return total


def widened(distance: Any) -> Any:
    """Distances increased by the rounding error they may have."""
    return distance * (1 + 1e-12) + TINY


def _without_surplus(points: Array, k: int, keys: Array) -> tuple[Array, Array]:
    """Rows along a Z-curve, and separately those that cannot be among the k nearest of any."""
    order = morton_order(points[:, :3])
    if len(points) < 2**31:
        order = order.astype(np.int32)
    if k >= len(points):
        return order, order[:0]
    along = points[order]
    place = np.zeros(len(order), np.int64)
    np.cumsum((along[1:] != along[:-1]).any(axis=1), out=place[1:])
    if not len(place) or place[-1] == len(place) - 1:
        return order, order[:0]
    order = order[np.lexsort((keys[order], place))]
    surplus = rank_in_row(place) > k
    return order[~surplus], order[surplus]


def _blocks(rows: Array) -> list[Array]:
    return [rows[first : first + QUERY_BLOCK] for first in range(0, len(rows), QUERY_BLOCK)]


def _without(itself: Array, distance: Array, to: Array) -> tuple[Array, Array]:
    """Neighbors of points without the points themselves, which the tree lists first or later."""
    odd = np.flatnonzero(to[:, 0] != itself)
    if len(odd):
        last = np.argsort(to[odd] == itself[odd, None], axis=1, kind="stable")
        first = np.roll(last, 1, axis=1)  # itself, or one of more than k + 1 coincident points
        to[odd] = np.take_along_axis(to[odd], first, 1)
        distance[odd] = np.take_along_axis(distance[odd], first, 1)
    return distance[:, 1:], to[:, 1:]


def _runs_of_at_most(counts: Array, most: int) -> list[tuple[int, int]]:
    """Cut rows into runs whose counts sum to about `most`."""
    if not len(counts):
        return []
    block = np.cumsum(counts) // most
    cuts = np.flatnonzero(np.diff(block)) + 1
    edges = [0, *cuts.tolist(), len(counts)]
    return list(itertools.pairwise(edges))
