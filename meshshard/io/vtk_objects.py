"""VTK and PyVista objects in memory to meshes, and back; arrays are shared where possible."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np

from meshshard.errors import ReadError, n_of
from meshshard.io.dataset import Dataset, field_name, to_mesh
from meshshard.io.readers.vtk_topology import (
    SECTIONS,
    face_stream,
    listed_faces,
    polydata_cells,
    structured_cells,
)
from meshshard.io.writers import is_polydata, vtk_storable
from meshshard.mesh import Array, Faces, Mesh
from meshshard.mesh.checks import warn
from meshshard.mesh.ragged import no_rows

__all__ = ["datasets_of", "from_pyvista", "grid_of_meshio", "to_pyvista", "to_vtk", "vtk_leaves"]


def from_pyvista(dataset: Any, name: str = "mesh") -> Mesh:
    """A checked mesh from a PyVista or VTK object; arrays are shared where possible.

    Args:
        dataset: PolyData, UnstructuredGrid, StructuredGrid, RectilinearGrid, ImageData, PointSet,
            or a MultiBlock of these.
        name: name of the mesh in messages.

    Raises:
        ReadError: the object is empty or of another class.
        MeshError: the mesh is inconsistent.
    """
    return to_mesh(datasets_of(dataset, name), name)


def grid_of_meshio(mesh: Any) -> Any:
    """A PyVista grid from a meshio.Mesh; sets are left out, fields keep their types."""
    import pyvista

    plain = copy(mesh)
    plain.cell_sets, plain.point_sets, plain.point_data = {}, {}, {}
    grid = pyvista.from_meshio(plain)
    for name, values in mesh.point_data.items():  # PyVista would convert them to float64
        grid.point_data[name] = values
    return grid


def datasets_of(item: Any, name: str, above: Sequence[str] = ()) -> Iterator[Dataset]:
    """The data sets in a VTK object, depth first.

    Args:
        item: a data set, a composite of data sets, or None (an empty block).
        name: name of the object in messages.
        above: names of the blocks that contain it.

    Raises:
        ReadError: the object is of another class.
    """
    for dataset, block in vtk_leaves(item, name, above):
        yield _dataset(dataset, name, block)


def vtk_leaves(item: Any, name: str, above: Sequence[str] = ()) -> Iterator[tuple[Any, str]]:
    """The vtkDataSets in a VTK object and the names of their blocks; see `datasets_of`."""
    if item is None:
        return
    if item.IsA("vtkDataSet"):
        yield item, "/".join(above)
        return
    for block, child in _children(item, name):
        yield from vtk_leaves(child, name, (*above, *block))


def _children(item: Any, name: str) -> list[tuple[tuple[str, ...], Any]]:
    """Names and contents of the blocks of a composite; a partition has no name of its own."""
    if item.IsA("vtkMultiBlockDataSet"):
        blocks = range(item.GetNumberOfBlocks())
        return [((_block_name(item, i),), item.GetBlock(i)) for i in blocks]
    if item.IsA("vtkPartitionedDataSetCollection"):
        sets = range(item.GetNumberOfPartitionedDataSets())
        return [((_block_name(item, i),), item.GetPartitionedDataSet(i)) for i in sets]
    if item.IsA("vtkPartitionedDataSet"):
        return [((), item.GetPartitionAsDataObject(i)) for i in range(item.GetNumberOfPartitions())]
    raise ReadError(f"{name}: a {item.GetClassName()} is not a mesh")


def _block_name(blocks: Any, i: int) -> str:
    has = blocks.HasMetaData(i) and blocks.GetMetaData(i).Has(blocks.NAME())
    return str(blocks.GetMetaData(i).Get(blocks.NAME())).strip() if has else str(i)


def _dataset(item: Any, name: str, block: str) -> Dataset:
    n_points = item.GetNumberOfPoints()
    return Dataset(
        _coordinates(item),
        *_cells(item, name),
        point_fields=_fields(item.GetPointData(), n_points, name, "point") if n_points else {},
        cell_fields=_fields(item.GetCellData(), item.GetNumberOfCells(), name, "cell"),
        block=block,
    )


def _cells(item: Any, name: str) -> tuple[Array, Array, Array, Faces | None]:
    """Connectivity, offsets, types and the faces of polyhedra."""
    if item.IsA("vtkPolyData"):
        sections = (item.GetVerts(), item.GetLines(), item.GetPolys(), item.GetStrips())
        return *polydata_cells(dict(zip(SECTIONS, map(_rows, sections), strict=True))), None
    if item.IsA("vtkUnstructuredGrid"):
        return _grid_cells(item)
    if hasattr(item, "GetDimensions"):
        shape = [0, 0, 0]
        item.GetDimensions(shape)
        return *structured_cells(shape), None
    if item.GetNumberOfCells():
        raise ReadError(f"{name}: a {item.GetClassName()} cannot be partitioned")
    return *no_rows(), np.zeros(0, np.uint8), None


def _grid_cells(item: Any) -> tuple[Array, Array, Array, Faces | None]:
    connectivity, offsets = _rows(item.GetCells())
    n = len(offsets) - 1
    types = _numpy(item.GetCellTypes()).astype(np.uint8) if n else np.zeros(0, np.uint8)
    faces = item.GetPolyhedronFaces()
    if faces is None or not faces.GetNumberOfCells():
        return connectivity, offsets, types, None
    listed = *_rows(item.GetPolyhedronFaceLocations()), *_rows(faces)[::-1]
    return connectivity, offsets, types, listed_faces(*listed, "mesh")


def _rows(cells: Any) -> tuple[Array, Array]:
    """Connectivity and offsets of a vtkCellArray."""
    if cells is None or not cells.GetNumberOfCells():
        return no_rows()
    offsets = _numpy(cells.GetOffsetsArray()).astype(np.int64, copy=False)
    return _numpy(cells.GetConnectivityArray()), offsets


def _coordinates(item: Any) -> Array:
    """(n, 3) points; those of images and rectilinear grids are computed."""
    points = item.GetPoints()
    if points is None or not points.GetNumberOfPoints():
        return np.zeros((0, 3), np.float32)
    if not item.IsA("vtkPointSet"):
        import pyvista

        return np.asarray(pyvista.wrap(item).points)
    return _numpy(points.GetData())


def _fields(attributes: Any, n: int, name: str, kind: str) -> dict[str, Array]:
    """Numeric arrays of `n` rows; others are left out with a warning.

    Raises:
        ReadError: an array has another number of rows.
    """
    out: dict[str, Array] = {}
    for i in range(attributes.GetNumberOfArrays()):
        array = attributes.GetAbstractArray(i)
        label = field_name(array.GetName(), i, out, kind, name)
        if not array.IsA("vtkDataArray"):
            warn(f"{name}: {kind} array '{label}' is not numeric, left out")
            continue
        out[label] = _numpy(array)
        if len(out[label]) != n:
            raise ReadError(
                f"{name}: {kind} array '{label}' has {n_of(len(out[label]), 'rows')} for "
                f"{n_of(n, f'{kind}s')}; it is cut short, or belongs to another mesh"
            )
    return out


def _numpy(array: Any) -> Array:
    from vtkmodules.util.numpy_support import vtk_to_numpy

    return np.asarray(vtk_to_numpy(array)).view(np.ndarray)  # type: ignore[no-untyped-call]


def to_pyvista(mesh: Mesh) -> Any:
    """The mesh as a PyVista PolyData or UnstructuredGrid that shares its arrays."""
    import pyvista

    return pyvista.wrap(to_vtk(mesh))


def to_vtk(mesh: Mesh) -> Any:
    """A vtkPolyData, or a vtkUnstructuredGrid for solids, that shares the arrays of the mesh.

    A point cloud gets one vertex cell per point, so that it can be rendered.

    Raises:
        MeshshardError: VTK has no type for an array.
    """
    from vtkmodules.vtkCommonCore import vtkPoints
    from vtkmodules.vtkCommonDataModel import vtkPolyData, vtkUnstructuredGrid

    flat = is_polydata(mesh)
    out: Any = vtkPolyData() if flat else vtkUnstructuredGrid()
    points = vtkPoints()
    points.SetData(_vtk(mesh.points, "points"))
    out.SetPoints(points)
    if not flat:
        _set_cells(out, mesh)
    elif mesh.n_cells:
        cells = _vtk_cells(mesh.connectivity, mesh.offsets)
        (out.SetLines if mesh.dim == 1 else out.SetPolys)(cells)
    else:
        ids = np.arange(mesh.n_points + 1, dtype=np.int64)
        out.SetVerts(_vtk_cells(ids[:-1], ids))
    _add_fields(out.GetPointData(), mesh.point_fields)
    _add_fields(out.GetCellData(), mesh.cell_fields)
    return out


def _add_fields(attributes: Any, fields: Mapping[str, Array]) -> None:
    for name, values in fields.items():
        array = _vtk(values, name)
        array.SetName(name)
        attributes.AddArray(array)


def _set_cells(grid: Any, mesh: Mesh) -> None:
    types, cells = _vtk(mesh.types, "types"), _vtk_cells(mesh.connectivity, mesh.offsets)
    if mesh.faces is None:
        grid.SetCells(types, cells)
    elif hasattr(grid, "SetPolyhedralCells"):  # VTK 9.4
        of = np.arange(len(mesh.faces.offsets) - 1)
        locations = _vtk_cells(of, mesh.faces.cell_offsets)
        faces = _vtk_cells(mesh.faces.connectivity, mesh.faces.offsets)
        grid.SetPolyhedralCells(types, cells, locations, faces)
    else:
        stream, ends = face_stream(mesh.faces, mesh.types)
        has_faces = ends >= 0
        starts = np.full(len(ends), -1)
        starts[has_faces] = np.append(0, ends[has_faces][:-1])
        grid.SetCells(types, cells, _vtk_ids(starts), _vtk_ids(stream))


def _vtk_cells(connectivity: Array, offsets: Array) -> Any:
    from vtkmodules.vtkCommonDataModel import vtkCellArray

    cells = vtkCellArray()
    cells.SetData(_vtk_ids(offsets), _vtk_ids(connectivity))
    return cells


def _vtk(values: Array, name: str) -> Any:
    """A VTK array on the same memory, unless VTK needs another type or layout."""
    from vtkmodules.util.numpy_support import numpy_to_vtk

    values = vtk_storable(values, name)
    if values.ndim > 2:
        values = values.reshape(len(values), -1)
    return numpy_to_vtk(values)  # type: ignore[no-untyped-call]


def _vtk_ids(values: Array) -> Any:
    from vtkmodules.util.numpy_support import numpy_to_vtkIdTypeArray

    values = np.ascontiguousarray(values, np.int64)
    return numpy_to_vtkIdTypeArray(values)  # type: ignore[no-untyped-call]
