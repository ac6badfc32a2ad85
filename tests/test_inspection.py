"""Inspection: oddities are found and counted, points merge only where that glues cells."""

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
    """The same cells with points of their own."""
    return replace(
        mesh,
        points=mesh.points[mesh.connectivity],
        connectivity=np.arange(len(mesh.connectivity)),
        point_fields={},
    )


@pytest.mark.parametrize("mesh", [grid_surface(7, 5), grid_volume(3, 10), grid_volume(3, 12)])
def test_a_soup_is_glued_into_the_mesh_it_was(mesh):
    with pytest.warns(MeshWarning, match="exact duplicates of earlier points merged"):
        glued, found = weld_and_match(soup(mesh))
    whole, parts = cell_graph(mesh), cell_graph(glued, found)
    assert np.array_equal(whole.indptr, parts.indptr)
    assert np.array_equal(whole.indices, parts.indices)
    assert glued.points is not mesh.points
    assert glued.n_points == len(mesh.connectivity)  # rows stay, only a map is added


def test_two_patches_side_by_side_become_one():
    left, right = grid_surface(3, 3), grid_surface(3, 3)
    both = Mesh(
        np.concatenate([left.points, right.points + np.array([3, 0, 0])]),
        np.concatenate([left.connectivity, right.connectivity + left.n_points]),
        np.concatenate([left.offsets, right.offsets[1:] + left.offsets[-1]]),
        np.concatenate([left.types, right.types]),
    )
    with pytest.warns(MeshWarning, match="joins cells along 3 more facets"):
        glued, found = weld_and_match(both)
    assert len(found.first) == 2 * 12 + 3
    assert glued.weld is not None


def test_nothing_is_merged_where_cells_are_glued_already():
    mesh = grid_volume(2)
    glued, _ = weld_and_match(mesh)
    assert glued is mesh


def test_a_weld_map_that_is_there_is_kept():
    apart = replace(soup(grid_surface(2, 2)), weld=np.arange(16))
    _, found = weld_and_match(apart)
    assert len(found.first) == 0


def test_a_tolerance_merges_points_of_open_edges_within_it():
    mesh = soup(grid_surface(4, 4))
    jitter = np.random.default_rng(0).uniform(-1e-7, 1e-7, mesh.points.shape)
    mesh = replace(mesh, points=mesh.points + jitter)
    found = match(facets(mesh), mesh.n_points)
    glued = weld(mesh, 1e-6, open_points(mesh, found))
    assert len(np.unique(glued.weld)) == 25


@given(lattice_points())
def test_coincident_points_name_the_first_of_their_place(points):
    first = coincident(points)
    for i, p in enumerate(points):
        assert first[i] == np.flatnonzero((points == p).all(axis=1))[0]


@given(lattice_points(), st.floats(0.1, 0.9))
def test_a_tolerance_below_the_spacing_is_exact(points, tolerance):
    assert np.array_equal(coincident(points, tolerance), coincident(points))


def test_minus_zero_is_zero():
    assert coincident(np.array([[0.0, 0, 0], [-0.0, 0, -0.0]])).tolist() == [0, 0]


def test_oddities_are_counted():
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


def test_a_copy_alone_with_its_original_is_found():
    assert inspect(surface([[0, 1, 2, 3], [2, 3, 0, 1]], np.eye(4)[:, :3])).copies == (1,)
    assert inspect(surface([[0, 1, 2], [0, 2, 3]], np.eye(4)[:, :3])).copies == ()


def test_a_mesh_without_surprises_has_no_findings():
    for mesh in (grid_surface(5, 5), grid_volume(3), grid_volume(2, 42)):
        assert inspect(mesh).findings(mesh) == []


def test_points_of_a_cloud_at_one_place():
    cloud = Mesh(np.repeat(np.random.default_rng(0).random((10, 3)), 10, axis=0))
    (line,) = inspect(cloud).findings(cloud)
    assert "90 points coincident" in line


def test_findings_are_warnings_of_glue():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        weld_and_match(surface([[0, 1, 2], [0, 1, 3]], np.eye(5)[:, :3]))
    text = " ".join(str(w.message) for w in caught)
    assert "opposite winding" in text
    assert "1 point unused" in text
