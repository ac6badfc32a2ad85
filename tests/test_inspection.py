"""Inspection: irregularities are counted, and points are welded only if that connects cells."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import grid_surface, grid_volume, lattice_points, surface

from meshshard.errors import MeshWarning
from meshshard.graph import cell_graph
from meshshard.mesh import Mesh
from meshshard.mesh.facets import facets, match
from meshshard.mesh.inspection import coincident, inspect, open_points, weld, weld_and_match


def soup(mesh):
    """The same cells without shared points."""
    return replace(
        mesh,
        points=mesh.points[mesh.connectivity],
        connectivity=np.arange(len(mesh.connectivity)),
        point_fields={},
    )


@pytest.mark.parametrize("mesh", [grid_surface(7, 5), grid_volume(3, 10), grid_volume(3, 12)])
def test_welding_restores_the_adjacency_of_cells_without_shared_points(mesh):
    with pytest.warns(MeshWarning, match="exact duplicates of earlier points merged"):
        welded, found = weld_and_match(soup(mesh))
    whole, parts = cell_graph(mesh), cell_graph(welded, found)
    assert np.array_equal(whole.indptr, parts.indptr)
    assert np.array_equal(whole.indices, parts.indices)
    assert welded.points is not mesh.points
    assert welded.n_points == len(mesh.connectivity)  # all rows are kept


def test_welding_connects_two_patches_along_their_border():
    left, right = grid_surface(3, 3), grid_surface(3, 3)
    both = Mesh(
        np.concatenate([left.points, right.points + np.array([3, 0, 0])]),
        np.concatenate([left.connectivity, right.connectivity + left.n_points]),
        np.concatenate([left.offsets, right.offsets[1:] + left.offsets[-1]]),
        np.concatenate([left.types, right.types]),
    )
    with pytest.warns(MeshWarning, match="joins cells along 3 more facets"):
        welded, found = weld_and_match(both)
    assert len(found.first) == 2 * 12 + 3
    assert welded.weld is not None


def test_connected_cells_are_not_welded():
    mesh = grid_volume(2)
    welded, _ = weld_and_match(mesh)
    assert welded is mesh


def test_an_existing_weld_is_kept():
    mesh = replace(soup(grid_surface(2, 2)), weld=np.arange(16))
    with pytest.warns(MeshWarning, match="4 of 4 cells share no edge with another"):
        _, found = weld_and_match(mesh)
    assert len(found.first) == 0


def test_points_of_open_edges_within_the_tolerance_are_welded():
    mesh = soup(grid_surface(4, 4))
    jitter = np.random.default_rng(0).uniform(-1e-7, 1e-7, mesh.points.shape)
    mesh = replace(mesh, points=mesh.points + jitter)
    found = match(facets(mesh), mesh.n_points)
    welded = weld(mesh, 1e-6, open_points(mesh, found))
    assert len(np.unique(welded.weld)) == 25


@given(lattice_points())
def test_coincident_gives_the_first_point_at_the_same_place(points):
    first = coincident(points)
    for i, p in enumerate(points):
        assert first[i] == np.flatnonzero((points == p).all(axis=1))[0]


@given(lattice_points(), st.floats(0.1, 0.9))
def test_a_tolerance_below_the_spacing_gives_the_exact_result(points, tolerance):
    assert np.array_equal(coincident(points, tolerance), coincident(points))


def test_minus_zero_equals_zero():
    assert coincident(np.array([[0.0, 0, 0], [-0.0, 0, -0.0]])).tolist() == [0, 0]


def test_irregularities_are_counted():
    sheet = grid_surface(4, 4)
    cells = sheet.connectivity.reshape(-1, 4).tolist()
    cells[5] = cells[5][::-1]  # turned
    cells += [cells[0], cells[3][1:] + cells[3][:1], cells[9][::-1]]  # copies
    cells += [[0, 1, 1]]  # collapsed
    points = np.concatenate([sheet.points, [[9.0, 9, 9]] * 3])  # orphans
    found = inspect(surface(cells, points))
    assert found.orphans == 3
    assert found.copies == (16, 17, 18)
    assert found.collapsed == (19,)
    assert found.shared > 0
    assert inspect(surface(cells[:16], sheet.points)).turned == 4


def test_a_copy_without_other_neighbors_is_found():
    assert inspect(surface([[0, 1, 2, 3], [2, 3, 0, 1]], np.eye(4)[:, :3])).copies == (1,)
    assert inspect(surface([[0, 1, 2], [0, 2, 3]], np.eye(4)[:, :3])).copies == ()


def test_a_regular_mesh_has_no_findings():
    for mesh in (grid_surface(5, 5), grid_volume(3), grid_volume(2, 42)):
        assert inspect(mesh).findings(mesh) == []


def test_coincident_points_of_a_cloud_are_counted():
    cloud = Mesh(np.repeat(np.random.default_rng(0).random((10, 3)), 10, axis=0))
    (line,) = inspect(cloud).findings(cloud)
    assert "90 points coincident" in line


def test_weld_and_match_warns_of_findings():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        weld_and_match(surface([[0, 1, 2], [0, 1, 3]], np.eye(5)[:, :3]))
    text = " ".join(str(w.message) for w in caught)
    assert "opposite winding" in text
    assert "1 point unused" in text
