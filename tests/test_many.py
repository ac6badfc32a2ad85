"""8 to 64 simulated ranks: a model, and the exchange of a random graph."""

import copy
import random

import pytest
import torch
from test_models import far, loss_of, net, sample, whole

from meshshard.comm import Exchange, simulate
from meshshard.tensor import shard

TOLERANCE = 1e-12


def sizes_of(n_ranks, seed):
    """Uneven sizes, some of them zero."""
    chosen = random.Random(seed)
    return [0, 40, *(chosen.choice([0, 1, 3, 11, 17]) for _ in range(n_ranks - 2))]


def model_job(domain, model, sizes, serial):
    model = copy.deepcopy(model)
    x = shard(sample(0, 0, sum(sizes)), domain, sizes).requires_grad_()
    out = model(x)
    loss_of(out, 0).backward()
    domain.average_gradients(model)
    want_out, want_grad, twin = serial
    errors = [far(out.detach().gather(), want_out), far(x.grad.gather(), want_grad)]
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    return errors + [far(whole(p.grad), q.grad) for p, q in pairs]


@pytest.mark.parametrize("n_ranks", [8, 16, 64])
def test_a_model_on_many_ranks(n_ranks):
    sizes, model = sizes_of(n_ranks, n_ranks), net()
    x, twin = sample(0, 0, sum(sizes)).requires_grad_(), copy.deepcopy(model)
    out = twin(x)
    loss_of(out, 0).backward()
    serial = (out.detach(), x.grad, twin)
    for errors in simulate(n_ranks, lambda domain: model_job(domain, model, sizes, serial)):
        assert max(errors) <= TOLERANCE, errors


def graph_job(domain, sizes, wanted, adjoint):
    """Every rank needs random rows of others: halo rows, and gradients of owned rows."""
    needs = [needed(sizes, rank) for rank in range(domain.size)]
    me, first = domain.rank, domain.offset(sizes)
    last = first + sizes[me]
    theirs = [[i for i in ids if first <= i < last] for ids in needs]
    starts = [sum(sizes[:r]) for r in range(domain.size)]
    receive = [
        sum(starts[r] <= i < starts[r] + sizes[r] for i in needs[me]) for r in range(domain.size)
    ]
    rows = torch.tensor([i - first for ids in theirs for i in ids], dtype=torch.int64)
    plan = Exchange(domain, sizes[me], rows, [len(ids) for ids in theirs], receive)
    x = wanted[first:last].clone().requires_grad_()
    local = domain.exchange(x, plan)
    local[sizes[me] :].sum().backward()
    same = torch.equal(local[sizes[me] :].detach(), wanted[needs[me]])
    return same and torch.equal(x.grad, adjoint[first:last])


def needed(sizes, rank):
    """Random ids of rows of other ranks, ascending."""
    first = sum(sizes[:rank])
    others = [i for i in range(sum(sizes)) if not first <= i < first + sizes[rank]]
    return sorted(random.Random(rank).sample(others, min(7, len(others))))


@pytest.mark.parametrize("n_ranks", [8, 32])
def test_an_exchange_between_many_ranks(n_ranks):
    sizes = sizes_of(n_ranks, 2)
    wanted, adjoint = sample(0, 0, sum(sizes)), torch.zeros(sum(sizes), 5, dtype=torch.float64)
    for rank in range(n_ranks):
        adjoint[needed(sizes, rank)] += 1
    assert all(simulate(n_ranks, lambda domain: graph_job(domain, sizes, wanted, adjoint)))
