"""Coarse levels: the same clusters, edges and transfers on any ranks."""

import copy

import pytest
import torch
from convs import C, divided, farthest, grid, own, serial

from meshshard.comm import DomainError, init_domain
from meshshard.errors import MeshshardError
from meshshard.models import MeshGraphNet
from meshshard.nn import cluster, cluster_around, coarsen, farthest_points
from meshshard.tensor import ShardGraph, ShardTensor

pytestmark = pytest.mark.slow

N = 120


def in_order(x, sharding):
    """A sharded tensor in the order of its source."""
    names = ShardTensor.from_local(sharding.sources(torch.device("cpu")), sharding).gather()
    out = torch.empty_like(x.gather())
    out[names] = x.gather()
    return out


def level_job():
    """Labels, coarse edges and transfers against those of one rank."""
    domain = init_domain()
    edges = torch.from_numpy(grid(12, 10))
    renumbered, nodes, origin = divided(grid(12, 10), N, domain, metis=True)
    graph, whole = ShardGraph.from_edge_index(renumbered, nodes), serial(edges, N)
    labels, all_labels = cluster(graph, 8), cluster(whole, 8)
    assert torch.equal(in_order(labels, nodes), all_labels.to_local())
    level, every = coarsen(graph, labels), coarsen(whole, all_labels)
    assert level.graph.nodes.total == every.graph.nodes.total == 15
    ours = domain.share(sorted(level.graph.edges.origin.tolist()))
    assert sorted(n for part in ours for n in part) == sorted(every.graph.edges.origin.tolist())
    x = torch.randn(N, C, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    a, b = own(x, whole.nodes), own(x[origin], nodes)
    far = []
    for reduce in ("mean", "max", "sum"):
        results = []
        for rows, at, one in ((a, whole, every), (b, graph, level)):
            coarse = one.coarse(rows, reduce)
            out = one.fine(coarse * coarse)
            (grad,) = torch.autograd.grad((out**2).sum(), rows)
            names = one.graph.nodes
            results.append([in_order(coarse, names), in_order(out, at.nodes)])
            results[-1].append(in_order(grad, at.nodes))
            results[-1] = [r.detach() for r in results[-1]]
        assert torch.equal(*[r[0] for r in results])
        far += [farthest(p, q) for p, q in zip(results[1], results[0], strict=True)]
    return max(far)


@pytest.mark.parametrize("size", [2, 3])
def test_levels_do_not_depend_on_the_ranks(ranks, size):
    assert max(ranks[size].run(level_job)) < 1e-12


def model_job():
    """A model of two levels: outputs and gradients."""
    domain = init_domain()
    edges = torch.from_numpy(grid(12, 10))
    renumbered, nodes, origin = divided(grid(12, 10), N, domain, metis=False)
    graph, whole = ShardGraph.from_edge_index(renumbered, nodes), serial(edges, N)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, C, dtype=torch.float64, generator=generator)
    e = torch.rand(edges.shape[1], 3, dtype=torch.float64, generator=generator)
    torch.manual_seed(3)
    model = MeshGraphNet(C, 3, 2, hidden=8, layers=(1, 1, 1)).double()
    results = []
    for rows, at in ((x, whole), (x[origin], graph)):
        one = copy.deepcopy(model)
        first = coarsen(at, cluster(at, 6))
        levels = [first, coarsen(first.graph, cluster(first.graph, 4))]
        leaf = own(rows, at.nodes)
        out = one(leaf, at, at.take(e), levels)
        out.square().sum().backward()
        at.domain.average_gradients(one)
        results.append([in_order(out.detach(), at.nodes), in_order(leaf.grad, at.nodes)])
        results[-1] += [p.grad for p in one.parameters()]
    return max(farthest(a, b) for a, b in zip(results[1], results[0], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_a_model_of_several_levels(ranks, size):
    assert max(ranks[size].run(model_job)) < 1e-9


def points_job():
    """Clusters around farthest points."""
    domain = init_domain()
    renumbered, nodes, origin = divided(grid(12, 10), N, domain, metis=True)
    edges = torch.from_numpy(grid(12, 10))
    graph, whole = ShardGraph.from_edge_index(renumbered, nodes), serial(edges, N)
    pos = torch.rand(N, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    labels = []
    for rows, at in ((pos, whole), (pos[origin], graph)):
        mine = own(rows, at.nodes)
        found = cluster_around(mine, farthest_points(mine, 9))
        assert coarsen(at, found).graph.nodes.total == 9
        labels.append(in_order(found, at.nodes))
    return torch.equal(*labels)


def test_clusters_around_points(ranks):
    assert all(ranks[3].run(points_job))


def test_labels_with_gaps_are_refused():
    graph = serial(torch.tensor([[0, 1, 2], [1, 2, 0]]), 3)
    with pytest.raises(DomainError, match="no node has label 1"):
        coarsen(graph, torch.tensor([0, 2, 2]))


def test_labels_and_sizes_that_cannot_be_are_refused():
    graph = serial(torch.tensor(grid(4, 2)), 8)
    with pytest.raises(MeshshardError, match="label -1 is negative; number clusters from 0"):
        coarsen(graph, torch.tensor([-1, 0, 0, 0, 1, 1, 1, 1]))
    with pytest.raises(MeshshardError, match="clusters of 0 nodes"):
        cluster(graph, 0)
