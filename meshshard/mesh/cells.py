"""Reference cells: dimension, number of points and faces of each VTK cell type.

Type numbers are VTK's (vtkCellType.h). The facets of a curved cell are those of its corners, so a
quadratic triangle shares edges with a linear one; its other nodes belong to no facet.
"""

from typing import NamedTuple

import numpy as np

from meshshard.mesh.arrays import Array

__all__ = [
    "CELL_TYPES",
    "EMPTY",
    "HEXAHEDRON",
    "LINE",
    "PIXEL",
    "POLYGON",
    "POLYHEDRON",
    "POLY_LINE",
    "POLY_VERTEX",
    "QUAD",
    "STRIP",
    "TRIANGLE",
    "VERTEX",
    "VOXEL",
    "CellType",
    "cell_type",
    "dimensions",
    "type_name",
    "types_present",
]

VERTEX, POLY_VERTEX, LINE, POLY_LINE = 1, 2, 3, 4
TRIANGLE, POLYGON, QUAD = 5, 7, 9
HEXAHEDRON, POLYHEDRON = 12, 42
EMPTY, STRIP, PIXEL, VOXEL = 0, 6, 8, 11  # in files only: a Mesh has none


class CellType(NamedTuple):
    """One VTK cell type.

    Attributes:
        name: Lower-case name for messages.
        dim: Topological dimension, 0 to 3.
        n_points: Number of points of a cell; 0 where it varies (`least` applies).
        n_corners: Number of leading points that are corners; 0 where all are.
        least: Smallest number of points, where it varies.
        faces: For solids, the corners of each face, with outward normals.
    """

    name: str
    dim: int
    n_points: int
    n_corners: int = 0
    least: int = 1
    faces: tuple[tuple[int, ...], ...] = ()


_TET = ((0, 1, 3), (1, 2, 3), (2, 0, 3), (0, 2, 1))
_HEX = ((0, 4, 7, 3), (1, 2, 6, 5), (0, 1, 5, 4), (3, 7, 6, 2), (0, 3, 2, 1), (4, 5, 6, 7))
_WEDGE = ((0, 1, 2), (3, 5, 4), (0, 3, 4, 1), (1, 4, 5, 2), (2, 5, 3, 0))
_PYRAMID = ((0, 3, 2, 1), (0, 1, 4), (1, 2, 4), (2, 3, 4), (3, 0, 4))


def _prism(n: int) -> tuple[tuple[int, ...], ...]:
    """Faces of a prism with an n-gon as its base: bottom, top, then the n sides."""
    sides = tuple((i, (i + 1) % n, n + (i + 1) % n, n + i) for i in range(n))
    return (tuple(reversed(range(n))), tuple(range(n, 2 * n)), *sides)


CELL_TYPES: dict[int, CellType] = {
    1: CellType("vertex", 0, 1),
    2: CellType("poly-vertex", 0, 0),
    3: CellType("line", 1, 2),
    4: CellType("poly-line", 1, 0, least=2),
    5: CellType("triangle", 2, 3),
    7: CellType("polygon", 2, 0, least=3),
    9: CellType("quad", 2, 4),
    10: CellType("tetrahedron", 3, 4, faces=_TET),
    12: CellType("hexahedron", 3, 8, faces=_HEX),
    13: CellType("wedge", 3, 6, faces=_WEDGE),
    14: CellType("pyramid", 3, 5, faces=_PYRAMID),
    15: CellType("pentagonal prism", 3, 10, faces=_prism(5)),
    16: CellType("hexagonal prism", 3, 12, faces=_prism(6)),
    21: CellType("quadratic edge", 1, 3, 2),
    22: CellType("quadratic triangle", 2, 6, 3),
    23: CellType("quadratic quad", 2, 8, 4),
    24: CellType("quadratic tetrahedron", 3, 10, 4, faces=_TET),
    25: CellType("quadratic hexahedron", 3, 20, 8, faces=_HEX),
    26: CellType("quadratic wedge", 3, 15, 6, faces=_WEDGE),
    27: CellType("quadratic pyramid", 3, 13, 5, faces=_PYRAMID),
    28: CellType("biquadratic quad", 2, 9, 4),
    29: CellType("triquadratic hexahedron", 3, 27, 8, faces=_HEX),
    30: CellType("quadratic linear quad", 2, 6, 4),
    31: CellType("quadratic linear wedge", 3, 12, 6, faces=_WEDGE),
    32: CellType("biquadratic quadratic wedge", 3, 18, 6, faces=_WEDGE),
    33: CellType("biquadratic quadratic hexahedron", 3, 24, 8, faces=_HEX),
    34: CellType("biquadratic triangle", 2, 7, 3),
    35: CellType("cubic line", 1, 4, 2),
    37: CellType("triquadratic pyramid", 3, 19, 5, faces=_PYRAMID),
    42: CellType("polyhedron", 3, 0, least=4),
}
_FILE_TYPES = {
    EMPTY: CellType("empty cell", 0, 0, least=0),
    STRIP: CellType("triangle strip", 2, 0, least=3),
    PIXEL: CellType("pixel", 2, 4),  # a quad, and
    VOXEL: CellType("voxel", 3, 8),  # a hexahedron, in another point order
}
_DIM = np.full(256, -1)
for _number, _cell in {**CELL_TYPES, **_FILE_TYPES}.items():
    _DIM[_number] = _cell.dim


def cell_type(number: int) -> CellType | None:
    """The cell type of a VTK type number, those found in files only included; None if unknown."""
    return CELL_TYPES.get(number) or _FILE_TYPES.get(number)


def type_name(number: int) -> str:
    """Name of a VTK cell type for messages."""
    cell = cell_type(number)
    return cell.name if cell else f"type {number}"


def dimensions(types: Array | int) -> Array:
    """Dimension of each VTK cell type, -1 where it is unknown; same shape as `types`."""
    return np.asarray(_DIM[types])


def types_present(types: Array) -> list[int]:
    """The VTK cell types that occur, ascending."""
    if len(types) and types.min() == types.max():  # avoids a pass of bincount over millions
        return [int(types[0])]
    return [int(number) for number in np.flatnonzero(np.bincount(types, minlength=1))]
