"""ParaView: the shards of a folder as pieces, one parallel file that opens them all."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from xml.sax.saxutils import quoteattr

import numpy as np

from meshshard._write import is_polydata, vtk_type, write_vtk
from meshshard.assembly import Piece, extract
from meshshard.mesh import Array, Mesh
from meshshard.store import Folder

__all__ = ["export"]

DUPLICATE = 1  # bit of vtkGhostType: another piece owns this point or cell


def export(folder: Folder, directory: str | Path, *, ghosts: bool = False) -> Path:
    """Write every shard as a .vtp or .vtu piece, with a .pvtp or .pvtu and a .vtm over them.

    Pieces hold the fields, `shard_id` (int32) and `global_id` (int64, row in the file) on cells
    and points; names that the file uses already get an underscore. Empty shards have every array.

    Args:
        folder: of shards.
        directory: made where it is missing; files of the same names are replaced.
        ghosts: also write the halo, flagged in `vtkGhostType` (uint8, 1: owned elsewhere).

    Returns:
        The parallel file.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    stem = Path(folder.manifest["name"]).stem or "mesh"
    flat = all(is_polydata(folder.piece(p).mesh) for p in range(folder.k))
    files, sample = [], None
    for shard, mesh in enumerate(_pieces(folder, ghosts)):
        path = directory / f"{stem}_{shard:05d}.{'vtp' if flat else 'vtu'}"
        write_vtk(mesh, path)
        files.append(path.name)
        sample = sample or mesh
    assert sample is not None
    blocks = directory / f"{stem}.vtm"
    blocks.write_text(_multiblock(files), encoding="utf-8")
    whole = directory / f"{stem}.{'pvtp' if flat else 'pvtu'}"
    whole.write_text(_parallel(files, sample, flat, ghosts), encoding="utf-8")
    return whole


def _pieces(folder: Folder, ghosts: bool) -> Iterator[Mesh]:
    """Every shard as a mesh, with its ids."""
    if not ghosts:
        for shard in range(folder.k):
            piece = folder.piece(shard)
            yield _with_ids(piece, np.full(len(piece.cells), shard), shard)
        return
    whole, labels = folder.gather(), folder.labels()
    first = np.concatenate([[0], np.cumsum(folder.sizes)])
    row = np.concatenate([folder.origin(p) for p in range(folder.k)])
    for shard in range(folder.k):
        own = folder.piece(shard)
        halo = row[folder.plan(shard).halo]
        mine = row[first[shard] : first[shard + 1]]
        if folder.entity == "cells":
            piece = extract(whole, np.concatenate([own.cells, halo]))
            seen = np.zeros(whole.n_points, bool)
            seen[own.points] = True
            cell_ghost = np.arange(len(piece.cells)) >= len(own.cells)
            point_ghost = ~seen[piece.points]
            owner = labels[piece.cells]
        else:
            piece = extract(whole, own.cells, np.concatenate([mine, halo]))
            cell_ghost = np.zeros(len(piece.cells), bool)
            point_ghost = labels[piece.points] != shard
            owner = np.full(len(piece.cells), shard)
        yield _with_ids(piece, owner, shard).with_fields(
            cell=_flags(cell_ghost, whole.n_cells > 0), point=_flags(point_ghost, True)
        )


def _flags(ghost: Array, wanted: bool) -> dict[str, Array]:
    return {"vtkGhostType": ghost.astype(np.uint8) * DUPLICATE} if wanted else {}


def _with_ids(piece: Piece, owner: Array, shard: int) -> Mesh:
    """The piece with its ids as fields; a cloud has none on cells."""
    mesh = piece.mesh
    point = {
        _free("shard_id", mesh.point_fields): np.full(mesh.n_points, shard, np.int32),
        _free("global_id", mesh.point_fields): piece.points.astype(np.int64),
    }
    cell = {
        _free("shard_id", mesh.cell_fields): owner.astype(np.int32),
        _free("global_id", mesh.cell_fields): piece.cells.astype(np.int64),
    }
    cloud = mesh.name and not mesh.n_cells and not mesh.cell_fields and not len(owner)
    return mesh.with_fields(cell={} if cloud else cell, point=point)


def _free(name: str, taken: Mapping[str, Array]) -> str:
    while name in taken:
        name += "_"
    return name


def _parallel(files: list[str], sample: Mesh, flat: bool, ghosts: bool) -> str:
    """Text of the parallel file: which arrays every piece has, and where the pieces are."""
    kind = "PPolyData" if flat else "PUnstructuredGrid"
    arrays = {
        "PPointData": sample.point_fields,
        "PCellData": sample.cell_fields,
        "PPoints": {"Points": sample.points},
    }
    sections = "".join(f"<{t}>\n{_declared(f)}</{t}>\n" for t, f in arrays.items())
    pieces = "".join(f"<Piece Source={quoteattr(f)}/>\n" for f in files)
    body = f'<{kind} GhostLevel="{int(ghosts)}">\n{sections}{pieces}</{kind}>\n'
    return _file(kind, body)


def _declared(fields: Mapping[str, Array]) -> str:
    return "".join(
        f'<PDataArray type="{vtk_type(a)}" Name={quoteattr(name)} '
        f'NumberOfComponents="{int(np.prod(a.shape[1:], dtype=int))}"/>\n'
        for name, a in fields.items()
    )


def _multiblock(files: list[str]) -> str:
    blocks = "".join(
        f'<DataSet index="{i}" name="shard {i}" file={quoteattr(f)}/>\n'
        for i, f in enumerate(files)
    )
    return _file(
        "vtkMultiBlockDataSet", f"<vtkMultiBlockDataSet>\n{blocks}</vtkMultiBlockDataSet>\n"
    )


def _file(kind: str, body: str) -> str:
    order = "LittleEndian" if sys.byteorder == "little" else "BigEndian"
    head = f'type="{kind}" version="1.0" byte_order="{order}" header_type="UInt64"'
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<VTKFile {head}>\n{body}</VTKFile>\n'
