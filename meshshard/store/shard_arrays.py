"""The arrays of a shard: which there must be, of which type and shape, and with which values.

Types and shapes are verified whenever a shard is opened, and values before a plan or a piece is
used, so nothing is allocated, repeated or indexed by a number that only a damaged file states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from meshshard.mesh import Array, Mesh
from meshshard.mesh.checks import check_cells, check_points
from meshshard.mesh.submesh import Piece

__all__ = ["check_piece", "wrong_array"]


class _Spec(NamedTuple):
    """Kinds of dtype ("u1" is a dtype), length (None: any) and row shape of an array."""

    kinds: str
    length: str | None
    row: tuple[int, ...] = ()
    needed: bool = True


_SPECS = {
    "points.xyz": _Spec("f", "points", (3,)),
    "points.origin": _Spec("iu", "points"),
    "points.weld": _Spec("iu", "points", needed=False),
    "cells.origin": _Spec("iu", "cells"),
    "cells.file_row": _Spec("iu", "cells", needed=False),
    "cells.connectivity": _Spec("iu", None),
    "cells.offsets": _Spec("iu", "cells + 1"),
    "cells.types": _Spec("u", "cells"),
    "faces.cell_offsets": _Spec("iu", "cells + 1", needed=False),
    "faces.offsets": _Spec("iu", None, needed=False),
    "faces.connectivity": _Spec("iu", None, needed=False),
    "plan.halo": _Spec("iu", "halo"),
    "plan.hops": _Spec("u", "halo"),
    "plan.indptr": _Spec("iu", "local + 1"),
    "plan.indices": _Spec("iu", None),
    "plan.send_rows": _Spec("iu", None),
    "plan.send_counts": _Spec("iu", "shards"),
    "plan.recv_counts": _Spec("iu", "shards"),
}


def wrong_array(arrays: Mapping[str, Array], manifest: Mapping[str, Any], shard: int) -> str:
    """What is wrong with the names, dtypes and shapes of the arrays of a shard; empty if nothing.

    Args:
        arrays: the arrays by name.
        manifest: a valid manifest.
        shard: number of the shard.
    """
    fields = dict(_fields(manifest, shard))
    needed = {name for name, spec in _SPECS.items() if spec.needed} | fields.keys()
    if any(name.startswith("faces.") for name in arrays):
        needed |= {name for name in _SPECS if name.startswith("faces.")}
    if missing := needed - arrays.keys():
        return f"array {min(missing)!r} is missing"
    if unknown := arrays.keys() - fields.keys() - _SPECS.keys():
        return f"array {min(unknown)!r} is unknown"
    lengths = _lengths(manifest, shard)
    for name, spec in _SPECS.items():
        values = arrays.get(name)
        if values is None:
            continue
        length = len(values) if spec.length is None and values.ndim else lengths.get(spec.length)
        if values.shape != (length, *spec.row) or values.dtype.kind not in spec.kinds:
            return f"array {name!r} has shape {values.shape} and dtype {values.dtype}"
    for name, (dtype, length, width) in fields.items():
        values = arrays[name]
        rest = int(np.prod(values.shape[1:], dtype=int))
        if values.shape[:1] != (length,) or (rest, values.dtype) != (width, dtype):
            return f"field {name!r} has shape {values.shape} and dtype {values.dtype}"
    if manifest["points_dtype"] != str(arrays["points.xyz"].dtype):
        return f"points are {arrays['points.xyz'].dtype}, not {manifest['points_dtype']}"
    return ""


def _lengths(manifest: Mapping[str, Any], shard: int) -> dict[str | None, int]:
    record = manifest["shards"][shard]
    return {
        "points": record["points"],
        "cells": record["cells"],
        "cells + 1": record["cells"] + 1,
        "halo": record["halo"],
        "local + 1": record["owned"] + record["halo"] + 1,
        "shards": len(manifest["shards"]),
    }


def _fields(
    manifest: Mapping[str, Any], shard: int
) -> Iterator[tuple[str, tuple[np.dtype[Any], int, int]]]:
    """Names of the stored fields with dtype, rows and width."""
    for field in manifest["fields"]:
        rows = manifest["shards"][shard].get(field["on"], -1)
        dtype = np.dtype(field["dtype"]).newbyteorder("=")
        yield f"{field['on'].removesuffix('s')}:{field['name']}", (dtype, rows, field["width"])


def check_piece(piece: Piece, n_cells: int, n_points: int, weld: Array | None = None) -> Piece:
    """Verify ids, offsets, coordinates and rows of a piece, and return it.

    Args:
        piece: arrays of the right types and shapes.
        n_cells: number of cells of the whole mesh.
        n_points: number of points of the whole mesh.
        weld: rows of the whole mesh that the points are merged with.

    Raises:
        MeshError: the cells or the coordinates are wrong.
        ValueError: a row is none of the whole mesh.
    """
    mesh: Mesh = piece.mesh
    check_cells(mesh, mesh.n_points, mesh.name)
    check_points(mesh.points, mesh.name)
    origins = (("cell", piece.cells, n_cells), ("point", piece.points, n_points))
    for what, rows, n in (*origins, ("point", piece.points if weld is None else weld, n_points)):
        if len(rows) and not 0 <= rows.min() <= rows.max() < n:
            raise ValueError(f"the origin of a {what} is none of {n} {what}s")
    return piece
