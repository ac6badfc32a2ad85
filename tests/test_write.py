"""Written files are read back bit for bit, by meshshard and by VTK."""

import functools
import operator
import string
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from strategies import grid_surface

from meshshard import io
from meshshard.errors import MeshshardError, MeshWarning
from meshshard.io.readers.stl import FACET
from meshshard.mesh import Faces, Mesh

DTYPES = ("f4", "f8", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8")
SHEET = replace(grid_surface(4, 3), cell_fields={"p": np.arange(12.0)})
CLOUD = Mesh(points=np.eye(3), point_fields={"u": np.arange(3, dtype=np.int64)})
CUBE = [(0, 3, 2, 1), (4, 5, 6, 7), (0, 1, 5, 4), (1, 2, 6, 5), (2, 3, 7, 6), (3, 0, 4, 7)]


@st.composite
def fields(draw, n):
    names = draw(
        st.lists(st.text(string.printable + "ρ∞名\"<&'", min_size=1, max_size=12), max_size=3)
    )
    names = [name for name in dict.fromkeys(" ".join(name.split()) for name in names) if name]
    shape = st.sampled_from([(n,), (n, 2), (n, 3), (n, 9)])
    return {name: draw(hnp.arrays(draw(st.sampled_from(DTYPES)), draw(shape))) for name in names}


@st.composite
def surfaces(draw):
    """Any polygons on any points, with fields of any type and name."""
    n = draw(st.integers(3, 12))
    cells = draw(
        st.lists(st.lists(st.integers(0, n - 1), min_size=3, max_size=6), min_size=1, max_size=8)
    )
    finite = st.floats(-1e6, 1e6, width=32)
    points = draw(hnp.arrays(draw(st.sampled_from(["f4", "f8"])), (n, 3), elements=finite))
    offsets = np.cumsum([0, *map(len, cells)])
    return Mesh(
        points=points,
        connectivity=np.array(functools.reduce(operator.iadd, cells, [])),
        offsets=offsets,
        types=np.full(len(cells), 7, np.uint8),
        point_fields=draw(fields(n)),
        cell_fields=draw(fields(len(cells))),
    )


def assert_equal(a, b):
    """Assert that two meshes are equal bit for bit, dtypes included."""
    for name in ("points", "connectivity", "offsets", "types"):
        assert np.array_equal(getattr(a, name), getattr(b, name)), name
    for of, to in ((a.point_fields, b.point_fields), (a.cell_fields, b.cell_fields)):
        assert list(of) == list(to)
        for name in of:
            assert (of[name].dtype, of[name].shape) == (to[name].dtype, to[name].shape), name
            assert of[name].tobytes() == to[name].tobytes(), name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("suffix", ["vtp", "vtu"])
@given(mesh=surfaces())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_round_trip(mesh, suffix, tmp_path):
    path = tmp_path / f"a.{suffix}"
    io.write(mesh, path)
    assert_equal(io.read(path), mesh)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.filterwarnings("ignore")
@given(mesh=surfaces())
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_vtk_reads_written_files(mesh, tmp_path):
    from vtkmodules.vtkIOXML import vtkXMLPolyDataReader

    path = tmp_path / "a.vtp"
    io.write(mesh, path)
    reader = vtkXMLPolyDataReader()
    reader.SetFileName(str(path))
    reader.Update()
    assert_equal(io.from_pyvista(reader.GetOutput()), mesh)
    assert_equal(io.from_pyvista(io.to_vtk(mesh)), mesh)


def polyhedra():
    """A cube as a polyhedron beside a tetrahedron."""
    points = [(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0)]
    points += [(x, y, 1) for x, y, _ in points] + [(0.5, 0.5, 2)]
    faces = Faces(np.array([0, 6, 6]), np.arange(7) * 4, np.ravel(CUBE))
    return Mesh(
        points=np.array(points, float),
        connectivity=np.array([*range(8), 4, 5, 6, 8]),
        offsets=np.array([0, 8, 12]),
        types=np.array([42, 10], np.uint8),
        faces=faces,
        cell_fields={"p": np.array([1.0, 2.0])},
    )


@pytest.mark.parametrize("name", ["meshshard.vtu", "binary.vtu", "ascii.vtu", "a.vtk", "pyvista"])
def test_polyhedra(tmp_path, name):
    mesh, path = polyhedra(), tmp_path / name
    grid = io.to_pyvista(mesh)
    assert grid.volume == pytest.approx(1 + 1 / 6)
    if name == "meshshard.vtu":
        io.write(mesh, path)
    elif name != "pyvista":
        grid.save(path, binary=name != "ascii.vtu")
    back = io.from_pyvista(grid) if name == "pyvista" else io.read(path)
    assert back.types.tolist() == [42, 10]
    assert sorted(back.connectivity[:8]) == list(range(8))
    assert np.array_equal(back.faces.connectivity, mesh.faces.connectivity)
    assert np.array_equal(back.faces.offsets, mesh.faces.offsets)
    assert np.array_equal(back.faces.cell_offsets, mesh.faces.cell_offsets)


def test_old_face_stream_keeps_order(tmp_path):
    mesh = polyhedra()
    both = Mesh(
        points=mesh.points,
        connectivity=np.concatenate([mesh.connectivity, np.arange(8)]),
        offsets=np.array([0, 8, 12, 20]),
        types=np.array([42, 10, 42], np.uint8),
        faces=Faces(np.array([0, 6, 6, 12]), np.arange(13) * 4, np.tile(np.ravel(CUBE), 2)),
    )
    io.write(both, tmp_path / "a.vtu")
    back = io.read(tmp_path / "a.vtu").faces
    assert all(np.array_equal(a, b) for a, b in zip(back, both.faces, strict=True))


def test_volume_and_cloud(tmp_path):
    with pytest.raises(MeshshardError, match=r"a \.vtp cannot hold a volume"):
        io.write(polyhedra(), tmp_path / "a.vtp")
    cloud = Mesh(points=np.eye(3), point_fields={"u": np.arange(3, dtype=np.int64)})
    for name in ("a.vtp", "a.vtu", "a.npz"):
        io.write(cloud, tmp_path / name)
        assert_equal(io.read(tmp_path / name), cloud)
    with pytest.raises(MeshshardError, match=r"\.vtkhdf, \.stl or \.npz, not '\.xyz'"):
        io.write(cloud, tmp_path / "a.xyz")
    assert io.to_vtk(cloud).GetNumberOfVerts() == 3


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [polyhedra(), SHEET, CLOUD], ids=lambda mesh: mesh.kind)
def test_vtkhdf(mesh, tmp_path):
    io.write(mesh, tmp_path / "a.vtkhdf")
    assert_equal(io.read(tmp_path / "a.vtkhdf"), mesh)
    bad = mesh.with_fields(point={"a/b": np.zeros(mesh.n_points)})
    with pytest.raises(MeshshardError, match=r"HDF5 allows no '/' and '\.' in the field 'a/b'"):
        io.write(bad, tmp_path / "b.vtkhdf")
    assert list(tmp_path.iterdir()) == [tmp_path / "a.vtkhdf"]


def test_stl(tmp_path):
    path = tmp_path / "a.stl"
    with pytest.warns(MeshWarning, match="an .stl has no fields; left out: p"):
        io.write(SHEET, path)
    triangles = io.read(path)
    assert (triangles.n_cells, triangles.n_points) == (24, 20)
    assert np.allclose(triangles.area_vectors().sum(0), SHEET.area_vectors().sum(0))
    normals = np.frombuffer(path.read_bytes(), FACET, offset=84)["normal"]
    assert np.allclose(normals, triangles.normals())
    concave = io.from_arrays([(0, 0, 0), (2, 1, 0), (0, 2, 0), (1, 1, 0)], [[0, 1, 2, 3]])
    io.write(concave, path)
    assert io.read(path).areas().sum() == pytest.approx(1)
    for mesh in (polyhedra(), CLOUD):
        with pytest.raises(MeshshardError, match=rf"holds polygons only, not a {mesh.kind}"):
            io.write(mesh, path)


def test_a_failed_write_leaves_nothing(tmp_path):
    path = tmp_path / "a.vtp"
    path.write_text("before")
    bad = Mesh(points=np.eye(3), point_fields={"s": np.array(["a", "b", "c"])})
    with pytest.raises(MeshshardError, match="'s' of type"):
        io.write(bad, path)
    for name, shape, words in (("", (3,), "an array has no name"), ("q", (3, 0), "'q' has no val")):
        bad = Mesh(points=np.eye(3), point_fields={name: np.zeros(shape)})
        for other in ("a.vtp", "a.vtu", "a.vtkhdf"):
            with pytest.raises(MeshshardError, match=words):
                io.write(bad, tmp_path / other)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_memory_is_shared():
    mesh = io.from_arrays(np.eye(3), [[0, 1, 2]], point_fields={"p": np.zeros(3)})
    grid = io.to_pyvista(mesh)
    assert np.shares_memory(np.asarray(grid.point_data["p"]), mesh.point_fields["p"])
    assert np.shares_memory(io.from_pyvista(grid).points, mesh.points)
