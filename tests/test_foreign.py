"""What VTK and meshio print, drop, shorten or do not list is an error or a warning."""

import re
import warnings

import h5py
import meshio
import numpy as np
import pytest
import pyvista as pv
from foreign import ensight, ensight_values, foam_case, gmsh, hexahedra, vtkhdf, xdmf
from vtkmodules.vtkFiltersParallel import vtkRemoveGhosts

import meshshard as ms
from meshshard import io
from meshshard.errors import MeshError, MeshWarning, ReadError

pytestmark = pytest.mark.slow  # each read starts a process


def read(path, **options):
    """The mesh, and the text of all warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", MeshWarning)
        mesh = io.read(path, **options)
    return mesh, "\n".join(str(w.message) for w in caught)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda text: text.replace("4\n(", "3\n(").replace("303\n", ""),
            "mesh = 4, field = 3 in p",
        ),
        (lambda text: text[: text.index("302")], "Error reading line 8"),
    ],
)
def test_a_short_field_of_openfoam_is_refused(tmp_path, change, words):
    case = foam_case(tmp_path, serial=(3,))
    field = tmp_path / "3" / "p"
    field.write_text(change(field.read_text()))
    with pytest.raises(ReadError, match=rf"case\.foam: VTK cannot read it: .*{words}") as caught:
        io.read(case)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("serial", "time", "expected"),
    [((), None, 900), ((3,), None, 900), ((3,), 3, 300), ((3, 9), 9, 900)],
)
def test_a_decomposed_case_of_openfoam(tmp_path, serial, time, expected):
    mesh, said = read(foam_case(tmp_path, pieces=(9,), serial=serial), time=time)
    assert mesh.cell_fields["p"].tolist() == [expected + i for i in range(4)]
    from_pieces = "processor folders" in said
    assert from_pieces == (9 not in serial and time != 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MeshWarning)
        assert ms.partition(mesh, 1).quality.pieces == [1]  # joined where processors meet


def test_times_of_openfoam_are_listed(tmp_path):
    with pytest.raises(ReadError, match=r"2 time steps \(3, 5\); choose one with --time T"):
        io.read(foam_case(tmp_path, serial=(3, 5)))


@pytest.mark.parametrize(("time", "expected"), [(None, 300), (0, 0)])
def test_initial_conditions_of_openfoam_are_read_if_asked_for(tmp_path, time, expected):
    mesh, _ = read(foam_case(tmp_path, serial=(0, 3)), time=time)
    assert mesh.cell_fields["p"][0] == expected


def test_a_reader_that_fails_does_not_only_blame_the_file(tmp_path):
    (tmp_path / "a.msh").write_text("$MeshFormat\n4.1 0 8\n$EndMeshFormat\n$Nodes\n9 9 9 9\n")
    with pytest.raises(ReadError, match=r"a\.msh: cannot be read \(.*or holds what the reader"):
        io.read(tmp_path / "a.msh")


@pytest.mark.parametrize("blocks", [{"grid": 3}, {"fluid": 3, "wall": 3}])
def test_times_of_vtkhdf(tmp_path, blocks):
    path = vtkhdf(tmp_path / "a.vtkhdf", **blocks)
    for time, words in ((None, r"3 time steps \(0, 0.5, 1\)"), (7, "no time step 7; .* 0, 0.5, 1")):
        with pytest.raises(ReadError, match=words):
            io.read(path, time=time)
    assert io.read(path, time=1.0).cell_fields["p"].tolist() == [200, 201] * len(blocks)


def test_blocks_of_vtkhdf(tmp_path):
    mesh = io.read(vtkhdf(tmp_path / "a.vtkhdf", fluid=0, wall=0))
    assert (mesh.n_cells, mesh.blocks) == (4, ("fluid", "wall"))
    with pytest.raises(ReadError, match="some blocks have time steps and some have none"):
        io.read(vtkhdf(tmp_path / "b.vtkhdf", fluid=3, wall=0))


def test_close_times_can_be_typed(tmp_path):
    path = vtkhdf(tmp_path / "a.vtkhdf", grid=3)
    with h5py.File(path, "a") as file:
        file["VTKHDF/Steps/Values"][:] = [0.1, 0.1 + 1e-9, 0.1 + 2e-9]
    with pytest.raises(ReadError) as caught:
        io.read(path)
    words = re.search(r"\((.*)\)", str(caught.value))[1].split(", ")
    assert len(set(words)) == 3
    assert io.read(path, time=float(words[1])).cell_fields["p"].tolist() == [100, 101]


def test_a_time_is_refused_where_there_is_none(tmp_path):
    for name in ("a.vtp", "a.stl"):
        pv.Sphere(theta_resolution=4, phi_resolution=4).save(tmp_path / name)
        with pytest.raises(ReadError, match=f"{name}: has no time step 7; leave out --time"):
            io.read(tmp_path / name, time=7)


TWO_SETS = (
    "TIME\ntime set: 1\nnumber of steps: 2\nfilename numbers: 4 7\ntime values: 0.0\n 1.0\n"
    "time set: 2\nnumber of steps: 3\nfilename start number: 0\nfilename increment: 1\n"
    "time values: 0.0 0.5 1.0\n"
)


def test_two_time_sets_of_ensight(tmp_path):
    for number, value in ((4, 40), (7, 70)):
        ensight_values(tmp_path / f"q{number}.s", [value, value])
    for step in range(3):
        ensight_values(tmp_path / f"p{step:03d}.s", [step, step])
    variables = "scalar per element: 1 q q*.s\nscalar per element: 2 p p***.s"
    path = ensight(tmp_path, variables, TWO_SETS)
    with pytest.raises(ReadError, match=r"3 time steps \(0, 0.5, 1\)"):
        io.read(path)
    mesh, said = read(path, time=0.5)
    assert (mesh.cell_fields["p"][0], mesh.cell_fields["q"][0]) == (1, 40)
    assert "'q' has no step at 0.5; an earlier one is read" in said
    mesh, said = read(path, time=1.0)
    assert (mesh.cell_fields["p"][0], mesh.cell_fields["q"][0], said) == (2, 70, "")
    ensight_values(tmp_path / "q7.s", [70])
    with pytest.raises(
        ReadError, match=r"q7\.s holds 1 values, 'q' needs 2; the file is truncated"
    ):
        io.read(path, time=1.0)


@pytest.mark.parametrize("cut", [13, 8, 1, 30])
def test_a_short_variable_of_ensight_is_refused(tmp_path, cut):
    ensight_values(tmp_path / "U.v", [(1, 0, 1), (1, 0, 2)])
    path = ensight(tmp_path, "vector per element: U U.v")
    if cut == 1:
        assert io.read(path).cell_fields["U"].tolist() == [[1, 0, 1], [1, 0, 2]]
        return
    (tmp_path / "U.v").write_bytes((tmp_path / "U.v").read_bytes()[:-cut])
    with pytest.raises(ReadError, match=r"U\.v holds [345] values, 'U' needs 6; .* truncated"):
        io.read(path)


def test_a_short_binary_variable_of_ensight_is_refused(tmp_path):
    ensight_values(tmp_path / "U.v", [(1, 0, 1), (1, 0, 2)], binary=True)
    path = ensight(tmp_path, "vector per element: U U.v", binary=True)
    assert io.read(path).cell_fields["U"].tolist() == [[1, 0, 1], [1, 0, 2]]
    (tmp_path / "U.v").write_bytes((tmp_path / "U.v").read_bytes()[:-2])
    with pytest.raises(ReadError, match=r"a\.case: (VTK cannot read|U\.v holds 5 values)"):
        io.read(path)


def test_a_missing_variable_of_ensight_is_refused(tmp_path):
    path = ensight(tmp_path, "scalar per element: T T.s")
    with pytest.raises(ReadError, match=r"a\.case: VTK cannot read it: Unable to open file.*T\.s"):
        io.read(path)


@pytest.mark.parametrize(
    ("lines", "triangles", "expected", "words"),
    [
        ((1, 0), ((5,), (5,)), [5, 5], ""),
        ((1, 1), ((5,), ()), [5, 0], ""),
        ((1, 1), ((5, 6), (5,)), [5, 5], r"physical groups \[5, 6\]; only the first is kept"),
    ],
)
def test_physical_groups_of_gmsh(tmp_path, lines, triangles, expected, words):
    mesh, said = read(gmsh(tmp_path / "a.msh", lines, triangles))
    assert mesh.cell_fields["gmsh:physical"].tolist() == expected
    assert re.search(words, said)
    mesh, _ = read(gmsh(tmp_path / "b.msh", (0, 0), ((), ())))
    assert "gmsh:physical" not in mesh.cell_fields


LINEAR = ("Triangle", "Quadrilateral", "Tetrahedron", "Hexahedron", "Wedge", "Pyramid")


@pytest.mark.parametrize("first", [68, 75])
@pytest.mark.parametrize("name", LINEAR)
def test_curved_cells_of_order_one_are_linear(first, name):
    cell = getattr(pv.examples.cells, name)()
    number = first + 1 + LINEAR.index(name)
    grid = pv.UnstructuredGrid(cell.cells, [number], cell.points)
    mesh = io.from_pyvista(grid)
    assert mesh.types.tolist() == cell.celltypes.tolist()
    assert io.to_pyvista(mesh).compute_cell_sizes()["Volume"][0] == pytest.approx(
        cell.compute_cell_sizes()["Volume"][0], rel=1e-5
    )
    more = pv.UnstructuredGrid([27, *range(27)], [72], np.random.default_rng(0).random((27, 3)))
    with pytest.raises(MeshError, match=r"type 72 of cell 0 .* convert the cells to linear ones"):
        io.from_pyvista(more)


def test_cells_that_vtk_hides_are_left_out():
    for bit in range(8):
        grid = hexahedra(4)
        grid.cell_data["vtkGhostType"] = np.array([0, 1 << bit, 0, 0], np.uint8)
        kept = vtkRemoveGhosts()
        kept.SetInputData(grid)
        kept.Update()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MeshWarning)
            n = io.from_pyvista(grid).n_cells
        assert n == kept.GetOutput().GetNumberOfCells()


def test_arrays_without_a_name_or_of_another_length():
    ball = pv.Sphere(theta_resolution=4, phi_resolution=4)
    ball.clear_data()
    ball.cell_data["p"] = np.arange(ball.n_cells, dtype=float)
    ball.GetCellData().GetArray(0).SetName("")
    with pytest.warns(MeshWarning, match="cell array 0 has no name; it is called 'array 0'"):
        assert list(io.from_pyvista(ball).cell_fields) == ["array 0"]
    ball.GetCellData().GetArray(0).SetNumberOfTuples(3)
    ball.GetCellData().GetArray(0).SetName("q")
    with pytest.raises(ReadError, match="cell array 'q' has 3 rows for 16 cells; it is cut short"):
        io.from_pyvista(ball)


def test_a_soup_whose_facets_match_nowhere_is_said(tmp_path):
    ball = pv.Sphere(theta_resolution=8, phi_resolution=8)
    corners = np.asarray(ball.points)[ball.regular_faces.ravel()].astype(float)
    corners += np.random.default_rng(0).uniform(-1e-6, 1e-6, corners.shape)
    cells = np.arange(len(corners)).reshape(-1, 3)
    io.write(ms.from_arrays(corners, cells), tmp_path / "a.vtp")
    with pytest.warns(MeshWarning, match=r"96 of 96 cells share no edge .* --weld TOL"):
        ms.partition(tmp_path / "a.vtp", 2)


@pytest.mark.parametrize("include", ["//Grid[@Name='mesh']", "/Xdmf/Domain/Grid[1]"])
def test_xdmf_of_dolfinx(tmp_path, include):
    path = xdmf(tmp_path / "a.xdmf", {"p": {0: "1 2", 0.5: "3 4"}, "q": {0.5: "5 6"}}, include)
    with pytest.raises(ReadError, match=r"2 time steps \(0, 0\.5\); choose one with --time T"):
        io.read(path)
    mesh, said = read(path, time=0.5)
    assert {k: v.tolist() for k, v in mesh.cell_fields.items()} == {"p": [3, 4], "q": [5, 6]}
    assert (mesh.n_points, mesh.n_cells, said) == (4, 2, "")


@pytest.mark.parametrize("data_format", ["HDF", "XML", "Binary"])
def test_xdmf_of_meshio(tmp_path, data_format):
    grid = hexahedra(2)
    grid.cell_data["p"], grid.point_data["u"] = np.arange(2.0), np.arange(36.0).reshape(12, 3)
    path = tmp_path / "a.xdmf"
    meshio.Mesh(
        grid.points,
        [("hexahedron", grid.cell_connectivity.reshape(2, 8))],
        cell_data={"p": [np.arange(2.0)]},
        point_data={"u": np.arange(36.0).reshape(12, 3)},
    ).write(path, data_format=data_format)
    mesh, said = read(path)
    assert np.array_equal(mesh.points, grid.points)
    assert np.array_equal(mesh.cell_fields["p"], grid.cell_data["p"])
    assert np.array_equal(mesh.point_fields["u"], grid.point_data["u"])
    assert said == ""
    if data_format == "HDF":
        (tmp_path / "a.h5").unlink()
        with pytest.raises(ReadError, match=r"refers to 'a\.h5', which does not exist"):
            io.read(path)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("1 2<", "1<", "a list of 1 numbers, declared as 2: truncated"),
        ("'mesh'", "'none'", "include .* selects nothing"),
        ("</Domain>", "", "not well-formed"),
        ("Domain", "Other", "not an XDMF file"),
    ],
)
def test_damaged_xdmf_is_refused(tmp_path, old, new, words):
    path = xdmf(tmp_path / "a.xdmf", {"p": {0: "1 2"}})
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ReadError, match=rf"a\.xdmf: .*{words}"):
        io.read(path)
