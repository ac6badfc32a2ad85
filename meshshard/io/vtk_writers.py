"""Writers that use VTK: VTKHDF, and STL, for which it triangulates polygons."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from meshshard.errors import MeshshardError, n_of
from meshshard.io.readers.stl import FACET
from meshshard.io.vtk_objects import to_pyvista, to_vtk
from meshshard.io.writers import atomically, is_polydata
from meshshard.mesh import Mesh
from meshshard.mesh.checks import warn

__all__ = ["write_hdf", "write_stl"]


def write_hdf(mesh: Mesh, path: Path) -> None:
    """Write .vtkhdf, atomically.

    Raises:
        MeshshardError: HDF5 does not allow the name of a field, VTK has no type for an array, or
            the file cannot be written.
    """
    from vtkmodules.vtkIOHDF import vtkHDFWriter

    for name in (*mesh.cell_fields, *mesh.point_fields):
        if "/" in name or "." in name:
            raise MeshshardError(f"{path}: HDF5 allows no '/' and '.' in the field {name!r}")
    with atomically(path) as part, TemporaryDirectory(prefix="meshshard-") as folder:
        plain = Path(folder) / "mesh.vtkhdf"  # HDF5 refuses `part`, which is locked
        writer = vtkHDFWriter()
        writer.SetInputData(to_vtk(mesh))
        writer.SetFileName(str(plain))
        if not writer.Write():
            raise MeshshardError(f"{path}: VTK cannot write it to {folder}; free some space there")
        shutil.copyfile(plain, part)


def write_stl(mesh: Mesh, path: Path) -> None:
    """Write the triangles of a surface as binary .stl with float32 coordinates, atomically.

    Polygons are triangulated. Fields are left out with a warning.

    Raises:
        MeshshardError: the mesh is not a surface of polygons, or the file cannot be written.
    """
    if mesh.dim != 2 or not is_polydata(mesh):
        raise MeshshardError(f"{path}: an .stl holds polygons only, not a {mesh.kind}; use .vtu")
    triangles = to_pyvista(mesh).triangulate().regular_faces
    corners = np.asarray(mesh.points)[triangles]
    facets = np.zeros(len(corners), FACET)
    facets["corners"] = corners
    normal = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    length = np.linalg.norm(normal, axis=1, keepdims=True)
    facets["normal"] = np.divide(normal, length, out=np.zeros_like(normal), where=length > 0)
    if fields := [*mesh.cell_fields, *mesh.point_fields]:
        warn(f"{path}: an .stl has no fields; left out: {', '.join(fields)}")
    if lost := int((np.diff(mesh.offsets) - 2).sum()) - len(triangles):
        warn(f"{path}: {n_of(lost, 'triangles')} of degenerate polygons left out")
    with atomically(path) as part, part.open("wb") as file:
        file.write(b"meshshard".ljust(80) + np.uint32(len(facets)).tobytes())
        file.write(facets.tobytes())
