"""Corners of dtypes, values and empty tensors, alike on all ranks; rows as leaves."""

import pytest
import torch
from torch import nn

from meshshard.comm import simulate
from meshshard.tensor import ShardTensor, shard

INF, NAN = float("inf"), float("nan")
SIZES = [(0, 0, 4), (1, 0, 3)]
ROWS = torch.tensor(
    [[1.0, NAN, 2.0], [INF, 1.0, -INF], [0.5, 3.0, 1.0], [2.0, -INF, -INF]], dtype=torch.float64
)
TABLES = torch.arange(24).int().view(4, 3, 2)
CALLS = {
    "softmax": (lambda x: x.softmax(0), ROWS),
    "log_softmax": (lambda x: x.log_softmax(0), ROWS),
    "logsumexp": (lambda x: x.logsumexp(0), ROWS),
    "any of uint8": (lambda x: x.any(0), (ROWS > 1).to(torch.uint8)),
    "addbmm of int32": (
        lambda x: torch.addbmm(torch.ones(2, 2).int(), x.view(4, 1, 1).expand(4, 2, 3), TABLES),
        torch.arange(4).int(),
    ),
    "all of uint8": (lambda x: x.all(), (ROWS > 1).to(torch.uint8)),
}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", CALLS)
def test_values_and_dtypes(name, sizes):
    call, given = CALLS[name]
    want = call(given)

    def _job(domain):
        out = call(shard(given, domain, sizes))
        return out.gather() if isinstance(out, ShardTensor) else out

    for found in simulate(3, _job):
        torch.testing.assert_close(found, want, equal_nan=True)


def test_logsumexp_of_no_rows():
    out = simulate(3, lambda d: shard(torch.zeros(0, 3), d, (0, 0, 0)).logsumexp(0))
    assert all(found.tolist() == [-INF] * 3 for found in out)


BAD = {
    "quantile": (lambda x: x.quantile(0.5, 0), torch.zeros(0, 4), RuntimeError),
    "matmul": (lambda x: x @ x.mT, torch.ones(3, 4, dtype=torch.bool), NotImplementedError),
}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", BAD)
def test_all_ranks_raise_what_torch_raises(name, sizes):
    call, given, kind = BAD[name]
    with pytest.raises(kind):
        call(given)

    def _job(domain):
        with pytest.raises(kind):
            call(shard(given, domain, sizes, dim=1))

    simulate(3, _job)


class Inverse(torch.autograd.Function):
    """An inverse with its own backward."""

    @staticmethod
    def forward(ctx, x):
        out = torch.linalg.inv(x)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        (out,) = ctx.saved_tensors
        return -out.mT @ grad @ out.mT


def test_a_users_function_may_call_one_that_can_fail():
    given = torch.eye(2, dtype=torch.float64) * torch.arange(1.0, 5)[:, None, None]
    want = given.clone().requires_grad_()
    torch.linalg.inv(want).sum().backward()

    def _job(domain):
        x = shard(given.clone(), domain, (1, 0, 3)).requires_grad_()
        Inverse.apply(x).sum().backward()
        return x.grad.gather()

    for found in simulate(3, _job):
        torch.testing.assert_close(found, want.grad)


LEAVES = {
    "parameter": nn.Parameter,
    "requires_grad_": lambda row: row.requires_grad_(),
    "detached": lambda row: row.detach().requires_grad_(),
}


@pytest.mark.parametrize("name", LEAVES)
def test_a_row_as_a_leaf_has_a_gradient(name):
    def _job(domain):
        leaf = LEAVES[name](shard(ROWS[:, 2:], domain, (1, 0, 3))[2])
        seen = []
        leaf.register_hook(seen.append)
        (leaf * 3).sum().backward()
        return leaf.is_leaf, leaf.grad.tolist(), len(seen)

    assert simulate(3, _job) == [(True, [3.0], 1)] * 3
