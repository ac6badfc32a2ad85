"""STL, PLY and OBJ: parsing in bulk gives the same result as parsing line by line."""

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshshard import io
from meshshard.errors import ReadError
from meshshard.io.readers import obj

pytestmark = pytest.mark.slow


@pytest.fixture
def load(tmp_path):
    def load(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return io.read(path)

    return load


def test_stl(load):
    facet = "facet normal 0 0 1\nouter loop\nvertex {}\nvertex {}\nvertex {}\nendloop\nendfacet\n"
    one, two = facet.format("0 0 0", "1 0 0", "1 1 0"), facet.format("0 0 0", "1 1 0", "0 1 0")
    assert load("a.stl", f"solid a\n{one}{two}endsolid a\n").n_points == 4
    mesh = load("a.stl", f"solid a\n{one}endsolid a\nsolid b\n{two}endsolid b\n")
    assert mesh.blocks == ("a", "b")
    corners = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [-0.0, 0, 0], [1, 1, 0], [0, 1, 0]], "<f4")
    body = b"".join(b"\0" * 12 + corners[i : i + 3].tobytes() + b"\0\0" for i in (0, 3))
    binary = load("a.stl", b"solid lies".ljust(80) + struct.pack("<I", 2) + body)
    assert binary.connectivity.tolist() == [0, 1, 2, 0, 2, 3]
    assert binary.points.tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]]


PLY = """ply
format {} 1.0
element vertex 3
property float x
property float y
property float z
property double pressure
element face 1
property list uchar int vertex_indices
property uchar flag
end_header
"""


def test_ply(load):
    rows = [(0, 0, 0, 5), (1, 0, 0, 6), (0, 1, 0, 7)]
    text = "\n".join(" ".join(map(str, row)) for row in rows) + "\n3 0 1 2 9\n"
    packed = b"".join(struct.pack("<3fd", *r) for r in rows) + struct.pack("<B3iB", 3, 0, 1, 2, 9)
    for coding, data in (("ascii", text.encode()), ("binary_little_endian", packed)):
        mesh = load("a.ply", PLY.format(coding).encode() + data)
        assert mesh.connectivity.tolist() == [0, 1, 2]
        assert mesh.point_fields["pressure"].tolist() == [5, 6, 7]
        assert mesh.cell_fields["flag"].tolist() == [9]
        with pytest.raises(ReadError, match="truncated"):
            load("a.ply", PLY.format(coding).encode() + data[:-4])
        with pytest.raises(ReadError, match="two properties are called 'y'"):
            load("a.ply", PLY.format(coding).replace("float z", "float y").encode() + data)


def test_obj(load):
    text = "v 0 0 0\nv 1 0 0\nv 1 1 0\nv 0 1 0\n"
    assert load("a.obj", text).kind == "point cloud"
    mesh = load("a.obj", text + "f -4/1/1 -3 -2\nf 1//2 3 \\\n4\n")
    assert mesh.connectivity.tolist() == [0, 1, 2, 0, 2, 3]


@st.composite
def obj_lines(draw):
    """Lines of an OBJ file in any order; some are wrong."""
    number = st.sampled_from(["0", "1.5", "-2", "3e-2", "nan", "1_0", "x", "1"])
    index = st.integers(-3, 4).map(str)
    corner = st.builds("{}{}".format, index, st.sampled_from(["", "/1", "//2", "/1/-2", "/", "/x"]))
    vertex = st.lists(number, min_size=2, max_size=5).map(lambda w: " ".join(["v", *w]))
    good = st.sampled_from(["v 0 0 0", "v 1 0 0 1", "v 0 1 0 .5 .5 .5", " v\t0 0 1\r"])
    cell = st.builds(
        lambda key, words: " ".join([key, *words]),
        st.sampled_from(["f", "l", "  f", "f\t"]),
        st.lists(corner, max_size=5),
    )
    other = st.sampled_from(["", "# f 1 2", "vn 0 0 1", "vt 0 0", "g a", "s off", "f /1 2", "v"])
    rare = draw(st.booleans())
    kinds = st.one_of(good, good, good, cell, other, *([vertex] if rare else []))
    lines = draw(st.lists(kinds, max_size=20))
    return "\n".join(lines) + draw(st.sampled_from(["", "\n"]))


@given(obj_lines())
@settings(max_examples=400, deadline=None)
def test_obj_in_bulk_equals_obj_by_line(text):
    text = text.encode()
    try:
        points, *cells = obj._at_once(text)
    except ValueError:
        return
    slow, *slow_cells = obj._by_line(text, Path("a.obj"))
    assert np.array_equal(points, slow.reshape(-1, 3), equal_nan=True)
    for mine, other in zip(cells, slow_cells, strict=True):
        assert [a.tolist() for a in mine] == [a.tolist() for a in other]


def test_obj_with_many_kinds_of_lines(load):
    """All kinds of lines of regular files are parsed in bulk."""
    text = "# c\nv 0 0 0\n v 1 0 0 1\nvn 0 0 1\nv 1 1 0\nf 1//1 2//1 3//1\nv 0 1 0\nl 1 2\n"
    text += "l 1 2 3\nf -4 -2/7 -1\nf 1/1/1 2/2/2 3 4"
    assert obj._at_once(text.encode()).faces[0].tolist() == [0, 1, 2, 0, 2, 3, 0, 1, 2, 3]
    with pytest.warns(match="1 line, 1 poly-line left out"):
        mesh = load("a.obj", text)
    assert np.diff(mesh.offsets).tolist() == [3, 3, 4]
    for line, words in (
        ("f 1 2 x", "line 12: .*x"), ("f 1 2 -9", "line 12: index -9 is out of range: 4 points"),
        ("v 1 2", "line 12: a vertex needs three"), ("f /1 2 3", "line 12"),
    ):  # fmt: skip
        with pytest.raises(ReadError, match=words):
            load("a.obj", f"{text}\n{line}\n")


FORMATS = {"i1": "b", "u1": "B", "i2": "h", "u2": "H", "i4": "i", "u4": "I", "f4": "f", "f8": "d"}
WORDS = {"i1": "char", "u1": "uchar", "i2": "short", "u2": "ushort", "i4": "int", "u4": "uint",
         "f4": "float", "f8": "double"}  # fmt: skip


@st.composite
def ply_faces(draw):
    """Properties (name, type, type of the count) of a face element, and rows of values."""
    kind = st.sampled_from(sorted(FORMATS))
    counts = st.sampled_from(["u1", "i1", "u2", "i4"])
    properties = [(f"p{i}", draw(kind), "") for i in range(draw(st.integers(0, 2)))]
    properties += [(f"l{i}", draw(kind), draw(counts)) for i in range(draw(st.integers(0, 1)))]
    properties += [("vertex_indices", draw(st.sampled_from(["i4", "u1", "u2"])), draw(counts))]
    properties = draw(st.permutations(properties))
    widths = draw(st.sampled_from([(3, 3), (3, 5)]))
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        lengths = [draw(st.integers(*widths)) if p[2] else 1 for p in properties]
        rows.append([[draw(st.integers(0, 3)) for _ in range(n)] for n in lengths])
    return properties, rows


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("coding", ["ascii", "binary_little_endian", "binary_big_endian"])
@given(ply_faces())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_ply_of_any_layout(load, coding, faces):
    properties, rows = faces
    order = {"ascii": "", "binary_little_endian": "<", "binary_big_endian": ">"}[coding]
    lines = [
        f"property list {WORDS[length]} {WORDS[kind]} {name}"
        if length
        else f"property {WORDS[kind]} {name}"
        for name, kind, length in properties
    ]
    head = (
        f"ply\nformat {coding} 1.0\nelement vertex 4\nproperty float x\nproperty float y\n"
        f"property float z\nelement face {len(rows)}\n" + "\n".join(lines)
        + "\nelement edge 1\nproperty int vertex1\nend_header\n"
    )  # fmt: skip
    points = np.arange(12)
    parts = [("f4", points.tolist())]
    for row in rows:
        for (_, kind, length), values in zip(properties, row, strict=True):
            parts += [(length, [len(values)])] if length else []
            parts += [(kind, values)]
    parts.append(("i4", [7]))
    if order:
        body = b"".join(struct.pack(f"{order}{len(v)}{FORMATS[k]}", *v) for k, v in parts)
    else:
        body = " ".join(str(v) for _, values in parts for v in values).encode()
    mesh = load("a.ply", head.encode() + body)
    place = [name for name, _, _ in properties].index("vertex_indices")
    assert mesh.points.ravel().tolist() == points.tolist()
    assert np.split(mesh.connectivity, mesh.offsets[1:-1])[-1].tolist() == rows[-1][place]
    assert mesh.connectivity.tolist() == [i for row in rows for i in row[place]]
    for i, (name, kind, length) in enumerate(properties):
        if not length:
            assert mesh.cell_fields[name].dtype == kind
            assert mesh.cell_fields[name].tolist() == [row[i][0] for row in rows]
    for end in (len(body) // 2, len(body) - 1 if order else body.rfind(b" ")):
        with pytest.raises(ReadError, match="truncated"):
            load("a.ply", head.encode() + body[:end])
