"""STL files, binary and ascii; corners at the same place become one point."""

from __future__ import annotations

import re
from array import array
from io import BytesIO
from pathlib import Path

import numpy as np

from meshshard.errors import ReadError
from meshshard.io.dataset import Dataset, free_name
from meshshard.io.readers.scanner import parse_numbers
from meshshard.mesh import Array
from meshshard.mesh.cells import POLYGON
from meshshard.mesh.inspection import coincident

__all__ = ["read_stl"]

FACET = np.dtype([("normal", "<f4", 3), ("corners", "<f4", (3, 3)), ("attribute", "<u2")])
_LETTERS = b"factnormaloutrloopvrtxvrtxvrtxndloopndfact"  # of a facet, without e


def read_stl(path: Path) -> list[Dataset]:
    """The triangles of an STL file, one data set per solid; equal corners are merged.

    Raises:
        ReadError: the declared count is wrong, a facet is not a triangle, or the file is cut short.
    """
    data = path.read_bytes()
    declared = int.from_bytes(data[80:84], "little")
    if len(data) >= 84 and len(data) == 84 + FACET.itemsize * declared:
        corners = np.frombuffer(data, FACET, declared, 84)["corners"].reshape(-1, 3)
        solids = {"": corners}
    elif data.lstrip()[:5].lower() == b"solid" and b"\0" not in data[:512]:
        solids = _ascii_solids(data, path)
    else:
        present = max(0, len(data) - 84) // FACET.itemsize
        raise ReadError(
            f"{path}: it declares {declared} triangles and has {present}: truncated, or not STL"
        )
    datasets = [
        _triangles(corners, name if len(solids) > 1 else "", path)
        for name, corners in solids.items()
        if len(corners)
    ]
    if not datasets:
        raise ReadError(f"{path}: empty: no triangles in it")
    return datasets


def _triangles(corners: Array, block: str, path: Path) -> Dataset:
    finite = np.isfinite(corners).all(axis=1)  # before memory is taken to merge corners
    if not finite.all():
        facet = int(np.argmin(finite)) // 3
        raise ReadError(f"{path}: facet {facet} has a corner that is not finite; repair the file")
    first = coincident(corners)
    kept = first == np.arange(len(corners))
    n = len(corners) // 3
    return Dataset(
        corners[kept],
        (np.cumsum(kept) - 1)[first],
        np.arange(n + 1, dtype=np.int64) * 3,
        np.full(n, POLYGON, np.uint8),
        block=block,
    )


def _ascii_solids(data: bytes, path: Path) -> dict[str, Array]:
    """Corners (3 m, 3) of the solids in an ascii file, by name."""
    solids: dict[str, Array] = {}
    name, begin = None, 0
    word = re.escape(data.lstrip()[:5])  # in its own case: faster than ignoring case
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
            corners = _corners(data[begin : match.start() - 3], line, path)
            solids[free_name(name, solids)] = corners
            name = None
    if name is not None:
        raise ReadError(f"{path}: truncated: the solid '{name}' has no endsolid")
    return solids


def _corners(body: bytes, line: int, path: Path) -> Array:
    """(3 m, 3) corners of the m facets between solid and endsolid.

    Without its numbers, the text of every facet is the same, so one comparison checks all of it.
    """
    lower = body if b"FACET" not in body and b"Facet" not in body else body.lower()
    n = lower.count(b"endfacet")
    if lower.translate(None, b"0123456789+-.eE \t\r\n") == _LETTERS * n:
        try:
            numbers = parse_numbers(_without_words(lower), np.float64)
        except ValueError:
            numbers = np.empty(0)
        if len(numbers) == 12 * n:
            return np.ascontiguousarray(numbers.reshape(n, 4, 3)[:, 1:]).reshape(-1, 3)
    return _corners_by_line(lower, line, path)


def _without_words(text: bytes) -> bytes:
    """Replace all letters by blanks, except the e of exponents, which follow a digit or point."""
    letters = np.frombuffer(text, np.uint8).copy()
    word = letters >= ord("A")
    exponent = letters == ord("e")
    exponent[1:] &= ~word[:-1] & (letters[:-1] > ord("-"))
    letters[word & ~exponent] = ord(" ")
    return letters.tobytes()


def _corners_by_line(body: bytes, line: int, path: Path) -> Array:
    """The same as `_corners`, slower: for unusual text, and to find the line of an error."""
    corners, first = array("d"), 0
    for number, text in enumerate(BytesIO(body), line):
        keyword, *words = text.split() or [b""]
        if keyword == b"vertex":
            corners.extend(_vertex(words, f"{path}: line {number}"))
        first = len(corners) if keyword == b"facet" else first
        if keyword == b"endfacet" and len(corners) - first != 9:
            n = (len(corners) - first) // 3
            raise ReadError(f"{path}: line {number}: the facet has {n} vertices, must have 3")
    if len(corners) % 9:
        n = len(corners) // 3
        raise ReadError(f"{path}: the facets from line {line} on have {n} vertices, not 3 each")
    return np.array(corners, np.float64).reshape(-1, 3)


def _vertex(words: list[bytes], where: str) -> list[float]:
    try:
        x, y, z = (float(word) for word in words)
    except ValueError:
        raise ReadError(f"{where}: a vertex must be three numbers") from None
    return [x, y, z]
