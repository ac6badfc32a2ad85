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
from meshshard.mesh.checks import warn
from meshshard.mesh.ragged import no_rows, offsets_of

__all__ = ["read_ply"]

TYPES = {
    "char": "i1", "uchar": "u1", "short": "i2", "ushort": "u2", "int": "i4", "uint": "u4",
    "float": "f4", "double": "f8", "int8": "i1", "uint8": "u1", "int16": "i2", "uint16": "u2",
    "int32": "i4", "uint32": "u4", "float32": "f4", "float64": "f8",
}  # fmt: skip
BYTE_ORDERS = {"ascii": "", "binary_little_endian": "<", "binary_big_endian": ">"}
VECTORS = {"Normals": ("nx", "ny", "nz"), "RGB": ("red", "green", "blue")}


class _Property(NamedTuple):
    """A property: dtype of its values, and for a list dtype of its count ("" for a scalar)."""

    name: str
    dtype: str
    count_dtype: str


class _Element(NamedTuple):
    """An element of the header: name, number of rows and properties of a row."""

    name: str
    n: int
    properties: list[_Property]


class _Columns(NamedTuple):
    """Columns of an element: scalars by name, and the point ids of its polygons in CSR form."""

    scalars: dict[str, Array]
    ids: Array
    offsets: Array


class _Layout(NamedTuple):
    """Byte offsets of the rows (n,), of the counts of their lists (n, n_lists), and of the end."""

    rows: Array
    counts: Array
    end: int


def read_ply(path: Path) -> list[Dataset]:
    """Points, polygons and every scalar property of a PLY file.

    Raises:
        ReadError: the header or the data are damaged.
    """
    file = Scanner(path)
    byte_order, elements = _header(file)
    if not byte_order:
        file = Scanner(path, file.floats().tobytes())
    if other := [e.name for e in elements if e.n and e.name not in ("vertex", "face")]:
        warn(f"{path}: elements left out: {', '.join(other)}; only vertex and face are read")
    read = {element.name: _read_element(file, byte_order, element) for element in elements}
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
    """The byte order ("<" or ">", "" for ascii) and the elements."""
    formats: list[str] = []
    elements: list[_Element] = []
    while (words := file.line()) != ["end_header"]:
        try:
            _header_line(words, formats, elements)
        except (ValueError, KeyError, IndexError) as error:
            line = " ".join(words)[:60]
            raise ReadError(f"{file.path}: PLY header: '{line}' is damaged: {error}") from None
    if not formats or any(element.n < 0 for element in elements):
        raise ReadError(
            f"{file.path}: PLY header: no format line, or an element with a negative count; "
            "export the file again"
        )
    return formats[-1], elements


def _header_line(words: list[str], formats: list[str], elements: list[_Element]) -> None:
    if not words:
        raise ValueError("no end_header (truncated?)")
    if words[0] == "format":
        formats.append(BYTE_ORDERS[words[1]])
    elif words[0] == "element":
        elements.append(_Element(words[1], int(words[2]), []))
    elif words[0] == "property":
        _add_property(words, elements[-1].properties)


def _add_property(words: list[str], properties: list[_Property]) -> None:
    is_list = words[1] == "list"
    name = words[4 if is_list else 2]
    count_dtype, dtype = (TYPES[w] for w in words[2:4]) if is_list else ("", TYPES[words[1]])
    if name in [p.name for p in properties]:
        raise ValueError(f"two properties are called '{name}'")
    properties.append(_Property(name, dtype, count_dtype))


def _read_element(file: Scanner, byte_order: str, element: _Element) -> _Columns:
    """Read the columns of an element, and advance the file past it."""
    try:
        layout = _layout(file.data, file.at, byte_order, element)
        file.at = layout.end
        return _parse(file.data, byte_order, element.properties, layout)
    except (struct.error, IndexError, ValueError):
        raise ReadError(
            f"{file.path}: truncated or damaged in the element '{element.name}'; "
            "copy or export the file again"
        ) from None


def _layout(data: bytes, at: int, byte_order: str, element: _Element) -> _Layout:
    """Byte offsets of the rows and counts of an element.

    If the lists of all rows are as long as those of the first row, all rows have the same size and
    the offsets are computed at once; otherwise row by row.

    Raises:
        ValueError, IndexError, struct.error: the data end too early, or a count is negative or not
            a whole number.
    """
    n, properties = element.n, element.properties
    first = _layout_by_row(data, at, byte_order, properties, min(n, 1))
    size = first.end - at
    if n * size <= len(data) - at:
        rows = at + np.arange(n if size else 0) * size
        counts = first.counts + (rows - at)[:, None]
        dtypes = [_dtype(byte_order, p.count_dtype) for p in properties if p.count_dtype]
        columns = [_values(data, *pair)[:, 0] for pair in zip(counts.T, dtypes, strict=True)]
        if all((column == column[:1]).all() for column in columns):
            return _Layout(rows, counts, at + n * size)
    return _layout_by_row(data, at, byte_order, properties, n)


def _layout_by_row(
    data: bytes, at: int, byte_order: str, properties: list[_Property], n: int
) -> _Layout:
    """`_layout` of `n` rows, computed row by row."""
    # a list: bytes before it, reader of its count, bytes of the count, bytes of a value
    lists, skip, min_size = [], 0, 0
    for p in properties:
        value_size, count_size = _dtype(byte_order, p.dtype).itemsize, 0
        if p.count_dtype:
            count_size = _dtype(byte_order, p.count_dtype).itemsize
            lists.append(
                (skip, _count_reader(data, byte_order, p.count_dtype), count_size, value_size)
            )
        skip = 0 if p.count_dtype else skip + value_size
        min_size += count_size or value_size
    if n * min_size > len(data) - at:
        raise ValueError("more rows than the data can hold")
    rows, counts = array("q"), array("q")
    for _ in range(n):
        rows.append(at)
        for before, read_count, count_size, value_size in lists:
            at += before
            counts.append(at)
            n_values = read_count(at)
            if n_values < 0:
                raise ValueError("a count is negative or not a whole number")
            at += count_size + n_values * value_size
        at += skip
    if at > len(data):
        raise ValueError("the last row is truncated")
    return _Layout(np.array(rows), np.array(counts).reshape(n, len(lists)), at)


def _count_reader(data: bytes, byte_order: str, dtype: str) -> Callable[[int], int]:
    """A function that reads the count at a byte offset; -1 if it is not a whole number."""
    if not byte_order:
        numbers = memoryview(data).cast("d")
        return lambda at: int(x) if (x := numbers[at >> 3]).is_integer() else -1
    if dtype == "u1":
        return data.__getitem__
    read = struct.Struct(byte_order + np.dtype(dtype).char).unpack_from
    return lambda at: int(read(data, at)[0])


def _parse(data: bytes, byte_order: str, properties: list[_Property], layout: _Layout) -> _Columns:
    """All scalars, and the list of point ids."""
    scalars: dict[str, Array] = {}
    polygons = no_rows()
    lists = [p for p in properties if p.count_dtype]
    point_ids = next((p for p in lists if p.name.startswith("vertex_ind")), None)
    at, counts = layout.rows, iter(layout.counts.T)
    for p in properties:
        dtype = _dtype(byte_order, p.dtype)
        if not p.count_dtype:
            scalars[p.name] = _as_type(_values(data, at, dtype)[:, 0], p.dtype)
            at = at + dtype.itemsize
            continue
        count_dtype, count_at = _dtype(byte_order, p.count_dtype), next(counts)
        count = _values(data, count_at, count_dtype)[:, 0].astype(np.int64)
        at = count_at + count_dtype.itemsize
        if p is point_ids:
            polygons = _ragged(data, at, count, dtype)
        at = at + count * dtype.itemsize
    return _Columns(scalars, *polygons)


def _as_type(values: Array, dtype: str) -> Array:
    """Values as `dtype`; the numbers of an ascii file may not fit."""
    if values.dtype.kind == "f" and dtype[0] in "iu":
        limits = np.iinfo(dtype)
        if not ((values >= limits.min) & (values <= limits.max)).all():
            raise ValueError(f"a value does not fit {dtype}")
    return values.astype(dtype)


def _ragged(data: bytes, at: Array, counts: Array, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Lists of `counts` ids that start at the byte offsets `at`, in CSR form: (ids, offsets)."""
    offsets = offsets_of(counts)
    ids = np.empty(offsets[-1], np.int64)
    for width in np.flatnonzero(np.bincount(counts)).tolist():
        rows = np.flatnonzero(counts == width)
        values = _values(data, at[rows], dtype, width)
        ids[offsets[rows][:, None] + np.arange(width)] = _to_int64(values)
    return ids, offsets


def _values(data: bytes, at: Array, dtype: np.dtype[Any], width: int = 1) -> Array:
    """(n, width) values: `width` consecutive ones from each byte offset in `at` (n,)."""
    room = len(data) - width * dtype.itemsize + 1
    return np.ndarray((max(room, 0), width), dtype, data, 0, (1, dtype.itemsize))[at]


def _to_int64(ids: Array) -> Array:
    """The ids as int64.

    Raises:
        ValueError: some are not whole numbers.
    """
    with np.errstate(invalid="ignore"):
        out = ids.astype(np.int64)
    if ids.dtype.kind == "f" and (out != ids).any():
        raise ValueError("a point id is not a whole number")
    return out


def _dtype(byte_order: str, dtype: str) -> np.dtype[Any]:
    return np.dtype(byte_order + dtype if byte_order else "f8")
