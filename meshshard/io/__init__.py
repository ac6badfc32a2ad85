"""Files and PyVista objects to meshes, and back."""

from meshshard.io.files import from_arrays, from_pyvista, read, to_pyvista, to_vtk, write

__all__ = ["from_arrays", "from_pyvista", "read", "to_pyvista", "to_vtk", "write"]
