"""Objects of other packages go straight into `partition`."""

import meshio
import numpy as np
import pytest
import scipy.sparse
import torch
import trimesh
from foreign import hexahedra
from strategies import grid_surface
from torch_geometric.data import Data

import meshshard as ms
from meshshard.errors import MeshshardError, PartitionError
from meshshard.partitioning.objects import KINDS

POINTS = np.random.default_rng(0).random((60, 3))
EDGES = np.array([[0, 1, 2, 3, 0, 2], [1, 2, 3, 4, 2, 0]])


@pytest.mark.parametrize(
    "points",
    [
        POINTS,
        POINTS[:, :2].astype(np.float32),
        torch.from_numpy(POINTS),
        torch.from_numpy(POINTS).requires_grad_(),
        torch.from_numpy(POINTS).bfloat16(),
        torch.from_numpy(-POINTS)._neg_view(),
        np.ma.array(POINTS, mask=False),
        trimesh.PointCloud(POINTS).vertices,
    ],
)
def test_points(points):
    parts = ms.partition(points, 3).check()
    assert (parts.entity, parts.mesh.n_points) == ("points", 60)
    assert np.allclose(parts.mesh.points[:, :2], POINTS[:, :2], atol=0.01)


def test_a_trimesh():
    box = trimesh.creation.box(subdivisions=0).subdivide()
    box.face_attributes["p"] = np.arange(len(box.faces))
    parts = ms.partition(box, 2).check()
    assert (parts.entity, parts.mesh.kind, parts.mesh.n_cells) == ("cells", "surface", 48)
    assert parts.mesh.cell_fields["p"].tolist() == list(range(48))


def test_a_meshio_mesh():
    grid = hexahedra(4)
    mesh = meshio.Mesh(
        grid.points,
        [("hexahedron", grid.cell_connectivity.reshape(4, 8))],
        cell_data={"p": [np.arange(4)]},
        point_data={"i": np.arange(20) + 2**60},
        cell_sets={"inlet": [np.array([0])]},
    )
    parts = ms.partition(mesh, 2).check()
    assert (parts.entity, parts.mesh.kind, parts.mesh.n_cells) == ("cells", "volume", 4)
    assert parts.mesh.cell_fields["p"].tolist() == [0, 1, 2, 3]
    assert parts.mesh.point_fields["i"].tolist() == (np.arange(20) + 2**60).tolist()
    assert list(mesh.cell_sets) == ["inlet"]


@pytest.mark.parametrize("form", ["csr_matrix", "coo_array", "csc_array", "lil_matrix"])
def test_a_sparse_matrix_is_a_graph(form):
    graph = ms.cell_graph(grid_surface(6, 5))
    ones = np.ones(graph.n_edges)
    matrix = scipy.sparse.csr_array((ones, graph.indices, graph.indptr), shape=(30, 30))
    parts = ms.partition(getattr(scipy.sparse, form)(matrix), 3).check()
    assert (parts.entity, parts.graph.n_nodes) == ("nodes", 30)
    assert np.array_equal(parts.labels, ms.partition(graph, 3).labels)


def test_a_pyg_graph_keeps_the_direction_of_its_edges():
    parts = ms.partition(Data(edge_index=torch.from_numpy(EDGES), num_nodes=5), 1).check()
    pairs = np.stack([parts.graph.indices, parts.graph.destinations()])
    assert sorted(parts.origin[pairs].T.tolist()) == sorted(EDGES.T.tolist())


def test_pyg_points_with_and_without_edges():
    pos = torch.from_numpy(POINTS)
    data = Data(pos=pos, edge_index=torch.from_numpy(EDGES), x=pos[:, :2], y=pos[:, 0])
    parts = ms.partition(data, 2).check()
    assert (parts.entity, parts.graph.n_edges) == ("points", 6)
    assert np.array_equal(parts.mesh.point_fields["x"], POINTS[:, :2])
    assert np.array_equal(parts.mesh.point_fields["y"], POINTS[:, 0])
    assert ms.partition(Data(pos=pos), 2).graph.n_edges == 60 * 16
    box = trimesh.creation.box()
    data = Data(pos=torch.tensor(box.vertices), face=torch.tensor(box.faces.T))
    assert np.array_equal(ms.partition(data, 2).mesh.connectivity, box.faces.ravel())


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (None, "cannot cut a NoneType; pass a Mesh, .*a PyG Data, or make a mesh with from_arrays"),
        ([[0, 0, 0]], "cannot cut a list"),
        (np.zeros((3, 4)), r"points must be \(n, 3\) or \(n, 2\) numbers, not \(3, 4\)"),
        (np.array(["a"]), r"points must be .* not \(1,\) of <U1"),
        (torch.zeros(3), r"not \(3,\) of float32"),
        (
            torch.zeros(4, 3).to_sparse(),
            r"the tensor is not a plain array \(.*sparse_coo.* a dense",
        ),
        (torch.zeros(4, 3, device="meta"), r"is not a plain array \(torch.float32, .* on meta\)"),
        (torch.zeros(4, 3).to(torch.float8_e5m2), r"is not a plain array \(torch.float8_e5m2"),
        (torch.nested.nested_tensor([torch.zeros(2, 3)], layout=torch.jagged), "not a plain array"),
        (scipy.sparse.csr_array((3, 4)), r"square, not \(3, 4\)"),
        (Data(x=torch.zeros(2, 1)), "needs pos, edge_index or both"),
        (np.ma.masked_less(POINTS, 0.5), "masked array are missing"),
        (Data(pos=torch.zeros(2, 3), edge_index=torch.zeros(2, 1)), r"must be \(2, m\) integers"),
        (Data(pos=torch.zeros(2, 3), edge_index=torch.tensor([[0], [7]])), "nodes below 2"),
        (trimesh.Scene(), "cannot cut a Scene"),
    ],
)
def test_other_objects_are_refused_in_one_sentence(item, words):
    with pytest.raises(PartitionError, match=words) as caught:
        ms.partition(item, 2)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, MeshshardError)


def test_the_message_lists_every_kind():
    with pytest.raises(PartitionError) as caught:
        ms.partition(object(), 2)
    assert all(kind.name in str(caught.value) for kind in KINDS)
