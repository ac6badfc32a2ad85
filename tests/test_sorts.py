"""Sorts, order statistics, unique values and counts along the sharded dim, against one process."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshshard.comm import simulate
from meshshard.tensor import ShardTensor, shard

SIZES = [(5, 0, 8), (0, 13, 0), (0, 1, 12)]
CALLS = {
    "sort": lambda x: x.sort(dim=0, stable=True),
    "descending": lambda x: x.sort(dim=0, descending=True, stable=True),
    "argsort": lambda x: x.argsort(dim=0, stable=True),
    "msort": torch.msort,
    "topk": lambda x: x[:, ::2].topk(4, 0),
    "smallest": lambda x: x[:, ::2].topk(3, 0, largest=False),
    "kthvalue": lambda x: x[:, ::2].kthvalue(3, 0),
    "median of all": torch.median,
    "nanmedian of all": torch.nanmedian,
    "median": lambda x: x[:, ::2].median(0),
    "nanmedian": lambda x: x[:, ::2].nanmedian(0),
    "quantile": lambda x: torch.quantile(x[:, ::2], torch.tensor([0.0, 0.3, 1.0]).double(), 0),
    "nanquantile": lambda x: x[:, ::2].nanquantile(0.4, 0, keepdim=True),
    "quantile of all": lambda x: x[:, 2].nanquantile(0.25, interpolation="nearest"),
    "mode": lambda x: x.nan_to_num().mode(0),
    "unique": lambda x: x.detach().unique(),
    "unique rows": lambda x: torch.unique(
        x.detach().nan_to_num().round(), return_inverse=True, return_counts=True, dim=0
    ),
    "runs": lambda x: torch.unique_consecutive(
        x.detach()[:, 0].round(), return_inverse=True, return_counts=True
    ),
    "nonzero": lambda x: (x > 0).nonzero(),
    "where": lambda x: torch.where(x[:, 0] > 0),
    "bincount": lambda x: x[:, 0].nan_to_num().abs().long().bincount(minlength=3),
    "histc": lambda x: x.nan_to_num().histc(5),
    "histogram": lambda x: x.detach().nan_to_num().histogram(4, density=True),
    "aminmax": lambda x: x.aminmax(dim=0),
    "bucketize": lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0]).double()),
    "searchsorted": lambda x: torch.searchsorted(
        x.nan_to_num()[:, 0].msort(), x[:, 1].nan_to_num()
    ),
    "cdist": lambda x: torch.cdist(x.nan_to_num(), x.nan_to_num()[:4] + 1),
    "pairs": lambda x: torch.cdist(x.nan_to_num(), x.nan_to_num().round() + 5),
    "norm 0": lambda x: torch.linalg.vector_norm(x, 0, 0),
}


def values(rows=13, nan=True):
    """Columns with ties, infinities and NaN."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 3, dtype=torch.float64, generator=generator)
    x[:, 1] = x[:, 1].round() * 0.0 if rows < 3 else x[:, 1].round()
    x[rows // 2, 2] = torch.nan if nan else 1.0
    x[0, 0] = -0.0
    return x


def results(out):
    return list(out) if isinstance(out, (tuple, list)) else [out]


def weighted(outs, seeds):
    """A number of all results that have gradients."""
    terms = []
    for out, seed in zip(outs, seeds, strict=True):
        if out.requires_grad:
            if type(out) is ShardTensor:
                seed = shard(seed, out.sharding.domain, out.sharding, dim=out.sharded_dim)
            terms.append((out.nan_to_num() * seed).sum())
    return sum(terms) if terms else None


def seeds_of(outs):
    return [torch.cos(torch.arange(o.numel()).double()).reshape(o.shape) for o in outs]


def compare(call, whole, sizes, dim=0):
    """Values and gradients of a call on three ranks are those of one process."""
    x = whole.clone().requires_grad_(whole.is_floating_point())
    expected = results(call(x))
    seeds = seeds_of(expected)
    number = weighted(expected, seeds)
    grad = None
    if number is not None:
        (grad,) = torch.autograd.grad(number, x, allow_unused=True)
        grad = torch.zeros_like(x) if grad is None else grad

    def job(domain):
        own = shard(whole, domain, sizes, dim=dim).requires_grad_(whole.is_floating_point())
        found = results(call(own))
        number = weighted(found, seeds)
        if grad is not None:
            (got,) = torch.autograd.grad(number, own)
            found.append(got)
        return [f.detach().gather() if type(f) is ShardTensor else f.detach() for f in found]

    for found in simulate(len(sizes), job):
        wanted = [*expected, grad] if grad is not None else expected
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, want.detach(), equal_nan=True)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients(name, sizes):
    compare(CALLS[name], values(), sizes)


@given(st.lists(st.integers(0, 9), min_size=3, max_size=3), st.booleans(), st.integers(0, 5))
@settings(max_examples=15, deadline=None)
def test_stable_sort_of_any_sizes(sizes, descending, ties):
    x = torch.arange(sum(sizes)) * 7 % (ties + 1)
    compare(lambda y: y.sort(dim=0, descending=descending, stable=True), x, sizes)


def test_sort_keeps_sizes_and_unique_is_sharded():
    def job(domain):
        x = shard(values(), domain, [5, 0, 8])
        rows, unique = x.argsort(0), x.unique()
        return rows.sharding.sizes, rows.dtype, type(unique) is ShardTensor

    assert simulate(3, job) == [((5, 0, 8), torch.int64, True)] * 3


def test_half_and_bool_sort_as_in_torch():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.bool, torch.int8):
        x = (values(nan=False) * 50).to(dtype)[:, 0]
        compare(lambda y: y.argsort(dim=0, stable=True), x.detach(), (5, 0, 8))
