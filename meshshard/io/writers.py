"""Meshes to VTK's XML files, appended raw: any reader opens them, and reading gives the same bits.

Written here rather than by VTK, whose writer does not escape quotes and angle brackets in names.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO
from xml.sax.saxutils import quoteattr

import numpy as np

from meshshard.atomic_write import atomic_file
from meshshard.errors import MeshshardError
from meshshard.io.readers.vtk_faces import face_stream
from meshshard.mesh import Array, Mesh
from meshshard.mesh.cells import LINE, POLYGON, QUAD, TRIANGLE

__all__ = ["clean_names", "in_xml", "is_polydata", "vtk_type", "write_npz", "write_vtk"]


DTYPES = {
    "i1": "Int8", "u1": "UInt8", "i2": "Int16", "u2": "UInt16", "i4": "Int32", "u4": "UInt32",
    "i8": "Int64", "u8": "UInt64", "f4": "Float32", "f8": "Float64",
}  # fmt: skip
FLAT = (LINE, 4, TRIANGLE, POLYGON, QUAD)  # cell types that PolyData can hold
_UNSAFE = re.compile(r"[\"<>&'\x00-\x1f\x7f]")
_NOT_XML = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff\ud800-\udfff]")


def clean_names(names: Iterable[str]) -> dict[str, str]:
    """Names that VTK's own writers can write.

    Args:
        names: array names.

    Returns:
        For each name one without quotes, angle brackets, ampersands and control characters; all
        different.
    """
    out: dict[str, str] = {}
    listed = list(names)
    taken = {name for name in listed if not _UNSAFE.search(name)}
    for name in listed:
        clean, n = _UNSAFE.sub("_", name), 2
        if name not in taken:
            while clean in taken:
                clean, n = f"{_UNSAFE.sub('_', name)} ({n})", n + 1
            taken.add(clean)
        out[name] = clean
    return out


def is_polydata(mesh: Mesh) -> bool:
    """Whether VTK's PolyData can hold the cells."""
    kinds = np.flatnonzero(np.bincount(mesh.types, minlength=1)).tolist() if mesh.n_cells else []
    return all(kind in FLAT for kind in kinds)


def in_xml(name: str) -> str:
    """A name as a quoted attribute; what XML cannot hold is replaced."""
    return quoteattr(_NOT_XML.sub("_", name))


class _Arrays:
    """Arrays to append, each with its offset."""

    def __init__(self) -> None:
        self.listed: list[Array] = []
        self.at = 0

    def tag(self, values: Array, name: str) -> str:
        """The DataArray element of an array that will be appended."""
        values = _storable(values, name)
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
        """An element with the elements of some arrays in it."""
        body = "".join(self.tag(values, key) for key, values in arrays.items())
        return f"<{name}>\n{body}</{name}>\n"

    def append_to(self, file: BinaryIO) -> None:
        """Write all of them, each behind its length."""
        for values in self.listed:
            file.write(np.uint64(values.nbytes).tobytes())
            file.write(values.reshape(-1).view(np.uint8).data)


def _storable(values: Array, name: str) -> Array:
    """Contiguous, in this machine's byte order, of a type that VTK knows."""
    if values.dtype.kind == "b":
        values = values.view(np.uint8)
    elif values.dtype == np.float16:
        values = values.astype(np.float32)
    values = np.ascontiguousarray(values, values.dtype.newbyteorder("="))
    if values.dtype.str[1:] not in DTYPES:
        raise MeshshardError(
            f"array '{name}' of type {values.dtype} cannot be written to VTK files"
        )
    return values


def vtk_type(values: Array) -> str:
    """VTK's name for the type in which an array is written."""
    return DTYPES[_storable(values[:0], "array").dtype.str[1:]]


def write_vtk(mesh: Mesh, path: Path) -> None:
    """Write .vtp (cells up to dimension 2) or .vtu, whole or not at all.

    Raises:
        MeshshardError: the cells do not fit a .vtp, or an array has no VTK type.
    """
    flat = path.suffix.lower() == ".vtp"
    if flat and not is_polydata(mesh):
        raise MeshshardError(f"{path}: a .vtp cannot hold a {mesh.kind} like {mesh.name}; use .vtu")
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
    with _whole(path) as part, part.open("wb") as file:
        file.write(header.encode())
        arrays.append_to(file)
        file.write(b"\n</AppendedData>\n</VTKFile>\n")


def _polydata(mesh: Mesh, arrays: _Arrays) -> tuple[str, str]:
    """Counts and cells of a PolyData piece; a cloud gets a vertex a point, or nobody sees it."""
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
    if not mesh.n_cells and not mesh.cell_fields:  # as above
        ids = np.arange(mesh.n_points, dtype=np.int64)
        ends, types = ids + 1, np.ones(mesh.n_points, np.uint8)
    cells = {"connectivity": _ids(ids), "offsets": ends, "types": types}
    if mesh.faces is not None:
        # the older two arrays: every VTK reads them, those of 9.4 are lost on earlier ones
        cells["faces"], cells["faceoffsets"] = face_stream(mesh.faces, mesh.types)
    return f'NumberOfCells="{len(types)}"', arrays.section("Cells", cells)


def _ids(connectivity: Array) -> Array:
    return connectivity.astype(np.int64, copy=False)


def write_npz(mesh: Mesh, path: Path) -> None:
    """Write the points and point fields of a cloud as .npz.

    Raises:
        MeshshardError: the mesh has cells, or a field is called like the points.
    """
    if mesh.n_cells:
        raise MeshshardError(
            f"{path}: an .npz holds a cloud, {mesh.name} has cells; use .vtp or .vtu"
        )
    if "points" in mesh.point_fields:
        raise MeshshardError(f"{path}: a field is called 'points'; use .vtp")
    arrays: dict[str, Any] = {"points": mesh.points, **mesh.point_fields}
    with _whole(path) as part, part.open("wb") as file:
        np.savez(file, **arrays)


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """Write beside, then rename: nobody ever sees half a file."""
    try:
        with atomic_file(path) as part:
            yield part
    except OSError as error:
        raise MeshshardError(
            f"{path}: cannot be written ({error.strerror or error}); "
            "make its directory, or room in it, or write elsewhere"
        ) from None
