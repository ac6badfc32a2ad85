"""Methods of partitioning: valid, balanced labels that follow the options."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import graphs, grid_surface, grid_volume

from meshshard.errors import MeshWarning, PartitionError
from meshshard.graph import Graph, cell_graph
from meshshard.partitioning.methods import (
    METHODS,
    RCB,
    Given,
    Metis,
    Morton,
    Random,
    label,
    partitioner_of,
)
from meshshard.partitioning.partition import partition

pytestmark = pytest.mark.slow

SHEET = grid_surface(40, 30)
NODES = SHEET.n_cells
GRAPH = cell_graph(SHEET)
PLACED = Graph(GRAPH.indptr, GRAPH.indices, True, None, SHEET.centers())
ALL = [Metis("cut"), Metis(recursive=True), *(method.make() for method in METHODS.values())]


def cut(labels):
    return int((labels[GRAPH.destinations()] != labels[GRAPH.indices]).sum() // 2)


@pytest.mark.parametrize("method", ALL, ids=repr)
@pytest.mark.parametrize("parts", [1, 2, 7, 8])
def test_labels_are_balanced(method, parts):
    sizes = np.bincount(label(PLACED, parts, method), minlength=parts)
    assert sizes.sum() == NODES
    assert sizes.max() <= max(np.ceil(NODES / parts), 1.0051 * NODES / parts, NODES / parts + 2)
    assert sizes.min() > 0


@pytest.mark.parametrize("method", ALL, ids=repr)
def test_targets_are_met(method):
    shares = np.array([4.0, 2.0, 1.0])
    sizes = np.bincount(label(PLACED, 3, method, shares), minlength=3)
    assert np.allclose(sizes / NODES, shares / 7, atol=0.03)


@pytest.mark.parametrize("method", ALL, ids=repr)
def test_weights_are_balanced(method):
    load = np.where(np.arange(NODES) < NODES // 2, 10.0, 1.0)
    weighted = Graph(PLACED.indptr, PLACED.indices, True, load, PLACED.positions)
    sums = np.bincount(label(weighted, 4, method), load)
    assert sums.max() <= 1.04 * load.sum() / 4


@pytest.mark.parametrize("method", ALL, ids=repr)
def test_the_same_call_gives_the_same_labels(method):
    assert np.array_equal(label(PLACED, 5, method), label(PLACED, 5, method))


def test_metis_cuts_fewer_edges_than_morton_and_random():
    by_metis = cut(label(GRAPH, 8, Metis()))
    assert by_metis < cut(label(PLACED, 8, Morton())) < cut(label(PLACED, 8, Random()))


def test_metis_volume_sends_fewer_rows_than_metis_cut():
    """On a volume; rows sent are pairs of a node and another part with an edge from it."""
    graph = cell_graph(grid_volume(20))

    def rows(labels):
        to = labels[graph.destinations()]
        away = to != labels[graph.indices]
        return len(np.unique(graph.indices[away].astype(np.int64) * 8 + to[away]))

    assert rows(label(graph, 8, Metis("volume"))) < rows(label(graph, 8, Metis("cut")))


def test_a_seed_changes_the_labels():
    assert not np.array_equal(label(GRAPH, 8, Metis(seed=1)), label(GRAPH, 8, Metis(seed=2)))


@pytest.mark.slow
@settings(max_examples=25)
@given(graphs(), st.integers(1, 5))
def test_metis_takes_any_directed_graph(graph, parts):
    if parts > graph.n_nodes:
        return
    labels = label(graph, parts, Metis())
    assert set(labels.tolist()) == set(range(parts))


def test_a_graph_without_edges_is_cut_evenly():
    unlinked = Graph(np.zeros(101, np.int64), np.zeros(0, np.int32), symmetric=True)
    assert np.bincount(label(unlinked, 4, Metis())).max() == 25


def test_one_heavy_node_leaves_no_part_empty():
    load = np.ones(NODES)
    load[0] = 1e9
    labels = label(Graph(GRAPH.indptr, GRAPH.indices, True, load), 4, Metis())
    assert set(labels.tolist()) == {0, 1, 2, 3}


def test_more_parts_than_nodes_leave_the_last_empty():
    with pytest.warns(MeshWarning, match="9 parts for 3 nodes: 6 shards will be empty"):
        labels = label(Graph(np.zeros(4, np.int64), np.zeros(0, np.int32)), 9, Metis())
    assert labels.tolist() == [0, 1, 2]


def test_parts_of_few_nodes_are_not_empty():
    labels = label(GRAPH, NODES // 3, Metis())
    assert np.bincount(labels, minlength=NODES // 3).min() >= 1


@pytest.mark.parametrize("parts", [40, 60, 120])
def test_small_parts_are_not_scattered_for_equal_counts(parts):
    made = partition(SHEET, parts)
    by_rcb = partition(SHEET, parts, method=RCB())
    assert sum(p > 1 for p in made.quality.pieces) <= parts // 10
    assert made.quality.volume <= 1.1 * by_rcb.quality.volume


def test_labels_from_a_file_and_from_an_array(tmp_path):
    wanted = np.arange(NODES) % 3
    file = tmp_path / "mesh.graph.part.3"
    file.write_text("\n".join(map(str, wanted)) + "\n")
    assert np.array_equal(label(GRAPH, 3, Given(file)), wanted)
    assert np.array_equal(label(GRAPH, 3, Given(wanted)), wanted)


def test_a_user_function_as_method():
    def halves(graph, parts):
        return np.arange(graph.n_nodes) * parts // graph.n_nodes

    assert np.array_equal(label(GRAPH, 2, halves), np.arange(NODES) * 2 // NODES)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (Given(np.arange(5)), r"labels of shape \(5,\), expected \(1200,\)"),
        (Given(np.full(NODES, 2)), "node 0 the label 2, expected 0 to 1 for 2 parts"),
        (Given(np.zeros(NODES)), "labels of dtype float64, expected integers"),
        (Metis("speed"), "objective 'speed' is unknown"),
        (Metis(imbalance=1.0), "must be above 1"),
    ],
)
def test_invalid_labels_and_options_are_refused(method, message):
    with pytest.raises(PartitionError, match=message):
        label(GRAPH, 2, method)


def test_a_wrong_line_of_a_label_file_is_named(tmp_path):
    file = tmp_path / "labels.part.2"
    file.write_text("0\n1\nlots\n")
    with pytest.raises(PartitionError, match="line 3: 'lots' is not a label"):
        label(GRAPH, 2, Given(file))
    with pytest.raises(PartitionError, match="could not be read"):
        label(GRAPH, 2, Given(tmp_path / "missing"))


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_invalid_weights_name_their_row(bad):
    load = np.ones(NODES)
    load[7] = bad
    with pytest.raises(PartitionError, match="at row 7"):
        label(Graph(GRAPH.indptr, GRAPH.indices, True, load), 2, Metis())


@pytest.mark.parametrize("targets", [[1.0, 0.0], [1.0], [1.0, np.nan]])
def test_invalid_targets_are_refused(targets):
    with pytest.raises(PartitionError, match="targets must be 2 positive numbers"):
        label(GRAPH, 2, Metis(), np.array(targets))


def test_geometric_methods_need_positions():
    with pytest.raises(PartitionError, match="Morton needs positions"):
        label(GRAPH, 2, Morton())


def test_the_table_of_methods():
    assert partitioner_of() == Metis()
    for name, row in METHODS.items():
        assert partitioner_of(name) == row.make()
    assert METHODS["random"].options == ("seed",)
    options = {"seed": 3, "objective": "cut", "halo": 2}
    assert partitioner_of("metis", options) == Metis("cut", seed=3)
    assert partitioner_of("random", options) == Random(3)
    assert partitioner_of(Metis(seed=5), options) == Metis(seed=5)


def test_an_unknown_method_is_one_sentence_with_the_known_names():
    with pytest.raises(PartitionError) as caught:
        partition(SHEET, 2, method="meits")
    assert str(caught.value) == (
        "method 'meits' is unknown; did you mean 'metis'? Methods are "
        f"{', '.join(METHODS)}, or a file of labels"
    )
    assert all(name in partition.__doc__ for name in METHODS)
