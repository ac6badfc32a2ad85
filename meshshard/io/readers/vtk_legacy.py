"""Legacy .vtk files, versions 1 to 5.1, ascii and binary; every count is checked."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

import numpy as np

from meshshard.errors import ReadError
from meshshard.io.dataset import Dataset, free_name
from meshshard.io.readers.scanner import Scanner
from meshshard.io.readers.vtk_topology import (
    MAX_IMPLICIT_POINTS,
    faces_of_stream,
    lattice,
    polydata_cells,
    structured_cells,
)
from meshshard.mesh import Array, Faces
from meshshard.mesh.cells import POLYHEDRON
from meshshard.mesh.checks import warn
from meshshard.mesh.ragged import gather_rows, no_rows, offsets_of

__all__ = ["read_legacy"]


DTYPES = {
    "bit": "u1", "char": "i1", "signed_char": "i1", "unsigned_char": "u1", "short": "i2",
    "unsigned_short": "u2", "int": "i4", "unsigned_int": "u4", "long": "i8", "unsigned_long": "u8",
    "float": "f4", "double": "f8", "vtkidtype": "i4", "vtktypeint64": "i8", "vtktypeuint64": "u8",
    "long_long": "i8", "unsigned_long_long": "u8", "vtktypeint32": "i4", "vtktypeuint32": "u4",
}  # fmt: skip
POLYDATA = {"VERTICES": "Verts", "LINES": "Lines", "POLYGONS": "Polys", "TRIANGLE_STRIPS": "Strips"}
WIDTHS = {"VECTORS": 3, "NORMALS": 3, "TENSORS": 9, "TENSORS6": 6} | dict.fromkeys(
    ("GLOBAL_IDS", "PEDIGREE_IDS", "EDGE_FLAGS"), 1
)
KINDS = ("POLYDATA", "UNSTRUCTURED_GRID", "STRUCTURED_GRID", "STRUCTURED_POINTS",
         "RECTILINEAR_GRID")  # fmt: skip


def read_legacy(path: Path) -> list[Dataset]:
    """The data set of a legacy .vtk file.

    Args:
        path: a file that starts with "# vtk DataFile".

    Raises:
        ReadError: counts and data disagree, or the file has an unknown section.
    """
    return [_Legacy(path).dataset()]


class _Legacy:
    """State of one pass over a file."""

    def __init__(self, path: Path) -> None:
        self.file = Scanner(path)
        self.path = path
        self.file.raw_line()
        self.file.raw_line()  # a free title
        coding = self.file.line()
        if coding[:1] not in (["ASCII"], ["BINARY"]):
            raise ReadError(f"{path}: corrupt: the third line must say ASCII or BINARY")
        self.is_binary = coding[0] == "BINARY"
        self.kind = ""
        self.points: Array | None = None
        self.cells: dict[str, tuple[Array, Array]] = {}
        self.types: Array | None = None
        self.grid: dict[str, Array] = {}
        self.fields: dict[str, dict[str, Array]] = {"POINT_DATA": {}, "CELL_DATA": {}}
        self.rows: dict[str, int] = {}
        self.on = ""

    def dataset(self) -> Dataset:
        """Read all sections, then build the data set."""
        while words := self.file.line():
            self._section(words)
        if self.kind in ("POLYDATA", "UNSTRUCTURED_GRID") and self.points is None:
            raise ReadError(f"{self.path}: truncated: it has no POINTS")
        points, connectivity, offsets, types, faces = self._geometry()
        for on, n in (("POINT_DATA", len(points)), ("CELL_DATA", len(types))):
            if self.rows.get(on, n) != n:
                raise ReadError(f"{self.path}: {on} {self.rows[on]} does not fit, the file has {n}")
        return Dataset(
            points, connectivity, offsets, types, faces,
            self.fields["POINT_DATA"], self.fields["CELL_DATA"],
        )  # fmt: skip

    def _section(self, words: list[str]) -> None:
        key = words[0].upper()
        if key.endswith("_COORDINATES"):
            self.grid[key] = self._numbers(self._count(words, 1), self._word(words, 2), key)
            return
        if key not in _SECTIONS:
            raise ReadError(
                f"{self.path}: corrupt: expected a keyword, got '{words[0][:40]}'; "
                f"a count before it is wrong ({', '.join(self.cells) or 'POINTS'})"
            )
        _SECTIONS[key](self, key, words)

    def _dataset(self, key: str, words: list[str]) -> None:
        self.kind = self._word(words, 1).upper()
        if self.kind not in KINDS:
            raise ReadError(f"{self.path}: {key} {self.kind} cannot be partitioned")

    def _points(self, key: str, words: list[str]) -> None:
        n = self._count(words, 1)
        self.points = self._numbers(3 * n, self._word(words, 2), key).reshape(n, 3)

    def _cells(self, key: str, words: list[str]) -> None:
        self.cells[key] = self._ragged(key, self._count(words, 1), self._count(words, 2))

    def _cell_types(self, key: str, words: list[str]) -> None:
        self.types = self._numbers(self._count(words, 1), "int", key)

    def _metadata(self, key: str, words: list[str]) -> None:
        """Skip to the next blank line."""
        blank = re.compile(rb"\n[ \t\r]*\n").search(self.file.data, self.file.at)
        self.file.at = blank.end() if blank else len(self.file.data)

    def _grid(self, key: str, words: list[str]) -> None:
        self.grid[key] = self._header_numbers(words)

    def _data(self, key: str, words: list[str]) -> None:
        self.on = key
        self.rows[key] = self._count(words, 1)

    def _field(self, key: str, words: list[str]) -> None:
        for _ in range(self._count(words, 2)):
            self._field_array()

    def _scalars(self, key: str, words: list[str]) -> None:
        width = self._count(words, 3) if len(words) > 3 else 1
        if self.file.peek()[:1] == ["LOOKUP_TABLE"]:
            self.file.line()
        self._attribute(words, self._word(words, 2), width)

    def _vectors(self, key: str, words: list[str]) -> None:
        self._attribute(words, self._word(words, 2), WIDTHS[key])

    def _texture(self, key: str, words: list[str]) -> None:
        self._attribute(words, self._word(words, 3), self._count(words, 2))

    def _colors(self, key: str, words: list[str]) -> None:
        self._attribute(words, self._color_type(), self._count(words, 2))

    def _lookup_table(self, key: str, words: list[str]) -> None:
        self._numbers(4 * self._count(words, 2), self._color_type(), key)

    def _color_type(self) -> str:
        return "unsigned_char" if self.is_binary else "float"

    def _attribute(self, words: list[str], kind: str, width: int) -> None:
        self._store(self._word(words, 1), kind, self.rows.get(self.on, 0), width)

    def _field_array(self) -> None:
        words = self.file.line()
        if words[:1] == ["METADATA"]:
            self._section(words)
            words = self.file.line()
        width, n = self._count(words, 1), self._count(words, 2)
        if self._word(words, 3).lower() == "string" and not self.is_binary:
            for _ in range(width * n):
                self.file.raw_line()
            warn(f"{self.path}: array '{unquote(words[0])}' is not numeric, left out")
            return
        if self.on and n != self.rows[self.on]:
            raise ReadError(
                f"{self.path}: array '{unquote(words[0])}' has {n} rows for "
                f"{self.on} {self.rows[self.on]}"
            )
        self._store(words[0], words[3], n, width)

    def _store(self, name: str, kind: str, n: int, width: int) -> None:
        """Read an array; it is dropped if no POINT_DATA or CELL_DATA precedes it."""
        name = unquote(name)
        values = self._numbers(n * width, kind, f"array '{name}'")
        if not self.on or not n:
            return
        fields = self.fields[self.on]
        if name in fields:
            warn(f"{self.path}: two arrays are called '{name}'; the later is renamed")
            name = free_name(name, fields)
        fields[name] = values.reshape(n, width) if width > 1 else values

    def _ragged(self, key: str, n: int, size: int) -> tuple[Array, Array]:
        """Connectivity and offsets, from the two arrays of version 5 or the older counted lists."""
        head = self.file.peek()
        if head[:1] == ["OFFSETS"]:
            self.file.line()
            offsets = self._numbers(n, self._word(head, 1), f"{key} OFFSETS").astype(np.int64)
            head = self.file.line()
            if head[:1] != ["CONNECTIVITY"]:
                raise ReadError(f"{self.path}: corrupt: {key} has OFFSETS but no CONNECTIVITY")
            ids = self._numbers(size, self._word(head, 1), f"{key} CONNECTIVITY")
            return ids, offsets if n else no_rows()[1]
        values = self._numbers(size, "int", key).astype(np.int64)
        return self._counted(key, values, n)

    def _counted(self, key: str, values: Array, n: int) -> tuple[Array, Array]:
        """Connectivity and offsets from [count, ids …, count, ids …]."""
        width = int(values[0]) + 1 if len(values) else 0
        if width > 1 and n * width == len(values) and (values[::width] == width - 1).all():
            ids = values.reshape(n, width)[:, 1:].ravel()
            return ids, np.arange(n + 1, dtype=np.int64) * (width - 1)
        listed, starts, at = values.tolist(), [], 0
        for _ in range(n):
            if at >= len(listed) or listed[at] < 0:
                break
            starts.append(at)
            at += 1 + listed[at]
        if len(starts) != n or at != len(listed):
            raise ReadError(
                f"{self.path}: corrupt: the {n} cells of {key} do not fit the {len(listed)} "
                "numbers that its header declares"
            )
        first = np.array(starts, np.int64)
        keep = np.ones(len(values), bool)
        keep[first] = False
        return values[keep], offsets_of(values[first])

    def _geometry(self) -> tuple[Array, Array, Array, Array, Faces | None]:
        if self.kind == "POLYDATA":
            return *self._polydata(), None
        if self.kind == "UNSTRUCTURED_GRID":
            return self._unstructured()
        shape = [int(v) for v in self.grid.get("DIMENSIONS", np.zeros(0))]
        if len(shape) != 3 or min(shape) < 1:
            raise ReadError(f"{self.path}: DIMENSIONS must be three counts, got {shape}")
        points = self.points if self.points is not None else self._lattice(shape)
        if len(points) != int(np.prod([float(s) for s in shape])):
            raise ReadError(f"{self.path}: DIMENSIONS {shape} do not fit {len(points)} points")
        return points, *structured_cells(shape), None

    def _polydata(self) -> tuple[Array, Array, Array, Array]:
        sections = {name: self.cells[key] for key, name in POLYDATA.items() if key in self.cells}
        points = self.points if self.points is not None else np.zeros((0, 3))
        return points, *polydata_cells(sections)

    def _unstructured(self) -> tuple[Array, Array, Array, Array, Faces | None]:
        points = self.points if self.points is not None else np.zeros((0, 3))
        ids, offsets = self.cells.get("CELLS", no_rows())
        types = self.types if self.types is not None else np.zeros(0, np.int64)
        if len(types) != len(offsets) - 1:
            raise ReadError(
                f"{self.path}: {len(offsets) - 1} CELLS, but {len(types)} CELL_TYPES (truncated?)"
            )
        if len(types) and (types.min() < 0 or types.max() > 255):
            raise ReadError(f"{self.path}: cell types must be 0 to 255")
        types = types.astype(np.uint8)
        if not (types == POLYHEDRON).any():
            return points, ids, offsets, types, None
        return points, *_unstream(ids, offsets, types, str(self.path))

    def _lattice(self, shape: list[int]) -> Array:
        if np.prod([float(s) for s in shape]) > MAX_IMPLICIT_POINTS and not any(
            self.fields.values()
        ):
            raise ReadError(f"{self.path}: it declares DIMENSIONS {shape} without an array")
        axes = [self.grid.get(f"{axis}_COORDINATES") for axis in "XYZ"]
        origin = self.grid.get("ORIGIN", np.zeros(3))
        spacing = self.grid.get("SPACING", self.grid.get("ASPECT_RATIO", np.ones(3)))
        if len(origin) != 3 or len(spacing) != 3:
            raise ReadError(f"{self.path}: ORIGIN and SPACING must be three numbers each")
        full = [
            np.arange(n) * h + o if axis is None else axis
            for n, axis, o, h in zip(shape, axes, origin, spacing, strict=True)
        ]
        return lattice(full)

    def _numbers(self, n: int, kind: str, what: str) -> Array:
        dtype = DTYPES.get(kind.lower())
        if dtype is None:
            raise ReadError(f"{self.path}: {what} has the type '{kind}', which is not numeric")
        if not self.is_binary:
            wide = np.int64 if kind.lower() in ("int", "vtkidtype") and n else np.dtype(dtype)
            values = self.file.ascii(n, wide, what)
            return values if what.isupper() else values.astype(dtype, copy=False)
        if kind.lower() == "bit":
            return np.unpackbits(self.file.binary((n + 7) // 8, "u1", what))[:n]
        return self.file.binary(n, ">" + dtype, what)

    def _header_numbers(self, words: list[str]) -> Array:
        try:
            return np.array([float(word) for word in words[1:4]])
        except ValueError:
            raise ReadError(f"{self.path}: '{' '.join(words)[:60]}' must be numbers") from None

    def _word(self, words: list[str], i: int) -> str:
        if i >= len(words):
            raise ReadError(f"{self.path}: corrupt: the line '{' '.join(words)[:60]}' is too short")
        return words[i]

    def _count(self, words: list[str], i: int) -> int:
        word = self._word(words, i)
        if not (word.isascii() and word.isdigit()):
            raise ReadError(
                f"{self.path}: corrupt: '{word[:40]}' in {words[0][:40]} is not a count"
            )
        return int(word)


_SECTIONS: dict[str, Callable[[_Legacy, str, list[str]], None]] = {
    "DATASET": _Legacy._dataset,
    "POINTS": _Legacy._points,
    **dict.fromkeys((*POLYDATA, "CELLS"), _Legacy._cells),
    "CELL_TYPES": _Legacy._cell_types,
    "METADATA": _Legacy._metadata,
    **dict.fromkeys(("DIMENSIONS", "ORIGIN", "SPACING", "ASPECT_RATIO"), _Legacy._grid),
    **dict.fromkeys(("POINT_DATA", "CELL_DATA"), _Legacy._data),
    "FIELD": _Legacy._field,
    "SCALARS": _Legacy._scalars,
    **dict.fromkeys(WIDTHS, _Legacy._vectors),
    "TEXTURE_COORDINATES": _Legacy._texture,
    "COLOR_SCALARS": _Legacy._colors,
    "LOOKUP_TABLE": _Legacy._lookup_table,
}


def _unstream(
    ids: Array, offsets: Array, types: Array, name: str
) -> tuple[Array, Array, Array, Faces | None]:
    """Points and faces of polyhedra, which are stored as face streams in place of points."""
    if (np.diff(offsets) < 0).any() or offsets[-1] != len(ids):
        raise ReadError(f"{name}: corrupt: cell offsets do not fit the connectivity")
    poly = np.flatnonzero(types == POLYHEDRON)
    stream, stream_offsets = gather_rows(ids.astype(np.int64), offsets, poly)
    ends = np.full(len(types), -1, np.int64)
    ends[poly] = stream_offsets[1:]
    faces = faces_of_stream(stream, ends, name)
    points: list[Array] = [ids[a:b] for a, b in itertools.pairwise(offsets)]
    if faces is not None:
        corners = faces.offsets[faces.cell_offsets]
        for cell in poly.tolist():
            of = faces.connectivity[corners[cell] : corners[cell + 1]]
            points[cell] = np.unique(of)
    counts = np.array([len(p) for p in points])
    return np.concatenate(points), offsets_of(counts), types, faces
