"""Index tuples of every kind, read and written: as serial, in all shardings; errors alike."""

import pytest
import torch

from meshshard.comm import simulate
from meshshard.tensor import ShardTensor, shard

ALL = slice(None)
WIDE = torch.tensor([[True, False, True]] * 2 + [[False, True, True]] * 3)
ONE = {
    "mask of all": WIDE,
    "mask of one dim": (ALL, WIDE[0]),
    "mask of rows and numbers": (torch.tensor([True, False, True, False, False]), [2, 0]),
    "number and numbers": (4, [2, -1]),
    "number, new dim, numbers": (4, None, torch.tensor([[0], [2]])),
    "new dim, numbers": (None, ALL, torch.tensor([2, 0])),
    "column": (ALL, 1),
    "slices": (slice(1, None, 2), slice(None, 2)),
    "no numbers": torch.zeros(0, dtype=torch.int64),
}
SIZES = {0: (2, 0, 3), 1: (0, 3, 0)}


def numbers(*shape):
    return torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


def whole(x):
    return x.gather() if isinstance(x, ShardTensor) else x


def on_ranks(call, dim, sizes, *tensors):
    """What a call returns on three ranks, and the gradient of its sum, of a sharded tensor."""
    x, *others = tensors

    def _job(domain):
        rows = shard(x, domain, sizes, dim=dim).requires_grad_()
        out = call(rows, *others)
        (grad,) = torch.autograd.grad((out * out).sum(), rows)
        return whole(out).detach(), whole(grad)

    return simulate(3, _job)


def serial(call, *tensors):
    x, *others = tensors
    leaf = x.clone().requires_grad_()
    out = call(leaf, *others)
    (grad,) = torch.autograd.grad((out * out).sum(), leaf)
    return out.detach(), grad


def read(index):
    return lambda x: x[index]


def changed(index):
    """What `x[index] = x[index] * 2` makes of an intermediate tensor."""

    def _call(x):
        y = x * 1
        y[index] = y[index] * 2
        return y

    return _call


def assigned(index):
    def _call(x, value):
        y = x * 1
        y[index] = value
        return y

    return _call


@pytest.mark.parametrize("dim", SIZES)
@pytest.mark.parametrize("index", ONE)
@pytest.mark.parametrize("call", [read, changed])
def test_reads_and_changes(call, index, dim):
    want = serial(call(ONE[index]), numbers(5, 3))
    for found in on_ranks(call(ONE[index]), dim, SIZES[dim], numbers(5, 3)):
        torch.testing.assert_close(found, want, rtol=0, atol=0)


@pytest.mark.parametrize("dim", SIZES)
@pytest.mark.parametrize("index", ONE)
@pytest.mark.parametrize("one", [True, False])
def test_assignments(index, dim, one):
    value = numbers(5, 3)[ONE[index]] * 10
    value = numbers() if one else value
    want = serial(assigned(ONE[index]), numbers(5, 3), value)
    for found in on_ranks(assigned(ONE[index]), dim, SIZES[dim], numbers(5, 3), value):
        torch.testing.assert_close(found, want, rtol=0, atol=0)


@pytest.mark.parametrize("sizes", [(0, 1, 0), (1, 0, 0)])
@pytest.mark.parametrize("call", [read, changed])
def test_masks_of_one_row(call, sizes):
    want = serial(call(WIDE[:1]), numbers(1, 3))
    for found in on_ranks(call(WIDE[:1]), 0, sizes, numbers(1, 3)):
        torch.testing.assert_close(found, want, rtol=0, atol=0)


def test_bools_of_a_square_are_set_along_the_last_dim():
    value = torch.tensor([True, False, True, True])

    def _job(domain):
        x = shard(torch.zeros(4, 4, dtype=torch.bool), domain, [1, 0, 3])
        x[:] = value
        return x.gather()

    for found in simulate(3, _job):
        assert torch.equal(found, value.expand(4, 4))


@pytest.mark.parametrize("place", [1, 0])
def test_sharded_values_along_other_dims(place):
    """Rows of the value that are another dim of what is set move between ranks."""
    value = numbers(4, 4) * 10

    def _job(domain):
        x = shard(numbers(4, 4), domain, [1, 2, 1])
        x[:] = shard(value, domain, [1, 2, 1], dim=place)
        return x.gather()

    for found in simulate(3, _job):
        assert torch.equal(found, value)


BAD = {
    "mask too short": (ALL, torch.tensor([True, False])),
    "mask of rows too short": torch.tensor([True] * 4),
    "mask too narrow": WIDE[:, :2],
    "number out of range": (ALL, torch.tensor([5])),
}


@pytest.mark.parametrize("index", BAD)
@pytest.mark.parametrize("sizes", [(0, 0, 5), (2, 0, 3)])
def test_all_ranks_raise_for_an_index_that_does_not_fit(index, sizes):
    def _job(domain):
        x = shard(numbers(5, 3), domain, sizes)
        with pytest.raises(IndexError):
            x[BAD[index]]
        with pytest.raises(IndexError):
            x[BAD[index]] = 1.0
        return x.gather()

    for found in simulate(3, _job):
        assert torch.equal(found, numbers(5, 3))
