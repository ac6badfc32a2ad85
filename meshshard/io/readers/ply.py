"""PLY files, ascii and binary.

The numbers of an ascii file are converted to binary float64, so that both are parsed the same way.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshshard.errors import ReadError
from meshshard.io.dataset import Dataset
from meshshard.io.readers.scanner import Scanner
from meshshard.mesh import Array
from meshshard.mesh.cells import POLYGON
from meshshard.mesh.ragged import no_rows, offsets_of

__all__ = ["read_ply"]

TYPES = {
    "char": "i1", "uchar": "u1", "short": "i2", "ushort": "u2", "int": "i4", "uint": "u4",
    "float": "f4", "double": "f8", "int8": "i1", "uint8": "u1", "int16": "i2", "uint16": "u2",
    "int32": "i4", "uint32": "u4", "float32": "f4", "float64": "f8",
}  # fmt: skip
CODINGS = {"ascii": "", "binary_little_endian": "<", "binary_big_endian": ">"}
VECTORS = {"Normals": ("nx", "ny", "nz"), "RGB": ("red", "green", "blue")}


class _Property(NamedTuple):
    """One property: its type, and for a list the type of its count (empty for a scalar)."""

    name: str
    kind: str
    length: str


class _Element(NamedTuple):
    """One element of the header: `n` rows of these properties."""

    name: str
    n: int
    properties: list[_Property]


class _Columns(NamedTuple):
    """Scalars of an element by name; the corners of its rows (CSR), if it has any."""

    scalars: dict[str, Array]
    ids: Array
    offsets: Array


class _Places(NamedTuple):
    """Positions of the rows (n,), of the counts of their lists (n, n_lists), and of the end."""

    rows: Array
    counts: Array
    end: int


def read_ply(path: Path) -> list[Dataset]:
    """Points, polygons and every scalar property of a PLY file.

    Raises:
        ReadError: the header or the data are damaged.
    """
    file = Scanner(path)
    coding, elements = _header(file)
    if not coding:
        file = Scanner(path, file.floats().tobytes())
    read = {element.name: _columns(file, coding, element) for element in elements}
    none = _Columns({}, *no_rows())
    points, faces = read.get("vertex", none).scalars, read.get("face", none)
    missing = {"x", "y", "z"} - set(points)
    if missing:
        raise ReadError(f"{path}: no points: the vertex element lacks {sorted(missing)}")
    coordinates = np.column_stack([points.pop(axis) for axis in "xyz"])
    for name, parts in VECTORS.items():
        if all(part in points for part in parts):
            points[name] = np.column_stack([points.pop(part) for part in parts])
    types = np.full(len(faces.offsets) - 1, POLYGON, np.uint8)
    return [Dataset(coordinates, faces.ids, faces.offsets, types, None, points, faces.scalars)]


def _header(file: Scanner) -> tuple[str, list[_Element]]:
    """The sign of the byte order (empty for ascii), and the elements."""
    formats: list[str] = []
    elements: list[_Element] = []
    while (words := file.line()) != ["end_header"]:
        try:
            _header_line(words, formats, elements)
        except (ValueError, KeyError, IndexError) as error:
            line = " ".join(words)[:60]
            raise ReadError(f"{file.path}: PLY header: '{line}' is damaged: {error}") from None
    if not formats or any(element.n < 0 for element in elements):
        raise ReadError(f"{file.path}: PLY header: no format, or a negative count")
    return formats[-1], elements


def _header_line(words: list[str], formats: list[str], elements: list[_Element]) -> None:
    if not words:
        raise ValueError("no end_header (truncated?)")
    if words[0] == "format":
        formats.append(CODINGS[words[1]])
    elif words[0] == "element":
        elements.append(_Element(words[1], int(words[2]), []))
    elif words[0] == "property":
        _add_property(words, elements[-1].properties)


def _add_property(words: list[str], properties: list[_Property]) -> None:
    is_list = words[1] == "list"
    name = words[4 if is_list else 2]
    length, kind = (TYPES[w] for w in words[2:4]) if is_list else ("", TYPES[words[1]])
    if name in [p.name for p in properties]:
        raise ValueError(f"two properties are called '{name}'")
    properties.append(_Property(name, kind, length))


def _columns(file: Scanner, coding: str, element: _Element) -> _Columns:
    """The columns of an element; advances the file past it."""
    try:
        places = _places(file.data, file.at, coding, element)
        file.at = places.end
        return _split(file.data, coding, element.properties, places)
    except (struct.error, IndexError, ValueError):
        raise ReadError(
            f"{file.path}: truncated within the element '{element.name}', or damaged there"
        ) from None


def _places(data: bytes, at: int, coding: str, element: _Element) -> _Places:
    """Where rows and counts are: at once if all rows have the counts of the first, else a walk.

    Raises:
        ValueError, IndexError, struct.error: the data end before, or a count is not a count.
    """
    n, properties = element.n, element.properties
    first = _walk(data, at, coding, properties, min(n, 1))
    size = first.end - at
    if n * size <= len(data) - at:
        rows = at + np.arange(n if size else 0) * size
        counts = first.counts + (rows - at)[:, None]
        lengths = [_dtype(coding, p.length) for p in properties if p.length]
        columns = [_values(data, *pair)[:, 0] for pair in zip(counts.T, lengths, strict=True)]
        if all((column == column[:1]).all() for column in columns):
            return _Places(rows, counts, at + n * size)
    return _walk(data, at, coding, properties, n)


def _walk(data: bytes, at: int, coding: str, properties: list[_Property], n: int) -> _Places:
    """`_places` of `n` rows, row by row."""
    steps, skip, least = [], 0, 0
    for p in properties:
        size, length = _dtype(coding, p.kind).itemsize, 0
        if p.length:
            length = _dtype(coding, p.length).itemsize
            steps.append((skip, _counter(data, coding, p.length), length, size))
        skip = 0 if p.length else skip + size
        least += length or size
    if n * least > len(data) - at:
        raise ValueError("more rows than the data can hold")
    rows, counts = array("q"), array("q")
    for _ in range(n):
        rows.append(at)
        for before, count, length, size in steps:
            at += before
            counts.append(at)
            n_values = count(at)
            if n_values < 0:
                raise ValueError("not a count")
            at += length + n_values * size
        at += skip
    if at > len(data):
        raise ValueError("the last row is cut")
    return _Places(np.array(rows), np.array(counts).reshape(n, len(steps)), at)


def _counter(data: bytes, coding: str, kind: str) -> Callable[[int], int]:
    """A function that reads the count at a position; negative if it is not a whole number."""
    if not coding:
        numbers = memoryview(data).cast("d")
        return lambda at: int(x) if (x := numbers[at >> 3]).is_integer() else -1
    if kind == "u1":
        return data.__getitem__
    read = struct.Struct(coding + np.dtype(kind).char).unpack_from
    return lambda at: int(read(data, at)[0])


def _split(data: bytes, coding: str, properties: list[_Property], places: _Places) -> _Columns:
    """All scalars, and the list of the corners."""
    scalars: dict[str, Array] = {}
    corners = no_rows()
    lists = [p for p in properties if p.length]
    wanted = next((p for p in lists if p.name.startswith("vertex_ind")), None)
    at, counts = places.rows, iter(places.counts.T)
    for p in properties:
        kind = _dtype(coding, p.kind)
        if not p.length:
            scalars[p.name] = _values(data, at, kind)[:, 0].astype(p.kind)
            at = at + kind.itemsize
            continue
        length, count_at = _dtype(coding, p.length), next(counts)
        count = _values(data, count_at, length)[:, 0].astype(np.int64)
        at = count_at + length.itemsize
        if p is wanted:
            corners = _ragged(data, at, count, kind)
        at = at + count * kind.itemsize
    return _Columns(scalars, *corners)


def _ragged(data: bytes, at: Array, counts: Array, kind: np.dtype[Any]) -> tuple[Array, Array]:
    """Concatenated ids of `counts` values from each of the given positions on; their offsets."""
    offsets = offsets_of(counts)
    ids = np.empty(offsets[-1], np.int64)
    for width in np.flatnonzero(np.bincount(counts)).tolist():
        rows = np.flatnonzero(counts == width)
        values = _values(data, at[rows], kind, width)
        ids[offsets[rows][:, None] + np.arange(width)] = _whole(values)
    return ids, offsets


def _values(data: bytes, at: Array, kind: np.dtype[Any], width: int = 1) -> Array:
    """(n, width) values from each of the given positions (n,) on."""
    room = len(data) - width * kind.itemsize + 1
    return np.ndarray((max(room, 0), width), kind, data, 0, (1, kind.itemsize))[at]


def _whole(ids: Array) -> Array:
    """The ids as int64.

    Raises:
        ValueError: some are not whole numbers.
    """
    with np.errstate(invalid="ignore"):
        out = ids.astype(np.int64)
    if ids.dtype.kind == "f" and (out != ids).any():
        raise ValueError("a corner that is not a whole number")
    return out


def _dtype(coding: str, kind: str) -> np.dtype[Any]:
    return np.dtype(coding + kind if coding else "f8")
