"""The ParaView export, read by VTK's parallel readers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from samples import ROOT, cloud, cut, fields, surface, volume
from vtkmodules.util.numpy_support import vtk_to_numpy
from vtkmodules.vtkCommonCore import vtkOutputWindow, vtkStringOutputWindow
from vtkmodules.vtkIOXML import (
    vtkXMLMultiBlockDataReader,
    vtkXMLPolyDataReader,
    vtkXMLPPolyDataReader,
    vtkXMLPUnstructuredGridReader,
    vtkXMLUnstructuredGridReader,
)

from meshshard import io, store
from meshshard.errors import StoreError
from meshshard.mesh import Array, Mesh
from meshshard.store import paraview

READERS = {
    ".pvtp": vtkXMLPPolyDataReader,
    ".pvtu": vtkXMLPUnstructuredGridReader,
    ".vtp": vtkXMLPolyDataReader,
    ".vtu": vtkXMLUnstructuredGridReader,
    ".vtm": vtkXMLMultiBlockDataReader,
}
CASES = [("surface", "cells", ".pvtp"), ("surface", "points", ".pvtp"),
         ("cloud", "points", ".pvtp"), ("hexes", "cells", ".pvtu"), ("volume", "cells", ".pvtu"),
         ("volume", "points", ".pvtu")]  # fmt: skip


def sample(name: str) -> Mesh:
    makers = {"surface": surface, "cloud": cloud, "volume": volume}
    return makers[name]() if name in makers else volume(3, False)


def export(tmp_path: Path, mesh: Mesh, on: str, *, k: int = 5, ghosts: bool = False) -> Any:
    """A partition with two empty shards, and its parallel file."""
    n = mesh.n_cells if on == "cells" else mesh.n_points
    labels = np.sort(np.arange(n) % 3) + (np.arange(n) % 3 == 2)
    labels = np.where(labels == 1, 4, labels)
    made = cut(mesh, k + 1, on=on, method=np.minimum(labels, k))
    assert (made.sizes == 0).sum() >= 2
    folder = store.load(made.save(tmp_path / "x.shards"))
    return folder, paraview.export(folder, tmp_path / "名 前.paraview", ghosts=ghosts)


def read(path: Path) -> Any:
    """Read a file with VTK; it must not print errors."""
    window = vtkStringOutputWindow()
    vtkOutputWindow.SetInstance(window)
    reader = READERS[path.suffix]()
    reader.SetFileName(str(path))
    reader.Update()
    vtkOutputWindow.SetInstance(None)
    assert window.GetOutput() == ""
    return reader.GetOutput()


def arrays(attributes: Any) -> dict[str, Array]:
    found = [attributes.GetArray(i) for i in range(attributes.GetNumberOfArrays())]
    values = [np.array(vtk_to_numpy(a)).reshape(-1, a.GetNumberOfComponents()) for a in found]
    return {a.GetName(): v for a, v in zip(found, values, strict=True)}


@pytest.mark.parametrize("ghosts", [False, True])
@pytest.mark.parametrize(("name", "on", "suffix"), CASES)
def test_the_parallel_file(tmp_path: Path, name: str, on: str, suffix: str, ghosts: bool) -> None:
    mesh = sample(name)
    folder, path = export(tmp_path, mesh, on, ghosts=ghosts)
    assert path.suffix == suffix
    data = read(path)
    cell, point = arrays(data.GetCellData()), arrays(data.GetPointData())
    if mesh.n_cells:
        compare(cell, mesh.cell_fields, mesh.n_cells, ghosts)
    compare(point, mesh.point_fields, mesh.n_points, name != "cloud" or ghosts)
    owner = cell if on == "cells" else point
    rows, shards = owner["global_id"][:, 0], owner["shard_id"][:, 0]
    np.testing.assert_array_equal(shards, folder.labels()[rows])
    places = vtk_to_numpy(data.GetPoints().GetData())
    np.testing.assert_array_equal(places, mesh.points[point["global_id"][:, 0]])
    if ghosts:
        for found, n in [(point, mesh.n_points), *([(cell, mesh.n_cells)] if cell else [])]:
            mine = found["vtkGhostType"][:, 0] == 0
            np.testing.assert_array_equal(np.sort(found["global_id"][mine, 0]), np.arange(n))
    else:
        assert "vtkGhostType" not in {**cell, **point}


def compare(found: dict[str, Array], truth: Any, n: int, repeated: bool) -> None:
    """Every field is present and equal to its source rows."""
    rows = found["global_id"][:, 0]
    if repeated:
        assert set(rows) == set(range(n))
    else:
        np.testing.assert_array_equal(np.sort(rows), np.arange(n))
    for name, values in truth.items():
        values = values.reshape(n, -1)
        values = values.astype(np.uint8) if values.dtype == bool else values
        assert found[name].dtype == values.dtype
        np.testing.assert_array_equal(found[name], values[rows])


@pytest.mark.parametrize("ghosts", [False, True])
@pytest.mark.parametrize(("name", "on", "suffix"), CASES)
def test_every_piece(tmp_path: Path, name: str, on: str, suffix: str, ghosts: bool) -> None:
    mesh = sample(name)
    folder, path = export(tmp_path, mesh, on, ghosts=ghosts)
    blocks = read(next(path.parent.glob("*.vtm")))
    files = sorted(path.parent.glob(f"*.{suffix[2:]}"))
    assert blocks.GetNumberOfBlocks() == len(files) == folder.k
    extra = {"shard_id", "global_id"} | ({"vtkGhostType"} if ghosts else set())
    for shard, file in enumerate(files):
        piece, block = read(file), blocks.GetBlock(shard)
        cell, point = arrays(piece.GetCellData()), arrays(piece.GetPointData())
        assert set(point) == {*mesh.point_fields, *extra}
        assert set(cell) == ({*mesh.cell_fields, *extra} if mesh.n_cells else set())
        assert all(len(a) == piece.GetNumberOfCells() for a in cell.values())
        assert all(len(a) == piece.GetNumberOfPoints() for a in point.values())
        if block is not None:
            assert block.GetNumberOfPoints() == piece.GetNumberOfPoints()
        owner = cell if on == "cells" else point
        mine = owner["shard_id"][:, 0] == shard
        rows = owner["global_id"][:, 0]
        np.testing.assert_array_equal(rows[mine], folder.origin(shard))
        if ghosts:
            np.testing.assert_array_equal(owner["vtkGhostType"][:, 0] == 0, mine)
            halo = folder.plan(shard).halo
            first = np.concatenate([folder.origin(p) for p in range(folder.k)])
            assert set(first[halo]) <= set(rows)


@pytest.mark.slow
@pytest.mark.parametrize(("file", "on", "halo"), [("volume_8.vtu", "cells", 1),
    ("volume_8.vtu", "points", 1), ("boundary_8.vtp", "cells", 3)])  # fmt: skip
def test_filters_of_vtk_give_the_results_of_the_whole_mesh(
    tmp_path: Path, file: str, on: str, halo: int
) -> None:
    import pyvista

    mesh = io.read(ROOT / "datasets" / "ahmed" / "run_8" / file)
    folder = store.load(cut(mesh, 8, on=on, halo=halo).save(tmp_path / "x.shards"))
    pieces = pyvista.wrap(read(paraview.export(folder, tmp_path / "p", ghosts=True)))
    whole, joined = averaged(io.to_pyvista(mesh)), averaged(pieces)
    mine = pieces.point_data["vtkGhostType"] == 0
    rows = np.asarray(pieces.point_data["global_id"][mine])
    np.testing.assert_array_equal(np.sort(rows), np.arange(mesh.n_points))
    expected = whole.point_data["CpMeanTrim"][rows]
    np.testing.assert_allclose(joined.point_data["CpMeanTrim"][mine], expected, atol=1e-6)
    assert contour_size(joined) == pytest.approx(contour_size(whole), rel=1e-6)
    cracked = averaged(pyvista.wrap(read(paraview.export(folder, tmp_path / "q"))))
    assert contour_size(cracked) != pytest.approx(contour_size(whole), rel=1e-3)


def averaged(mesh: Any) -> Any:
    return mesh.cell_data_to_point_data(pass_cell_data=True)


def contour_size(mesh: Any) -> float:
    """Area (length on a surface) of a contour, without its cells from ghosts."""
    mesh.point_data.set_scalars(mesh.point_data["CpMeanTrim"].astype(float), "Cp")
    contour = mesh.contour([-0.1], scalars="Cp")
    sizes = contour.compute_cell_sizes()
    ghost = contour.cell_data.get("vtkGhostType", np.zeros(contour.n_cells))
    return float((sizes["Area"] + sizes["Length"])[np.asarray(ghost) == 0].sum())


def test_field_names_that_the_export_uses(tmp_path: Path) -> None:
    mesh = surface()
    n = mesh.n_cells
    mesh = mesh.with_fields(
        cell={"shard_id": np.full(n, 7.5), "global_id": np.full(n, 8.5)},
        point={"global_id": np.full(mesh.n_points, 9.5), "global_id_": np.zeros(mesh.n_points)},
    )
    _, path = export(tmp_path, mesh, "cells")
    data = read(path)
    cell, point = arrays(data.GetCellData()), arrays(data.GetPointData())
    assert set(cell["shard_id"].ravel()) == {7.5}
    np.testing.assert_array_equal(np.sort(cell["global_id_"].ravel()), np.arange(n))
    assert set(point["global_id"].ravel()) == {9.5}
    assert "global_id__" in point
    assert "shard_id" in point


def test_field_names_with_characters_that_xml_lacks(tmp_path: Path) -> None:
    names = ("bell\x07", "tab\tnew\nline", "a]]>b")
    mesh = Mesh(
        points=np.random.default_rng(0).random((40, 3)),
        point_fields=dict.fromkeys(names, np.arange(40.0)),
        name="a&b<c>'\".vtp",
    )
    _, path = export(tmp_path, mesh, "points")
    assert {"bell_", "tab\tnew\nline", "a]]>b"} <= set(arrays(read(path).GetPointData()))


def test_lines_keep_their_kind(tmp_path: Path) -> None:
    ids = np.arange(30)
    mesh = Mesh(
        points=np.random.default_rng(0).random((31, 3)),
        connectivity=np.stack([ids, ids + 1], -1).ravel(),
        offsets=np.arange(0, 61, 2),
        types=np.full(30, 3, np.uint8),
        cell_fields=fields(30),
    )
    _, path = export(tmp_path, mesh, "cells")
    assert read(path).GetNumberOfLines() == 30


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    folder = store.load(cut(surface(), 2).save(tmp_path / "x.shards"))
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="file: cannot be written"):
        paraview.export(folder, tmp_path / "file")
    with pytest.raises(StoreError, match="cannot be written"):
        paraview.export(folder, tmp_path / "file" / "below")
