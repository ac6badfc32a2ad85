"""Neighbors: the points nearest to a place, exactly, by a k-d tree; ties go by name."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from meshshard.errors import MeshError, n_of
from meshshard.graph.morton import morton_order
from meshshard.mesh import Array

__all__ = ["Cloud", "Pairs", "finite", "rank_in_row", "squared_length", "widened"]

QUERY = 1 << 16  # places asked about at once: bounds the memory of neighbor tables
FOUND = 1 << 22  # neighbors fetched at once
LARGE = 1e150  # coordinates up to here have squares
TINY = 1e-160  # below, squares lose their digits


class Pairs(NamedTuple):
    """Places and rows that are near each other, ordered by place, distance, name.

    Attributes:
        at: (n_pairs,) number of the place.
        to: (n_pairs,) row of the point.
        squares: (n_pairs,) squared distance, the coordinates' squares summed in their order.
    """

    at: Array
    to: Array
    squares: Array


class Cloud:
    """Points that can be asked which of them are near.

    Points along a Z-curve (near in space is near in memory) are two to four times as fast to ask.

    Attributes:
        points: (n, d) finite float64.
        names: (n,) int64 by which ties are broken, the lowest first.
    """

    def __init__(
        self,
        points: Array,
        most: int | None = None,
        names: Array | None = None,
        workers: int = 1,
    ) -> None:
        """Prepare points.

        Args:
            points: (n, d) finite float64.
            most: neighbors that will be asked for, where that is known. Nobody hears a point with
                more than that many of lower name at its place, so such points are left out: a tree
                full of them would be one leaf.
            names: (n,) int64; the rows if left out.
            workers: threads that search.
        """
        from scipy.spatial import cKDTree

        self.points = points
        self.names = np.arange(len(points)) if names is None else names
        self._workers = workers
        most = len(points) if most is None else most
        self._order, self._crowd = _thinned(points, most, self.names)
        self._along = points[self._order]
        self._tree = cKDTree(self._along, leafsize=16, balanced_tree=False)

    def nearest(
        self, k: int, places: Array | None = None, within: float = np.inf
    ) -> tuple[Array, Array]:
        """The k nearest points of each place, by distance, then name.

        Args:
            k: at most `most`.
            places: (m, d) finite float64; the cloud's own points if left out, and then none of
                them is its own neighbor, others at the same place are.
            within: the largest distance that counts.

        Returns:
            (m, k) rows, -1 where there are fewer; (m,) distance of the k-th to the last digit or
            two, inf where there are fewer.
        """
        own = places is None
        places = self.points if places is None else places
        n, m = len(self._order), len(places)
        found = np.full((m, k), -1, np.int32 if n < 2**31 else np.int64)
        reach = np.full(m, np.inf)
        if n and k:
            sequence = self._order if own else morton_order(places[:, :3])
            jobs = [(rows, own) for rows in _blocks(sequence)]
            jobs += [(rows, False) for rows in _blocks(self._crowd)] if own else []

            def _one(job: tuple[Array, bool]) -> None:
                rows, in_tree = job
                itself = rows if in_tree else None
                found[rows], reach[rows] = self._nearest(places[rows], k, within, itself)

            with ThreadPoolExecutor(self._workers) as threads:
                list(threads.map(_one, jobs))
        return found, reach

    def count(self, within: float, places: Array | None = None) -> Array:
        """(m,) number of points within a distance, itself included, to the last digit or two."""
        places = self.points if places is None else places
        counts = self._tree.query_ball_point(
            places, widened(within), return_length=True, workers=self._workers
        )
        return np.asarray(counts, np.int64).reshape(len(places))

    def ball(self, within: float, places: Array | None = None) -> Iterator[Pairs]:
        """All points within a distance of each place, in runs of places; as `nearest` otherwise."""
        own = places is None
        places = self.points if places is None else places
        for first, last in _runs_of_at_most(self.count(within, places), FOUND):
            rows = np.arange(first, last)
            pairs = self._ball(places[rows], widened(within), rows if own else None)
            keep = pairs.squares <= within**2
            yield Pairs(first + pairs.at[keep], pairs.to[keep], pairs.squares[keep])

    def _nearest(
        self, places: Array, k: int, within: float, itself: Array | None
    ) -> tuple[Array, Array]:
        """As `nearest`.

        The tree is asked for two more than k: itself, and one that shows whether the k-th is tied.
        Where distances are too close to tell, exact ones decide.
        """
        asked = min(k + 1 + (itself is not None), len(self._order))
        answer: Any = self._tree.query(places, asked, distance_upper_bound=widened(within))
        distance, found = (a.reshape(-1, asked) for a in answer)
        nothing = found == len(self._order)
        to = self._order[np.where(nothing, 0, found)] if nothing.any() else self._order[found]
        if nothing.any():
            to[nothing] = -1
        if itself is not None:
            distance, to = _without(itself, distance, to)
        close = distance[:, 1:] <= widened(distance[:, :-1])
        close &= distance[:, 1:] < np.inf
        unclear = close.any(axis=1)
        if within < np.inf:
            last = distance[:, :k]
            unclear |= ((last < np.inf) & (widened(last) >= within)).any(axis=1)
        self._settle(places, to, np.flatnonzero(unclear), (k, within, itself))
        out = np.full((len(to), k), -1, to.dtype)
        width = min(k, to.shape[1])
        out[:, :width] = to[:, :width]
        full = out[:, -1] >= 0
        return out, np.where(full, distance[:, k - 1] if width == k else np.inf, np.inf)

    def _settle(
        self, places: Array, to: Array, rows: Array, of: tuple[int, float, Array | None]
    ) -> None:
        """Put exact neighbors where distances were too close to tell; in place."""
        k, within, itself = of
        if not len(rows):
            return
        near = to[rows]
        squares = squared_length(places[rows][:, None] - self.points[near])
        squares[near < 0] = np.inf
        by = np.lexsort((self.names[near], squares))
        near, squares = np.take_along_axis(near, by, 1), np.take_along_axis(squares, by, 1)
        near[squares > within**2] = -1
        to[rows] = near
        if to.shape[1] <= k:
            return
        last = np.sqrt(squares[:, k - 1])
        tied = np.flatnonzero((squares[:, k] < np.inf) & (np.sqrt(squares[:, k]) <= widened(last)))
        for some in np.array_split(tied, max(1, len(tied) * k // QUERY)):
            if len(some):
                at = rows[some]
                itself_at = None if itself is None else itself[at]
                pairs = self._ball(places[at], widened(last[some]), itself_at)
                keep = (rank_in_row(pairs.at) < k) & (pairs.squares <= within**2)
                rank = rank_in_row(pairs.at)[keep]
                to[at] = -1
                to[at[pairs.at[keep]], rank] = pairs.to[keep]

    def _ball(self, places: Array, reach: Array | float, itself: Array | None) -> Pairs:
        """All points within `reach`, but for itself."""
        lists: Any = self._tree.query_ball_point(places, reach, workers=self._workers)
        at = np.repeat(np.arange(len(places)), [len(f) for f in lists])
        flat = np.fromiter(itertools.chain.from_iterable(lists), np.int64, len(at))
        to = self._order[flat]
        if itself is not None:
            other = to != itself[at]
            at, to = at[other], to[other]
        squares = squared_length(places[at] - self.points[to])
        by = np.lexsort((self.names[to], squares, at))
        return Pairs(at[by], to[by], squares[by])


def finite(points: Array) -> Array:
    """Points as float64.

    Raises:
        MeshError: naming the rows of those that are not finite, or too far away to be squared.
    """
    points = np.asarray(points, np.float64)
    near = np.abs(points) < LARGE
    if not near.all():
        bad = np.flatnonzero(~near.all(axis=1))
        raise MeshError(
            f"{n_of(len(bad), 'points')} not finite: ids {bad[:5].tolist()}; remove them"
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
    """A distance, or distances, with what rounding may have taken."""
    return distance * (1 + 1e-12) + TINY


def _thinned(points: Array, k: int, names: Array) -> tuple[Array, Array]:
    """Rows along a Z-curve, and those that nobody needs who asks for k neighbors."""
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
    order = order[np.lexsort((names[order], place))]
    crowd = rank_in_row(place) > k
    return order[~crowd], order[crowd]


def _blocks(rows: Array) -> list[Array]:
    return [rows[first : first + QUERY] for first in range(0, len(rows), QUERY)]


def _without(itself: Array, distance: Array, to: Array) -> tuple[Array, Array]:
    """Neighbors of points but for the points themselves, which the tree put first or later."""
    odd = np.flatnonzero(to[:, 0] != itself)
    if len(odd):
        last = np.argsort(to[odd] == itself[odd, None], axis=1, kind="stable")
        there = np.roll(last, 1, axis=1)  # itself first; else one of more than k + 1 at its place
        to[odd] = np.take_along_axis(to[odd], there, 1)
        distance[odd] = np.take_along_axis(distance[odd], there, 1)
    return distance[:, 1:], to[:, 1:]


def _runs_of_at_most(counts: Array, most: int) -> list[tuple[int, int]]:
    """Cut rows into runs whose counts sum to about `most`."""
    if not len(counts):
        return []
    block = np.cumsum(counts) // most
    cuts = np.flatnonzero(np.diff(block)) + 1
    edges = [0, *cuts.tolist(), len(counts)]
    return list(itertools.pairwise(edges))
