"""Cells and points that a file does not spell out: PolyData's sections, structured grids."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from meshshard.mesh import Array
from meshshard.mesh.cells import POLYGON, QUAD
from meshshard.mesh.checks import STRIP
from meshshard.mesh.ragged import offsets_of

__all__ = ["MOST_IMPLICIT", "SECTIONS", "lattice", "polydata_cells", "structured_cells"]

MOST_IMPLICIT = 1 << 24  # points of a grid that no array backs
SECTIONS: Mapping[str, Callable[[Array], Array]] = {  # of a PolyData: types from point counts
    "Verts": lambda n: np.where(n == 1, 1, 2),
    "Lines": lambda n: np.where(n == 2, 3, 4),
    "Polys": lambda n: np.full(len(n), POLYGON),
    "Strips": lambda n: np.full(len(n), STRIP),
}


def polydata_cells(runs: Mapping[str, tuple[Array, Array]]) -> tuple[Array, Array, Array]:
    """Connectivity, offsets and types of a PolyData, in the order of its cell data.

    Args:
        runs: connectivity and offsets of the sections, by the words of `SECTIONS`; any may lack.
    """
    full = [(name, *runs[name]) for name in SECTIONS if name in runs and len(runs[name][1]) > 1]
    if not full:
        return np.zeros(0, np.int64), np.zeros(1, np.int64), np.zeros(0, np.uint8)
    counts = [np.diff(offsets) for _, _, offsets in full]
    kinds = [
        SECTIONS[name](n).astype(np.uint8) for (name, _, _), n in zip(full, counts, strict=True)
    ]
    if len(full) == 1:
        _, connectivity, offsets = full[0]
        return connectivity, offsets, kinds[0]
    joined = np.concatenate([ids for _, ids, _ in full])
    return joined, offsets_of(np.concatenate(counts)), np.concatenate(kinds)


def lattice(axes: Sequence[Array]) -> Array:
    """(n, 3) points of a grid of lines at the places (x, y, z), x fastest."""
    z, y, x = np.meshgrid(*axes[::-1], indexing="ij")
    return np.column_stack([x.ravel(), y.ravel(), z.ravel()])


def structured_cells(shape: Sequence[int]) -> tuple[Array, Array, Array]:
    """Connectivity, offsets and types of a structured grid of `shape` points, x fastest."""
    stride = np.cumprod([1, *shape[:2]])
    axes = [a for a in range(3) if shape[a] > 1]
    corners = np.zeros(1, np.int64)
    for place, axis in enumerate(axes):
        step = corners + stride[axis]
        corners = np.concatenate([corners, step[::-1] if place == 1 else step])
    base = np.zeros(1 if axes else 0, np.int64)
    for axis in axes[::-1]:
        base = (base[:, None] + np.arange(shape[axis] - 1) * stride[axis]).ravel()
    kind = (1, 3, QUAD, 12)[len(axes)]
    connectivity = (base[:, None] + corners).ravel()
    return (
        connectivity,
        np.arange(len(base) + 1, dtype=np.int64) * len(corners),
        np.full(len(base), kind, np.uint8),
    )
