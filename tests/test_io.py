"""Reading files; an error is one line that names the file and what is wrong."""

import base64
import gzip
import importlib
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from meshshard import io
from meshshard.errors import MeshError, MeshWarning, ReadError
from meshshard.io.formats import FORMATS, recognize

POINTS = [(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0)]


def vtp(*, points=POINTS, polys=((0, 1, 2), (0, 2, 3)), cell="", point="", **sections):
    """An ascii .vtp."""
    cells = {"Polys": polys, **sections}
    counts = " ".join(f'NumberOf{name}="{len(of)}"' for name, of in cells.items())
    body = "".join(
        f"<{name}>{array('Int64', 'connectivity', [i for c in of for i in c])}"
        f"{array('Int64', 'offsets', np.cumsum([len(c) for c in of]))}</{name}>"
        for name, of in cells.items()
    )
    coordinates = array("Float64", "Points", np.ravel(points), 3)
    return (
        '<?xml version="1.0"?><VTKFile type="PolyData" version="1.0"><PolyData>'
        f'<Piece NumberOfPoints="{len(points)}" {counts}><PointData>{point}</PointData>'
        f"<CellData>{cell}</CellData><Points>{coordinates}</Points>{body}</Piece></PolyData></VTKFile>"
    )


def array(kind, name, values, width=1):
    text = " ".join(map(str, values))
    return (
        f'<DataArray type="{kind}" Name="{name}" NumberOfComponents="{width}" format="ascii">'
        f"{text}</DataArray>"
    )


def vtu(cells, types, points=POINTS):
    """An ascii .vtu."""
    return (
        '<VTKFile type="UnstructuredGrid" version="1.0"><UnstructuredGrid>'
        f'<Piece NumberOfPoints="{len(points)}" NumberOfCells="{len(cells)}"><Points>'
        f"{array('Float64', 'Points', np.ravel(points), 3)}</Points><Cells>"
        f"{array('Int64', 'connectivity', [i for c in cells for i in c])}"
        f"{array('Int64', 'offsets', np.cumsum([len(c) for c in cells]))}"
        f"{array('UInt8', 'types', types)}</Cells></Piece></UnstructuredGrid></VTKFile>"
    )


@pytest.fixture
def load(tmp_path):
    def load(name, content, **options):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return io.read(path, **options)

    return load


@pytest.fixture(autouse=True)
def _warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error", MeshWarning)
        yield


def test_plain_surface(load):
    mesh = load(
        "a.vtp", vtp(cell=array("Float32", "p", [1, 2]), point=array("Int64", "i", range(4)))
    )
    assert (mesh.kind, mesh.n_points, mesh.n_cells) == ("surface", 4, 2)
    assert mesh.types.tolist() == [7, 7]
    assert mesh.cell_fields["p"].tolist() == [1, 2]
    assert mesh.point_fields["i"].dtype == np.int64
    assert mesh.cell_origin is None


def encoded(name, values, how):
    """A DataArray in one of VTK's binary encodings; returns (element, appended bytes)."""
    raw = np.ascontiguousarray(values).tobytes()
    kind = {"f4": "Float32", "i8": "Int64"}[np.asarray(values).dtype.str[1:]]
    if "zlib" in how:
        blocks = [raw[i : i + 16] for i in range(0, len(raw), 16)]
        packed = [zlib.compress(block) for block in blocks]
        head = struct.pack(
            f"<{3 + len(blocks)}Q", len(blocks), 16, len(raw) % 16, *map(len, packed)
        )
        parts = [head, *packed]
    else:
        parts = [struct.pack("<Q", len(raw)), raw]
    element = f'<DataArray type="{kind}" Name="{name}" NumberOfComponents="3" format="{{}}"{{}}'
    if "raw" in how:
        return element.format("appended", ' offset="{}"/>'), b"".join(parts)
    if "joined" in how:
        parts = [b"".join(parts)]
    text = b"".join(base64.b64encode(part) for part in parts)
    if "appended" in how:
        return element.format("appended", ' offset="{}"/>'), text
    return element.format("binary", f">\n  {text.decode()}\n</DataArray>"), b""


@pytest.mark.parametrize(
    "how",
    ["inline", "inline joined", "inline zlib", "appended", "appended joined", "appended zlib",
     "raw", "raw zlib"],
)  # fmt: skip
def test_encodings(load, how):
    points = np.random.default_rng(0).random((7, 3)).astype("f4")
    field = np.arange(21).reshape(7, 3)
    elements, appended = [], b""
    for name, values in (("f", field), ("Points", points)):
        element, data = encoded(name, values, how)
        elements.append(element.format(len(appended)) if data else element)
        appended += data
    coding = "raw" if "raw" in how else "base64"
    tail = f'<AppendedData encoding="{coding}">\n _'.encode() + appended + b"\n</AppendedData>"
    compressor = 'compressor="vtkZLibDataCompressor"' if "zlib" in how else ""
    text = (
        f'<VTKFile type="PolyData" byte_order="LittleEndian" header_type="UInt64" {compressor}>'
        f'<PolyData><Piece NumberOfPoints="7"><PointData>{elements[0]}</PointData>'
        f"<Points>{elements[1]}</Points></Piece></PolyData>"
    ).encode()
    mesh = load("a.vtp", text + (tail if appended else b"") + b"</VTKFile>")
    assert mesh.points.tobytes() == points.tobytes()
    assert np.array_equal(mesh.point_fields["f"], field)


def test_cells_of_lower_dimension_are_left_out(load):
    content = vtp(
        Verts=[(0,)], Lines=[(0, 1)], Strips=[(0, 1, 2, 3)], cell=array("Int32", "p", range(5))
    )
    with pytest.warns(MeshWarning, match=r"1 vertex, 1 line left out"):
        mesh = load("a.vtp", content)
    # cell data are in the order verts, lines, polys, strips, for any order of the sections
    assert mesh.cell_fields["p"].tolist() == [2, 3, 4, 4]
    assert mesh.cell_origin.tolist() == [2, 3, 4, 4]
    assert mesh.connectivity.tolist() == [0, 1, 2, 0, 2, 3, 0, 1, 2, 2, 1, 3]
    assert mesh.types.tolist() == [7, 7, 5, 5]


def test_vertex_cells_are_read_as_a_cloud(load):
    content = vtp(polys=(), Verts=[(i,) for i in range(4)], cell=array("Int32", "p", range(4)))
    mesh = load("a.vtp", content)
    assert mesh.kind == "point cloud"
    assert mesh.point_fields["p"].tolist() == [0, 1, 2, 3]
    with pytest.warns(MeshWarning, match="fields are left out: p"):
        load("a.vtp", vtp(polys=(), Verts=[(1,)], cell=array("Int32", "p", [1])))


def test_ghost_cells_are_left_out(load):
    content = vtp(cell=array("UInt8", "vtkGhostType", [0, 1]) + array("Int32", "p", [5, 6]))
    with pytest.warns(MeshWarning, match="1 ghost cell left out"):
        mesh = load("a.vtp", content)
    assert {k: v.tolist() for k, v in mesh.cell_fields.items()} == {"p": [5]}
    assert mesh.cell_origin.tolist() == [0]


def test_unusual_arrays(load):
    cell = (
        array("Float32", "p", [1, 2]) + array("Float32", "p", [3, 4])
        + array("String", "s", [65, 0]) + array("Float32", "n", ["nan", "inf"])
        + array("Int32", "part_id", [0, 1]) + array("Bit", "b", [0, 1])
        + array("Int64", "i", [2**53 + 1, -1])
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mesh = load("a.vtp", vtp(cell=cell))
    messages = "\n".join(str(w.message) for w in caught)
    for words in ("called 'p'", "'s' is not numeric", "'n' has 1 NaN and 1 inf", "array 'part_id'"):
        assert words in messages
    assert list(mesh.cell_fields) == ["p", "p (2)", "n", "part_id", "b", "i"]
    assert mesh.cell_fields["i"].tolist() == [2**53 + 1, -1]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.vtp", "", "empty file"),
        ("a.vtp", "version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
        ("a.vtp", "\n<!DOCTYPE html><html></html>", "HTML"),
        ("a.vtp", b"\x01\x02 random", "not a .vtp file"),
        ("a.xyzmesh", "mesh", r"\.xyzmesh.*\.vtp"),
        ("a.vtp", vtp()[:-300], "truncated"),
        ("a.vtp", vtp().replace("<Points>", "<Points"), "not well-formed"),
        ("a.vtp", vtp(points=[], polys=[]), "empty: no points"),
        ("a.vtp", vtp(polys=[(0, 1, 2), (0, 9, 1)]), "cell 1 refers to point 9"),
        ("a.vtp", vtp(polys=[(0, -5, 2)]), "cell 0 refers to point -5"),
        ("a.vtp", vtp(polys=[(0, 1)]), "cell 0 is a polygon with 2 points"),
        ("a.vtp", vtp(cell=array("Float32", "p", [1])), "'p' holds 1 .* declares 2"),
        ("a.vtp", vtp(cell=array("Float32", "p", ["x", "y"])), "'p' is damaged"),
        ("a.vtp", vtp(points=[(0, 0, 0), (1, 0, "nan"), (0, 1, 0), (1, 1, 1)]), "ids 1"),
        ("a.vtp", vtp().replace('Points="4"', 'Points="100000000000"'), "declares 300000000000"),
        ("a.vtp", vtp().replace("3 6</", "3 600</"), "offset 600"),
        ("a.vtp", vtp().replace("3 6</", "6 3</"), "backwards|does not fit"),
        ("a.vtu", vtu([(0, 1, 2), (0, 1)], [5, 99]), "type 99 of cell 1"),
        ("a.vtu", vtu([(0, 1, 2), (0, 1)], [5, 5]), "cell 1 is a triangle with 2 points"),
        ("a.vtu", vtu([(0, 1, 2, 3)], [42]), "polyhedron without faces"),
        ("a.obj", "v 0 0 0\nv 1 0 0\nv 0 1 0\nf 0 1 2\n", "line 4: index 0: OBJ .* 1-based"),
        ("a.obj", "v 0 0 0\nv 1 0 0\nv 0 1 0\nf 1 2 9\n", "refers to point 8"),
        ("a.stl", "solid a\nendsolid a\n", "empty: no triangle"),
        ("a.stl", "solid a\nfacet normal 0 0 1\nouter loop\nvertex 0 0 0\n", "truncated"),
        ("a.stl", b"x" * 80 + struct.pack("<I", 10) + b"\0" * 100, "declares 10 .* has 2:"),
        ("a.csv", "x,y,z,p\n0,0,0,1\n1,,0,2\n", "line 3"),
        ("a.csv", "x,y,z,p\n0,0,0,1\n1,0,0\n", "line 3 has 3 columns"),
        ("a.csv", "a,b\n0,0\n", "no columns x, y, z"),
        ("a.npz", b"PK\x03\x04 nothing", "damaged"),
        ("a.vtk", "no legacy file", "not a .vtk file"),
        ("a.vtp.gz", gzip.compress(vtp().encode())[:-20], "gz"),
    ],
)  # fmt: skip
def test_bad_files_are_refused(load, name, content, words):
    with pytest.raises((ReadError, MeshError), match=words) as caught:
        load(name, content)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(ReadError, match="no such file"):
        io.read(tmp_path / "a.vtp")
    with pytest.raises(ReadError, match="folder"):
        io.read(tmp_path)


def test_gzip_and_unusual_file_names(load):
    assert load("a.vtp.gz", gzip.compress(vtp().encode())).n_cells == 2
    assert load("d ü #/日本 'q\".vtp", vtp()).n_cells == 2
    assert load("grid.vtp", vtu([(0, 1, 2)], [5])).types.tolist() == [5]


def collection(kind, body):
    return f'<VTKFile type="{kind}"><{kind}>{body}</{kind}></VTKFile>'


def test_blocks(load):
    load("a.vtp", vtp(cell=array("Float32", "p", [1, 2]) + array("Int32", "i", [1, 2])))
    load("b.vtp", vtp(polys=[(0, 1, 2, 3)]))
    body = (
        '<DataSet name="body" file="a.vtp"/><DataSet name="none"/>'
        '<Block name="wheels"><DataSet name="front" file="b.vtp"/></Block>'
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mesh = load("all.vtm", collection("vtkMultiBlockDataSet", body))
    assert mesh.blocks == ("body", "wheels/front")
    assert mesh.cell_fields["block"].tolist() == [0, 0, 1]
    assert np.isnan(mesh.cell_fields["p"][2])
    assert "i" not in mesh.cell_fields
    assert mesh.connectivity[-4:].tolist() == [4, 5, 6, 7]
    assert any("'i' left out" in str(w.message) for w in caught)


def test_pieces(load):
    for name in ("a.vtp", "b.vtp"):
        load(name, vtp(cell=array("Int32", "p", [1, 2])))
    pieces = '<Piece Source="a.vtp"/><Piece Source="b.vtp"/>'
    mesh = load("all.pvtp", collection("PPolyData", pieces))
    assert mesh.cell_fields["p"].tolist() == [1, 2, 1, 2]
    assert mesh.blocks == ()
    with pytest.raises(ReadError, match=r"absent\.vtp"):
        load("all.pvtp", collection("PPolyData", '<Piece Source="absent.vtp"/>'))
    with pytest.raises(ReadError, match="circle"):
        load("all.pvtp", collection("PPolyData", '<Piece Source="all.pvtp"/>'))


def test_arrays_that_pieces_lack(load):
    load("a.vtp", vtp(cell=array("Float32", "p", [1, 2])))
    load("b.vtp", vtp())
    pieces = '<Piece Source="a.vtp"/><Piece Source="b.vtp"/>'
    listed = '<PCellData><PDataArray type="Float32" Name="q"/></PCellData>'
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mesh = load("all.pvtp", collection("PPolyData", listed + pieces))
    said = "\n".join(str(w.message) for w in caught)
    assert "cell array 'q' is listed, but no piece has it" in said
    assert "'p': NaN in 1 of 2 pieces, which lack it" in said
    assert np.isnan(mesh.cell_fields["p"]).tolist() == [False, False, True, True]


def test_time_steps(load):
    load("a.vtp", vtp())
    load("b.vtp", vtp(polys=[(0, 1, 2)]))
    body = '<DataSet timestep="0" file="a.vtp"/><DataSet timestep="0.5" file="b.vtp"/>'
    text = collection("Collection", body)
    with pytest.raises(ReadError, match=r"\(0, 0.5\); choose one with --time"):
        load("a.pvd", text)
    assert load("a.pvd", text, time=0.5).n_cells == 1
    with pytest.raises(ReadError, match=r"no time step 7; choose one of 0, 0\.5"):
        load("a.pvd", text, time=7)


LEGACY = """# vtk DataFile Version 3.0
a title
ASCII
DATASET POLYDATA
POINTS 4 float
0 0 0 1 0 0 1 1 0 0 1 0
POLYGONS 2 8
3 0 1 2
3 0 2 3
CELL_DATA 2
SCALARS a%20b float 1
LOOKUP_TABLE default
1 2
FIELD f 1
U 3 2 double
1 2 3 4 5 nan
POINT_DATA 4
VECTORS v float
0 0 0 1 1 1 2 2 2 3 3 3
"""


def test_legacy(load):
    with pytest.warns(MeshWarning, match="'U' has 1 NaN"):
        mesh = load("a.vtk", LEGACY)
    assert mesh.cell_fields["a b"].tolist() == [1, 2]
    assert mesh.cell_fields["U"].shape == (2, 3)
    assert mesh.point_fields["v"].shape == (4, 3)
    for change, words in (
        (("POLYGONS 2 8", "POLYGONS 2 7"), "corrupt.*POLYGONS"),
        (("POLYGONS 2 8", "POLYGONS 2 4"), "corrupt.*POLYGONS"),
        (("POINTS 4", "POINTS 100000000000"), "POINTS needs"),
        (("CELL_DATA 2", "CELL_DATA 1"), "corrupt|does not fit"),
        (("3 0 2 3", "3 0 2 z"), "POLYGONS"),
    ):
        with pytest.raises(ReadError, match=words):
            load("a.vtk", LEGACY.replace(*change))


PLY = """ply
format ascii 1.0
element vertex 3
property float x
property float y
property float z
property uchar red
element tristrips {n}
property list int int vertex_indices
end_header
0 0 0 255
1 0 0 {red}
0 1 0 0
"""


def test_what_ply_and_csv_cannot_hold_is_said(load):
    with pytest.warns(MeshWarning, match="elements left out: tristrips; only vertex and face are"):
        load("a.ply", PLY.format(n=1, red=7) + "3 0 1 2\n")
    assert load("a.ply", PLY.format(n=0, red=7)).point_fields["red"].tolist() == [255, 7, 0]
    for red in (256, -1, "nan"):
        with pytest.raises(ReadError, match="damaged in the element 'vertex'"):
            load("a.ply", PLY.format(n=0, red=red))
    with pytest.warns(MeshWarning, match="a.csv: id: integers from 2.53 on are rounded; use"):
        load("a.csv", "x,y,z,id\n0,0,0,9007199254740993\n")
    with pytest.raises(ReadError, match="empty: no points below the header line"):
        load("a.csv", "x,y,z\n")


def test_clouds(load, tmp_path):
    points = np.random.default_rng(0).random((5, 3))
    np.savez(tmp_path / "a.npz", pos=points, p=np.arange(5))
    mesh = io.read(tmp_path / "a.npz")
    assert np.array_equal(mesh.points, points)
    assert mesh.point_fields["p"].dtype == np.int64
    np.savez(tmp_path / "a.npz", points=points.T)
    with pytest.raises(ReadError, match=r"\(3, 5\)"):
        io.read(tmp_path / "a.npz")
    mesh = load("a.csv", 'x, y,z,"p q"\n0,0,0,1\n1,0,0,2\n')
    assert mesh.point_fields["p q"].tolist() == [1, 2]
    torch.save({"pos": torch.ones(4, 2), "u": torch.zeros(4, 3)}, tmp_path / "a.pt")
    assert io.read(tmp_path / "a.pt").points.tolist() == [[1, 1, 0]] * 4
    views = {"a": torch.arange(3.0)._neg_view(), "b": torch.ones(3, dtype=torch.complex64).imag}
    torch.save({"pos": torch.ones(3, 3), **views}, tmp_path / "a.pt")
    assert io.read(tmp_path / "a.pt").point_fields["a"].tolist() == [0, -1, -2]
    for bad in (torch.ones(3).to_sparse(), torch.ones(3).to(torch.float8_e5m2)):
        torch.save({"pos": torch.ones(3, 3), "bad": bad}, tmp_path / "a.pt")
        with pytest.raises(ReadError, match=r"'bad' is not a plain array .* make it a dense float"):
            io.read(tmp_path / "a.pt")
    torch.save({"pos": Path("x")}, tmp_path / "a.pt")
    with pytest.raises(ReadError, match="plain dict of tensors"):
        io.read(tmp_path / "a.pt")


def test_big_endian(load):
    points = np.arange(9).reshape(3, 3)
    raw = points.astype(">f8").tobytes()
    text = (
        '<VTKFile type="PolyData" byte_order="BigEndian"><PolyData>'
        '<Piece NumberOfPoints="3"><Points>'
        '<DataArray type="Float64" format="binary">'
        + base64.b64encode(struct.pack(">I", len(raw)) + raw).decode()
        + "</DataArray></Points></Piece></PolyData></VTKFile>"
    )
    assert load("a.vtp", text).points.tolist() == points.tolist()


def test_import_io_loads_no_vtk_and_no_torch():
    import subprocess
    import sys

    code = (
        "import sys; sys.path[:] = %r; import meshshard.io; "
        "sys.exit(any(m.split('.')[0] in ('vtkmodules', 'pyvista', 'torch') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code % sys.path], check=False).returncode == 0


def test_image(load):
    text = (
        '<VTKFile type="ImageData"><ImageData Origin="1 0 0" Spacing="2 1 1">'
        f'<Piece Extent="0 2 0 1 0 0"><CellData>{array("Int32", "p", [1, 2])}</CellData>'
        "</Piece></ImageData></VTKFile>"
    )
    mesh = load("a.vti", text)
    assert mesh.connectivity.tolist() == [0, 1, 4, 3, 1, 2, 5, 4]
    assert mesh.points[2].tolist() == [5, 0, 0]
    with pytest.raises(ReadError, match="without any array"):
        load("a.vti", text.replace("0 2 0 1", "0 99999 0 99999").split("<CellData>")[0]
             + "</Piece></ImageData></VTKFile>")  # fmt: skip


@pytest.mark.parametrize("row", FORMATS, ids=lambda row: row.name)
def test_every_format_has_a_reader_and_suffixes(row):
    module, function = row.reader.split(":")
    assert callable(getattr(importlib.import_module(f"meshshard.io.{module}"), function))
    assert row.suffixes == tuple(suffix.lower().lstrip(".") for suffix in row.suffixes)
    assert sum(other.name == row.name for other in FORMATS) == 1


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.msh", b"$MeshFormat", "Gmsh"),
        ("a.msh", b'(0 "Fluent")', "Fluent"),
        ("a.inp", b"*HEADING", "Abaqus"),
        ("a.inp", b"8 6 0", "AVS UCD"),
        ("a.cgns", b"\x89HDF\r\n\x1a\n", "CGNS"),
        ("a.hdf", b"\x89HDF\r\n\x1a\n", "VTKHDF"),
        ("a.stl", b"\xef\xbb\xbf <?xml version", "VTK XML"),
        ("mesh", b"# vtk DataFile Version 3.0", "VTK legacy"),
        ("a.foam", b"", "OpenFOAM"),
    ],
)
def test_content_and_suffix_identify_the_format(tmp_path, name, content, expected):
    (tmp_path / name).write_bytes(content)
    assert recognize(tmp_path / name).name == expected


def test_lz4(tmp_path):
    import pyvista as pv
    from vtkmodules.vtkIOXML import vtkXMLPolyDataWriter

    ball = pv.Sphere()
    writer = vtkXMLPolyDataWriter()
    writer.SetCompressorTypeToLZ4()
    writer.SetInputData(ball)
    writer.SetFileName(str(tmp_path / "a.vtp"))
    writer.Write()
    assert b"vtkLZ4DataCompressor" in (tmp_path / "a.vtp").read_bytes()[:500]
    assert np.array_equal(io.read(tmp_path / "a.vtp").points, ball.points)
