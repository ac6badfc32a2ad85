"""METIS' own dual graph of a mesh, as a second opinion on `cell_graph`."""

import ctypes

import numpy as np

from meshshard.mesh import Array, Mesh


def mesh_to_dual(mesh: Mesh, common: int) -> tuple[Array, Array]:
    """CSR (indptr, indices) of cells that share `common` points, by METIS_MeshToDual.

    For simplices this is adjacency by facet. Calls the library that pymetis contains.
    """
    import pymetis._internal as carrier

    integer, pointer = ctypes.c_int64, ctypes.POINTER(ctypes.c_int64)
    rows, columns = pointer(), pointer()
    numbers = (mesh.n_cells, mesh.n_points, common, 0)
    cells, points, shared, base = (ctypes.byref(integer(n)) for n in numbers)
    arrays = [np.ascontiguousarray(a, np.int64) for a in (mesh.offsets, mesh.connectivity)]
    given = [a.ctypes.data_as(pointer) for a in arrays]
    call = ctypes.CDLL(carrier.__file__).METIS_MeshToDual
    status = call(cells, points, *given, shared, base, ctypes.byref(rows), ctypes.byref(columns))
    assert status == 1
    indptr = np.ctypeslib.as_array(rows, (mesh.n_cells + 1,)).copy()
    return indptr, np.ctypeslib.as_array(columns, (int(indptr[-1]),)).copy()
