"""Facets: exactly the pairs of cells that share a facet are matched."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from metis_dual import mesh_to_dual
from strategies import grid_surface, grid_volume, surface, surfaces, volumes

from meshshard.errors import MeshError
from meshshard.graph import cell_graph, point_graph
from meshshard.mesh import Mesh
from meshshard.mesh.cells import CELL_TYPES
from meshshard.mesh.facets import edges, facets, match


def facets_by_hand(mesh):
    """For each cell the sets of corners of its facets, from the tables, one by one."""
    out = []
    for i, number in enumerate(mesh.types):
        ids = mesh.connectivity[mesh.offsets[i] : mesh.offsets[i + 1]].tolist()
        cell = CELL_TYPES[int(number)]
        if number == 42:
            first, last = mesh.faces.cell_offsets[i : i + 2]
            bounds = mesh.faces.offsets
            out.append(
                [
                    mesh.faces.connectivity[bounds[f] : bounds[f + 1]].tolist()
                    for f in range(first, last)
                ]
            )
        elif cell.dim == 3:
            out.append([[ids[c] for c in face] for face in cell.faces])
        else:
            ids = ids[: cell.n_corners or len(ids)]
            out.append([[a, b] for a, b in zip(ids, ids[1:] + ids[:1], strict=True)])
    return [[frozenset(f) for f in cell] for cell in out]


def neighbors_by_hand(mesh):
    cells = [set(c) for c in facets_by_hand(mesh)]
    pairs = [(i, j) for i, j in combinations(range(len(cells)), 2) if cells[i] & cells[j]]
    return {*pairs, *((j, i) for i, j in pairs)}


def pairs_of(graph):
    return list(zip(graph.destinations().tolist(), graph.indices.tolist(), strict=True))


@given(surfaces())
def test_polygons_share_an_edge(mesh):
    found = pairs_of(cell_graph(mesh))
    assert len(found) == len(set(found))
    assert set(found) == neighbors_by_hand(mesh)


@given(volumes())
def test_solids_share_a_face(mesh):
    found = pairs_of(cell_graph(mesh))
    assert len(found) == len(set(found))
    assert set(found) == neighbors_by_hand(mesh)


@given(surfaces())
def test_all_pairs_of_a_shared_edge_are_matched(mesh):
    listed = facets(mesh)
    found = match(listed, mesh.n_points)
    sets = [f for cell in facets_by_hand(mesh) for f in cell]
    expected = {(i, j) for i, j in combinations(range(len(sets)), 2) if sets[i] == sets[j]}
    got = {tuple(sorted(p)) for p in zip(found.first.tolist(), found.second.tolist(), strict=True)}
    assert got == expected
    assert found.open.tolist() == [sets.count(s) == 1 for s in sets]
    assert found.shared == sum(sets.count(s) > 2 for s in set(sets))


@pytest.mark.parametrize("kind", [10, 12, 42])
def test_a_cube_of_cells_has_the_neighbors_of_a_lattice(kind):
    mesh = grid_volume(4, kind)
    graph = cell_graph(mesh)
    if kind == 10:
        assert set(pairs_of(graph)) == neighbors_by_hand(mesh)
    else:
        i = np.arange(64).reshape(4, 4, 4)
        pairs = [(i[1:], i[:-1]), (i[:, 1:], i[:, :-1]), (i[:, :, 1:], i[:, :, :-1])]
        expected = {(a, b) for x, y in pairs for a, b in zip(x.ravel(), y.ravel(), strict=True)}
        assert set(pairs_of(graph)) == expected | {(b, a) for a, b in expected}


@pytest.mark.parametrize(
    ("mesh", "common"),
    [(grid_surface(30, 20), 2), (grid_volume(6, 12), 3), (grid_volume(5, 10), 3)],
    ids=["quads", "hexahedra", "tetrahedra"],
)
def test_metis_finds_the_same_dual_cell_by_cell(mesh, common):
    indptr, indices = mesh_to_dual(mesh, common)
    ours = cell_graph(mesh)
    assert np.array_equal(indptr, ours.indptr)
    for cell in range(mesh.n_cells):
        row = slice(indptr[cell], indptr[cell + 1])
        assert np.array_equal(np.sort(indices[row]), ours.indices[row])


def test_quadratic_cells_share_edges_with_linear_ones():
    points = np.random.default_rng(0).random((8, 3))
    mesh = Mesh(
        points,
        np.array([0, 1, 2, 4, 5, 6, 1, 3, 2]),
        np.array([0, 6, 9]),
        np.array([22, 5], np.uint8),
    )
    assert pairs_of(cell_graph(mesh)) == [(0, 1), (1, 0)]


def test_curves_are_connected_at_their_ends():
    mesh = Mesh(
        np.zeros((5, 3)),
        np.array([0, 1, 1, 2, 3, 3, 4]),
        np.array([0, 2, 5, 7]),
        np.array([3, 4, 3], np.uint8),
    )
    assert pairs_of(cell_graph(mesh)) == [(0, 1), (1, 0), (1, 2), (2, 1)]


def test_degenerate_edges_connect_nothing():
    mesh = surface([[0, 1, 1], [1, 1, 2]], np.eye(3))
    assert pairs_of(cell_graph(mesh)) == []


def test_a_facet_of_too_many_cells_is_refused():
    cells = [[0, 1, i] for i in range(2, 1503)]
    with pytest.raises(MeshError, match="1501 cells share one facet at point 0"):
        cell_graph(surface(cells, np.random.default_rng(0).random((1503, 3))))


@given(surfaces())
def test_mesh_edges_of_polygons_are_their_sides(mesh):
    sides = {f for cell in facets_by_hand(mesh) for f in cell}
    a, b = edges(mesh)
    assert {frozenset(e) for e in zip(a.tolist(), b.tolist(), strict=True)} == sides


def test_the_edges_of_a_polygon_form_a_cycle():
    turn = np.linspace(0, 2 * np.pi, 120, endpoint=False)
    mesh = surface([list(range(120))], np.stack([np.cos(turn), np.sin(turn), 0 * turn], axis=1))
    assert point_graph(mesh).n_edges == 240


@pytest.mark.parametrize("kind", [12, 42])
def test_two_cubes_have_twenty_edges(kind):
    mesh = grid_volume(1, kind)
    assert point_graph(mesh).n_edges == 24
    assert set(np.bincount(point_graph(mesh).destinations())) == {3}
