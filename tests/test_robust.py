"""Damaged files give a mesh or one clear error; they never crash or stop the process."""

import subprocess
import sys
import warnings
from pathlib import Path

import meshio
import numpy as np
import pytest
import pyvista as pv

from meshshard import io
from meshshard.errors import MeshWarning, ReadError
from meshshard.io import child
from meshshard.mesh import Mesh

pytestmark = pytest.mark.slow

FUZZ = """
import random, sys, warnings
sys.path[:] = {path!r}
from meshshard.errors import MeshshardError
from meshshard.io import read
warnings.simplefilter("ignore")
good, mutant, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
data, dice = open(good, "rb").read(), random.Random(0)
for _ in range(rounds):
    new = bytearray(data)
    for _ in range(dice.choice([1, 1, 2, 8])):
        at, what = dice.randrange(len(new)), dice.randrange(4)
        if what == 0:
            new[at] = dice.randrange(256)
        elif what == 1:
            del new[at : at + dice.randrange(1, 30)]
        elif what == 2:
            new[at:at] = bytes(dice.choice(b"0123456789-e. ") for _ in range(dice.randrange(1, 12)))
        else:
            new = new[: max(at, len(new) // 2)] or new
    open(mutant, "wb").write(new)
    try:
        read(mutant)
    except MeshshardError as error:
        assert "\\n" not in str(error), error
"""


def seeds(folder):
    """Small valid files of all formats that are read without a child process."""
    ball = pv.Sphere(theta_resolution=4, phi_resolution=4)
    ball.cell_data["p"] = np.arange(ball.n_cells, dtype=np.float32)
    solid, image = pv.examples.cells.Polyhedron(), pv.ImageData(dimensions=(3, 3, 2))
    for text in (True, False):
        for suffix in ("vtp", "vtk", "stl", "ply"):
            ball.save(folder / f"ball{text:d}.{suffix}", binary=not text)
        for suffix in ("vtu", "vtk"):
            solid.save(folder / f"solid{text:d}.{suffix}", binary=not text)
    image.save(folder / "image.vti")
    image.cast_to_structured_grid().save(folder / "grid.vts")
    image.cast_to_rectilinear_grid().save(folder / "grid.vtk")
    ball.save(folder / "ball.obj")
    np.savetxt(folder / "a.csv", np.eye(5), delimiter=",", header="x,y,z,p,q", comments="")
    np.savez(folder / "a.npz", points=np.eye(3), p=np.arange(3))
    io.write(io.from_pyvista(ball), folder / "own.vtp")
    return sorted(folder.iterdir())


@pytest.mark.slow
def test_mutated_files_never_crash(tmp_path):
    (tmp_path / "good").mkdir()
    for good in seeds(tmp_path / "good"):
        mutant = tmp_path / f"mutant{good.suffix}"
        command = [sys.executable, "-c", FUZZ.format(path=sys.path), good, mutant, "100"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"{good.name}: {done.returncode}\n{done.stderr[-2000:]}"


@pytest.mark.filterwarnings("ignore")
def test_a_truncated_file_is_refused(tmp_path):
    path = tmp_path / "a.vtp"
    io.write(io.from_pyvista(pv.Sphere(theta_resolution=4, phi_resolution=4)), path)
    data = path.read_bytes()
    for size in range(0, len(data) - 1, 37):
        path.write_bytes(data[:size])
        with pytest.raises(ReadError):
            io.read(path)


def test_vtkhdf(tmp_path):
    ball, path = pv.Sphere(), tmp_path / "a.vtkhdf"
    ball.save(path)
    mesh = io.read(path)
    assert np.array_equal(mesh.points, ball.points)
    assert mesh.n_cells == ball.n_cells
    path.write_bytes(path.read_bytes()[:4000])
    with pytest.raises(ReadError, match=r"a\.vtkhdf"):
        io.read(path)


def test_meshio(tmp_path):
    points = np.vstack([np.zeros(3), np.eye(3)])
    cells = [("tetra", [[0, 1, 2, 3]]), ("triangle", [[0, 1, 2]])]
    tags = {"gmsh:physical": [[7], [8]], "gmsh:geometrical": [[1], [1]]}
    meshio.Mesh(points, cells, cell_data=tags).write(tmp_path / "a.msh", file_format="gmsh22")
    (tmp_path / "a.su2").write_text(
        "NDIME= 3\nNELEM= 1\n10 0 1 2 3 0\nNPOIN= 4\n0 0 0 0\n1 0 0 1\n0 1 0 2\n0 0 1 3\n"
        "NMARK= 1\nMARKER_TAG= wall\nMARKER_ELEMS= 1\n5 0 1 2\n"
    )
    for name, words in (("a.msh", "1 triangle left out"), ("a.su2", "tags of string type")):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", MeshWarning)
            mesh = io.read(tmp_path / name)
        assert any(words in str(w.message) for w in caught)
        assert mesh.types.tolist() == [10]
    (tmp_path / "a.msh").write_text("$MeshFormat\n4.1 0 8\n$EndMeshFormat\n$Nodes\n9 9 9 9\n")
    with pytest.raises(ReadError, match=r"a\.msh: cannot be read"):
        io.read(tmp_path / "a.msh")


def test_a_reader_that_crashes_or_hangs_is_an_error(tmp_path, monkeypatch):
    path = tmp_path / "a.case"
    path.write_text("FORMAT")
    fake = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(fake))
    monkeypatch.setattr(child, "TIME_LIMIT", 0.5)
    for text, words in (("kill -SEGV $$", "SIGSEGV"), ("exec sleep 9", "did not end within"),
                        ("echo no >&2; exit 3", "failed: no")):  # fmt: skip
        fake.write_text(f"#!/bin/sh\n{text}\n")
        fake.chmod(0o700)
        with pytest.raises(ReadError, match=words):
            io.read(path)


@pytest.mark.parametrize(
    "make",
    [
        lambda: pv.ImageData(dimensions=(3, 4, 5)),
        lambda: pv.ImageData(dimensions=(3, 4, 5)).cast_to_structured_grid(),
        lambda: pv.ImageData(dimensions=(3, 4, 5)).cast_to_rectilinear_grid(),
        lambda: pv.ImageData(dimensions=(3, 4, 5)).cast_to_unstructured_grid(),
    ],
)
def test_grids_in_memory(make):
    mesh = io.from_pyvista(make())
    assert (mesh.kind, mesh.n_points, mesh.n_cells) == ("volume", 60, 24)
    assert set(mesh.types.tolist()) == {12}
    assert io.to_pyvista(mesh).volume == pytest.approx(24)


def test_blocks_in_memory():
    blocks = pv.MultiBlock(
        {"a": pv.Triangle(), "none": None, "in": pv.MultiBlock({"b": pv.Cube()})}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MeshWarning)
        mesh = io.from_pyvista(blocks, "two")
    assert mesh.blocks == ("a", "in/b")
    assert mesh.cell_fields["block"].tolist() == [0] + [1] * 6
    with pytest.raises(ReadError, match="empty"):
        io.from_pyvista(pv.PolyData())


def test_lines_and_strips_in_memory():
    strip = pv.Plane(i_resolution=3, j_resolution=1).triangulate().strip()
    mesh = io.from_pyvista(strip)
    assert mesh.n_cells == 6
    assert np.allclose(mesh.area_vectors().sum(0), [0, 0, 1])
    lines = io.from_pyvista(pv.lines_from_points(np.eye(3)))
    assert (lines.kind, lines.n_cells) == ("curves", 2)
    assert isinstance(io.from_pyvista(pv.PointSet(np.eye(3))), Mesh)


def test_openfoam_marker(tmp_path):
    """An empty .foam file stands for the case in its folder; without a case it is an error."""
    marker = Path(tmp_path / "case.foam")
    marker.touch()
    with pytest.raises(ReadError, match=r"case\.foam"):
        io.read(marker)
