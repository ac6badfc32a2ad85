"""Pieces: the cells and points of every shard of a partition, as meshes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from meshshard.errors import MeshError
from meshshard.mesh.submesh import Piece, extract

if TYPE_CHECKING:
    from meshshard.partitioning.partition import Partition

__all__ = ["pieces_of"]


def pieces_of(partition: Partition) -> Iterator[Piece]:
    """The cells and points of every shard; its owned rows come first, in shard order.

    If points are sharded, a cell goes to the lowest shard that owns one of its points, together
    with the other points that it needs. If cells are sharded, points that no cell uses go to the
    first shard.

    Raises:
        MeshError: the partition is of a bare graph.
    """
    mesh = partition.mesh
    if mesh is None:
        raise MeshError("a bare graph has no cells and points; partition a mesh or a cloud")
    first = partition.offsets
    if partition.entity == "cells":
        used = np.zeros(mesh.n_points, bool)
        used[mesh.connectivity] = True
        unused = np.flatnonzero(~used)
        for p in range(partition.k):
            cells = partition.origin[first[p] : first[p + 1]]
            yield extract(mesh, cells, unused if p == 0 and len(unused) else None)
        return
    lowest = np.zeros(0, np.int64)
    if mesh.n_cells:
        lowest = np.minimum.reduceat(partition.labels[mesh.connectivity], mesh.offsets[:-1])
    order = np.argsort(lowest, kind="stable")
    bounds = np.searchsorted(lowest[order], np.arange(partition.k + 1))
    for p in range(partition.k):
        cells = order[bounds[p] : bounds[p + 1]]
        yield extract(mesh, cells, partition.origin[first[p] : first[p + 1]])
