"""Mesh: points, cells and fields in plain numpy, and what follows from them."""

from meshshard.mesh.arrays import Array
from meshshard.mesh.mesh import Faces, Mesh

__all__ = ["Array", "Faces", "Mesh"]
