"""Pieces: the cells and points of every shard, as meshes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from meshshard.mesh import Array, Mesh
from meshshard.mesh.submesh import Piece, extract

__all__ = ["pieces_of_cells", "pieces_of_points"]


def pieces_of_cells(mesh: Mesh, origin: Array, offsets: Array) -> Iterator[Piece]:
    """The cells that every shard owns, with the points that they need.

    Points that no cell uses go to the first shard.

    Args:
        mesh: the whole mesh.
        origin: (n_cells,) row in the mesh of every cell in shard order.
        offsets: (k + 1,) shard p owns the cells offsets[p]:offsets[p + 1] of that order.
    """
    used = np.zeros(mesh.n_points, bool)
    used[mesh.connectivity] = True
    unused = np.flatnonzero(~used)
    for p, (first, last) in enumerate(pairwise(offsets)):
        yield extract(mesh, origin[first:last], unused if p == 0 and len(unused) else None)


def pieces_of_points(mesh: Mesh, origin: Array, offsets: Array) -> Iterator[Piece]:
    """The points that every shard owns, followed by the other points that its cells need.

    A cell goes to the lowest shard that owns one of its points.

    Args:
        mesh: the whole mesh, or a cloud.
        origin: (n_points,) row in the mesh of every point in shard order.
        offsets: (k + 1,) shard p owns the points offsets[p]:offsets[p + 1] of that order.
    """
    owner = np.empty(mesh.n_points, np.int64)
    owner[origin] = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    lowest = np.zeros(0, np.int64)
    if mesh.n_cells:
        lowest = np.minimum.reduceat(owner[mesh.connectivity], mesh.offsets[:-1])
    order = np.argsort(lowest, kind="stable")
    bounds = np.searchsorted(lowest[order], np.arange(len(offsets)))
    for p, (first, last) in enumerate(pairwise(offsets)):
        yield extract(mesh, order[bounds[p] : bounds[p + 1]], origin[first:last])
