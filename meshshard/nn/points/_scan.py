"""Scan: exact neighbors by brute force, chunk by chunk in torch, on any device."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from meshshard.graph.neighbors import Pairs
from meshshard.mesh import Array

__all__ = ["Scan", "intrinsic_dimension"]

CHUNK = {"cpu": 1 << 22, "cuda": 1 << 28}  # distances held at once
SAMPLE = 1000  # points from which the intrinsic dimension is estimated
SPARE = 8  # candidates beyond k, whose order rounding may have changed


class Scan:
    """Brute-force nearest neighbors, with the interface of `graph.neighbors.NeighborIndex`.

    For many coordinates, where a k-d tree prunes nothing, and for devices without one. Candidates
    come from one matrix product (|x|^2 + |y|^2 - 2 x.y), whose rounding error is bounded. They are
    then compared by exact squared distances, as in `NeighborIndex`; queries for which the bound
    cannot exclude other points are compared with all points.
    """

    def __init__(self, points: Tensor, keys: Tensor) -> None:
        """Prepare points; results are NumPy arrays.

        Args:
            points: (n, d) finite float64.
            keys: (n,) int64 by which ties are broken.
        """
        self._rows = keys.argsort(stable=True)  # of the columns, which ascend by key
        self._columns = torch.empty_like(self._rows)
        self._columns[self._rows] = torch.arange(len(keys), device=keys.device)
        self._points = points = points[self._rows]
        self._center = points.mean(0) if len(points) else points.new_zeros(points.shape[1])
        self._centered = points - self._center
        self._squares = (self._centered * self._centered).sum(1)

    def nearest(
        self, k: int, queries: Array | None = None, within: float = math.inf
    ) -> tuple[Array, Array]:
        """As `NeighborIndex.nearest`."""
        where = self._points[self._columns] if queries is None else self._on_device(queries)
        n, m, device = len(self._points), len(where), where.device
        width = min(k, n - (queries is None))
        found = torch.full((m, k), -1, dtype=torch.int64, device=device)
        kth = torch.full((m,), math.inf, dtype=torch.float64, device=device)
        for rows in self._chunks(m) if width > 0 else []:
            itself = self._columns[rows] if queries is None else None
            to, squares = self._nearest(where[rows], width, itself)
            found[rows, :width] = torch.where(squares <= within**2, self._rows[to], -1)
            if width == k:
                last = squares[:, -1]
                kth[rows] = torch.where(last <= within**2, last.sqrt(), math.inf)
        return found.cpu().numpy(), kth.cpu().numpy()

    def count(self, within: float, queries: Array | None = None) -> Array:
        """As `NeighborIndex.count`."""
        where = self._points[self._columns] if queries is None else self._on_device(queries)
        counts = [
            (self._squared_distances(where[rows], None) <= within**2).sum(1)
            for rows in self._chunks(len(where))
        ]
        return np.asarray(torch.cat([where.new_zeros(0, dtype=torch.int64), *counts]).cpu())

    def ball(self, within: float, queries: Array | None = None) -> Iterator[Pairs]:
        """As `NeighborIndex.ball`."""
        where = self._points[self._columns] if queries is None else self._on_device(queries)
        for rows in self._chunks(len(where)):
            itself = self._columns[rows] if queries is None else None
            squares = self._squared_distances(where[rows], itself)
            pairs = torch.nonzero(squares <= within**2, as_tuple=True)
            near, at, column = (a.cpu().numpy() for a in (squares[pairs], rows[pairs[0]], pairs[1]))
            by = np.lexsort((column, near, at))
            to = self._rows.cpu().numpy()[column[by]]
            yield Pairs(at[by], to, near[by])

    def _on_device(self, queries: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(queries)).to(self._points.device)

    def _chunks(self, m: int) -> list[Tensor]:
        """Rows of the queries, in chunks."""
        most = CHUNK.get(self._points.device.type, CHUNK["cpu"])
        size = max(1, most // max(1, len(self._points)))
        return _split(torch.arange(m, device=self._points.device), size)

    def _nearest(self, queries: Tensor, k: int, itself: Tensor | None) -> tuple[Tensor, Tensor]:
        """(m, k) columns and squared distances, ordered by distance, then column."""
        asked = min(k + SPARE, len(self._points))
        centered = queries - self._center
        length = (centered * centered).sum(1)
        rough = torch.addmm(self._squares[None], centered, self._centered.T, alpha=-2).add_(
            length[:, None]
        )
        if itself is not None:
            rough[torch.arange(len(itself), device=rough.device), itself] = math.inf
        close, to = rough.topk(asked, dim=1, largest=False)
        to = to.sort(1).values
        squares = _squared(queries[:, None] - self._points[to])
        if itself is not None:
            squares[to == itself[:, None]] = math.inf
        to, squares = _ordered(to, squares, k)
        if asked < len(self._points):
            error = 8 * (16 + queries.shape[1]) * 2.0**-52 * (length + self._squares.max())
            unclear = torch.nonzero(~(squares[:, -1] < close[:, -1] - error)).view(-1)
            size = max(1, CHUNK["cpu"] // len(self._points))
            for some in _split(unclear, size):
                at = None if itself is None else itself[some]
                to[some], squares[some] = _lowest(self._squared_distances(queries[some], at), k)
        return to, squares

    def _squared_distances(self, queries: Tensor, itself: Tensor | None) -> Tensor:
        """(m, n) exact squared distances, inf from a point to itself."""
        total = queries.new_zeros(len(queries), len(self._points))
        for axis in range(queries.shape[1]):
            difference = queries[:, axis, None] - self._points[None, :, axis]
            total += difference.mul_(difference)
        if itself is not None:
            total[torch.arange(len(itself), device=total.device), itself] = math.inf
        return total


def intrinsic_dimension(points: Tensor, k: int = 10) -> float:
    """Estimate of the dimension in which points (n, d) spread; features often lie on a manifold.

    Maximum likelihood from the distances to k neighbors in a sample (Levina and Bickel, 2004).
    """
    some = points[:: max(1, -(-len(points) // SAMPLE))]
    if len(some) <= k:
        return 0.0
    scan = Scan(some, torch.arange(len(some), device=some.device))
    _, squares = scan._nearest(scan._points, k, torch.arange(len(some), device=some.device))
    squares = squares.clamp(min=1e-300)
    growth = float((squares[:, -1:] / squares[:, :-1]).log().mean()) / 2
    return 1 / growth if growth else float(points.shape[1])


def _split(rows: Tensor, size: int) -> list[Tensor]:
    return list(torch.split(rows, size)) if len(rows) else []


def _squared(difference: Tensor) -> Tensor:
    """Squared length along the last axis, summed in a fixed order."""
    total = difference.new_zeros(difference.shape[:-1])
    for axis in range(difference.shape[-1]):
        total += difference[..., axis] * difference[..., axis]
    return total


def _ordered(to: Tensor, squares: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The first k by distance, then column, given ascending columns."""
    squares, by = squares.sort(dim=1, stable=True)
    return to.gather(1, by[:, :k]), squares[:, :k]


def _lowest(squares: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Columns and values of the k smallest of each row; ties go to the lowest column."""
    last = squares.kthvalue(k, dim=1, keepdim=True).values
    less, tie = squares < last, squares == last
    keep = less | (tie & (tie.cumsum(1) <= k - less.sum(1, keepdim=True)))
    to = torch.nonzero(keep)[:, 1].view(len(squares), k)
    return _ordered(to, squares.gather(1, to), k)
