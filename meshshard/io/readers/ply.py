"""PLY files, ascii and binary.

The words of an ascii file are made a binary one of float64, so that both are taken apart alike.
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
from meshshard.mesh.ragged import offsets_of

__all__ = ["read_ply"]

TYPES = {
    "char": "i1", "uchar": "u1", "short": "i2", "ushort": "u2", "int": "i4", "uint": "u4",
    "float": "f4", "double": "f8", "int8": "i1", "uint8": "u1", "int16": "i2", "uint16": "u2",
    "int32": "i4", "uint32": "u4", "float32": "f4", "float64": "f8",
}  # fmt: skip
CODES = {"i1": "b", "u1": "B", "i2": "h", "u2": "H", "i4": "i", "u4": "I", "f4": "f", "f8": "d"}
CODINGS = {"ascii": "", "binary_little_endian": "<", "binary_big_endian": ">"}
NO_CORNERS = (np.zeros(0, np.int64), np.zeros(1, np.int64))
VECTORS = {"Normals": ("nx", "ny", "nz"), "RGB": ("red", "green", "blue")}


class _Property(NamedTuple):
    """One property: its type, and for a list that of its count, empty for a scalar."""

    name: str
    kind: str
    length: str


class _Element(NamedTuple):
    """One element of the header: `n` rows of these properties."""

    name: str
    n: int
    properties: list[_Property]


class _Columns(NamedTuple):
    """Scalars of an element by name; corners of its rows (CSR), where it has such a list."""

    scalars: dict[str, Array]
    ids: Array
    offsets: Array


def read_ply(path: Path) -> list[Dataset]:
    """Points, polygons and every scalar property of a PLY file.

    Raises:
        ReadError: the header or the data are damaged.
    """
    file = Scanner(path)
    coding, elements = _header(file)
    blank = _Columns({}, *NO_CORNERS)
    if not coding:
        file = Scanner(path, file.floats().tobytes())
    read = {element.name: _columns(file, coding, element) for element in elements}
    points, faces = read.get("vertex", blank).scalars, read.get("face", blank)
    missing = {"x", "y", "z"} - set(points)
    if missing:
        raise ReadError(f"{path}: no points: the vertex element lacks {sorted(missing)}")
    where = np.column_stack([points.pop(axis) for axis in "xyz"])
    for name, parts in VECTORS.items():
        if all(part in points for part in parts):
            points[name] = np.column_stack([points.pop(part) for part in parts])
    types = np.full(len(faces.offsets) - 1, 7, np.uint8)
    return [Dataset(where, faces.ids, faces.offsets, types, None, points, faces.scalars)]


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
    lists = [i for i, p in enumerate(element.properties) if p.length]
    if not lists:
        rows = _take(file, coding, element.n, _row(coding, element.properties), element.name)
        return _of_rows(rows, element.properties, None)
    even = _even(file, coding, element, lists[0]) if len(lists) == 1 else None
    return even or _uneven(file, coding, element)


def _kind(coding: str, kind: str) -> np.dtype[Any]:
    return np.dtype(coding + kind if coding else "f8")


def _row(coding: str, properties: list[_Property]) -> np.dtype[np.void]:
    """A row of scalars and of the counts of lists, in fields called by their place."""
    return np.dtype([(f"{i}", _kind(coding, p.length or p.kind)) for i, p in enumerate(properties)])


def _take(file: Scanner, coding: str, n: int, row: np.dtype[np.void], what: str) -> Array:
    """The next `n` rows."""
    if n * row.itemsize > len(file.data) - file.at:
        raise ReadError(f"{file.path}: truncated within the element {what}, or its header lies")
    return file.binary(n, row, what)


def _of_rows(rows: Array, properties: list[_Property], ids: Array | None) -> _Columns:
    """Columns from rows of one layout, with (n, width) corners."""
    scalars = {
        p.name: rows[f"{i}"].astype(p.kind) for i, p in enumerate(properties) if not p.length
    }
    if ids is None:
        return _Columns(scalars, *NO_CORNERS)
    n, width = ids.shape
    return _Columns(scalars, _whole(ids).ravel(), np.arange(n + 1, dtype=np.int64) * width)


def _whole(ids: Array) -> Array:
    """As int64.

    Raises:
        ValueError: not all of them are whole numbers.
    """
    with np.errstate(invalid="ignore"):
        out = ids.astype(np.int64)
    if ids.dtype.kind == "f" and (out != ids).any():
        raise ValueError("a corner that is no whole number")
    return out


def _corners_of(element: _Element) -> _Property | None:
    """The list that holds the corners of a face."""
    lists = (p for p in element.properties if p.length)
    return next((p for p in lists if p.name.startswith("vertex_ind")), None)


def _even(file: Scanner, coding: str, element: _Element, place: int) -> _Columns | None:
    """The element at once where its one list is as long in every row as in the first."""
    if not element.n or _corners_of(element) is not element.properties[place]:
        return None
    begin, fields = file.at, _row(coding, element.properties).descr
    try:
        first = _take(file, coding, 1, np.dtype(fields[: place + 1]), element.name)
        width, file.at = int(first[f"{place}"][0]), begin
        corners = ("ids", _kind(coding, element.properties[place].kind), (max(width, 0),))
        row = np.dtype([*fields[: place + 1], corners, *fields[place + 1 :]])
        rows = _take(file, coding, element.n, row, element.name)
        if (rows[f"{place}"] == width).all():
            return _of_rows(rows, element.properties, rows["ids"])
    except (ReadError, ValueError, OverflowError):
        pass
    file.at = begin
    return None


class _List(NamedTuple):
    """A list property, the scalars between it and the list before, and the bytes of these."""

    property: _Property
    scalars: list[_Property]
    skip: int


def _lists(coding: str, properties: list[_Property]) -> tuple[list[_List], _List]:
    """The lists of an element; the scalars behind the last one stand before one of no name."""
    out: list[_List] = []
    scalars: list[_Property] = []
    for p in (*properties, _Property("", "u1", "u1")):
        if p.length:
            out.append(_List(p, scalars, sum(_kind(coding, s.kind).itemsize for s in scalars)))
            scalars = []
        else:
            scalars.append(p)
    return out[:-1], out[-1]


def _uneven(file: Scanner, coding: str, element: _Element) -> _Columns:
    """The element with rows of any length: a walk finds the counts of its lists."""
    lists, tail = _lists(coding, element.properties)
    try:
        places, file.at = _walk(file, coding, element.n, lists, tail.skip)
        return _apart(file.data, coding, [*lists, tail], places, _corners_of(element))
    except (struct.error, IndexError, ValueError):
        raise ReadError(
            f"{file.path}: truncated within the element {element.name}, or damaged there"
        ) from None


def _apart(
    data: bytes, coding: str, parts: list[_List], places: Array, wanted: _Property | None
) -> _Columns:
    """All scalars and the list `wanted`, from the places of the counts."""
    scalars, corners = {}, NO_CORNERS
    at = places[:, 0] - parts[0].skip
    for part, place in zip(parts, (*places.T, None), strict=True):
        for p in part.scalars:
            scalars[p.name] = _at(data, at, _kind(coding, p.kind))[:, 0].astype(p.kind)
            at = at + _kind(coding, p.kind).itemsize
        if place is None:
            break
        length, kind = _kind(coding, part.property.length), _kind(coding, part.property.kind)
        counts = _at(data, place, length)[:, 0].astype(np.int64)
        at = place + length.itemsize
        if part.property is wanted:
            corners = _ragged(data, at, counts, kind)
        at = at + counts * kind.itemsize
    return _Columns(scalars, *corners)


def _walk(file: Scanner, coding: str, n: int, lists: list[_List], tail: int) -> tuple[Array, int]:
    """(n, n_lists) where the counts lie, and where the last row ends."""
    places, at = array("q"), file.at
    steps = [
        (
            part.skip,
            _counter(file.data, coding, part.property.length),
            _kind(coding, part.property.length).itemsize,
            _kind(coding, part.property.kind).itemsize,
        )
        for part in lists
    ]
    for _ in range(n):
        for skip, count, size, item in steps:
            at += skip
            length = count(at)
            if length < 0:
                raise ValueError("a count that is none")
            places.append(at)
            at += size + length * item
        at += tail
    if at > len(file.data):
        raise ValueError("the last row is cut")
    return np.array(places, np.int64).reshape(n, len(lists)), at


def _counter(data: bytes, coding: str, kind: str) -> Callable[[int], int]:
    """What reads the count at a byte; it is negative where it is no count."""
    if kind == "u1" and coding:
        return data.__getitem__
    if coding:
        read = struct.Struct(coding + CODES[kind]).unpack_from
        return lambda at: int(read(data, at)[0])
    numbers = np.frombuffer(data)
    whole = (numbers >= 0) & (numbers <= len(data)) & (numbers % 1 == 0)
    counts = np.where(whole, numbers, -1).astype(np.int64).data
    return lambda at: counts[at >> 3]


def _at(data: bytes, at: Array, kind: np.dtype[Any], width: int = 1) -> Array:
    """(n, width) values that lie from each of the given bytes (n,) on."""
    room = len(data) - width * kind.itemsize + 1
    return np.ndarray((max(room, 0), width), kind, data, 0, (1, kind.itemsize))[at]


def _ragged(data: bytes, at: Array, counts: Array, kind: np.dtype[Any]) -> tuple[Array, Array]:
    """`counts` values from each of the given bytes on, one run after the other; their offsets."""
    offsets = offsets_of(counts)
    ids = np.empty(offsets[-1], np.int64)
    for width in np.flatnonzero(np.bincount(counts)).tolist():
        rows = np.flatnonzero(counts == width)
        ids[offsets[rows][:, None] + np.arange(width)] = _whole(_at(data, at[rows], kind, width))
    return ids, offsets
