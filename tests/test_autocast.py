"""Autocast: the dtypes of torch, also of functions that are made of others."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from meshshard.comm import simulate
from meshshard.tensor import ShardTensor, shard


def gathered(x):
    return x.gather() if isinstance(x, ShardTensor) else x


BIASES = {
    "linear": (torch.nn.functional.linear, (6, 4), (5, 4), (5,)),
    "addmm": (torch.addmm, (6, 5), (6, 4), (4, 5)),
    "conv1d": (lambda x, w, b: torch.conv1d(x, w, b), (2, 6, 4), (5, 6, 3), (5,)),
    "inner": (lambda x, y, _: torch.inner(x, y), (6,), (6,), (1,)),
}


@pytest.mark.parametrize("name", BIASES)
def test_products_and_biases_the_same_dtype(name):
    call, *shapes = BIASES[name]
    given = [torch.ones(shape).cumsum(0) / 10 for shape in shapes]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = call(*given)

    def _job(domain, dim):
        first = shard(given[0], domain, [0, given[0].shape[dim], 0], dim=dim)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return gathered(call(first, *given[1:]))

    for dim in range(min(given[0].ndim, 2)):
        for found in simulate(3, lambda domain, dim=dim: _job(domain, dim)):
            torch.testing.assert_close(found, want, rtol=2e-2, atol=2e-2)


HALF = {
    "trace": (torch.trace, 0),
    "reflect": (lambda x: F.pad(x, (1, 2), "reflect"), 1),
    "replicate": (lambda x: F.pad(x, (1, -2), "replicate"), 0),
    "circular": (lambda x: F.pad(x, (1, 2), "circular"), 1),
    "triplet": (lambda x: F.triplet_margin_loss(x, x.flip(0), x.roll(1, 0)), 0),
    "cosine": (lambda x: F.cosine_embedding_loss(x, x.flip(0), torch.ones(4)), 0),
    "cross entropy of sharded classes": (lambda x: F.cross_entropy(x, torch.arange(4)), 1),
    "nll_loss of sharded classes": (lambda x: F.nll_loss(x, torch.arange(4)), 1),
}


@pytest.mark.parametrize("name", HALF)
def test_half_precision_that_autocast_computes_in_float32(name):
    call, dim = HALF[name]
    given = torch.linspace(-1, 1, 16).reshape(4, 4).cos().bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = call(given)

    def _job(domain):
        x = shard(given, domain, (1, 0, 3), dim=dim)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return gathered(call(x))

    for found in simulate(3, _job):
        torch.testing.assert_close(found, want)
