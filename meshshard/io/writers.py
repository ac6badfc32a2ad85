"""Writers: VTK XML files with raw appended data, and .npz files.

The XML is not written with VTK because VTK does not escape quotes and angle brackets in names.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO
from xml.sax.saxutils import quoteattr

import numpy as np

from meshshard.atomic_write import atomic_file
from meshshard.errors import MeshshardError
from meshshard.io.readers.vtk_topology import face_stream
from meshshard.io.readers.vtk_xml import DTYPES
from meshshard.mesh import Array, Mesh
from meshshard.mesh.cells import LINE, POLY_LINE, POLYGON, QUAD, TRIANGLE, VERTEX, types_present

__all__ = [
    "atomically",
    "file_stem",
    "in_xml",
    "is_polydata",
    "vtk_storable",
    "vtk_type",
    "write_labels",
    "write_npz",
    "write_vtk",
    "xml_fields",
]

NAMES = {dtype: name for name, dtype in DTYPES.items() if name != "Bit"}  # VTK's, by NumPy type
FLAT = {LINE, POLY_LINE, TRIANGLE, POLYGON, QUAD}  # cell types that PolyData can hold
_NOT_XML = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff\ud800-\udfff]")


def is_polydata(mesh: Mesh) -> bool:
    """Whether VTK's PolyData can hold the cells."""
    return not mesh.n_cells or FLAT.issuperset(types_present(mesh.types))


def in_xml(name: str) -> str:
    """A name as a quoted attribute; characters that XML cannot represent become "_"."""
    return quoteattr(_NOT_XML.sub("_", name))


def xml_fields(fields: Mapping[str, Array]) -> dict[str, Array]:
    """The fields, with "_" for characters in names that XML cannot represent; no two alike."""
    out: dict[str, Array] = {}
    for name, values in fields.items():
        new = _NOT_XML.sub("_", name)
        while new in out or (new != name and new in fields):
            new += "_"
        out[new] = values
    return out


def file_stem(name: str) -> str:
    """The name of a file that other files list: "_" for control characters, as in `in_xml`."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", "_", _NOT_XML.sub("_", name))


class _Arrays:
    """The arrays of the appended data."""

    def __init__(self) -> None:
        self.listed: list[Array] = []
        self.at = 0

    def tag(self, values: Array, name: str) -> str:
        """Add an array; returns its DataArray element."""
        values = vtk_storable(values, name)
        width = int(np.prod(values.shape[1:], dtype=np.int64)) if values.ndim > 1 else 1
        kind = vtk_type(values)
        text = (
            f'<DataArray type="{kind}" Name={in_xml(name)} '
            f'NumberOfComponents="{width}" format="appended" offset="{self.at}"/>\n'
        )
        self.listed.append(values)
        self.at += 8 + values.nbytes
        return text

    def section(self, name: str, arrays: Mapping[str, Array]) -> str:
        """Add arrays; returns an element that contains their DataArray elements."""
        body = "".join(self.tag(values, key) for key, values in xml_fields(arrays).items())
        return f"<{name}>\n{body}</{name}>\n"

    def append_to(self, file: BinaryIO) -> None:
        """Write all arrays, each after its length."""
        for values in self.listed:
            file.write(np.uint64(values.nbytes).tobytes())
            file.write(values.reshape(-1).view(np.uint8).data)


def vtk_storable(values: Array, name: str) -> Array:
    """An array as VTK can hold it: contiguous, in native byte order, of a type that VTK has.

    The array itself if possible; bool becomes uint8, float16 becomes float32.

    Raises:
        MeshshardError: VTK has no such type, no arrays without a name or without values in a row.
    """
    if not name or 0 in values.shape[1:]:
        what = f"array {name!r} has no values in a row" if name else "an array has no name"
        raise MeshshardError(f"{what}, which VTK files cannot hold; rename it or leave it out")
    if values.dtype.kind == "b":
        values = values.view(np.uint8)
    elif values.dtype == np.float16:
        values = values.astype(np.float32)
    values = np.ascontiguousarray(values, values.dtype.newbyteorder("="))
    if values.dtype.str[1:] not in NAMES:
        raise MeshshardError(
            f"array '{name}' of type {values.dtype} cannot be stored in VTK files; convert it"
        )
    return values


def vtk_type(values: Array) -> str:
    """VTK's name of the type in which an array is written."""
    return NAMES[vtk_storable(values[:0], "array").dtype.str[1:]]


def write_vtk(mesh: Mesh, path: Path) -> None:
    """Write .vtp (cells up to dimension 2) or .vtu, atomically.

    Raises:
        MeshshardError: the cells do not fit a .vtp, an array has no VTK type, or the file cannot
            be written.
    """
    flat = path.suffix.lower() == ".vtp"
    if flat and not is_polydata(mesh):
        raise MeshshardError(f"{path}: a .vtp cannot hold a {mesh.kind} ({mesh.name}); use .vtu")
    arrays = _Arrays()
    counts, cells = _polydata(mesh, arrays) if flat else _unstructured(mesh, arrays)
    kind = "PolyData" if flat else "UnstructuredGrid"
    order = "LittleEndian" if sys.byteorder == "little" else "BigEndian"
    header = (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<VTKFile type="{kind}" version="1.0" byte_order="{order}" header_type="UInt64">\n'
        f'<{kind}>\n<Piece NumberOfPoints="{mesh.n_points}" {counts}>\n'
        + arrays.section("PointData", mesh.point_fields)
        + arrays.section("CellData", mesh.cell_fields)
        + arrays.section("Points", {"Points": mesh.points})
        + cells
        + f'</Piece>\n</{kind}>\n<AppendedData encoding="raw">\n_'
    )
    with atomically(path) as part, part.open("wb") as file:
        file.write(header.encode())
        arrays.append_to(file)
        file.write(b"\n</AppendedData>\n</VTKFile>\n")


def _polydata(mesh: Mesh, arrays: _Arrays) -> tuple[str, str]:
    """Counts and cells of PolyData; a cloud gets one vertex cell per point, to be visible."""
    empty = np.zeros(0, np.int64)
    parts = dict.fromkeys(("Verts", "Lines", "Strips", "Polys"), (empty, empty))
    if mesh.n_cells:
        parts["Polys" if mesh.dim == 2 else "Lines"] = (mesh.connectivity, mesh.offsets[1:])
    elif not mesh.cell_fields:
        ids = np.arange(mesh.n_points, dtype=np.int64)
        parts["Verts"] = (ids, ids + 1)
    counts = " ".join(f'NumberOf{name}="{len(ends)}"' for name, (_, ends) in parts.items())
    sections = [
        arrays.section(name, {"connectivity": _ids(ids), "offsets": ends})
        for name, (ids, ends) in parts.items()
    ]
    return counts, "".join(sections)


def _unstructured(mesh: Mesh, arrays: _Arrays) -> tuple[str, str]:
    ids, ends, types = mesh.connectivity, mesh.offsets[1:], mesh.types
    if not mesh.n_cells and not mesh.cell_fields:  # a cloud
        ids = np.arange(mesh.n_points, dtype=np.int64)
        ends, types = ids + 1, np.full(mesh.n_points, VERTEX, np.uint8)
    cells = {"connectivity": _ids(ids), "offsets": ends, "types": types}
    if mesh.faces is not None:
        # all versions of VTK read these; those before 9.4 ignore the newer arrays
        cells["faces"], cells["faceoffsets"] = face_stream(mesh.faces, mesh.types)
    return f'NumberOfCells="{len(types)}"', arrays.section("Cells", cells)


def _ids(connectivity: Array) -> Array:
    return connectivity.astype(np.int64, copy=False)


def write_npz(mesh: Mesh, path: Path) -> None:
    """Write the points and point fields of a point cloud as .npz, atomically.

    Raises:
        MeshshardError: the mesh has cells, a field is called "points", or the file cannot be
            written.
    """
    if mesh.n_cells:
        raise MeshshardError(
            f"{path}: an .npz holds a point cloud, {mesh.name} has cells; use .vtp or .vtu"
        )
    if "points" in mesh.point_fields:
        raise MeshshardError(f"{path}: a field is called 'points'; use .vtp")
    arrays: dict[str, Any] = {"points": mesh.points, **mesh.point_fields}
    with atomically(path) as part, part.open("wb") as file:
        np.savez(file, **arrays)


def write_labels(labels: Array, path: Path) -> None:
    """Write one label per line, as gpmetis does, atomically.

    Raises:
        MeshshardError: the file cannot be written.
    """
    with atomically(path) as part:
        np.savetxt(part, labels, fmt="%d")


@contextlib.contextmanager
def atomically(path: Path) -> Iterator[Path]:
    """Context manager: a temporary path that replaces `path` at the end."""
    try:
        with atomic_file(path) as part:
            yield part
    except OSError as error:
        raise MeshshardError(
            f"{path}: cannot be written ({error.strerror or error}); "
            "create the directory, free some space, or write elsewhere"
        ) from None
