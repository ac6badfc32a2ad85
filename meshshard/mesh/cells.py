"""Reference cells: what each VTK cell type is made of.

Numbers are VTK's own (vtkCellType.h). Only the corners of a curved cell bound its facets, so a
quadratic triangle shares edges with a linear one; the nodes beyond the corners ride along.
Pixels and voxels are quads and hexahedra in another point order: readers turn them.
"""

from typing import NamedTuple

__all__ = ["CELL_TYPES", "LINE", "POLYGON", "POLYHEDRON", "QUAD", "TRIANGLE", "CellType"]

TRIANGLE, POLYGON, QUAD, LINE, POLYHEDRON = 5, 7, 9, 3, 42


class CellType(NamedTuple):
    """One VTK cell type.

    Attributes:
        name: Lower-case name for messages.
        dim: Topological dimension, 0 to 3.
        n_points: Points a cell must have; 0 where the number is free (`least` applies).
        n_corners: Leading points that are corners; 0 where all are.
        least: Fewest points of a cell whose number is free.
        faces: For solids, the corners of each face, wound outward.
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
    """Faces of a prism over an n-gon: bottom, top, then the n sides."""
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
