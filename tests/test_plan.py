"""Plans: every shard receives its halo, and sharded sums equal serial sums bit for bit."""

import warnings
from itertools import combinations, pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from strategies import graphs, labels

from meshshard.errors import MeshWarning
from meshshard.graph.plan import runs
from meshshard.partitioning.methods import Given
from meshshard.partitioning.partition import partition


@st.composite
def partitions(draw):
    """Random directed graphs under random labels, some parts empty, halos of 1 to 3 hops."""
    graph = draw(graphs())
    k, given_labels = draw(labels(graph.n_nodes))
    with_warning = given_labels if k <= graph.n_nodes else np.minimum(given_labels, 0)
    k = k if k <= graph.n_nodes else 1
    return graph, partition(graph, k, method=Given(with_warning), halo=draw(st.integers(1, 3)))


def exchange(made, values):
    """Local rows of every shard after an exchange by its plan, in NumPy."""
    plans = [made.plan(p) for p in range(made.k)]
    owned = [values[made.offsets[p] : made.offsets[p + 1]] for p in range(made.k)]
    out = []
    for plan in plans:
        got = [owned[plan.shard]]
        for peer in plans:
            stop = np.cumsum(peer.send_counts)[plan.shard]
            rows = peer.send_rows[stop - peer.send_counts[plan.shard] : stop]
            assert len(rows) == plan.recv_counts[peer.shard]
            got.append(owned[peer.shard][rows])
        out.append(np.concatenate(got))
    return plans, out


def aggregate(indptr, indices, values):
    """Sums over in-edges in the order of the rows."""
    return np.array([np.add.accumulate([0.0, *values[indices[a:b]]])[-1]
                     for a, b in pairwise(indptr)])  # fmt: skip


@given(partitions())
def test_every_shard_receives_its_halo(case):
    case[1].check()


@given(partitions())
def test_one_layer_on_shards_is_the_serial_layer_bit_for_bit(case):
    graph, made = case
    x = np.random.default_rng(0).normal(size=graph.n_nodes) * 10.0 ** np.arange(graph.n_nodes)
    serial = aggregate(graph.indptr, graph.indices, x)
    plans, local = exchange(made, x[made.origin])
    for plan, rows in zip(plans, local, strict=True):
        got = aggregate(plan.indptr, plan.indices, rows)[: plan.n_owned]
        origin = made.origin[made.offsets[plan.shard] : made.offsets[plan.shard + 1]]
        assert np.array_equal(got, serial[origin])


@given(partitions())
def test_a_halo_of_depth_l_serves_l_layers_with_one_exchange(case):
    graph, made = case
    x = serial = np.random.default_rng(0).normal(size=graph.n_nodes)
    for _ in range(made.halo.depth):
        serial = aggregate(graph.indptr, graph.indices, serial)
    plans, local = exchange(made, x[made.origin])
    for plan, rows in zip(plans, local, strict=True):
        for _ in range(made.halo.depth):
            rows = aggregate(plan.indptr, plan.indices, rows)
        origin = made.origin[made.offsets[plan.shard] : made.offsets[plan.shard + 1]]
        assert np.array_equal(rows[: plan.n_owned], serial[origin])


@given(partitions())
def test_hops_are_distances_to_an_owned_row(case):
    graph, made = case
    moved = graph.permuted(made.origin)
    for shard in range(made.k):
        plan = made.plan(shard)
        reached = set(range(made.offsets[shard], made.offsets[shard + 1]))
        hops, border = {}, set(reached)
        for step in range(1, made.halo.depth + 1):
            sources = {int(s) for i in border
                       for s in moved.indices[moved.indptr[i] : moved.indptr[i + 1]]}  # fmt: skip
            border = sources - reached
            hops |= dict.fromkeys(border, step)
            reached |= border
        assert plan.halo.tolist() == sorted(hops)
        assert plan.hops.tolist() == [hops[i] for i in sorted(hops)]


@given(partitions())
def test_interior_rows_have_no_halo_sources(case):
    made = case[1]
    for shard in range(made.k):
        plan = made.plan(shard)
        rows = [plan.indices[plan.indptr[i] : plan.indptr[i + 1]] for i in range(plan.n_owned)]
        assert plan.interior().tolist() == [bool((r < plan.n_owned).all()) for r in rows]
        assert plan.cut_edges().tolist() == (plan.indices >= plan.n_owned).tolist()


@given(partitions(), st.integers(1, 6))
def test_shards_merge_onto_fewer_ranks(case, ranks):
    graph, made = case
    if ranks > made.k:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MeshWarning)  # uneven ranks are allowed here
        merged = made.merge(ranks)
    merged.check()
    assert merged.sizes.sum() == graph.n_nodes
    assert np.array_equal(merged.origin, made.origin)
    cuts = runs(made.sizes, ranks)
    assert np.array_equal(made.offsets[cuts], merged.offsets)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_runs_are_optimal(sizes, data):
    ranks = data.draw(st.integers(1, len(sizes)))
    k = len(sizes)
    choices = [(0, *inner, k) for inner in combinations(range(1, k), ranks - 1)]
    best = min(choices, key=lambda c: (max(sum(sizes[a:b]) for a, b in pairwise(c)), c))
    assert tuple(runs(np.array(sizes), ranks).tolist()) == best
