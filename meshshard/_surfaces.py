"""Surfaces of the drawing world: STL, PLY and OBJ, read with numpy alone."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshshard._checks import warn
from meshshard._datasets import Dataset
from meshshard._ragged import offsets_of
from meshshard._text import Scanner, parse_numbers
from meshshard.errors import ReadError
from meshshard.mesh import Array

__all__ = ["merge_points", "read_obj", "read_ply", "read_stl"]


FACET = np.dtype([("normal", "<f4", 3), ("corners", "<f4", (3, 3)), ("attribute", "<u2")])
_STL_FACET = b"factnormaloutrloopvrtxvrtxvrtxndloopndfact"  # a facet without e, space and numbers


def merge_points(points: Array) -> tuple[Array, Array]:
    """Exactly equal points made one.

    Args:
        points: (n, 3) coordinates; -0 equals 0.

    Returns:
        The rows kept, ascending (m,), and for each point its place among them (n,).
    """
    rows = np.ascontiguousarray(points + 0.0)
    bits = rows.view(np.uint32 if rows.itemsize == 4 else np.uint64).astype(np.uint64)
    key = bits[:, 0] * np.uint64(0x9E3779B97F4A7C15)
    for axis in (1, 2):
        key = (key ^ (key >> np.uint64(29)) ^ bits[:, axis]) * np.uint64(0xBF58476D1CE4E5B9)
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    if not np.array_equal(bits[first[inverse]], bits):  # two places with one hash
        whole = rows.view(np.dtype((np.void, rows.itemsize * 3))).ravel()
        _, first, inverse = np.unique(whole, return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return first[order], place[inverse]


def read_stl(path: Path) -> list[Dataset]:
    """The triangles of an STL file, exactly equal corners merged; one leaf a named solid.

    Raises:
        ReadError: the count is wrong, a facet is no triangle, or the text ends early.
    """
    data = path.read_bytes()
    declared = int.from_bytes(data[80:84], "little")
    if len(data) >= 84 and len(data) == 84 + FACET.itemsize * declared:
        corners = np.frombuffer(data, FACET, declared, 84)["corners"].reshape(-1, 3)
        solids = [("", corners)]
    elif data.lstrip()[:5].lower() == b"solid" and b"\0" not in data[:512]:
        solids = _ascii_solids(data, path)
    else:
        present = max(0, len(data) - 84) // FACET.itemsize
        raise ReadError(
            f"{path}: declares {declared} triangles, {present} are there: truncated or no STL file"
        )
    if not any(len(corners) for _, corners in solids):
        raise ReadError(f"{path}: empty: no triangle in it")
    return [_triangles(name, corners, len(solids)) for name, corners in solids if len(corners)]


def _triangles(name: str, corners: Array, n_solids: int) -> Dataset:
    kept, ids = merge_points(corners)
    n = len(ids) // 3
    return Dataset(
        corners[kept],
        ids,
        np.arange(n + 1, dtype=np.int64) * 3,
        np.full(n, 7, np.uint8),
        block=name if n_solids > 1 else "",
    )


def _ascii_solids(data: bytes, path: Path) -> list[tuple[str, Array]]:
    """Names and corners (3 m, 3) of the solids in an ascii file."""
    solids: list[tuple[str, Array]] = []
    name, begin = None, 0
    word = re.escape(data.lstrip()[:5])  # in the case it has: a literal is found fast
    for match in re.finditer(word + rb"([^\n]*)", data):
        if data[match.start() - 3 : match.start()].lower() != b"end":
            if name is not None:
                raise ReadError(f"{path}: the solid '{name}' has no endsolid: truncated")
            name = match[1].decode("utf-8", "replace").strip() or f"solid {len(solids)}"
            begin = match.end()
        elif name is None:
            raise ReadError(f"{path}: endsolid without a solid")
        else:
            line = data.count(b"\n", 0, begin) + 1
            solids.append((name, _corners(data[begin : match.start() - 3], line, path)))
            name = None
    if name is not None:
        raise ReadError(f"{path}: truncated: the solid '{name}' has no endsolid")
    return _distinct(solids)


def _corners(body: bytes, line: int, path: Path) -> Array:
    """(3 m, 3) corners of the m facets between solid and endsolid.

    What remains of a facet without its numbers is always the same: one comparison proves all.
    """
    lower = body if b"FACET" not in body and b"Facet" not in body else body.lower()
    n = lower.count(b"endfacet")
    if lower.translate(None, b"0123456789+-.eE \t\r\n") == _STL_FACET * n:
        try:
            numbers = parse_numbers(_without_words(lower), np.float64)
        except ValueError:
            numbers = np.empty(0)
        if len(numbers) == 12 * n:
            return np.ascontiguousarray(numbers.reshape(n, 4, 3)[:, 1:]).reshape(-1, 3)
    return _corners_by_line(lower, line, path)


def _without_words(text: bytes) -> bytes:
    """Blanks in place of all letters but the e of an exponent, which follows a digit or point."""
    letters = np.frombuffer(text, np.uint8).copy()
    word = letters >= ord("A")
    exponent = letters == ord("e")
    exponent[1:] &= ~word[:-1] & (letters[:-1] > ord("-"))
    letters[word & ~exponent] = ord(" ")
    return letters.tobytes()


def _corners_by_line(body: bytes, line: int, path: Path) -> Array:
    """`_corners` for a solid that is damaged or odd: slower, and says where."""
    rows: list[list[float]] = []
    first = 0
    for number, text in enumerate(body.split(b"\n"), line):
        words = text.split()
        if words[:1] == [b"facet"]:
            first = len(rows)
        elif words[:1] == [b"vertex"]:
            try:
                x, y, z = (float(word) for word in words[1:])
            except ValueError:
                raise ReadError(f"{path}: line {number}: a vertex is three numbers") from None
            rows.append([x, y, z])
        elif words[:1] == [b"endfacet"] and len(rows) - first != 3:
            raise ReadError(f"{path}: line {number}: the facet has {len(rows) - first} vertices")
    if len(rows) % 3:
        raise ReadError(f"{path}: the facets from line {line} on have {len(rows)} vertices")
    return np.array(rows, np.float64).reshape(-1, 3)


def _distinct(solids: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Number solids that share a name, so that they stay apart."""
    seen: dict[str, int] = {}
    out = []
    for name, rows in solids:
        seen[name] = seen.get(name, 0) + 1
        out.append((name if seen[name] == 1 else f"{name} ({seen[name]})", rows))
    return out


class _Property(NamedTuple):
    name: str
    kind: str
    length: str  # type of the count of a list, empty for a scalar


PLY_TYPES = {
    "char": "i1", "uchar": "u1", "short": "i2", "ushort": "u2", "int": "i4", "uint": "u4",
    "float": "f4", "double": "f8", "int8": "i1", "uint8": "u1", "int16": "i2", "uint16": "u2",
    "int32": "i4", "uint32": "u4", "float32": "f4", "float64": "f8",
}  # fmt: skip
VECTORS = {"Normals": ("nx", "ny", "nz"), "RGB": ("red", "green", "blue")}


def read_ply(path: Path) -> list[Dataset]:
    """Points, polygons and every scalar property of a PLY file.

    Raises:
        ReadError: the header or the data are damaged.
    """
    file = Scanner(path)
    coding, elements = _ply_header(file)
    points: dict[str, Array] = {}
    cells: dict[str, Array] = {}
    ids, offsets = np.zeros(0, np.int64), np.zeros(1, np.int64)
    for name, n, properties in elements:
        if not any(p.length for p in properties):
            columns = _ply_columns(file, coding, n, properties, name)
        else:
            columns, ids_here, offsets_here = _ply_lists(file, coding, n, properties, name)
            if name == "face":
                ids, offsets = ids_here, offsets_here
        points, cells = (
            (columns if name == "vertex" else points),
            (columns if name == "face" else cells),
        )
    missing = {"x", "y", "z"} - set(points)
    if missing:
        raise ReadError(f"{path}: no points: the vertex element lacks {sorted(missing)}")
    where = np.column_stack([points.pop(axis) for axis in "xyz"])
    for name, parts in VECTORS.items():
        if all(part in points for part in parts):
            points[name] = np.column_stack([points.pop(part) for part in parts])
    types = np.full(len(offsets) - 1, 7, np.uint8)
    return [Dataset(where, ids, offsets, types, None, points, cells)]


def _ply_header(file: Scanner) -> tuple[str, list[tuple[str, int, list[_Property]]]]:
    coding, elements = "", list[tuple[str, int, list[_Property]]]()
    while (words := file.line()) != ["end_header"]:
        try:
            if not words:
                raise ValueError("no end_header (truncated?)")
            if words[0] == "format":
                coding = {"ascii": "a", "binary_little_endian": "<", "binary_big_endian": ">"}[
                    words[1]
                ]
            elif words[0] == "element":
                elements.append((words[1], int(words[2]), []))
            elif words[0] == "property" and words[1] == "list":
                elements[-1][2].append(
                    _Property(words[4], PLY_TYPES[words[3]], PLY_TYPES[words[2]])
                )
            elif words[0] == "property":
                elements[-1][2].append(_Property(words[2], PLY_TYPES[words[1]], ""))
        except (ValueError, KeyError, IndexError) as error:
            line = " ".join(words)[:60]
            raise ReadError(f"{file.path}: PLY header: '{line}' is damaged: {error}") from None
    if not coding or any(n < 0 for _, n, _ in elements):
        raise ReadError(f"{file.path}: PLY header: no format, or a negative count")
    return coding, elements


def _ply_columns(
    file: Scanner, coding: str, n: int, properties: list[_Property], name: str
) -> dict[str, Array]:
    """Columns of an element without lists."""
    if coding == "a":
        table = file.ascii(n * len(properties), np.float64, name).reshape(n, len(properties))
        return {p.name: table[:, i].astype(p.kind) for i, p in enumerate(properties)}
    try:
        row = np.dtype([(p.name, coding + p.kind) for p in properties])
    except ValueError as error:
        raise ReadError(f"{file.path}: PLY element {name}: {error}") from None
    rows = file.binary(n, row, name)
    return {p.name: np.ascontiguousarray(rows[p.name]) for p in properties}


def _ply_lists(
    file: Scanner, coding: str, n: int, properties: list[_Property], name: str
) -> tuple[dict[str, Array], Array, Array]:
    """Scalar columns of an element, and its list (the corners of faces): values and offsets."""
    even = _ply_even(file, coding, n, properties, name)
    if even is not None:
        return even
    scalars: dict[str, list[float]] = {p.name: [] for p in properties if not p.length}
    counts: list[int] = []
    ids: list[int] = []
    corner = _ply_corners(properties)
    take = _ascii_taker(file, name) if coding == "a" else _binary_taker(file, coding, name)
    for _ in range(n):
        for p in properties:
            if not p.length:
                scalars[p.name].extend(take(p.kind, 1))
                continue
            count = int(take(p.length, 1)[0])
            values = take(p.kind, count)
            if p.name == corner:
                counts.append(count)
                ids.extend(values)
    kinds = {p.name: p.kind for p in properties}
    columns = {key: np.array(values, kinds[key]) for key, values in scalars.items()}
    return columns, np.array(ids, np.int64), offsets_of(np.array(counts, np.int64))


def _ply_corners(properties: list[_Property]) -> str:
    """The name of the list that holds the corners of a face."""
    return next((p.name for p in properties if p.name.startswith("vertex_ind")), "")


def _ply_even(
    file: Scanner, coding: str, n: int, properties: list[_Property], name: str
) -> tuple[dict[str, Array], Array, Array] | None:
    """`_ply_lists` at once for the common case: one list, as long in every row as in the first."""
    places = [i for i, p in enumerate(properties) if p.length]
    if not n or len(places) != 1 or properties[places[0]].name != _ply_corners(properties):
        return None
    begin, place = file.at, places[0]
    try:
        if coding == "a":
            width = int(file.ascii(place + 1, np.float64, name)[place])
            file.at = begin
            table = file.ascii(n * (len(properties) + width), np.float64, name).reshape(n, -1)
            counts, ids = table[:, place], table[:, place + 1 : place + 1 + width]
            rest = list(np.delete(table, np.s_[place : place + 1 + width], axis=1).T)
        else:
            head = [(f"{i}", coding + p.kind) for i, p in enumerate(properties[:place])]
            head.append(("n", coding + properties[place].length))
            width = int(file.binary(1, np.dtype(head), name)["n"][0])
            file.at = begin
            tail = [(f"{i}", coding + p.kind) for i, p in enumerate(properties)][place + 1 :]
            corners = ("ids", coding + properties[place].kind, (max(width, 0),))
            rows = file.binary(n, np.dtype([*head, corners, *tail]), name)
            counts, ids = rows["n"], rows["ids"]
            rest = [rows[key] for key, _ in [*head[:-1], *tail]]
    except (ReadError, ValueError):
        counts, ids, width = np.zeros(1), np.zeros(0), -1
    if (counts != width).any():
        file.at = begin
        return None
    scalars = [p for p in properties if not p.length]
    columns = {p.name: np.array(v, p.kind) for p, v in zip(scalars, rest, strict=True)}
    return columns, ids.astype(np.int64).ravel(), np.arange(n + 1, dtype=np.int64) * width


def _ascii_taker(file: Scanner, name: str) -> Any:
    words = file.data[file.at :].split()
    at = 0

    def take(kind: str, n: int) -> list[Any]:
        nonlocal at
        part = words[at : at + n]
        at += n
        if n < 0 or len(part) < n:
            raise ReadError(f"{file.path}: truncated within the element {name}")
        try:
            return [float(w) for w in part] if kind[0] == "f" else [int(w) for w in part]
        except ValueError:
            raise ReadError(f"{file.path}: element {name}: {part[0][:40]!r} is no number") from None

    return take


def _binary_taker(file: Scanner, coding: str, name: str) -> Any:
    codes = {"i1": "b", "u1": "B", "i2": "h", "u2": "H", "i4": "i", "u4": "I", "f4": "f", "f8": "d"}

    def take(kind: str, n: int) -> tuple[Any, ...]:
        if n < 0 or file.at + n * int(kind[1]) > len(file.data):
            raise ReadError(f"{file.path}: truncated within the element {name}")
        out = struct.unpack_from(f"{coding}{n}{codes[kind]}", file.data, file.at)
        file.at += n * int(kind[1])
        return out

    return take


def read_obj(path: Path) -> list[Dataset]:
    """Points, faces and lines of an OBJ file; texture, normals and groups are not geometry.

    Raises:
        ReadError: an index is 0 or out of range, or a line is damaged.
    """
    points: list[list[float]] = []
    cells: dict[bytes, list[list[int]]] = {b"f": [], b"l": []}
    text = path.read_bytes().replace(b"\\\r\n", b" ").replace(b"\\\n", b" ")
    for number, line in enumerate(text.split(b"\n"), 1):
        words = line.split()
        try:
            if words[:1] == [b"v"]:
                points.append([float(word) for word in words[1:4]])
                if len(words) < 4:
                    raise ValueError("a vertex needs three coordinates")
            elif words and words[0] in cells:
                cells[words[0]].append([_obj_id(word, len(points)) for word in words[1:]])
        except ValueError as error:
            raise ReadError(f"{path}: line {number}: {error}") from None
    if not points:
        raise ReadError(f"{path}: empty: no points (v lines) in it, or no OBJ file")
    # VTK's order: lines before polygons
    listed = cells[b"l"] + cells[b"f"]
    counts = np.array([len(ids) for ids in listed], np.int64)
    lines = len(cells[b"l"])
    kind = np.where(np.arange(len(listed)) < lines, np.where(counts == 2, 3, 4), 7)
    ids = np.fromiter((i for cell in listed for i in cell), np.int64, int(counts.sum()))
    where = np.array(points, np.float64)
    if any(len(set(ids)) < len(ids) for ids in cells[b"f"]):
        warn(f"{path}: some faces name a point twice")
    return [Dataset(where, ids, offsets_of(counts), kind.astype(np.uint8))]


def _obj_id(word: bytes, n: int) -> int:
    """Row of a point; indices count from 1, negative ones from the last point so far."""
    index = int(word.split(b"/")[0])
    if index == 0:
        raise ValueError("index 0: OBJ indices are 1-based; add 1 to all of them")
    if index < -n:
        raise ValueError(f"index {index} is out of range: {n} points so far")
    return index - 1 if index > 0 else n + index
