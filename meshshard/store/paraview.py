"""ParaView export: a VTK file per shard, and one parallel file that opens them all."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from meshshard.atomic_write import atomic_file, report_write_errors
from meshshard.io.writers import file_stem, in_xml, is_polydata, vtk_type, write_vtk, xml_fields
from meshshard.mesh import Array, Mesh
from meshshard.mesh.inspection import weld
from meshshard.mesh.ragged import gather_rows
from meshshard.mesh.submesh import Piece, extract
from meshshard.store.folder import Folder

__all__ = ["export"]

DUPLICATE = 1  # bit of vtkGhostType: another piece owns this point or cell


def export(folder: Folder, directory: str | Path, *, ghosts: bool = False) -> Path:
    """Write every shard as a .vtp or .vtu file, and a .pvtp or .pvtu and a .vtm that list them.

    Cells and points have the fields, `shard_id` (int32, the owner) and `global_id` (int64, source
    row); a name that is already used by a field gets an underscore. Files of empty shards declare
    every array.

    Args:
        folder: an open folder of shards.
        directory: created if missing; files of the same names are replaced.
        ghosts: also write the cells of other shards that share a point with the shard (a cloud:
            its halo). `vtkGhostType` (uint8) is 1 where another shard owns a cell or point, and 0
            once for every cell and point, so that filters give the results of the whole mesh.

    Returns:
        The parallel file.

    Raises:
        StoreError: the folder is damaged, or the directory cannot be written.
    """
    directory = Path(directory)
    with report_write_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
    stem = file_stem(Path(folder.manifest["name"]).stem) or "mesh"  # the files list it
    flat = all(is_polydata(folder.piece(p).mesh) for p in range(folder.k))
    files, sample = [], None
    for shard, mesh in enumerate(_pieces(folder, ghosts)):
        path = directory / f"{stem}_{shard:05d}.{'vtp' if flat else 'vtu'}"
        write_vtk(mesh, path)
        files.append(path.name)
        sample = sample or mesh
    assert sample is not None
    whole = directory / f"{stem}.{'pvtp' if flat else 'pvtu'}"
    _write(directory / f"{stem}.vtm", _multiblock(files))
    _write(whole, _parallel(files, sample, flat, ghosts))
    return whole


def _write(path: Path, text: str) -> None:
    with report_write_errors(path), atomic_file(path) as part:
        part.write_text(text, encoding="utf-8")


def _pieces(folder: Folder, ghosts: bool) -> Iterator[Mesh]:
    """Every shard as a mesh with `shard_id` and `global_id`; with its ghosts if `ghosts`."""
    cell_owner, point_owner = _owners(folder)
    pieces = _with_ghosts(folder) if ghosts else map(folder.piece, range(folder.k))
    for shard, piece in enumerate(pieces):
        mesh, cells, points = piece.mesh, cell_owner[piece.cells], point_owner[piece.points]
        point = _ids(points, piece.points, mesh.point_fields)
        cell = _ids(cells, piece.cells, mesh.cell_fields) if folder.manifest["n_cells"] else {}
        if ghosts:
            point |= _flags(points != shard)
            cell |= _flags(cells != shard) if cell else {}
        yield mesh.with_fields(cell=cell, point=point)


def _owners(folder: Folder) -> tuple[Array, Array]:
    """Owner of every cell and of every point: one shard each, also of points that several hold.

    If cells are sharded, that is the lowest shard with a cell at the point.
    """
    cells = np.zeros(folder.manifest["n_cells"], np.int64)
    points = np.zeros(folder.manifest["n_points"], np.int64)
    for shard in reversed(range(folder.k)):
        piece = folder.piece(shard)
        cells[piece.cells] = points[piece.points] = shard
    return cells, folder.labels() if folder.entity == "points" else points


def _with_ghosts(folder: Folder) -> Iterator[Piece]:
    """Every shard, followed by all cells of other shards at its points (a cloud: by its halo).

    Filters of VTK need every cell at a point. The halo of the plan is not enough: it holds
    neighbors across facets.
    """
    whole = folder.gather()
    row = np.concatenate([folder.origin(p) for p in range(folder.k)])
    merged = weld(whole) if folder.manifest.get("welded_points") else whole
    corners = merged.connectivity if merged.weld is None else merged.weld[merged.connectivity]
    cells, offsets = _cells_at_points(whole, corners)
    for shard in range(folder.k):
        own = folder.piece(shard)
        if whole.n_cells:
            at = own.points if merged.weld is None else merged.weld[own.points]
            near = np.unique(gather_rows(cells, offsets, at)[0])
            ghosts = np.setdiff1d(near, own.cells, assume_unique=True)
            yield extract(whole, np.concatenate([own.cells, ghosts]), own.points)
        else:
            halo = row[folder.plan(shard).halo]
            yield extract(whole, own.cells, np.concatenate([own.points, halo]))


def _cells_at_points(mesh: Mesh, corners: Array) -> tuple[Array, Array]:
    """Cells at every point, and their (n_points + 1,) offsets; `corners` of cells may be welded."""
    from scipy.sparse import csr_array

    ones = np.ones(len(corners), np.int8)
    shape = (mesh.n_cells, mesh.n_points)
    at = csr_array((ones, corners, mesh.offsets), shape=shape).tocsc()
    return at.indices, at.indptr


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
        for name, a in xml_fields(fields).items()
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
