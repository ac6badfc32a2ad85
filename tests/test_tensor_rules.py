"""Every rule: values and gradients equal those of the operation on the whole tensor."""

from itertools import pairwise

import pytest
import torch
from cases import CASES, REFUSED
from hypothesis import given, settings
from hypothesis import strategies as st

from meshshard.comm import init_domain
from meshshard.tensor import FAMILIES, NoShardRule, ShardTensor, shard
from meshshard.tensor.rules.table import one_table

SIZES = {1: [(14,)], 2: [(3, 11), (14, 0)], 4: [(5, 0, 7, 2), (0, 0, 13, 1)]}
TOLERANCE = 1e-10  # relative to the largest magnitude


def inputs():
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    return draw(14, 6), draw(14, 6), draw(6, 6), draw(6), torch.arange(14) * 5 % 6


def serial(case):
    x, y, w, c, n = inputs()
    leaves = [t.requires_grad_() for t in (x, y, w, c)]
    out = CASES[case](x, y, w, c, n)
    coefficients = torch.cos(torch.arange(out.numel(), dtype=torch.float64)).reshape(out.shape)
    grads = torch.autograd.grad((out * coefficients).sum(), leaves, allow_unused=True)
    return out.detach(), coefficients, grads


def far(got, wanted):
    """Largest difference, relative to the largest magnitude."""
    if wanted is None and got is None:
        return 0.0
    wanted = torch.zeros_like(got) if wanted is None else wanted
    got = torch.zeros_like(wanted) if got is None else got
    if got.numel() == 0 and wanted.numel() == 0:
        return 0.0
    if got.shape != wanted.shape:
        return float("inf")
    return ((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-3)).item()


def rule_job(case, sizes):
    domain = init_domain()
    out, coefficients, grads = serial(case)
    x, y, w, c, n = inputs()
    sx, sy, sn = (shard(t, domain, sizes) for t in (x, y, n))
    sx.requires_grad_(), sy.requires_grad_()
    w.requires_grad_(), c.requires_grad_()
    got = CASES[case](sx, sy, w, c, sn)
    if type(got) is ShardTensor:
        assert got.shape == out.shape
        loss = (got * shard(coefficients, domain, got.sharding, dim=got.sharded_dim)).sum()
        whole = got.detach().gather()
    else:
        loss = (got * coefficients).sum()
        whole = got.detach()
    errors = [far(whole, out)]
    loss.backward()
    for leaf, wanted in zip((sx, sy), grads[:2], strict=True):
        errors.append(far(None if leaf.grad is None else leaf.grad.gather(), wanted))
    for leaf, wanted in zip((w, c), grads[2:], strict=True):
        found = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        errors.append(far(domain.all_reduce(found) / domain.size, wanted))
    return errors


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_rule(ranks, case, size):
    for sizes in SIZES[size]:
        results = [rule_job(case, sizes)] if size == 1 else ranks[size].run(rule_job, case, sizes)
        for errors in results:
            assert max(errors) <= TOLERANCE, (sizes, errors)


def refused_job(case, sizes):
    domain = init_domain()
    x, y, w, c, n = inputs()
    with pytest.raises(NoShardRule):
        REFUSED[case](*(shard(t, domain, sizes) for t in (x, y)), w, c, shard(n, domain, sizes))


@pytest.mark.parametrize("case", REFUSED)
def test_operations_that_couple_all_rows_are_refused_on_every_rank(ranks, case):
    ranks[2].run(refused_job, case, (3, 11))


def test_a_function_has_a_rule_in_one_family():
    assert len(one_table(FAMILIES.values())) == sum(map(len, FAMILIES.values()))
    with pytest.raises(ValueError, match=r"\['torch.sin'\] have a rule in two families"):
        one_table([{torch.sin: len}, {torch.cos: len}, {torch.sin: len}])


SOME = ["mean of both", "var", "softmax rows", "amax", "contracted", "cat rows", "every third row",
        "mask of rows", "batch_norm points", "cross_entropy weights", "cumsum rows"]  # fmt: skip


@settings(max_examples=25)
@given(st.data())
def test_rules_on_any_sizes(ranks, data):
    size = data.draw(st.sampled_from([2, 3, 4]))
    cuts = sorted(data.draw(st.lists(st.integers(0, 14), min_size=size - 1, max_size=size - 1)))
    sizes = tuple(b - a for a, b in pairwise([0, *cuts, 14]))
    case = data.draw(st.sampled_from(SOME))
    for errors in ranks[size].run(rule_job, case, sizes):
        assert max(errors) <= TOLERANCE, (sizes, errors)
