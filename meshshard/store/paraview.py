"""ParaView export: a VTK file per shard, and one parallel file that opens them all."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from meshshard.atomic_write import report_write_errors
from meshshard.io.writers import in_xml, is_polydata, vtk_type, write_vtk
from meshshard.mesh import Array, Mesh
from meshshard.mesh.submesh import Piece, extract
from meshshard.store.folder import Folder

__all__ = ["export"]

DUPLICATE = 1  # bit of vtkGhostType: another piece owns this point or cell


def export(folder: Folder, directory: str | Path, *, ghosts: bool = False) -> Path:
    """Write every shard as a .vtp or .vtu file, and a .pvtp or .pvtu and a .vtm that list them.

    Cells and points have the fields, `shard_id` (int32) and `global_id` (int64, source row); a name
    that is already used by a field gets an underscore. Files of empty shards declare every array.

    Args:
        folder: an open folder of shards.
        directory: created if missing; files of the same names are replaced.
        ghosts: also write halo rows, flagged in `vtkGhostType` (uint8, 1: owned by another shard).

    Returns:
        The parallel file.

    Raises:
        StoreError: the folder is damaged, or the directory cannot be written.
    """
    directory = Path(directory)
    with report_write_errors(directory):
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
    whole = directory / f"{stem}.{'pvtp' if flat else 'pvtu'}"
    with report_write_errors(directory):
        (directory / f"{stem}.vtm").write_text(_multiblock(files), encoding="utf-8")
        whole.write_text(_parallel(files, sample, flat, ghosts), encoding="utf-8")
    return whole


def _pieces(folder: Folder, ghosts: bool) -> Iterator[Mesh]:
    """Every shard as a mesh with `shard_id` and `global_id`; with its halo if `ghosts`."""
    labels = folder.labels()
    pieces = _with_halo(folder, labels) if ghosts else map(folder.piece, range(folder.k))
    for shard, piece in enumerate(pieces):
        cells, points = np.full(len(piece.cells), shard), np.full(len(piece.points), shard)
        if folder.entity == "cells":
            cells = labels[piece.cells]
        else:
            points = labels[piece.points]
        mesh = piece.mesh
        point = _ids(points, piece.points, mesh.point_fields)
        cell = _ids(cells, piece.cells, mesh.cell_fields) if folder.manifest["n_cells"] else {}
        yield mesh.with_fields(cell=cell, point=point)


def _with_halo(folder: Folder, labels: Array) -> Iterator[Piece]:
    """Every shard with its halo rows after its owned rows; `vtkGhostType` flags the halo."""
    whole = folder.gather()
    row = np.concatenate([folder.origin(p) for p in range(folder.k)])
    for shard in range(folder.k):
        own, halo = folder.piece(shard), row[folder.plan(shard).halo]
        if folder.entity == "points":
            piece = extract(whole, own.cells, np.concatenate([folder.origin(shard), halo]))
            cell_ghost, point_ghost = np.zeros(len(own.cells), bool), labels[piece.points] != shard
        else:
            piece = extract(whole, np.concatenate([own.cells, halo]), own.points)
            cell_ghost = labels[piece.cells] != shard
            point_ghost = np.arange(len(piece.points)) >= len(own.points)
        flags = {"cell": _flags(cell_ghost)} if whole.n_cells else {}
        yield piece._replace(mesh=piece.mesh.with_fields(point=_flags(point_ghost), **flags))


def _flags(ghost: Array) -> dict[str, Array]:
    return {"vtkGhostType": np.where(ghost, DUPLICATE, 0).astype(np.uint8)}


def _ids(shards: Array, rows: Array, taken: Mapping[str, Array]) -> dict[str, Array]:
    return {
        _free("shard_id", taken): shards.astype(np.int32),
        _free("global_id", taken): rows.astype(np.int64),
    }


def _free(name: str, taken: Mapping[str, Array]) -> str:
    while name in taken:
        name += "_"
    return name


def _parallel(files: list[str], sample: Mesh, flat: bool, ghosts: bool) -> str:
    """Text of the .pvtp or .pvtu file: the arrays of every piece, and the files of the pieces."""
    kind = "PPolyData" if flat else "PUnstructuredGrid"
    arrays = {
        "PPointData": sample.point_fields,
        "PCellData": sample.cell_fields,
        "PPoints": {"Points": sample.points},
    }
    sections = "".join(f"<{t}>\n{_declared(f)}</{t}>\n" for t, f in arrays.items())
    pieces = "".join(f"<Piece Source={in_xml(f)}/>\n" for f in files)
    body = f'<{kind} GhostLevel="{int(ghosts)}">\n{sections}{pieces}</{kind}>\n'
    return _file(kind, body)


def _declared(fields: Mapping[str, Array]) -> str:
    return "".join(
        f'<PDataArray type="{vtk_type(a)}" Name={in_xml(name)} '
        f'NumberOfComponents="{int(np.prod(a.shape[1:], dtype=int))}"/>\n'
        for name, a in fields.items()
    )


def _multiblock(files: list[str]) -> str:
    blocks = "".join(
        f'<DataSet index="{i}" name="shard {i}" file={in_xml(f)}/>\n' for i, f in enumerate(files)
    )
    return _file(
        "vtkMultiBlockDataSet", f"<vtkMultiBlockDataSet>\n{blocks}</vtkMultiBlockDataSet>\n"
    )


def _file(kind: str, body: str) -> str:
    order = "LittleEndian" if sys.byteorder == "little" else "BigEndian"
    head = f'type="{kind}" version="1.0" byte_order="{order}" header_type="UInt64"'
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<VTKFile {head}>\n{body}</VTKFile>\n'
