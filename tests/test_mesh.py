"""Mesh: geometry of cells, compared with simple formulas."""

import numpy as np
import pytest
from hypothesis import given
from strategies import grid_surface, grid_volume, surfaces

from meshshard.errors import MeshError
from meshshard.mesh import Mesh


@given(surfaces())
def test_centers_are_the_means_of_the_points(mesh):
    for i, center in enumerate(mesh.centers()):
        ids = mesh.connectivity[mesh.offsets[i] : mesh.offsets[i + 1]]
        assert np.allclose(center, mesh.points[ids].astype(float).mean(axis=0), atol=1e-12)


@given(surfaces())
def test_area_vectors_are_half_the_sum_of_cross_products(mesh):
    for i, area in enumerate(mesh.area_vectors()):
        corners = mesh.points[mesh.connectivity[mesh.offsets[i] : mesh.offsets[i + 1]]].astype(
            float
        )
        fan = np.cross(corners, np.roll(corners, -1, axis=0)).sum(axis=0) / 2
        assert np.allclose(area, fan, atol=1e-12)


def test_more_than_one_chunk_of_cells():
    mesh = grid_surface(300, 150)  # 45,000 cells, more than one chunk
    assert np.array_equal(mesh.areas(), np.ones(45_000))
    assert np.array_equal(mesh.normals(), np.tile([0.0, 0, 1], (45_000, 1)))
    x, y = np.meshgrid(np.arange(300) + 0.5, np.arange(150) + 0.5, indexing="ij")
    assert np.array_equal(mesh.centers()[:, :2], np.stack([x.ravel(), y.ravel()], axis=1))


def test_a_curved_cell_has_the_area_of_its_corners():
    points = np.array([[0, 0, 0], [2, 0, 0], [0, 2, 0], [1, -1, 0], [1, 1, 0], [0, 1, 0.0]])
    mesh = Mesh(points, np.arange(6), np.array([0, 6]), np.array([22], np.uint8))
    assert mesh.areas().tolist() == [2.0]


def test_a_cell_without_area_has_no_normal():
    points = np.zeros((3, 3))
    mesh = Mesh(points, np.arange(3), np.array([0, 3]), np.array([5], np.uint8))
    assert mesh.normals().tolist() == [[0.0, 0.0, 0.0]]


def test_a_volume_has_no_surface_areas():
    with pytest.raises(MeshError, match="areas need a surface, got a volume"):
        grid_volume(1).areas()


def test_positions_far_from_the_origin_keep_their_precision_in_float32():
    near = np.random.default_rng(0).random((50, 3))
    cloud = Mesh(near + 1e7)
    assert len(np.unique(cloud.points.astype(np.float32), axis=0)) < 10
    relative = cloud.positions("points").astype(np.float32)
    assert len(np.unique(relative, axis=0)) == 50
    assert np.allclose(relative + cloud.offset, cloud.points, rtol=0, atol=1e-6)


def test_positions_near_the_origin_have_no_offset():
    cloud = Mesh(np.random.default_rng(0).random((50, 3)) + 10)
    assert not cloud.offset.any()
    assert np.array_equal(cloud.positions("points"), cloud.points)


@pytest.mark.parametrize(
    ("mesh", "kind"),
    [
        (grid_volume(1), "volume"),
        (grid_surface(1, 1), "surface"),
        (Mesh(np.zeros((2, 3))), "point cloud"),
    ],
)
def test_kinds(mesh, kind):
    assert mesh.kind == kind


def test_fields_are_added_to_a_copy():
    mesh = grid_surface(2, 2)
    more = mesh.with_fields(cell={"q": np.arange(4)})
    assert "q" not in mesh.cell_fields
    assert list(more.cell_fields) == ["p", "tau", "q"]
