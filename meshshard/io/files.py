"""Files and pyvista objects to meshes, and back.

The only file that imports VTK, pyvista or meshio, and only where a format needs them: VTK's XML and
legacy files, STL, PLY, OBJ and point clouds are read with numpy alone; VTKHDF, EnSight, OpenFOAM,
Fluent, Gmsh, SU2, Abaqus and CGNS in a child process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from meshshard.errors import MeshshardError, ReadError
from meshshard.io.child import read_in_child, serve
from meshshard.io.dataset import Dataset, assemble
from meshshard.io.formats import gunzip, recognize
from meshshard.io.readers.arrays import from_arrays, read_csv, read_npy, read_npz, read_pt
from meshshard.io.readers.obj import read_obj
from meshshard.io.readers.ply import read_ply
from meshshard.io.readers.stl import read_stl
from meshshard.io.readers.vtk_faces import face_stream, listed_faces
from meshshard.io.readers.vtk_legacy import read_legacy
from meshshard.io.readers.vtk_topology import SECTIONS, polydata_cells, structured_cells
from meshshard.io.readers.vtk_xml import INFLATE
from meshshard.io.readers.vtk_xml_pieces import read_xml
from meshshard.io.writers import clean_names, is_polydata, write_npz, write_vtk
from meshshard.mesh import Array, Mesh
from meshshard.mesh.checks import warn
from meshshard.mesh.ragged import offsets_of

__all__ = ["clean_names", "from_arrays", "from_pyvista", "read", "to_pyvista", "to_vtk", "write"]


def read(path: str | Path, *, time: float | None = None) -> Mesh:
    """Read a mesh or a point cloud from a file.

    Args:
        path: the file; its content decides where it contradicts the name.
        time: which step to take where the file holds several.

    Returns:
        A checked mesh, with the cells of the highest dimension in the file.

    Raises:
        ReadError: the file is missing, damaged, empty or of no known format.
        MeshError: the mesh in it contradicts itself.
    """
    path = Path(path)
    try:
        return assemble(_leaves(path, time), str(path))
    except MemoryError:
        raise ReadError(f"{path}: too large for the memory of this machine") from None
    except OSError as error:
        raise ReadError(f"{path}: cannot be read: {error.strerror or error}") from None


def _leaves(path: Path, time: float | None) -> list[Dataset]:
    """The data sets of a file, by the reader for its kind."""
    kind = recognize(path)
    if kind == "gz":
        return _unpacked_leaves(path, time)
    if kind == "xml":
        return read_xml(path, _XML_INFLATE, time)
    if kind in _READERS:
        return _READERS[kind](path)
    return read_in_child(path, time)


def _unpacked_leaves(path: Path, time: float | None) -> list[Dataset]:
    with TemporaryDirectory(prefix="meshshard-") as folder:
        plain = gunzip(path, Path(folder))
        try:
            if recognize(plain) == "gz":
                raise ReadError(f"{path}: gzipped twice; gunzip it")
            return _leaves(plain, time)
        except MeshshardError as error:
            raise type(error)(str(error).replace(str(plain), str(path))) from None


def _inflate_lz4(block: bytes, size: int) -> bytes:
    from vtkmodules.vtkIOCore import vtkLZ4DataCompressor

    compressor = vtkLZ4DataCompressor()
    compressor.AddObserver("ErrorEvent", lambda *_: None)  # type: ignore[arg-type]  # no print
    out = compressor.Uncompress(block, len(block), size)
    return b"" if out is None else _numpy(out).tobytes()


_XML_INFLATE = {**INFLATE, "vtkLZ4DataCompressor": _inflate_lz4}
_READERS: dict[str, Callable[[Path], list[Dataset]]] = {
    "legacy": read_legacy, "stl": read_stl, "ply": read_ply, "obj": read_obj,
    "npz": read_npz, "npy": read_npy, "csv": read_csv, "pt": read_pt,
}  # fmt: skip


def write(mesh: Mesh, path: str | Path) -> None:
    """Write a mesh, whole or not at all: .vtp (cells up to dimension 2), .vtu, or .npz (clouds).

    Points, cells and fields come back bit for bit; bool becomes uint8 and float16 float32 in VTK's
    files. Names keep their quotes and brackets, escaped; only what XML cannot hold becomes "_".

    Raises:
        MeshshardError: the suffix is another one, or the mesh does not fit the format.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix in (".vtp", ".vtu"):
        write_vtk(mesh, path)
    elif suffix == ".npz":
        write_npz(mesh, path)
    else:
        raise MeshshardError(f"{path}: meshes are written as .vtp, .vtu or .npz, not '{suffix}'")


def from_pyvista(dataset: Any, name: str = "mesh") -> Mesh:
    """A checked mesh from a pyvista or VTK object; arrays are shared wherever possible.

    Args:
        dataset: PolyData, UnstructuredGrid, StructuredGrid, RectilinearGrid, ImageData, PointSet,
            or a MultiBlock of these.
        name: what to call the mesh in messages.

    Raises:
        ReadError: it is empty or of another kind.
        MeshError: it contradicts itself.
    """
    return assemble(_walk(dataset, name, ()), name)


def _walk(item: Any, name: str, above: Sequence[str]) -> Iterator[Dataset]:
    """The leaves of a VTK object, depth first, with the names of their blocks."""
    if item is None:
        return
    if item.IsA("vtkDataSet"):
        yield replace(_leaf(item, name), block="/".join(above))
        return
    for block, child in _children(item, name):
        yield from _walk(child, name, (*above, *block))


def _children(item: Any, name: str) -> list[tuple[tuple[str, ...], Any]]:
    """What a composite object holds; partitions are pieces of a block, without a name."""
    if item.IsA("vtkMultiBlockDataSet"):
        blocks = range(item.GetNumberOfBlocks())
        return [((_block_name(item, i),), item.GetBlock(i)) for i in blocks]
    if item.IsA("vtkPartitionedDataSetCollection"):
        sets = range(item.GetNumberOfPartitionedDataSets())
        return [((str(i),), item.GetPartitionedDataSet(i)) for i in sets]
    if item.IsA("vtkPartitionedDataSet"):
        return [((), item.GetPartitionAsDataObject(i)) for i in range(item.GetNumberOfPartitions())]
    raise ReadError(f"{name}: a {item.GetClassName()} is no mesh")


def _block_name(blocks: Any, i: int) -> str:
    has = blocks.HasMetaData(i) and blocks.GetMetaData(i).Has(blocks.NAME())
    return str(blocks.GetMetaData(i).Get(blocks.NAME())).strip() if has else str(i)


def _leaf(item: Any, name: str) -> Dataset:
    """One VTK data set as arrays."""
    points = _fields(item.GetPointData(), name, "point") if item.GetNumberOfPoints() else {}
    leaf = Dataset(
        _coordinates(item),
        point_fields=points,
        cell_fields=_fields(item.GetCellData(), name, "cell"),
    )
    if item.IsA("vtkPolyData"):
        return replace(leaf, **_polydata_cells(item))
    if item.IsA("vtkUnstructuredGrid"):
        return replace(leaf, **_grid_cells(item))
    if hasattr(item, "GetDimensions"):
        shape = [0, 0, 0]
        item.GetDimensions(shape)
        connectivity, offsets, types = structured_cells(shape)
        return replace(leaf, connectivity=connectivity, offsets=offsets, types=types)
    if item.GetNumberOfCells():
        raise ReadError(f"{name}: a {item.GetClassName()} cannot be partitioned")
    return leaf


def _coordinates(item: Any) -> Array:
    """(n, 3) points; those of images and rectilinear grids are implied."""
    points = item.GetPoints()
    if points is None or not points.GetNumberOfPoints():
        return np.zeros((0, 3), np.float32)
    if not item.IsA("vtkPointSet"):
        import pyvista

        return np.asarray(pyvista.wrap(item).points)
    return _numpy(points.GetData())


def _numpy(array: Any) -> Array:
    from vtkmodules.util.numpy_support import vtk_to_numpy

    return np.asarray(vtk_to_numpy(array)).view(np.ndarray)  # type: ignore[no-untyped-call]


def _fields(attributes: Any, name: str, kind: str) -> dict[str, Array]:
    out: dict[str, Array] = {}
    for i in range(attributes.GetNumberOfArrays()):
        array = attributes.GetAbstractArray(i)
        label = array.GetName() or f"array {i}"
        if not array.IsA("vtkDataArray"):
            warn(f"{name}: {kind} array '{label}' is not numeric, left out")
            continue
        out[label] = _numpy(array)
    return out


def _cell_array(cells: Any) -> tuple[Array, Array]:
    """Connectivity and offsets of a vtkCellArray."""
    if cells is None or not cells.GetNumberOfCells():
        return np.zeros(0, np.int64), np.zeros(1, np.int64)
    offsets = _numpy(cells.GetOffsetsArray()).astype(np.int64, copy=False)
    return _numpy(cells.GetConnectivityArray()), offsets


def _polydata_cells(item: Any) -> dict[str, Any]:
    sections = (item.GetVerts(), item.GetLines(), item.GetPolys(), item.GetStrips())
    runs = dict(zip(SECTIONS, map(_cell_array, sections), strict=True))
    connectivity, offsets, types = polydata_cells(runs)
    return {"connectivity": connectivity, "offsets": offsets, "types": types}


def _grid_cells(item: Any) -> dict[str, Any]:
    connectivity, offsets = _cell_array(item.GetCells())
    n = len(offsets) - 1
    types = _numpy(item.GetCellTypes()) if n else np.zeros(0, np.uint8)
    cells = {"connectivity": connectivity, "offsets": offsets, "types": types.astype(np.uint8)}
    faces = item.GetPolyhedronFaces()
    if faces is None or not faces.GetNumberOfCells():
        return cells
    ids, ends = _cell_array(faces)
    of, per_cell = _cell_array(item.GetPolyhedronFaceLocations())
    return {**cells, "faces": listed_faces(of, per_cell, ends, ids, "mesh")}


def to_vtk(mesh: Mesh) -> Any:
    """A VTK data set that shares the mesh's arrays: vtkPolyData, or vtkUnstructuredGrid for solids.

    A cloud gets one vertex cell a point, so that it can be seen.
    """
    from vtkmodules.vtkCommonCore import vtkPoints
    from vtkmodules.vtkCommonDataModel import vtkPolyData, vtkUnstructuredGrid

    flat = is_polydata(mesh)
    out: Any = vtkPolyData() if flat else vtkUnstructuredGrid()
    points = vtkPoints()
    points.SetData(_vtk(mesh.points))
    out.SetPoints(points)
    if flat:
        ids = np.arange(mesh.n_points + 1, dtype=np.int64)
        cloud = not mesh.n_cells
        cells = _vtk_cells(ids[:-1] if cloud else mesh.connectivity, ids if cloud else mesh.offsets)
        (out.SetVerts if cloud else (out.SetLines if mesh.dim == 1 else out.SetPolys))(cells)
    else:
        _set_cells(out, mesh)
    _add_fields(out.GetPointData(), mesh.point_fields)
    _add_fields(out.GetCellData(), mesh.cell_fields)
    return out


def _add_fields(attributes: Any, fields: Mapping[str, Array]) -> None:
    for name, values in fields.items():
        array = _vtk(values)
        array.SetName(name)
        attributes.AddArray(array)


def _set_cells(grid: Any, mesh: Mesh) -> None:
    types, cells = _vtk(mesh.types), _vtk_cells(mesh.connectivity, mesh.offsets)
    if mesh.faces is None:
        grid.SetCells(types, cells)
    elif hasattr(grid, "SetPolyhedralCells"):  # VTK 9.4
        of = np.arange(len(mesh.faces.offsets) - 1)
        locations = _vtk_cells(of, mesh.faces.cell_offsets)
        faces = _vtk_cells(mesh.faces.connectivity, mesh.faces.offsets)
        grid.SetPolyhedralCells(types, cells, locations, faces)
    else:
        stream, _ = face_stream(mesh.faces, mesh.types)
        counts = np.diff(mesh.faces.cell_offsets) > 0
        lengths = np.add.reduceat(np.diff(mesh.faces.offsets) + 1, mesh.faces.cell_offsets[:-1])
        starts = np.where(counts, offsets_of(np.where(counts, lengths + 1, 0))[:-1], -1)
        grid.SetCells(types, cells, _vtk(starts, ids=True), _vtk(stream, ids=True))


def _vtk_cells(connectivity: Array, offsets: Array) -> Any:
    from vtkmodules.vtkCommonDataModel import vtkCellArray

    cells = vtkCellArray()
    cells.SetData(_vtk(offsets, ids=True), _vtk(connectivity, ids=True))
    return cells


def _vtk(values: Array, ids: bool = False) -> Any:
    """A VTK array on the same memory, unless its type or layout is not VTK's."""
    from vtkmodules.util.numpy_support import numpy_to_vtk, numpy_to_vtkIdTypeArray

    if values.dtype.kind == "b":
        values = values.view(np.uint8)
    elif values.dtype == np.float16:
        values = values.astype(np.float32)
    flat = np.ascontiguousarray(values.reshape(len(values), -1) if values.ndim > 2 else values)
    if ids:
        return numpy_to_vtkIdTypeArray(flat.astype(np.int64, copy=False))  # type: ignore[no-untyped-call]
    return numpy_to_vtk(flat)  # type: ignore[no-untyped-call]


def to_pyvista(mesh: Mesh) -> Any:
    """The mesh as a pyvista PolyData or UnstructuredGrid that shares its arrays."""
    import pyvista

    return pyvista.wrap(to_vtk(mesh))


def serve_foreign(path: str, out: str, time: str) -> None:
    """Entry of the child process: read a file with VTK, pyvista or meshio, write its leaves."""
    serve(lambda: list(_foreign(Path(path), json.loads(time))), Path(out))


def _foreign(path: Path, time: float | None) -> Iterator[Dataset]:
    from vtkmodules.vtkCommonCore import vtkOutputWindow, vtkStringOutputWindow

    window = vtkStringOutputWindow()
    vtkOutputWindow.SetInstance(window)
    try:
        item = _meshio(path) if recognize(path) == "meshio" else _pyvista(path, time)
    except MeshshardError:
        raise
    except (Exception, SystemExit) as error:  # whatever a foreign reader met; meshio exits
        said = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:200]
        raise ReadError(
            f"{path}: cannot be read, it is damaged, cut short or of another format ({said})"
        ) from None
    errors = [line for line in window.GetOutput().splitlines() if "ERR" in line or "rror:" in line]
    if errors:
        raise ReadError(f"{path}: VTK cannot read it: {errors[0].strip()[:200]}")
    leaves = list(_walk(item, str(path), ()))
    if recognize(path) != "vtkhdf" and not any(len(leaf.types) for leaf in leaves):
        raise ReadError(
            f"{path}: empty: no cells in it; is the file cut short or its case missing?"
        )
    yield from leaves


def _meshio(path: Path) -> Any:
    try:
        import meshio  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError:
        raise ReadError(f"{path}: needs meshio; pip install 'meshshard[meshio]'") from None
    import pyvista

    mesh = meshio.read(path)
    mesh.cell_sets, mesh.point_sets = {}, {}  # the arrays of tags say the same
    return pyvista.from_meshio(mesh)


def _pyvista(path: Path, time: float | None) -> Any:
    import pyvista

    fluent = recognize(path) == "fluent"
    get_reader: Any = pyvista.FluentReader if fluent else pyvista.get_reader
    reader = get_reader(path)
    times = list(getattr(reader, "time_values", None) or [])
    listed = ", ".join(f"{t:g}" for t in times[:20] + times[20:][-1:])
    if time is None and len(times) > 1:
        raise ReadError(f"{path}: {len(times)} time steps ({listed}); choose one with --time T")
    if time is not None and times:
        if time not in times:
            raise ReadError(f"{path}: has no time {time:g}; it has {listed}")
        reader.set_active_time_value(time)
    if hasattr(reader, "cell_to_point_creation"):  # OpenFOAM: only what the solver wrote
        reader.cell_to_point_creation = False
        if hasattr(reader.reader, "SetDecomposePolyhedra"):  # gone in VTK 9.7
            reader.decompose_polyhedra = False
    return _cell_zones(reader.read(), path) if fluent else reader.read()


def _cell_zones(blocks: Any, path: Path) -> Any:
    """Zones of cells of a Fluent case: VTK makes solids without sense of the zones of faces."""
    import pyvista

    keys = [key for key in blocks if key.endswith((":fluid", ":solid"))]
    if not keys:
        return blocks
    left = [key for key in blocks if key not in keys]
    if left:
        warn(f"{path}: mixed dimensions: {len(left)} zones of faces left out: {', '.join(left)}")
    return pyvista.MultiBlock({key: blocks[key] for key in keys})
