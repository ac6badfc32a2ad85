"""STL files, binary and ascii; equal corners are made one point."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from meshshard.errors import ReadError
from meshshard.io.dataset import Dataset
from meshshard.io.readers.scanner import parse_numbers
from meshshard.mesh import Array

__all__ = ["merge_points", "read_stl"]


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
        keyword, *words = text.split() or [b""]
        if keyword == b"vertex":
            rows.append(_vertex(words, f"{path}: line {number}"))
        first = len(rows) if keyword == b"facet" else first
        if keyword == b"endfacet" and len(rows) - first != 3:
            raise ReadError(f"{path}: line {number}: the facet has {len(rows) - first} vertices")
    if len(rows) % 3:
        raise ReadError(f"{path}: the facets from line {line} on have {len(rows)} vertices")
    return np.array(rows, np.float64).reshape(-1, 3)


def _vertex(words: list[bytes], where: str) -> list[float]:
    try:
        x, y, z = (float(word) for word in words)
    except ValueError:
        raise ReadError(f"{where}: a vertex is three numbers") from None
    return [x, y, z]


def _distinct(solids: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Number solids that share a name, so that they stay apart."""
    seen: dict[str, int] = {}
    out = []
    for name, rows in solids:
        seen[name] = seen.get(name, 0) + 1
        out.append((name if seen[name] == 1 else f"{name} ({seen[name]})", rows))
    return out
