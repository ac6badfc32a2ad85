"""Files and PyVista objects to meshes, and back."""

from meshshard.io.files import read, write
from meshshard.io.readers.arrays import from_arrays
from meshshard.io.vtk_objects import from_pyvista, to_pyvista, to_vtk

__all__ = ["from_arrays", "from_pyvista", "read", "to_pyvista", "to_vtk", "write"]
