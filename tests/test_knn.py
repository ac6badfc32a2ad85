"""Neighbors of sharded points: equal to one search over all points, including ties."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import meshshard.nn as ms_nn
from meshshard.comm import Domain, DomainError, init_domain
from meshshard.comm.domain import count_traffic
from meshshard.graph import knn_graph, radius_graph
from meshshard.nn.points import _search
from meshshard.nn.points._scan import intrinsic_dimension
from meshshard.tensor import NoShardRule, Sharding, ShardTensor, shard
from meshshard.tensor.shard_tensor import MeshshardError

SIZES = (1, 2, 3, 4)
laws = settings(max_examples=8, suppress_health_check=list(HealthCheck))


def on(ranks, size, job, *given_):
    """Results of a job on every rank; a job on one rank runs in this process."""
    return [job(*given_)] if size == 1 else ranks[size].run(job, *given_)


def by_distance(x, y, keys, own):
    """Rows of x for every row of y, by squared distance, then key; and these distances."""
    squares = np.zeros((len(y), len(x)))
    for axis in range(x.shape[1]):
        squares += (y[:, axis, None] - x[None, :, axis]) ** 2
    if own:
        squares[np.arange(len(y)), np.arange(len(y))] = np.inf
    order = np.lexsort((np.broadcast_to(keys, squares.shape), squares), axis=1)
    return order, np.take_along_axis(squares, order, 1)


def wanted(x, y, keys, own=False, k=None, r=1e9):
    order, squares = by_distance(x, y, keys, own)
    return [o[d <= r * r][:k].tolist() for o, d in zip(order, squares, strict=True)]


def rows(graph):
    """Ids of the sources of every row of this rank."""
    own = torch.arange(graph.sources.own) + graph.sources.first
    ids = torch.cat([own, graph.halo])[graph.indices].tolist()
    ends = graph.indptr.tolist()
    return [ids[a:b] for a, b in pairwise(ends)]


def random_sizes(rng, n, parts):
    """Random sizes that sum to n; some may be 0."""
    return np.diff([0, *np.sort(rng.integers(0, n + 1, parts - 1)), n]).tolist()


def random_shards(points, domain, rng, permuted):
    """Points sharded at random, and the row in the source of each."""
    sharding = Sharding(domain, random_sizes(rng, len(points), domain.size))
    keys = np.arange(len(points))
    if permuted:
        keys = rng.permutation(len(points))
        own = keys[sharding.first : sharding.first + sharding.own]
        sharding.origin = torch.from_numpy(own.copy())
    return shard(torch.from_numpy(points), domain, sharding), keys


def clouds(rng, lattice):
    n, m, d = rng.integers(0, 70), rng.integers(0, 40), rng.integers(1, 5)
    if lattice:
        return tuple(rng.integers(0, 4, (r, d)).astype(float) for r in (n, m))
    x = rng.normal(size=(n, d)) * rng.choice([1e-4, 1.0, 30.0], (n, 1))
    x = x[np.argsort(x[:, 0])] if rng.random() < 0.5 else x
    return x + 1e6, rng.normal(size=(m, d)) + 1e6


def law_job(seed, lattice, scan):
    domain, rng = init_domain(), np.random.default_rng(seed)
    _search.TREE_DIMS = 0 if scan else 8
    points, queries = clouds(rng, lattice)
    x, keys = random_shards(points, domain, rng, rng.random() < 0.5)
    y, _ = random_shards(queries, domain, rng, permuted=False)
    k, r = int(rng.integers(1, 30)), float(rng.choice([0.0, 1.0, 1.5, 2.0]))
    cases = [
        (ms_nn.knn_graph(x, k), wanted(points, points, keys, own=True, k=k), x),
        (ms_nn.knn_graph(x, k, loop=True), wanted(points, points, keys, k=k), x),
        (ms_nn.knn(x, y, k), wanted(points, queries, keys, k=k), y),
        (ms_nn.radius_graph(x, r), wanted(points, points, keys, own=True, r=r), x),
        (ms_nn.radius_graph(x, r, k), wanted(points, points, keys, own=True, k=k, r=r), x),
        (ms_nn.ball_query(x, y, r), wanted(points, queries, keys, r=r), y),
        (ms_nn.ball_query(x, y, r, k), wanted(points, queries, keys, k=k, r=r), y),
    ]
    _search.TREE_DIMS = 8
    for graph, want, to in cases:
        own = to.sharding
        assert graph.nodes is own
        assert graph.sources is x.sharding
        assert rows(graph) == want[own.first : own.first + own.own]


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True], ids=["tree", "scan"])
@pytest.mark.parametrize("size", SIZES)
@laws
@given(seed=st.integers(0, 2**32 - 1), lattice=st.booleans())
def test_neighbors_equal_one_search_over_all_points(ranks, size, scan, seed, lattice):
    on(ranks, size, law_job, seed, lattice, scan)


def many_job(kind):
    """Points sorted along an axis, so most neighbors are on the same rank; bytes sent, halo."""
    domain, rng = init_domain(), np.random.default_rng(2)
    points = rng.random((6000, 3))
    if kind == "surface":
        points = rng.normal(size=(6000, 3))
        points /= np.linalg.norm(points, axis=1, keepdims=True)
    if kind == "graded":
        points[:, 0] = 1e-4 * 1e4 ** points[:, 0]
    points = points[np.argsort(points[:, 1])]
    whole = knn_graph(points, 9)
    x = shard(torch.from_numpy(points), domain, random_sizes(rng, 6000, domain.size))
    with count_traffic(domain) as traffic:
        graph = ms_nn.knn_graph(x, 9)
    own = slice(x.sharding.first, x.sharding.first + x.sharding.own)
    assert np.array_equal(np.array(rows(graph)), whole.indices.reshape(-1, 9)[own])
    around = radius_graph(points, 0.05)
    got = rows(ms_nn.radius_graph(x, 0.05))
    ends = around.indptr[own.start : own.stop + 1]
    want = [around.indices[a:b].tolist() for a, b in pairwise(ends)]
    assert got == want
    return traffic.counts["route"].bytes, len(graph.halo)


@pytest.mark.parametrize("kind", ["surface", "volume", "graded"])
@pytest.mark.parametrize("size", [2, 4])
def test_bytes_sent_are_bounded_by_the_halo(ranks, size, kind):
    found = ranks[size].run(many_job, kind)
    sent, halo = (sum(column) for column in zip(*found, strict=True))
    assert sent < 3 * halo * (5 + 1 + 4) * 8  # points, ids of the halo, range queries


def source_rows_job(k):
    """Edges by rows in the source, for another numbering and sharding on each number of ranks."""
    domain, rng = init_domain(), np.random.default_rng(7)
    points = rng.integers(0, 4, (80, 2)).astype(float)
    order = np.random.default_rng(domain.size).permutation(80)
    sharding = Sharding(domain, random_sizes(rng, 80, domain.size))
    own = order[sharding.first : sharding.first + sharding.own]
    sharding.origin = torch.from_numpy(own.copy())
    x = ShardTensor.from_local(torch.from_numpy(points[own]), sharding)
    graph = ms_nn.knn_graph(x, k)
    origins = graph.origins[graph.indices].tolist()
    ends = graph.indptr.tolist()
    return {int(o): origins[ends[i] : ends[i + 1]] for i, o in enumerate(own)}


def test_ties_are_broken_by_the_row_in_the_source(ranks):
    want = source_rows_job(5)
    for size in SIZES[1:]:
        parts = ranks[size].run(source_rows_job, 5)
        assert {row: edges for part in parts for row, edges in part.items()} == want


@given(st.integers(0, 2**32 - 1), st.integers(13, 40))
@settings(max_examples=10)
def test_neighbors_in_many_dimensions(seed, dims):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 2, (50, dims)) * rng.choice([1.0, 1e-8], (50, 1))
    graph = ms_nn.knn_graph(torch.from_numpy(x), 6)
    assert rows(graph) == wanted(x, x, np.arange(50), own=True, k=6)


def test_features_of_low_intrinsic_dimension_are_searched_by_a_tree():
    flat = torch.rand(600, 3, dtype=torch.float64)
    features = torch.relu(flat @ torch.randn(3, 40, dtype=torch.float64))
    assert (
        intrinsic_dimension(features)
        < 8
        < intrinsic_dimension(torch.randn(600, 40, dtype=torch.float64))
    )
    for x in (features, torch.randn(200, 40, dtype=torch.float64)):
        whole = x.numpy()
        want = wanted(whole, whole, np.arange(len(x)), own=True, k=5)
        assert rows(ms_nn.knn_graph(x, 5)) == want
    assert intrinsic_dimension(torch.zeros(50, 40, dtype=torch.float64)) == 40


def test_of_many_coincident_points_the_lowest_rows_are_neighbors():
    points = torch.zeros(5000, 3)
    points[-1] = 1
    graph = ms_nn.knn_graph(points, 3)
    assert rows(graph)[::1999] == [[1, 2, 3], [0, 1, 2], [0, 1, 2]]
    assert rows(ms_nn.knn(points, points[-2:], 3)) == [[0, 1, 2], [4999, 0, 1]]


def refused_job():
    domain = init_domain()
    x = torch.zeros(4, 3)
    if domain.rank == 1:
        x[2, 1] = torch.nan
    sharding = Sharding(domain, [4, 4])
    with pytest.raises(DomainError, match=r"knn: rank 1: .*1 point not finite: ids \[2\]"):
        ms_nn.knn(ShardTensor.from_local(x, sharding), ShardTensor.from_local(x, sharding), 2)
    fine = ShardTensor.from_local(torch.zeros(4, 3), sharding)
    for most, count in ((None, 56), (2, 16)):
        assert ms_nn.radius_graph(fine, 1.0, most, count).edges.total == count
        message = f"radius_graph: {count} edges, at most {count - 1} are allowed"
        with pytest.raises(DomainError, match=message):
            ms_nn.radius_graph(fine, 1.0, most, count - 1)
    with pytest.raises(MeshshardError, match="sharded over different domains"):
        ms_nn.knn(fine, torch.zeros(4, 3), 2)
    with pytest.raises(MeshshardError, match="x has 3 coordinates, y has 2"):
        ms_nn.knn(fine, fine[:, :2], 2)
    with pytest.raises(MeshshardError, match="a row has 7 neighbors, more than the width of 2"):
        ms_nn.grouped(fine, ms_nn.radius_graph(fine, 1.0), 2)


def test_errors_are_raised_on_every_rank(ranks):
    ranks[2].run(refused_job)


def test_invalid_arguments_are_refused(monkeypatch):
    x = torch.zeros(4, 3)
    with pytest.raises(MeshshardError, match="0 neighbors"):
        ms_nn.knn_graph(x, 0)
    with pytest.raises(MeshshardError, match=r"2\.5 neighbors; take an integer"):
        ms_nn.knn_graph(x, 2.5)
    with pytest.raises(MeshshardError, match="radius of -1"):
        ms_nn.radius_graph(x, -1)
    with pytest.raises(MeshshardError, match="positions must be a tensor, not numpy"):
        ms_nn.knn_graph(np.zeros((4, 3)), 1)
    with pytest.raises(MeshshardError, match=r"positions must be \(n, d\), not \(4,\)"):
        ms_nn.knn_graph(x[:, 0], 1)
    across = shard(x, Domain(), [3], dim=1)
    with pytest.raises(NoShardRule, match="sharded along their rows"):
        ms_nn.knn_graph(across, 1)
    monkeypatch.setattr(_search, "_free_memory", lambda device: 100)
    with pytest.raises(DomainError, match="12 of them on rank 0, need 576 bytes there, but 100"):
        ms_nn.radius_graph(x, 1.0)


def vectors_job(seed):
    """Gradients of edge lengths in a kNN and a bipartite graph, against one rank."""
    domain, rng = init_domain(), np.random.default_rng(seed)
    points, queries = rng.random((40, 3)), rng.random((25, 3))
    x, _ = random_shards(points, domain, rng, permuted=True)
    y, _ = random_shards(queries, domain, rng, permuted=False)
    x.requires_grad_(), y.requires_grad_()
    a, b = torch.from_numpy(points).requires_grad_(), torch.from_numpy(queries).requires_grad_()
    got = ms_nn.edge_vectors(x, ms_nn.knn_graph(x, 5)).norm(dim=1).square().sum()
    got = got + ms_nn.edge_vectors(x, ms_nn.knn(x, y, 4), y).norm(dim=1).sum()
    want = ms_nn.edge_vectors(a, ms_nn.knn_graph(a, 5)).norm(dim=1).square().sum()
    want = want + ms_nn.edge_vectors(a, ms_nn.knn(a, b, 4), b).norm(dim=1).sum()
    got.backward(), want.backward()
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    torch.testing.assert_close(x.grad.gather(), a.grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(y.grad.gather(), b.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_gradients_of_edge_lengths_are_exact(ranks, size):
    on(ranks, size, vectors_job, 3)


def grouped_job():
    domain, rng = init_domain(), np.random.default_rng(5)
    points, queries = rng.random((50, 3)), rng.random((20, 3))
    x, _ = random_shards(points, domain, rng, permuted=False)
    y, _ = random_shards(queries, domain, rng, permuted=False)
    x.requires_grad_()
    a = torch.from_numpy(points).requires_grad_()
    groups, mask = ms_nn.grouped(x, ms_nn.ball_query(x, y, 0.3, 4), 6)
    want, where = ms_nn.grouped(a, ms_nn.ball_query(a, torch.from_numpy(queries), 0.3, 4), 6)
    assert groups.shape == (20, 6, 3)
    assert torch.equal(mask.gather(), where)
    assert torch.equal(groups.gather(), want)
    assert not want[~where].any()
    (groups**3).sum().backward(), (want**3).sum().backward()
    torch.testing.assert_close(x.grad.gather(), a.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_grouped_neighbors_of_a_ball_query(ranks, size):
    on(ranks, size, grouped_job)


def traffic_job():
    domain = init_domain()
    x = shard(torch.rand(60, 3), domain, [20, 40])
    with count_traffic(domain) as traffic:
        graph = ms_nn.knn_graph(x, 4)
    assert {kind: count.calls for kind, count in traffic.counts.items()} == {
        "counts": 3, "route": 3, "exchange": 1,
    }  # fmt: skip
    with count_traffic(domain) as traffic:
        ms_nn.edge_vectors(x, graph)
    assert traffic.total().calls == 1


def test_collectives_are_those_of_the_docstring(ranks):
    ranks[2].run(traffic_job)


def whole_interpolation(x, pos_x, pos_y, k):
    """PyG's formula, with neighbors by brute force."""
    order, _ = by_distance(pos_x.detach().numpy(), pos_y.detach().numpy(), np.arange(len(x)), False)
    near = torch.from_numpy(order[:, :k])
    weights = 1 / (pos_x[near] - pos_y[:, None]).square().sum(-1, keepdim=True).clamp(min=1e-16)
    return (x[near] * weights).sum(1) / weights.sum(1)


def interpolation_job(k, moving):
    domain, rng = init_domain(), np.random.default_rng(8)
    a, b, c = rng.normal(size=(30, 5)), rng.random((30, 2)), rng.random((45, 2))
    c[:3] = b[4:7]  # queries that coincide with points
    whole = [torch.from_numpy(v).requires_grad_(i == 0 or moving) for i, v in enumerate((a, b, c))]
    x, _ = random_shards(a, domain, rng, permuted=False)
    pos_x = ShardTensor.from_local(
        shard(whole[1].detach(), domain, x.sharding).to_local(), x.sharding
    )
    pos_y, _ = random_shards(c, domain, rng, permuted=False)
    own = [x, pos_x, pos_y]
    [t.requires_grad_(w.requires_grad) for t, w in zip(own, whole, strict=True)]
    got, want = ms_nn.knn_interpolate(*own, k), whole_interpolation(*whole, k)
    torch.testing.assert_close(got.gather(), want, rtol=1e-12, atol=1e-13)
    got.square().sum().backward(), want.square().sum().backward()
    for t, w in zip(own, whole, strict=True):
        assert (t.grad is None) == (w.grad is None)
        if w.grad is not None:
            torch.testing.assert_close(t.grad.gather(), w.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("moving", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_interpolation_has_exact_gradients(ranks, size, moving):
    for k in (1, 4, 99):
        on(ranks, size, interpolation_job, k, moving)


def test_interpolation_from_no_points_is_zero():
    out = ms_nn.knn_interpolate(torch.zeros(0, 2), torch.zeros(0, 3), torch.zeros(5, 3))
    assert torch.equal(out, torch.zeros(5, 2))


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_interpolation_in_half_precision(kind):
    pos = torch.rand(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = pos[:, :2].to(kind)
    got = ms_nn.knn_interpolate(x, pos, pos[:30])  # each query is a point: weights of 1e16
    assert got.dtype == kind
    assert torch.equal(got, x[:30])
    near = ms_nn.knn_interpolate(x.double(), pos.to(kind), pos[:30].to(kind))
    assert torch.isfinite(near).all()
