"""Graphs: exact nearest neighbors with ties, for any numbering; symmetrize, permute, check."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import graphs, lattice_points

from meshshard.errors import MeshError
from meshshard.graph import Graph, knn_graph, radius_graph


def by_distance(points, i):
    """All other points, by squared distance, then id."""
    d = ((points[i, 0] - points[:, 0]) ** 2 + (points[i, 1] - points[:, 1]) ** 2) + (
        points[i, 2] - points[:, 2]
    ) ** 2
    order = np.lexsort((np.arange(len(points)), d))
    order = order[order != i]
    return order, d[order]


def row(graph, i):
    return graph.indices[graph.indptr[i] : graph.indptr[i + 1]].tolist()


@given(lattice_points(), st.integers(1, 50))
def test_nearest_neighbors_by_distance_then_id(points, k):
    graph = knn_graph(points, k)
    for i in range(len(points)):
        assert row(graph, i) == by_distance(points, i)[0][:k].tolist()


@given(lattice_points(), st.floats(0.1, 3.0), st.none() | st.integers(1, 9))
def test_all_within_a_radius_by_distance_then_id(points, radius, most):
    graph = radius_graph(points, radius, most)
    for i in range(len(points)):
        order, d = by_distance(points, i)
        assert row(graph, i) == order[d <= radius**2][:most].tolist()


def test_many_points_against_all_distances():
    points = np.random.default_rng(3).random((700, 3)) @ np.diag([1, 1, 1e-3])
    graph = knn_graph(points, 12)
    for i in range(0, 700, 7):
        assert row(graph, i) == by_distance(points, i)[0][:12].tolist()


def test_coincident_points_take_the_lowest_ids():
    points = np.concatenate([np.zeros((30_000, 3)), np.ones((5, 3))])
    graph = knn_graph(points, 4)
    assert row(graph, 0) == [1, 2, 3, 4]
    assert row(graph, 3) == [0, 1, 2, 4]
    assert row(graph, 29_999) == [0, 1, 2, 3]
    assert row(graph, 30_001) == [30_000, 30_002, 30_003, 30_004]


def test_neighbors_in_feature_space():
    features = np.random.default_rng(3).random((60, 7))
    graph = knn_graph(features, 5)
    d = ((features[:, None] - features[None]) ** 2).sum(-1)
    np.fill_diagonal(d, np.inf)
    assert np.array_equal(graph.indices.reshape(60, 5), np.argsort(d, axis=1)[:, :5])


@pytest.mark.parametrize("n", [0, 1])
def test_too_few_points_have_no_neighbors(n):
    assert knn_graph(np.zeros((n, 3)), 4).n_edges == 0
    assert radius_graph(np.zeros((n, 3)), 1.0).n_edges == 0


def test_points_that_are_not_finite_are_named():
    points = np.zeros((5, 3))
    points[3, 1] = np.nan
    with pytest.raises(MeshError, match=r"1 point not finite: ids \[3\]"):
        knn_graph(points, 2)
    with pytest.raises(MeshError, match=r"1 point not below 1e\+150: ids \[3\]; rescale"):
        knn_graph(np.nan_to_num(points, nan=1e200), 2)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, np.nan, "2", None])
def test_numbers_of_neighbors_and_radii_are_positive(wrong):
    with pytest.raises(MeshError, match=r"k is .* expected the number of neighbors"):
        knn_graph(np.eye(3), wrong)
    if wrong != 1.5:
        with pytest.raises(MeshError, match=r"radius is .* expected a distance above 0"):
            radius_graph(np.eye(3), wrong)


@given(graphs())
def test_symmetrized_has_both_directions_once(graph):
    whole = graph.symmetrized()
    got = list(zip(whole.destinations().tolist(), whole.indices.tolist(), strict=True))
    one = set(zip(graph.destinations().tolist(), graph.indices.tolist(), strict=True))
    assert got == sorted(one | {(b, a) for a, b in one})


@given(graphs(), st.randoms(use_true_random=False))
def test_permuted_keeps_every_row_in_its_order(graph, random):
    origin = list(range(graph.n_nodes))
    random.shuffle(origin)
    moved = graph.permuted(np.array(origin))
    for new, old in enumerate(origin):
        assert [origin[j] for j in row(moved, new)] == row(graph, old)


def test_a_wrong_symmetric_flag_is_refused():
    graph = Graph(np.array([0, 1, 2, 3]), np.array([1, 0, 1]), symmetric=True)
    with pytest.raises(MeshError, match="nodes 1 and 2 are linked in one direction only"):
        graph.check()
    assert knn_graph(np.eye(3), 2).check().symmetrized().check().symmetric


@pytest.mark.parametrize(
    ("indptr", "indices", "message"),
    [
        ([0, 2, 1], [0, 1], "decreases after row 1"),
        ([0, 1, 3], [0, 1], "ends at 3, but there are 2 edges"),
        ([0, 1, 2], [0, 7], "edge 1 comes from node 7"),
        ([1, 2], [0, 0], "starts at 0"),
    ],
)
def test_an_inconsistent_graph_is_refused(indptr, indices, message):
    with pytest.raises(MeshError, match=message):
        Graph(np.array(indptr), np.array(indices)).check()
