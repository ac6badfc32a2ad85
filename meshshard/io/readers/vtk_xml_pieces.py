"""VTK XML files to data sets: pieces, blocks, partitions and time steps."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import numpy as np

from meshshard.errors import ReadError
from meshshard.io.dataset import Dataset, field_name
from meshshard.io.readers.vtk_topology import (
    MAX_IMPLICIT_POINTS,
    SECTIONS,
    faces_of_stream,
    lattice,
    listed_faces,
    polydata_cells,
    structured_cells,
)
from meshshard.io.readers.vtk_xml import XmlFile
from meshshard.io.times import time_step
from meshshard.mesh import Array, Faces
from meshshard.mesh.checks import warn
from meshshard.mesh.ragged import no_rows

__all__ = ["read_xml"]

Element = ElementTree.Element
MAX_DEPTH = 16  # of files that refer to files, and of blocks in blocks
IMAGE = {"Origin": "0 0 0", "Spacing": "1 1 1", "Direction": "1 0 0 0 1 0 0 0 1"}
COMPOSITE = ("vtkMultiBlockDataSet", "vtkPartitionedDataSetCollection", "vtkPartitionedDataSet")


def read_xml(path: Path, time: float | None = None) -> list[Dataset]:
    """All data sets of a VTK XML file and of the files it refers to, in order.

    Args:
        path: .vtp .vtu .vts .vtr .vti, their parallel forms, .vtm .vtpc or .pvd.
        time: the time step to read from a .pvd.

    Raises:
        ReadError: data are missing, damaged or of an unknown kind, or a file refers to one outside
            its folder or to one that has been read before.
    """
    folders = {path.parent.resolve()}
    if path.is_symlink():
        folders.add((path.parent / path.readlink()).parent.resolve())
    return _read(path, time, _Opened(folders, {_identity(path)}), 0)


class _Opened(NamedTuple):
    """Folders in which files may be opened, and the files that have been read."""

    folders: Collection[Path]
    files: set[tuple[int, int]]


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _read(path: Path, time: float | None, opened: _Opened, depth: int) -> list[Dataset]:
    if depth > MAX_DEPTH:
        raise ReadError(f"{path}: more than {MAX_DEPTH} files that refer to each other")
    file = XmlFile(path)
    kind = file.root.get("type", "")
    body = next((child for child in file.root if child.tag == kind), None)
    if body is None:
        raise ReadError(f"{path}: the element <{kind}> is missing")
    if kind in COMPOSITE:
        return list(_blocks(body, path, opened, depth, ()))
    if kind == "Collection":
        return _step(body, path, opened, depth, time)
    time_step(path, (), time)
    if kind.startswith("P") and body.find("Piece[@Source]") is not None:
        sources = [piece.get("Source") for piece in body.findall("Piece")]
        found = [data for source in sources for data in _follow(source, path, opened, depth)]
        _warn_missing(body, found, path)
        return found
    read_piece = _KINDS.get(kind)
    if read_piece is None:
        raise ReadError(
            f"{path}: data of type {kind} cannot be partitioned; "
            f"these can: {', '.join([*_KINDS, *COMPOSITE])}"
        )
    pieces = (piece for piece in body.findall("Piece") if len(piece) or piece.attrib)
    return [read_piece(file, body, piece) for piece in pieces]


def _warn_missing(body: Element, pieces: Sequence[Dataset], path: Path) -> None:
    """Warn about arrays that the index of a parallel file lists and no piece has."""
    for kind, section in (("point", "PPointData"), ("cell", "PCellData")):
        have = {name for piece in pieces for name in getattr(piece, f"{kind}_fields")}
        listed = body.find(section)
        for array in listed if listed is not None else ():
            if (name := array.get("Name")) and name not in have:
                warn(f"{path}: {kind} array '{name}' is listed, but no piece has it")


def _follow(name: str | None, path: Path, opened: _Opened, depth: int) -> list[Dataset]:
    """The data sets of a file that another one refers to.

    Each file is read once, so that the number of reads is bounded by what the files say, and not by
    what they multiply. Files outside the folder of the first one are not opened: it may come from
    someone who is not to learn what they hold.
    """
    target = path.parent / (name or "")
    if not name or "\0" in name or not target.is_file():
        raise ReadError(f"{path}: refers to '{name}', which is not a file; copy it there")
    if not any(target.resolve().is_relative_to(folder) for folder in opened.folders):
        raise ReadError(f"{path}: refers to '{name}' outside its folder; copy it there")
    if target.stat().st_size == 0:
        raise ReadError(f"{path}: refers to '{name}', which is an empty file (0 bytes)")
    if _identity(target) in opened.files:
        raise ReadError(f"{path}: refers to '{name}', which has been read before (a circle?)")
    opened.files.add(_identity(target))
    return _read(target, None, opened, depth + 1)


def _blocks(
    element: Element, path: Path, opened: _Opened, depth: int, above: Sequence[str]
) -> Iterator[Dataset]:
    """The data sets in a block; a DataSet element without a file is an empty block."""
    if len(above) > MAX_DEPTH:
        raise ReadError(f"{path}: more than {MAX_DEPTH} blocks in each other")
    for child in element:
        name = child.get("name") or child.get("index") or ""
        if child.tag == "DataSet" and child.get("file"):
            # partitions of a block are pieces of it, not blocks
            names: Sequence[str] = (
                above if element.tag in ("Partitions", "Piece") else (*above, name)
            )
            for dataset in _follow(child.get("file"), path, opened, depth):
                inner = (*names, dataset.block) if dataset.block else names
                yield replace(dataset, block="/".join(inner))
        elif child.tag in ("Block", "Piece", "Partitions"):
            yield from _blocks(child, path, opened, depth, (*above, name))


def _step(
    body: Element, path: Path, opened: _Opened, depth: int, time: float | None
) -> list[Dataset]:
    """One time step of a collection: the given one, or the only one."""
    entries = [(_number(d.get("timestep", "0"), path), d.get("file")) for d in body]
    wanted = time_step(path, [t for t, _ in entries], time)
    files = (name for t, name in entries if t == wanted)
    return [dataset for name in files for dataset in _follow(name, path, opened, depth)]


def _number(text: str, path: Path) -> float:
    try:
        return float(text)
    except ValueError:
        raise ReadError(f"{path}: '{text}' is not a number") from None


def _count(element: Element, attribute: str, path: Path) -> int:
    text = element.get(attribute, "0")
    if not text.strip().isdecimal() or len(text) > 18:  # below 2^63
        raise ReadError(f'{path}: {attribute}="{text}" is not a count')
    return int(text)


def _integers(element: Element, attribute: str, n: int, path: Path) -> list[int]:
    words = element.get(attribute, "").split()
    try:
        numbers = [int(word) for word in words]
    except ValueError:
        numbers = []
    if len(numbers) != n:
        raise ReadError(f'{path}: {attribute}="{" ".join(words)}" should be {n} integers')
    return numbers


def _polydata(file: XmlFile, body: Element, piece: Element) -> Dataset:
    n = _count(piece, "NumberOfPoints", file.path)
    sections = {
        section: _ragged(file, piece.find(section), rows, "offsets", "connectivity")
        for section in SECTIONS
        if (rows := _count(piece, f"NumberOf{section}", file.path))
    }
    connectivity, offsets, types = polydata_cells(sections)
    n_cells = len(types)
    return Dataset(
        points=_points(file, piece, n),
        connectivity=connectivity,
        offsets=offsets,
        types=types,
        point_fields=_fields(file, piece.find("PointData"), n, "point"),
        cell_fields=_fields(file, piece.find("CellData"), n_cells, "cell"),
    )


def _unstructured(file: XmlFile, body: Element, piece: Element) -> Dataset:
    n = _count(piece, "NumberOfPoints", file.path)
    n_cells = _count(piece, "NumberOfCells", file.path)
    cells = piece.find("Cells")
    connectivity, offsets = _ragged(file, cells, n_cells, "offsets", "connectivity")
    types = file.values(_array(file, cells, "types"), n_cells) if n_cells else np.zeros(0, np.uint8)
    if len(types) and (types.min() < 0 or types.max() > 255):
        raise ReadError(f"{file.path}: cell types must be 0 to 255")
    return Dataset(
        points=_points(file, piece, n),
        connectivity=connectivity,
        offsets=offsets,
        types=types.astype(np.uint8, copy=False),
        faces=_faces(file, cells, n_cells) if n_cells else None,
        point_fields=_fields(file, piece.find("PointData"), n, "point"),
        cell_fields=_fields(file, piece.find("CellData"), n_cells, "cell"),
    )


def _array(file: XmlFile, section: Element | None, name: str) -> Element:
    found = None if section is None else section.find(f"DataArray[@Name='{name}']")
    if found is None:
        where = "the file" if section is None else f"<{section.tag}>"
        raise ReadError(f"{file.path}: the array '{name}' is missing from {where}")
    return found


def _ragged(
    file: XmlFile, section: Element | None, n: int, offsets: str, values: str
) -> tuple[Array, Array]:
    """Values and (n + 1,) int64 offsets of a ragged array."""
    if not n:
        return no_rows()
    ends = file.values(_array(file, section, offsets), most=n + 1)
    if len(ends) == n + 1 and ends[0] == 0:
        ends = ends[1:]  # some writers store the leading zero
    if len(ends) != n:
        raise ReadError(f"{file.path}: {len(ends)} {offsets}, but the header declares {n} cells")
    out = np.zeros(n + 1, np.int64)
    out[1:] = ends
    return file.values(_array(file, section, values), most=max(0, int(out[-1]))), out


def _faces(file: XmlFile, cells: Element | None, n_cells: int) -> Faces | None:
    """Faces of polyhedra: four arrays since VTK 9.4, a face stream before."""
    names = {} if cells is None else {e.get("Name"): e for e in cells}
    if "face_connectivity" in names:
        return _new_faces(file, names, n_cells)
    if "faces" not in names or "faceoffsets" not in names:
        return None
    ends = file.values(names["faceoffsets"], n_cells).astype(np.int64)
    length = max(0, int(ends.max(initial=0)))
    stream = file.values(names["faces"], most=length).astype(np.int64)
    return faces_of_stream(stream, ends, str(file.path))


def _new_faces(file: XmlFile, names: Mapping[str | None, Element], n_cells: int) -> Faces | None:
    missing = {"face_offsets", "polyhedron_to_faces", "polyhedron_offsets"} - set(names)
    if missing:
        raise ReadError(f"{file.path}: the face array '{min(missing)}' is missing")
    per_cell = np.zeros(n_cells + 1, np.int64)
    per_cell[1:] = file.values(names["polyhedron_offsets"], n_cells)
    n_listed = max(0, int(per_cell[-1]))
    of = file.values(names["polyhedron_to_faces"], most=n_listed).astype(np.int64)
    if not len(of):
        return None
    most = max(int(of.max()) + 1, file.size)  # not all faces need belong to a cell
    offsets = np.append(0, file.values(names["face_offsets"], most=most).astype(np.int64))
    ids = file.values(names["face_connectivity"], most=max(0, int(offsets[-1])))
    return listed_faces(of, per_cell, offsets, ids, str(file.path))


def _points(file: XmlFile, piece: Element, n: int) -> Array:
    """(n, 3) coordinates."""
    section = piece.find("Points")
    array = None if section is None else section.find("DataArray")
    if array is None:
        if n:
            raise ReadError(f"{file.path}: {n} points are declared, but have no coordinates")
        return np.zeros((0, 3), np.float32)
    return file.values(array, 3 * n).reshape(n, 3)


def _fields(file: XmlFile, section: Element | None, n: int, kind: str) -> dict[str, Array]:
    """Numeric arrays of a section, in file order; others are left out with a warning."""
    out: dict[str, Array] = {}
    for i, array in enumerate(section if section is not None else ()):
        name = field_name(array.get("Name"), i, out, kind, str(file.path))
        if array.get("type") == "String" or array.tag != "DataArray":
            warn(f"{file.path}: {kind} array '{name}' is not numeric, left out")
            continue
        width = _count(array, "NumberOfComponents", file.path) or 1
        values = file.values(array, n * width)
        out[name] = values.reshape(n, width) if width > 1 else values
    return out


def _grid(file: XmlFile, body: Element, piece: Element) -> Dataset:
    """Structured, rectilinear and image data: the cells follow from the extent."""
    low, high = np.array(_integers(piece, "Extent", 6, file.path)).reshape(3, 2).T
    shape = [int(v) for v in high - low + 1]
    n = int(np.prod([float(max(0, s)) for s in shape]))
    axes = [max(0, s - 1) for s in shape if s > 1]
    n_cells = int(np.prod([float(a) for a in axes])) if axes and n else 0
    points = _fields(file, piece.find("PointData"), n, "point")
    cells = _fields(file, piece.find("CellData"), n_cells, "cell")
    explicit = piece.find("Points") is not None
    if not (points or cells or explicit) and n > MAX_IMPLICIT_POINTS:
        raise ReadError(f"{file.path}: it declares {n} structured points without any array")
    if n == 0:
        return Dataset(np.zeros((0, 3), np.float32))
    where = _points(file, piece, n) if explicit else _lattice(file, body, piece, low, shape)
    connectivity, offsets, types = structured_cells(shape)
    return Dataset(where, connectivity, offsets, types, None, points, cells)


def _lattice(file: XmlFile, body: Element, piece: Element, low: Array, shape: list[int]) -> Array:
    """(n, 3) points of a rectilinear grid or an image; x varies fastest."""
    coordinates = piece.find("Coordinates")
    if coordinates is not None:
        return lattice([file.values(a, n) for a, n in zip(coordinates, shape, strict=True)])
    origin, spacing, turn = (
        np.array([_number(word, file.path) for word in body.get(key, default).split()])
        for key, default in IMAGE.items()
    )
    if (len(origin), len(spacing), len(turn)) != (3, 3, 9):
        raise ReadError(f"{file.path}: Origin, Spacing or Direction of the image is damaged")
    steps = [np.arange(lo, lo + s) for lo, s in zip(low, shape, strict=True)]
    flat = lattice([s * h for s, h in zip(steps, spacing, strict=True)])
    return np.asarray(flat @ turn.reshape(3, 3).T + origin)


_KINDS = {
    "PolyData": _polydata,
    "UnstructuredGrid": _unstructured,
    "StructuredGrid": _grid,
    "RectilinearGrid": _grid,
    "ImageData": _grid,
}
