"""OBJ files: all lines of one kind are parsed at once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshshard.errors import ReadError
from meshshard.io.dataset import Dataset
from meshshard.io.readers.scanner import parse_numbers
from meshshard.mesh import Array
from meshshard.mesh.cells import LINE, POLY_LINE, POLYGON
from meshshard.mesh.checks import warn
from meshshard.mesh.ragged import offsets_of

__all__ = ["read_obj"]

BLANKS = (b"\t", b"\r", b"\v", b"\f")
_TO_SPACE = bytes.maketrans(b"".join(BLANKS), b"    ")
SPACE, NEWLINE, SLASH = b" \n/"


class _Geometry(NamedTuple):
    """Points (n, 3); for lines and for faces, the rows of their points and how many each has."""

    points: Array
    lines: tuple[Array, Array]
    faces: tuple[Array, Array]


def read_obj(path: Path) -> list[Dataset]:
    """Points, faces and lines of an OBJ file; texture, normals and groups are ignored.

    Raises:
        ReadError: an index is 0 or out of range, or a line is damaged.
    """
    text = path.read_bytes()
    if b"\\" in text:  # continued lines
        text = text.replace(b"\\\r\n", b" ").replace(b"\\\n", b" ")
    try:
        points, lines, faces = _at_once(text)
    except ValueError:
        points, lines, faces = _by_line(text, path)
    if not len(points):
        raise ReadError(f"{path}: empty: no points (v lines) in it, or not an OBJ file")
    if _has_repeated_points(*faces):
        warn(f"{path}: some faces have the same point twice")
    # VTK's order: lines before polygons
    ids, counts = (np.concatenate(pair) for pair in zip(lines, faces, strict=True))
    types = np.where(counts == 2, LINE, POLY_LINE)
    types[len(lines[1]) :] = POLYGON
    return [Dataset(points, ids, offsets_of(counts), types.astype(np.uint8))]


def _at_once(text: bytes) -> _Geometry:
    """The geometry of a regular file.

    Raises:
        ValueError: some line is irregular or damaged; use `_by_line`.
    """
    if any(blank in text for blank in BLANKS):
        text = text.translate(_TO_SPACE)
    text = text if text.endswith(b"\n") else text + b"\n"
    letters = np.frombuffer(text, np.uint8)
    bounds = np.concatenate([[0], np.flatnonzero(letters == NEWLINE) + 1])
    first, second = letters[bounds[:-1]], letters[np.minimum(bounds[:-1] + 1, len(letters) - 1)]
    if (first == SPACE).any():
        return _at_once(re.sub(rb"(?m)^ +", b"", text))
    alone = (second == SPACE) | (second == NEWLINE)  # v, but not vn or vt
    vertex, line, face = ((first == letter) & alone for letter in b"vlf")
    points = _coordinates(_Block(text, bounds, vertex))
    before = np.cumsum(vertex)
    lines, faces = (_rows(_Block(text, bounds, kind), before[kind]) for kind in (line, face))
    return _Geometry(points, lines, faces)


class _Block:
    """The concatenated lines of one kind, their keywords and all slashes replaced by blanks."""

    def __init__(self, text: bytes, bounds: Array, chosen: Array) -> None:
        edges = np.flatnonzero(np.diff(chosen, prepend=False, append=False))
        runs = bounds[edges].reshape(-1, 2).tolist()
        letters = np.frombuffer(bytearray().join(text[a:b] for a, b in runs), np.uint8)
        self.ends = np.cumsum(np.diff(bounds)[chosen])
        letters[self.ends - np.diff(bounds)[chosen]] = SPACE
        slash = letters == SLASH
        self.has_slash = bool(slash.any())
        if self.has_slash:
            if (letters[np.flatnonzero(slash) - 1] <= SPACE).any():
                raise ValueError("a word begins with a slash")
            letters[slash] = SPACE
        black = letters > SPACE
        black[1:] &= letters[:-1] <= SPACE
        starts = np.flatnonzero(black)
        self.letters, self.starts = letters, starts
        self.leads = ~slash[starts - 1]  # numbers that no slash precedes

    def numbers(self, dtype: Any) -> Array:
        """All numbers (n,), those behind slashes too."""
        out = parse_numbers(self.letters.tobytes(), dtype)
        if len(out) != len(self.starts):
            raise ValueError("some words are not numbers")
        return out

    def counts(self, starts: Array) -> Array:
        """(n_lines,) how many of the given places are in each line."""
        return np.diff(np.searchsorted(starts, self.ends), prepend=0)


def _coordinates(block: _Block) -> Array:
    """(n, 3) the first three numbers of each line."""
    counts, numbers = block.counts(block.starts), block.numbers(np.float64)
    if block.has_slash or (counts < 3).any():
        raise ValueError("a vertex is three numbers or more")
    if len(numbers) == 3 * len(counts):
        return numbers.reshape(-1, 3)
    return numbers[offsets_of(counts)[:-1, None] + np.arange(3)]


def _rows(block: _Block, before: Array) -> tuple[Array, Array]:
    """Rows of points, and how many each line has; `before` is the number of points above it."""
    counts = block.counts(block.starts[block.leads])
    ids = block.numbers(np.int64)[block.leads]
    negative = ids < 0
    if negative.any():
        so_far = np.repeat(before, counts)
        ids = np.where(negative, ids + so_far + 1, ids)
        if (ids[negative] < 1).any():
            raise ValueError("a negative index is out of range")
    if (ids == 0).any():
        raise ValueError("index 0")
    return ids - 1, counts


def _has_repeated_points(ids: Array, counts: Array) -> bool:
    starts = offsets_of(counts)[:-1]
    for width in np.flatnonzero(np.bincount(counts)):
        corners = ids[starts[counts == width][:, None] + np.arange(width)]
        corners.sort(axis=1)
        if (corners[:, 1:] == corners[:, :-1]).any():
            return True
    return False


def _by_line(text: bytes, path: Path) -> _Geometry:
    """The same as `_at_once`, slower: for irregular files, and to find the line of an error."""
    points: list[list[float]] = []
    cells: dict[bytes, list[list[int]]] = {b"l": [], b"f": []}
    for number, line in enumerate(text.split(b"\n"), 1):
        keyword, *words = line.split() or [b""]
        try:
            _take_line(keyword, words, points, cells)
        except ValueError as error:
            raise ReadError(f"{path}: line {number}: {error}") from None
    lines, faces = (_joined(listed) for listed in cells.values())
    return _Geometry(np.array(points, np.float64), lines, faces)


def _take_line(
    keyword: bytes,
    words: list[bytes],
    points: list[list[float]],
    cells: dict[bytes, list[list[int]]],
) -> None:
    if keyword == b"v":
        points.append(_vertex(words))
    elif keyword in cells:
        cells[keyword].append([_row(word, len(points)) for word in words])


def _vertex(words: list[bytes]) -> list[float]:
    if len(words) < 3:
        raise ValueError("a vertex needs three coordinates")
    return [float(word) for word in words[:3]]


def _row(word: bytes, n: int) -> int:
    """Row of a point; indices start at 1, negative ones count back from the last point so far."""
    index = int(word.split(b"/")[0])
    if index == 0:
        raise ValueError("index 0: OBJ indices are 1-based; add 1 to all of them")
    if index < -n:
        raise ValueError(f"index {index} is out of range: {n} points so far")
    if index >= 1 << 63:
        raise ValueError(f"index {index} is out of range")
    return index - 1 if index > 0 else n + index


def _joined(listed: list[list[int]]) -> tuple[Array, Array]:
    counts = np.array([len(ids) for ids in listed], np.int64)
    return np.array([i for ids in listed for i in ids], np.int64), counts
