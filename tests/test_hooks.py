"""Hooks on gradients get, and may replace, global values."""

import pytest
import torch
from torch import nn

from meshshard.comm import simulate
from meshshard.tensor import NoShardRule, ShardTensor, shard

X, Y = torch.randn(2, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Pair(nn.Module):
    """Two inputs, two outputs."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(9.0, dtype=torch.float64).view(3, 3))

    def forward(self, x, y):
        return (x @ self.weight) * y, x + y


def whole(x):
    return x.detach().gather() if type(x) is ShardTensor else x


def gradients(x, y, replace):
    """What the hooks of a module have seen, and the gradients of its inputs."""
    model, seen = Pair(), []

    def after(module, of_inputs, of_outputs):
        seen.extend(whole(g).clone() for g in (*of_inputs, *of_outputs))
        return tuple(2 * g for g in of_inputs) if replace else None

    model.register_full_backward_hook(after)
    if replace:
        model.register_full_backward_pre_hook(lambda module, grads: tuple(3 * g for g in grads))
    x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
    p, q = model(x, y)
    (p.square().sum() + q.sum()).backward()
    return [*seen, *(g if g is None else whole(g) for g in (x.grad, y.grad))]


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("sizes", [(4, 0, 2), (0, 6, 0), (2, 2, 2)])
def test_full_backward_hooks_equal_one_process(sizes, replace):
    want = gradients(X, Y, replace)
    assert len(want) == 6

    def _job(domain):
        got = gradients(shard(X, domain, sizes), shard(Y, domain, sizes), replace)
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w)
        return True

    assert all(simulate(3, _job))


def test_a_hook_on_plain_and_sharded_inputs():
    """Gradients of the plain input are those of the rows of each rank, as everywhere."""
    plain = X[:1].clone().requires_grad_()

    def _job(domain):
        model, seen = Pair(), []
        model.register_full_backward_hook(lambda module, i, o: seen.append(whole(i[0])))
        x = shard(X, domain, (4, 0, 2)).requires_grad_()
        model(x, plain)[0].sum().backward()
        with pytest.raises(NoShardRule, match="the first tensor that requires a gradient is plain"):
            model(plain, x)
        return seen[0]

    serial = X.clone().requires_grad_()
    Pair()(serial, plain)[0].sum().backward()
    for found in simulate(3, _job):
        torch.testing.assert_close(found, serial.grad)
