"""Morton (Z-order) curve: points that are close in the order are close in space."""

import numpy as np

from meshshard.mesh import Array

__all__ = ["morton_order"]

BITS = 21  # three coordinates in one 64-bit key


def morton_order(points: Array) -> Array:
    """(n,) int64 rows of `points` (n, d <= 3) in the order of a Z-curve through their bounding box.

    Points in the same of 2^63 voxels keep their order. Morton, 1966.
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
    """The 21-bit numbers x with two zero bits inserted after each bit."""
    for shift, mask in (
        (32, 0x001F00000000FFFF),
        (16, 0x001F0000FF0000FF),
        (8, 0x100F00F00F00F00F),
        (4, 0x10C30C30C30C30C3),
        (2, 0x1249249249249249),
    ):
        x = (x | (x << np.uint64(shift))) & np.uint64(mask)
    return x
