"""Hypothesis strategies: meshes, graphs and labels for property-based tests."""

import numpy as np
from hypothesis import strategies as st

from meshshard.graph import Graph
from meshshard.mesh import Faces, Mesh

GRID = 4  # points a side of the small lattices that surfaces are drawn on


@st.composite
def polygons(draw, max_cells=12, n_points=16):
    """Lists of 3 to 6 different point ids; edges are shared, non-manifold and copied at will."""
    ids = st.permutations(range(n_points))
    size = st.integers(3, 6)
    return [draw(ids)[: draw(size)] for _ in range(draw(st.integers(1, max_cells)))]


@st.composite
def surfaces(draw, max_cells=12):
    """Polygon soups over 16 points, with fields."""
    cells = draw(polygons(max_cells))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return surface(cells, rng.random((16, 3)).astype(np.float32), rng)


@st.composite
def volumes(draw, max_cells=8):
    """Tetrahedra, hexahedra, wedges, pyramids and polyhedra over 14 points."""
    kinds = {10: 4, 12: 8, 13: 6, 14: 5, 42: 4}
    types = draw(st.lists(st.sampled_from(sorted(kinds)), min_size=1, max_size=max_cells))
    rows = [draw(st.permutations(range(14)))[: kinds[t]] for t in types]
    return volume(types, rows)


@st.composite
def graphs(draw, max_nodes=24):
    """Directed graphs of 1 node and more, rows in no order, no loops, no doubles."""
    n = draw(st.integers(1, max_nodes))
    pairs = [(i, j) for i in range(n) for j in range(n) if i != j]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=80)) if pairs else []
    rows = [[j for i, j in edges if i == row] for row in range(n)]
    indptr = np.concatenate([[0], np.cumsum([len(r) for r in rows], dtype=np.int64)])
    return Graph(indptr, np.array([j for r in rows for j in r], np.int32))


@st.composite
def labels(draw, n, max_parts=6):
    """Number of parts and a label for each node; some parts may be empty."""
    k = draw(st.integers(1, max_parts))
    return k, np.array(draw(st.lists(st.integers(0, k - 1), min_size=n, max_size=n)), np.int64)


@st.composite
def lattice_points(draw, max_points=40):
    """Points on a small lattice: ties and duplicates everywhere."""
    row = st.tuples(*[st.integers(0, GRID - 1)] * 3)
    return np.array(draw(st.lists(row, min_size=1, max_size=max_points)), np.float64)


def surface(cells, points, rng=None):
    """A polygon mesh with a field of every kind that a solver writes."""
    rng = np.random.default_rng(0) if rng is None else rng
    n = len(cells)
    return Mesh(
        points=points,
        connectivity=np.array([i for c in cells for i in c], np.int64),
        offsets=np.concatenate([[0], np.cumsum([len(c) for c in cells], dtype=np.int64)]),
        types=np.full(n, 7, np.uint8),
        cell_fields={"p": rng.random(n).astype(np.float32), "tau": rng.random((n, 3))},
        point_fields={"T": rng.integers(-9, 9, len(points))},
    )


def volume(types, rows):
    """Solids over 14 points on a helix; polyhedra of four points are tetrahedra."""
    turn = np.linspace(0, 5, 14)
    points = np.stack([np.cos(turn), np.sin(turn), turn], axis=1)
    faces = [f for t, r in zip(types, rows, strict=True) if t == 42 for f in tetrahedron(r)]
    count = [4 * (t == 42) for t in types]
    return Mesh(
        points=points,
        connectivity=np.array([i for r in rows for i in r], np.int64),
        offsets=np.concatenate([[0], np.cumsum([len(r) for r in rows], dtype=np.int64)]),
        types=np.array(types, np.uint8),
        faces=Faces(
            np.concatenate([[0], np.cumsum(count, dtype=np.int64)]),
            np.arange(0, 3 * len(faces) + 1, 3, dtype=np.int64),
            np.array(faces, np.int64).ravel(),
        )
        if faces
        else None,
        cell_fields={"rank": np.arange(len(types), dtype=np.int16)},
    )


def tetrahedron(ids):
    """Faces of a tetrahedron, wound outward."""
    a, b, c, d = ids
    return [(a, b, d), (b, c, d), (c, a, d), (a, c, b)]


def grid_surface(n, m):
    """A flat sheet of n x m quads."""
    i = np.arange((n + 1) * (m + 1)).reshape(n + 1, m + 1)
    quads = np.stack([i[:-1, :-1], i[1:, :-1], i[1:, 1:], i[:-1, 1:]], axis=-1).reshape(-1, 4)
    x, y = np.meshgrid(np.arange(n + 1.0), np.arange(m + 1.0), indexing="ij")
    points = np.stack([x.ravel(), y.ravel(), np.zeros(x.size)], axis=1)
    return surface(quads.tolist(), points)


def grid_volume(n, kind=12):
    """A cube of n^3 hexahedra (12), six tetrahedra each (10), or polyhedra of six faces (42)."""
    i = np.arange((n + 1) ** 3).reshape(n + 1, n + 1, n + 1)
    c = [i[:-1, :-1, :-1], i[1:, :-1, :-1], i[1:, 1:, :-1], i[:-1, 1:, :-1]]
    c += [i[:-1, :-1, 1:], i[1:, :-1, 1:], i[1:, 1:, 1:], i[:-1, 1:, 1:]]
    cells = np.stack(c, axis=-1).reshape(-1, 8)
    if kind == 10:
        cut = [[0, 1, 2, 6], [0, 2, 3, 6], [0, 3, 7, 6], [0, 7, 4, 6], [0, 4, 5, 6], [0, 5, 1, 6]]
        cells = cells[:, np.array(cut)].reshape(-1, 4)
    x = np.arange(n + 1.0)
    points = np.stack(np.meshgrid(x, x, x, indexing="ij"), axis=-1).reshape(-1, 3)
    return Mesh(
        points=points,
        connectivity=cells.ravel(),
        offsets=np.arange(0, cells.size + 1, cells.shape[1], dtype=np.int64),
        types=np.full(len(cells), kind, np.uint8),
        faces=_cube_faces(cells) if kind == 42 else None,
        cell_fields={"p": np.arange(len(cells), dtype=np.float32)},
    )


def _cube_faces(cells):
    sides = [[0, 4, 7, 3], [1, 2, 6, 5], [0, 1, 5, 4], [3, 7, 6, 2], [0, 3, 2, 1], [4, 5, 6, 7]]
    faces = cells[:, np.array(sides)].reshape(-1, 4)
    per_cell = np.arange(0, len(faces) + 1, 6, dtype=np.int64)
    return Faces(per_cell, np.arange(0, faces.size + 1, 4, dtype=np.int64), faces.ravel())
