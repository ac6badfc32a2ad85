"""Neighbors of sharded points: those of one search over all points, ties and all."""

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
    """What a job returns on every rank; on one rank it runs here."""
    return [job(*given_)] if size == 1 else ranks[size].run(job, *given_)


def by_distance(x, y, names, own):
    """Rows of x for every row of y, by squared distance, then name; and these distances."""
    squares = np.zeros((len(y), len(x)))
    for axis in range(x.shape[1]):
        squares += (y[:, axis, None] - x[None, :, axis]) ** 2
    if own:
        squares[np.arange(len(y)), np.arange(len(y))] = np.inf
    order = np.lexsort((np.broadcast_to(names, squares.shape), squares), axis=1)
    return order, np.take_along_axis(squares, order, 1)


def wanted(x, y, names, own=False, k=None, r=1e9):
    order, squares = by_distance(x, y, names, own)
    return [o[d <= r * r][:k].tolist() for o, d in zip(order, squares, strict=True)]


def rows(graph):
    """Ids of the sources of every own row."""
    own = torch.arange(graph.sources.own) + graph.sources.first
    ids = torch.cat([own, graph.halo])[graph.indices].tolist()
    ends = graph.indptr.tolist()
    return [ids[a:b] for a, b in pairwise(ends)]


def divided(rng, n, parts):
    """Random sizes, empty ones among them."""
    return np.diff([0, *np.sort(rng.integers(0, n + 1, parts - 1)), n]).tolist()


def placed(points, domain, rng, named):
    """Rows of all, sharded at random, and the names of all rows."""
    sharding = Sharding(domain, divided(rng, len(points), domain.size))
    names = np.arange(len(points))
    if named:
        names = rng.permutation(len(points))
        own = names[sharding.first : sharding.first + sharding.own]
        sharding.origin = torch.from_numpy(own.copy())
    return shard(torch.from_numpy(points), domain, sharding), names


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
    points, places = clouds(rng, lattice)
    x, names = placed(points, domain, rng, rng.random() < 0.5)
    y, _ = placed(places, domain, rng, named=False)
    k, r = int(rng.integers(1, 30)), float(rng.choice([0.0, 1.0, 1.5, 2.0]))
    cases = [
        (ms_nn.knn_graph(x, k), wanted(points, points, names, own=True, k=k), x),
        (ms_nn.knn_graph(x, k, loop=True), wanted(points, points, names, k=k), x),
        (ms_nn.knn(x, y, k), wanted(points, places, names, k=k), y),
        (ms_nn.radius_graph(x, r), wanted(points, points, names, own=True, r=r), x),
        (ms_nn.radius_graph(x, r, k), wanted(points, points, names, own=True, k=k, r=r), x),
        (ms_nn.ball_query(x, y, r), wanted(points, places, names, r=r), y),
        (ms_nn.ball_query(x, y, r, k), wanted(points, places, names, k=k, r=r), y),
    ]
    _search.TREE_DIMS = 8
    for graph, want, to in cases:
        own = to.sharding
        assert graph.nodes is own
        assert graph.sources is x.sharding
        assert rows(graph) == want[own.first : own.first + own.own]


@pytest.mark.parametrize("scan", [False, True], ids=["tree", "scan"])
@pytest.mark.parametrize("size", SIZES)
@laws
@given(seed=st.integers(0, 2**32 - 1), lattice=st.booleans())
def test_neighbors_are_those_of_one_search_over_all_points(ranks, size, scan, seed, lattice):
    on(ranks, size, law_job, seed, lattice, scan)


def many_job(kind):
    """More points, divided along a curve: most of them need no other rank."""
    domain, rng = init_domain(), np.random.default_rng(2)
    points = rng.random((6000, 3))
    if kind == "surface":
        points = rng.normal(size=(6000, 3))
        points /= np.linalg.norm(points, axis=1, keepdims=True)
    if kind == "graded":
        points[:, 0] = 1e-4 * 1e4 ** points[:, 0]
    points = points[np.argsort(points[:, 1])]
    whole = knn_graph(points, 9)
    x = shard(torch.from_numpy(points), domain, divided(rng, 6000, domain.size))
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
def test_few_points_are_sent(ranks, size, kind):
    found = ranks[size].run(many_job, kind)
    sent, halo = (sum(column) for column in zip(*found, strict=True))
    assert sent < 3 * halo * (5 + 1 + 4) * 8  # points, ids of the halo, small cells


def names_job(k):
    """Edges by rows in the source; the same however the points are numbered and divided."""
    domain, rng = init_domain(), np.random.default_rng(7)
    points = rng.integers(0, 4, (80, 2)).astype(float)
    order = np.random.default_rng(domain.size).permutation(80)
    sharding = Sharding(domain, divided(rng, 80, domain.size))
    own = order[sharding.first : sharding.first + sharding.own]
    sharding.origin = torch.from_numpy(own.copy())
    x = ShardTensor.from_local(torch.from_numpy(points[own]), sharding)
    graph = ms_nn.knn_graph(x, k)
    origins = graph.origins[graph.indices].tolist()
    ends = graph.indptr.tolist()
    return {int(o): origins[ends[i] : ends[i + 1]] for i, o in enumerate(own)}


def test_ties_go_by_the_row_in_the_source(ranks):
    want = names_job(5)
    for size in SIZES[1:]:
        parts = ranks[size].run(names_job, 5)
        assert {row: edges for part in parts for row, edges in part.items()} == want


@given(st.integers(0, 2**32 - 1), st.integers(13, 40))
@settings(max_examples=10)
def test_features_of_many_coordinates(seed, dims):
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 2, (50, dims)) * rng.choice([1.0, 1e-8], (50, 1))
    graph = ms_nn.knn_graph(torch.from_numpy(x), 6)
    assert rows(graph) == wanted(x, x, np.arange(50), own=True, k=6)


def test_features_on_a_thin_sheet_are_searched_by_a_tree():
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


def test_many_points_at_one_place_take_the_lowest_rows():
    points = torch.zeros(5000, 3)
    points[-1] = 1
    graph = ms_nn.knn_graph(points, 3)
    assert rows(graph)[::1999] == [[1, 2, 3], [0, 1, 2], [0, 1, 2]]
    assert rows(ms_nn.knn(points, points[-2:], 3)) == [[0, 1, 2], [4999, 0, 1]]


def wrong_job():
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


def test_errors_come_on_every_rank(ranks):
    ranks[2].run(wrong_job)


def test_wrong_arguments_are_named(monkeypatch):
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
    """Gradients of edge lengths of an old and a bipartite graph, against the whole."""
    domain, rng = init_domain(), np.random.default_rng(seed)
    points, places = rng.random((40, 3)), rng.random((25, 3))
    x, _ = placed(points, domain, rng, named=True)
    y, _ = placed(places, domain, rng, named=False)
    x.requires_grad_(), y.requires_grad_()
    a, b = torch.from_numpy(points).requires_grad_(), torch.from_numpy(places).requires_grad_()
    got = ms_nn.edge_vectors(x, ms_nn.knn_graph(x, 5)).norm(dim=1).square().sum()
    got = got + ms_nn.edge_vectors(x, ms_nn.knn(x, y, 4), y).norm(dim=1).sum()
    want = ms_nn.edge_vectors(a, ms_nn.knn_graph(a, 5)).norm(dim=1).square().sum()
    want = want + ms_nn.edge_vectors(a, ms_nn.knn(a, b, 4), b).norm(dim=1).sum()
    got.backward(), want.backward()
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    torch.testing.assert_close(x.grad.gather(), a.grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(y.grad.gather(), b.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_lengths_of_edges_have_exact_gradients(ranks, size):
    on(ranks, size, vectors_job, 3)


def grouped_job():
    domain, rng = init_domain(), np.random.default_rng(5)
    points, places = rng.random((50, 3)), rng.random((20, 3))
    x, _ = placed(points, domain, rng, named=False)
    y, _ = placed(places, domain, rng, named=False)
    x.requires_grad_()
    a = torch.from_numpy(points).requires_grad_()
    groups, mask = ms_nn.grouped(x, ms_nn.ball_query(x, y, 0.3, 4), 6)
    want, where = ms_nn.grouped(a, ms_nn.ball_query(a, torch.from_numpy(places), 0.3, 4), 6)
    assert groups.shape == (20, 6, 3)
    assert torch.equal(mask.gather(), where)
    assert torch.equal(groups.gather(), want)
    assert not want[~where].any()
    (groups**3).sum().backward(), (want**3).sum().backward()
    torch.testing.assert_close(x.grad.gather(), a.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_groups_of_a_ball_query(ranks, size):
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


def test_what_is_sent_is_what_the_docstring_says(ranks):
    ranks[2].run(traffic_job)


def whole_interpolation(x, pos_x, pos_y, k):
    """PyG's formula, neighbors by looking at all points."""
    order, _ = by_distance(pos_x.detach().numpy(), pos_y.detach().numpy(), np.arange(len(x)), False)
    near = torch.from_numpy(order[:, :k])
    weights = 1 / (pos_x[near] - pos_y[:, None]).square().sum(-1, keepdim=True).clamp(min=1e-16)
    return (x[near] * weights).sum(1) / weights.sum(1)


def interpolation_job(k, places_move):
    domain, rng = init_domain(), np.random.default_rng(8)
    a, b, c = rng.normal(size=(30, 5)), rng.random((30, 2)), rng.random((45, 2))
    c[:3] = b[4:7]  # places that are points
    whole = [
        torch.from_numpy(v).requires_grad_(i == 0 or places_move) for i, v in enumerate((a, b, c))
    ]
    x, _ = placed(a, domain, rng, named=False)
    pos_x = ShardTensor.from_local(
        shard(whole[1].detach(), domain, x.sharding).to_local(), x.sharding
    )
    pos_y, _ = placed(c, domain, rng, named=False)
    own = [x, pos_x, pos_y]
    [t.requires_grad_(w.requires_grad) for t, w in zip(own, whole, strict=True)]
    got, want = ms_nn.knn_interpolate(*own, k), whole_interpolation(*whole, k)
    torch.testing.assert_close(got.gather(), want, rtol=1e-12, atol=1e-13)
    got.square().sum().backward(), want.square().sum().backward()
    for t, w in zip(own, whole, strict=True):
        assert (t.grad is None) == (w.grad is None)
        if w.grad is not None:
            torch.testing.assert_close(t.grad.gather(), w.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("places_move", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_interpolation_has_exact_gradients(ranks, size, places_move):
    for k in (1, 4, 99):
        on(ranks, size, interpolation_job, k, places_move)


def test_interpolation_from_nothing_is_zero():
    out = ms_nn.knn_interpolate(torch.zeros(0, 2), torch.zeros(0, 3), torch.zeros(5, 3))
    assert torch.equal(out, torch.zeros(5, 2))


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_interpolation_in_half_precision(kind):
    pos = torch.rand(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = pos[:, :2].to(kind)
    got = ms_nn.knn_interpolate(x, pos, pos[:30])  # each place is a point: weights of 1e16
    assert got.dtype == kind
    assert torch.equal(got, x[:30])
    near = ms_nn.knn_interpolate(x.double(), pos.to(kind), pos[:30].to(kind))
    assert torch.isfinite(near).all()
