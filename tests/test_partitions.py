"""Partition: from a mesh to shards in one call, and the properties of the result."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from scipy.sparse import csr_array
from strategies import grid_surface, grid_volume, surfaces, volumes

from meshshard.errors import MeshshardError, MeshWarning, PartitionError
from meshshard.graph import Graph, cell_graph, knn_graph
from meshshard.mesh import Mesh
from meshshard.partitioning.methods import Metis, Morton, Random
from meshshard.partitioning.partition import entity_of, partition

SHEET = grid_surface(20, 15)
CLOUD = Mesh(np.random.default_rng(0).random((300, 3)), point_fields={"p": np.arange(300.0)})


@pytest.mark.parametrize(
    "mesh", [SHEET, grid_volume(6), grid_volume(4, 10), grid_volume(4, 42), CLOUD]
)
@pytest.mark.parametrize("k", [1, 2, 7, 64])
def test_partitions_check(mesh, k):
    made = partition(mesh, k).check()
    assert made.k == k
    assert np.array_equal(np.sort(made.origin), np.arange(len(made.origin)))
    assert np.array_equal(np.bincount(made.labels, minlength=k), made.sizes)
    assert made.quality.owned == made.sizes.tolist()


@settings(max_examples=30)
@given(surfaces())
@pytest.mark.filterwarnings("ignore::meshshard.errors.MeshWarning")
def test_any_surface_can_be_partitioned(mesh):
    for on in ("cells", "points"):
        partition(mesh, 3, on=on, method=Random()).check()


@settings(max_examples=30)
@given(volumes())
@pytest.mark.filterwarnings("ignore::meshshard.errors.MeshWarning")
def test_any_volume_can_be_partitioned(mesh):
    for on in ("cells", "points"):
        partition(mesh, 3, on=on, method=Random(), halo=2).check()


def test_what_is_sharded_by_default():
    bare = replace(SHEET, cell_fields={}, point_fields={})
    assert entity_of(SHEET) == "cells"
    assert entity_of(replace(SHEET, cell_fields={})) == "points"
    assert entity_of(bare) == "cells"
    assert entity_of(CLOUD) == "points"
    with pytest.raises(PartitionError, match="has no cells"):
        entity_of(CLOUD, "cells")
    with pytest.raises(PartitionError, match="on 'edges' is unknown"):
        entity_of(SHEET, "edges")


def test_relabeling_parts_and_permuting_cells_change_nothing_else():
    """Sizes, halos and volume follow the permutation."""
    made = partition(SHEET, 6)
    turn = np.random.default_rng(1).permutation(6)
    relabeled = partition(SHEET, 6, method=turn[made.labels])
    assert np.array_equal(relabeled.sizes[turn], made.sizes)
    assert relabeled.quality.volume == made.quality.volume
    order = np.random.default_rng(2).permutation(SHEET.n_cells)
    cells = SHEET.connectivity.reshape(-1, 4)[order]
    shuffled = replace(SHEET, connectivity=cells.ravel(), cell_fields={})
    other = partition(shuffled, 6, on="cells", method=made.labels[order])
    assert np.array_equal(other.sizes, made.sizes)
    assert np.array_equal(np.diff(other.halo.offsets), np.diff(made.halo.offsets))


def test_parts_as_shares():
    sizes = partition(SHEET, [2, 1, 1]).sizes
    assert np.allclose(sizes / 300, [0.5, 0.25, 0.25], atol=0.02)


def test_weights_by_name_by_area_and_as_an_array():
    by_field = partition(SHEET, 4, weights="p").quality
    assert by_field.imbalance < 1.05
    assert partition(SHEET, 4, weights="area").quality.imbalance < 1.02
    assert partition(SHEET, 4, weights=np.ones(300)).quality.imbalance < 1.02
    with pytest.raises(PartitionError, match="no field 'q' on cells; fields: p, tau"):
        partition(SHEET, 4, weights="q")
    with pytest.raises(PartitionError, match=r"weights have shape \(300, 3\), expected \(300,\)"):
        partition(SHEET, 4, weights="tau")


@pytest.mark.slow
def test_uneven_loads_give_a_warning():
    heavy = np.ones(300)
    heavy[3] = 1e6
    with pytest.warns(MeshWarning, match="imbalance"):
        partition(SHEET, 4, weights=heavy)


def test_a_graph_of_neighbors_instead_of_the_mesh():
    graph = knn_graph(SHEET.centers(), 6)
    made = partition(SHEET, 5, graph=graph).check()
    assert made.graph.n_edges == graph.n_edges
    assert not made.graph.symmetric
    with pytest.raises(PartitionError, match=r"the graph has 300 nodes, expected 336 \(points\)"):
        partition(SHEET, 5, on="points", graph=graph)


def test_labels_as_a_tensor():
    labels = np.arange(300) % 3
    made = partition(SHEET, 3, method=torch.from_numpy(labels))
    assert np.array_equal(made.labels, labels)


def test_a_bare_graph():
    graph = cell_graph(SHEET)
    made = partition(graph, 4).check()
    assert made.entity == "nodes"
    with pytest.raises(PartitionError, match="has no positions"):
        made.edge_attributes(0)


@pytest.mark.parametrize("order", ["morton", "rcm", "file"])
def test_another_order_inside_a_shard(order):
    made = partition(SHEET, 4)
    other = made.reordered(order).check()
    assert np.array_equal(other.labels, made.labels)
    assert other.quality.volume == made.quality.volume
    if order == "file":
        assert np.array_equal(other.origin, made.origin)


def test_edge_attributes_are_source_minus_destination():
    made = partition(SHEET, 4)
    centers = SHEET.centers()
    for shard in range(4):
        plan = made.plan(shard)
        ids = np.concatenate([np.arange(*made.offsets[shard : shard + 2]), plan.halo])
        to = np.repeat(np.arange(plan.n_local), np.diff(plan.indptr))
        expected = centers[made.origin[ids[plan.indices]]] - centers[made.origin[ids[to]]]
        relative, length = made.edge_attributes(shard)
        assert np.array_equal(relative, expected)
        assert np.allclose(length, 1.0)


def test_merging_warns_where_ranks_are_uneven():
    made = partition(SHEET, 5)
    with pytest.warns(MeshWarning, match="5 shards on 2 ranks: the largest owns 20 %"):
        made.merge(2)
    with pytest.raises(PartitionError, match="5 shards for 6 ranks; use 1 to 5"):
        made.merge(6)


def test_quality_warns_of_shards_that_are_too_small():
    assert "use one rank" in str(partition(SHEET, 2).quality)
    assert "warning" not in str(partition(SHEET, 1).quality)
    assert "warning" not in str(partition(grid_surface(64, 128), 2).quality)


def test_quality_agrees_with_the_labels():
    made = partition(SHEET, 6)
    graph, labels = cell_graph(SHEET), made.labels
    a, b = labels[graph.destinations()], labels[graph.indices]
    quality = made.quality
    assert quality.edge_cut == (a != b).sum() // 2
    pairs = np.unique(np.stack([a, graph.indices])[:, a != b], axis=1)
    assert quality.volume == pairs.shape[1]
    assert quality.halo == np.bincount(pairs[0], minlength=6).tolist()
    assert quality.bytes_per_exchange(128) == quality.volume * 512
    assert quality.imbalance == made.sizes.max() * 6 / 300
    assert quality.pieces == [1] * 6


def test_quality_as_a_frame_of_numbers():
    quality = partition(SHEET, 6).quality
    frame = quality.as_frame()
    assert list(frame.columns) == ["owned", "halo", "sent", "peers", "pieces", "load"]
    assert (frame.index.name, len(frame)) == ("shard", 6)
    assert all(kind.kind in "if" for kind in frame.dtypes)
    assert frame["owned"].sum() == 300
    assert frame.attrs["volume"] == quality.volume == frame["sent"].sum()


def test_a_frame_without_pandas_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)  # what Python does where it is missing
    with pytest.raises(MeshshardError, match=r"pip install 'meshshard\[pandas\]'"):
        partition(SHEET, 2).quality.as_frame()


def test_labels_as_gpmetis_writes_them(tmp_path):
    made = partition(SHEET, 6)
    made.save_labels(tmp_path / "sheet.part.6")
    assert (tmp_path / "sheet.part.6").read_text().split() == [str(i) for i in made.labels]
    assert np.array_equal(partition(SHEET, 6, method=tmp_path / "sheet.part.6").labels, made.labels)


def test_pieces_are_counted():
    stripes = (np.arange(300) // 15) % 2
    assert partition(SHEET, 2, method=stripes).quality.pieces == [10, 10]


def test_a_partition_prints_as_text_and_html():
    made = partition(SHEET, 3)
    assert repr(made) == "Partition(mesh: 300 cells in 3 shards)"
    assert "<table>" in made._repr_html_()
    assert "imbalance" in str(made.quality)
    assert len(str(partition(SHEET, 40).quality).splitlines()) == 1 + 13 + 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"parts": 0}, "parts 0"),
        ({"parts": [1, -1]}, "positive share"),
        ({"parts": ["a"]}, "positive share"),
        ({"parts": [1, np.inf]}, "positive share"),
        ({"parts": 2, "halo": 0}, "halo 0 must be 1 to 255 hops"),
        ({"parts": 2, "halo": 1.5}, "halo 1.5 must be 1 to 255 hops"),
        ({"parts": 2, "halo": "1"}, "halo '1' must be"),
        ({"parts": 2, "graph": csr_array((300, 300))}, "graph is a csr_array; pass a Graph"),
        ({"parts": 2, "weights": np.ones(300, complex)}, "weights are of type complex128"),
        ({"parts": 2, "weights": ["a"] * 300}, "weights are of type <U1; expected a number for"),
        ({"parts": 2, "weights": np.ma.masked_less(np.arange(300), 5)}, "weights are masked"),
        (
            {"parts": 2, "method": np.ma.masked_less(np.arange(300) % 2, 1)},
            "masked labels; replace",
        ),
    ],
)
def test_invalid_arguments_are_refused(arguments, message):
    with pytest.raises(PartitionError, match=message):
        partition(SHEET, **arguments)


def test_an_empty_cloud_is_refused():
    with pytest.raises(PartitionError, match="has no points to partition"):
        partition(Mesh(np.zeros((0, 3))), 2)


def test_geometric_methods_need_no_neighbors():
    none = Graph(np.zeros(301, np.int64), np.zeros(0, np.int32))
    made = partition(CLOUD, 4, method=Morton(), graph=none).check()
    assert made.quality.volume == 0


def test_the_record_of_the_method():
    assert partition(SHEET, 2, method=Metis("cut", seed=3)).method == {
        "name": "Metis", "objective": "cut", "imbalance": 1.005, "seed": 3, "recursive": None,
        "contiguous": False, "timeout": None,
    }  # fmt: skip
