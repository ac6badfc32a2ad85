"""Reads and writes by row numbers along the sharded dim, against one process."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sorts import compare, values

from meshshard.comm import simulate
from meshshard.tensor import ShardTensor, shard

SIZES = [(5, 0, 8), (0, 13, 0)]
ROWS = torch.tensor([12, 0, 3, 3, -1])
PERMUTATION = torch.arange(13) * 5 % 13
GRID = torch.stack([PERMUTATION, PERMUTATION.flip(0), PERMUTATION * 0], 1)


def ids(x):
    """Row numbers that are sharded as a tensor, with repeats."""
    return torch.cumsum(torch.ones_like(x[:, 0], dtype=torch.int64), 0) * 4 % 13


def changed(x, change):
    out = x * 1
    change(out)
    return out


def setter(index, value):
    return lambda x: changed(x, lambda y: y.__setitem__(index(x), value(x)))


def adder(index, value):
    def _change(y):
        y[index(y)] += value(y)

    return lambda x: changed(x, _change)


CALLS = {
    "few rows": lambda x: x[ROWS],
    "permutation": lambda x: x[PERMUTATION],
    "sharded numbers": lambda x: x[ids(x)],
    "neighbors": lambda x: x[GRID],
    "pairs": lambda x: x[ROWS, torch.tensor([0, 1, 2, 1, 0])],
    "mask and column": lambda x: x[x[:, 0] > 0, 1],
    "index_select": lambda x: x.index_select(0, ids(x)),
    "gather": lambda x: torch.gather(x, 0, GRID),
    "gather few": lambda x: torch.gather(x, 0, GRID[:2, :2]),
    "gather sharded": lambda x: torch.gather(x, 0, ids(x)[:, None].expand(-1, 3)),
    "take": lambda x: x.take(torch.tensor([[0, 38], [-1, 7]])),
    "table": lambda x: torch.nn.functional.embedding(ids(x), x, padding_idx=4),
    "plain table": lambda x: torch.arange(26.0).reshape(13, 2)[ids(x)],
    "index_add": lambda x: x.index_add(0, ids(x), x * 2, alpha=3),
    "index_add few": lambda x: x.index_add(0, ROWS[:4], torch.ones(4, 3).double()),
    "index_copy": lambda x: x.index_copy(0, PERMUTATION, x * 2),
    "index_fill": lambda x: x.index_fill(0, ROWS, 2.0),
    "index_put": lambda x: x.index_put((ids(x),), x[0] * 2, accumulate=True),
    "put": lambda x: x.put(torch.tensor([0, 38]), torch.tensor([1.0, 2.0]).double()),
    "scatter": lambda x: x.scatter(0, GRID[:, :2], (x * 2)[:, :2]),
    "scatter_add": lambda x: x.scatter_add(0, ids(x)[:, None].expand(-1, 3), x),
    "scatter_reduce": lambda x: x.scatter_reduce(0, GRID, x * 2, "mean", include_self=False),
    "to a plain tensor": lambda x: torch.ones(13, 3).double().scatter(0, GRID, x),
    "add to a plain tensor": lambda x: torch.ones(13, 3).double().index_add(0, ids(x), x),
    "set few rows": setter(lambda x: ROWS, lambda x: 3.0),
    "set all rows": setter(lambda x: PERMUTATION, lambda x: x * 2),
    "set by sharded numbers": setter(lambda x: PERMUTATION.to(x.device), lambda x: x[ids(x)]),
    "set pairs": setter(lambda x: (ROWS[:3], ROWS[:3] % 3), lambda x: 5.0),
    "set a mask of rows": setter(lambda x: x[:, 0] > 0, lambda x: x[x[:, 0] > 0] * 3),
    "add to few rows": adder(lambda x: ROWS[:3], lambda x: 2.0),
    "add to all rows": adder(lambda x: PERMUTATION, lambda x: x * 2),
}


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients(name, sizes):
    compare(CALLS[name], values(nan=False), sizes)


@pytest.mark.parametrize(
    "name", ["permutation", "gather", "index_add few", "set few rows", "pairs"]
)
def test_another_dim_is_sharded(name):
    compare(CALLS[name], values(nan=False), (1, 0, 2), dim=1)


@given(st.lists(st.integers(0, 6), min_size=3, max_size=3), st.integers(1, 30))
@settings(max_examples=15, deadline=None)
def test_added_rows_of_any_sizes(sizes, step):
    n = sum(sizes)
    x = torch.arange(2.0 * n, dtype=torch.float64).reshape(n, 2)
    index = torch.arange(n) * step % max(n, 1)
    compare(lambda y: y.index_add(0, index, y)[index], x, sizes)


def test_a_permutation_stays_sharded_and_a_few_rows_are_replicated():
    def job(domain):
        x = shard(values(), domain, [5, 0, 8])
        many, few = x[PERMUTATION], x[ROWS]
        return many.sharding.sizes, type(few) is ShardTensor

    assert simulate(3, job) == [((5, 0, 8), False)] * 3


@pytest.mark.parametrize("call", [
    lambda x, i: x[i],
    lambda x, i: torch.gather(x, 0, i),
    lambda x, i: x.index_add(0, i, x),
    lambda x, i: torch.nn.functional.one_hot(i, 13),
])  # fmt: skip
def test_a_number_out_of_range_on_one_rank_raises_on_all(call):
    def job(domain):
        x = shard(torch.arange(13.0), domain, [5, 0, 8])
        numbers = torch.arange(13)
        numbers[-1] = 13
        with pytest.raises(IndexError, match="out of range"):
            call(x, shard(numbers, domain, [5, 0, 8]))
        return True

    assert all(simulate(3, job))
