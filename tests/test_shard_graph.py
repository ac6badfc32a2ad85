"""ShardGraph: every in-edge once, at its destination, in the order of the whole graph."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import graphs

from meshshard.comm import Domain, DomainError, init_domain, simulate
from meshshard.nn import DeepHalo, MeshBlock, knn_graph
from meshshard.tensor import ShardGraph, Sharding, ShardTensor, shard
from meshshard.tensor.shard_tensor import MeshshardError

SIZES = {1: [30], 2: [13, 17], 3: [0, 21, 9], 4: [5, 0, 24, 1]}


def random_edges(n, m, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([
        torch.randint(m, (count,), generator=generator),
        torch.randint(n, (count,), generator=generator),
    ])  # fmt: skip


def summed(edges, x, n):
    return x.new_zeros(n, *x.shape[1:]).index_add(0, edges[1], x[edges[0]])


def graph_job(bipartite):
    """A weighted sum over in-edges and both gradients, against the whole graph."""
    domain = init_domain()
    nodes = Sharding(domain, SIZES[domain.size])
    sources = Sharding(domain, [2 * n for n in reversed(nodes.sizes)]) if bipartite else nodes
    edges = random_edges(nodes.total, sources.total, 200)
    graph = ShardGraph.from_edge_index(edges, nodes, sources)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sources.total, 2, dtype=torch.float64, generator=generator, requires_grad=True)
    e = torch.randn(200, 1, dtype=torch.float64, generator=generator, requires_grad=True)
    v = torch.randn(nodes.total, 2, dtype=torch.float64, generator=generator)
    out = x.new_zeros(nodes.total, 2).index_add(0, edges[1], x[edges[0]] * e)
    want = torch.autograd.grad(out, (x, e), v)
    own = slice(sources.first, sources.first + sources.own)
    mine = ShardTensor.from_local(x.detach()[own].clone(), sources).requires_grad_()
    weight = graph.take(e.detach()).requires_grad_()
    got = summed_weighted(graph, mine, weight)
    there = slice(nodes.first, nodes.first + nodes.own)
    assert torch.equal(got, out[there])
    got.backward(v[there] * domain.size)
    assert torch.allclose(mine.grad.gather(), want[0], rtol=1e-12, atol=1e-13)
    edge_grad = want[1][graph.edges.origin]
    assert torch.allclose(weight.grad.to_local(), edge_grad, rtol=1e-12, atol=1e-13)
    assert graph.edges.total == 200
    return len(graph.halo)


def summed_weighted(graph, x, weight):
    rows = graph.local(x)[graph.indices] * weight.to_local()
    return rows.new_zeros(graph.nodes.own, 2).index_add(0, graph.destinations, rows)


@pytest.mark.parametrize("bipartite", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_edges_live_with_their_destination(ranks, size, bipartite):
    if size == 1:
        assert graph_job(bipartite) == 0
    else:
        assert sum(ranks[size].run(graph_job, bipartite)) > 0


def origins_job():
    domain = init_domain()
    nodes = Sharding(domain, SIZES[domain.size])
    graph = ShardGraph.from_edge_index(random_edges(30, 30, 40), nodes)
    ids = torch.cat([torch.arange(nodes.own) + nodes.first, graph.halo])
    assert torch.equal(graph.origins, ids)


def test_origins_of_owned_and_halo_rows(ranks):
    ranks[3].run(origins_job)


def edge_keys_job():
    """Edge keys of one graph, whose rows are divided differently on each number of ranks."""
    domain = init_domain()
    order = torch.randperm(30, generator=torch.Generator().manual_seed(domain.size))
    nodes = Sharding(domain, SIZES[domain.size])
    nodes.origin = order[nodes.first : nodes.first + nodes.own]
    edges = random_edges(30, 30, 60)
    place = torch.empty(30, dtype=torch.int64)
    place[order] = torch.arange(30)
    whole = place[edges].unique(dim=1)
    to = whole[1] - nodes.first
    mine = whole[:, (to >= 0) & (to < nodes.own)]
    mine = mine[:, torch.argsort(mine[1], stable=True)]
    count = torch.bincount(mine[1] - nodes.first, minlength=nodes.own)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), count.cumsum(0)])
    graph = ShardGraph.from_ids(mine[0], indptr, nodes)
    return graph.edges.origin.tolist()


def test_edge_keys_do_not_depend_on_the_partition(ranks):
    want = set((random_edges(30, 30, 60)[1] * 30 + random_edges(30, 30, 60)[0]).tolist())
    for size in (2, 3, 4):
        keys = [key for part in ranks[size].run(edge_keys_job) for key in part]
        assert len(keys) == len(set(keys))
        assert set(keys) == want


def wrong_job():
    domain = init_domain()
    nodes = Sharding(domain, [2, 2])
    ids = torch.tensor([1, 4 * domain.rank])
    with pytest.raises(DomainError, match="rank 1: expected sources 0 to 3, got 1 to 4"):
        ShardGraph.from_ids(ids, torch.tensor([0, 1, 2]), nodes)


def test_a_missing_source_is_an_error_on_every_rank(ranks):
    ranks[2].run(wrong_job)


def test_serial_graphs_need_no_ranks():
    graph = ShardGraph.from_edge_index(torch.tensor([[1, 0], [0, 1]]), Sharding(Domain(), [2]))
    assert graph.edge_index.tolist() == [[1, 0], [0, 1]]
    assert len(graph.halo) == 0
    assert "2 nodes and 2 edges" in repr(graph)
    with pytest.raises((DomainError, MeshshardError), match="expected sources 0 to 1, got 0 to 7"):
        ShardGraph.from_edge_index(torch.tensor([[7, 0], [0, 1]]), Sharding(Domain(), [2]))


@given(graphs(), st.data())
def test_serial_graphs_keep_every_edge_in_its_order(graph, data):
    to = np.repeat(np.arange(graph.n_nodes), np.diff(graph.indptr))
    whole = torch.from_numpy(np.stack([graph.indices, to]).astype(np.int64))
    order = data.draw(st.permutations(range(whole.shape[1])))
    made = ShardGraph.from_edge_index(whole[:, list(order)], Sharding(Domain(), [graph.n_nodes]))
    kept = whole[:, list(order)][:, made.edges.origin]
    assert torch.equal(made.edge_index, kept)
    assert made.edges.origin.tolist() == sorted(made.edges.origin.tolist(),
                                                key=lambda c: int(whole[1, order[c]]))  # fmt: skip


RING = torch.stack([torch.arange(8), (torch.arange(8) + 1) % 8])


@pytest.mark.parametrize("to", [-1, 8])
def test_a_missing_destination_is_an_error(to):
    edges = torch.tensor([[0, 1], [1, to]])
    with pytest.raises(MeshshardError, match="expected destinations 0 to 7, got"):
        ShardGraph.from_edge_index(edges, Sharding(Domain(), [8]))


@pytest.mark.parametrize("n", [7, 9])
def test_features_of_another_number_of_edges_are_refused(n):
    graph = ShardGraph.from_edge_index(RING, Sharding(Domain(), [8]))
    with pytest.raises(
        MeshshardError, match=rf"expected features of 8 edges, got shape \({n}, 2\)"
    ):
        graph.take(torch.zeros(n, 2))


def test_edges_of_a_knn_graph_have_no_order():
    graph = knn_graph(torch.randn(8, 3), 2)
    with pytest.raises(MeshshardError, match="not made from an edge_index"):
        graph.take(torch.zeros(16, 2))


def test_rows_along_another_dim_are_refused_on_every_rank():
    """Also on a rank whose number of owned rows equals the size of the other dim."""

    def job(domain):
        nodes = Sharding(domain, (3, 5))
        graph = ShardGraph.from_edge_index(RING, nodes)
        x = ShardTensor.from_local(torch.zeros(3, nodes.own), nodes, 1)
        with pytest.raises(MeshshardError, match="dim 1 with sizes"):
            graph.local(x)

    simulate(2, job)


def test_a_deep_halo_returns_edges_where_there_are_as_many_as_nodes():
    edges = torch.cat([RING, torch.tensor([[0, 4], [2, 6]])], 1)
    block = MeshBlock(4).double()
    x, e = torch.randn(8, 4, dtype=torch.float64), torch.randn(10, 4, dtype=torch.float64)

    def job(domain, layers=block):
        nodes = Sharding(domain, (8,) if domain.size == 1 else (4, 4))
        graph = ShardGraph.from_edge_index(edges, nodes)
        return [a.gather() for a in layers(shard(x, domain, nodes), graph, graph.take(e))]

    deep = DeepHalo(block, 1)
    for got, wanted in zip(simulate(2, lambda d: job(d, deep))[0], job(Domain()), strict=True):
        torch.testing.assert_close(got, wanted)
