"""Mesh: points, cells and fields in plain NumPy, with cell geometry, checks, welding and facets."""

from meshshard.mesh.arrays import Array
from meshshard.mesh.mesh import Faces, Mesh

__all__ = ["Array", "Faces", "Mesh"]
