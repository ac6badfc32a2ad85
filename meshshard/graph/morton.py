"""Morton (Z-order) curve: points that are close in the order are close in space."""

import numpy as np

from meshshard.mesh import Array

__all__ = ["morton_order"]

BITS = 21  # per coordinate: three coordinates fit into one 64-bit key


def morton_order(points: Array) -> Array:
    """The permutation that sorts points along a Z-curve through their bounding cube.

    The cube has 2^21 voxels per axis; points in the same voxel keep their order. Morton, 1966.

    Args:
        points: (n, d) coordinates with d <= 3.

    Returns:
        (n,) int64 rows of `points`.
    """
    if len(points) == 0:
        return np.zeros(0, np.int64)
    low = points.min(axis=0)
    extent = float((points.max(axis=0) - low).max()) or 1.0
    key = np.zeros(len(points), np.uint64)
    for axis in range(points.shape[1]):
        voxel = (points[:, axis] - low[axis]) * ((2**BITS - 1) / extent)
        key |= _spread(voxel.astype(np.uint64)) << np.uint64(axis)
    return np.argsort(key, kind="stable")


def _spread(x: Array) -> Array:
    """Insert two zero bits after each bit of 21-bit numbers."""
    for shift, mask in (
        (32, 0x001F00000000FFFF),
        (16, 0x001F0000FF0000FF),
        (8, 0x100F00F00F00F00F),
        (4, 0x10C30C30C30C30C3),
        (2, 0x1249249249249249),
    ):
        x = (x | (x << np.uint64(shift))) & np.uint64(mask)
    return x
