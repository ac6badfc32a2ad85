"""Sorts, order statistics, unique values, counts and distances along the sharded dim."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st

from meshshard.comm import simulate
from meshshard.tensor import ShardTensor, shard

SIZES = [(9,), (4, 0, 5), (0, 7, 2), (1, 1, 1, 6)]
COLUMNS = {1: (3,), 3: (2, 0, 1), 4: (0, 1, 1, 1)}


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def row(numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def ties(*shape):
    """Few different numbers, one of them NaN."""
    x = (draw(*shape) * 1.5).round()
    return torch.where(x == 2, torch.nan, x)


def whole(x):
    return x.detach().gather() if isinstance(x, ShardTensor) else x.detach()


def run(function, x):
    """Values, and the gradient of a leaf for weights that tell all elements apart."""
    found = function(x)
    found = list(found) if isinstance(found, (tuple, list)) else [found]
    loss = 0
    for out in found:
        if out.requires_grad:
            weights = torch.cos(torch.arange(out.numel(), dtype=torch.float64)).view(out.shape)
            loss = loss + (out * weights).nansum()
    if isinstance(loss, torch.Tensor):
        loss.backward()
    grad = torch.zeros_like(whole(x)) if x.grad is None else whole(x.grad)
    return [whole(out) for out in found], grad


def assert_as_serial(function, x, sizes, dim=0):
    differentiable = x.is_floating_point()
    wanted = run(function, x.clone().requires_grad_(differentiable))

    def job(domain):
        leaf = shard(x.clone(), domain, sizes, dim=dim).requires_grad_(differentiable)
        return run(function, leaf)

    for got in simulate(len(sizes), job):
        torch.testing.assert_close(got, wanted, equal_nan=True, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------------------------------- sorts
numbers = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, torch.inf, -torch.inf, torch.nan])


@settings(max_examples=60)
@given(st.data())
def test_sort_is_stable_on_any_sizes(data):
    sizes = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=4))
    width, descending = data.draw(st.integers(0, 3)), data.draw(st.booleans())
    count = sum(sizes) * width
    flat = data.draw(st.lists(numbers, min_size=count, max_size=count))
    x = torch.tensor(flat, dtype=torch.float64).reshape(sum(sizes), width)
    assert_as_serial(
        lambda x: torch.sort(x, dim=0, descending=descending, stable=True), x, tuple(sizes)
    )


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.uint8, torch.bool]
)
@pytest.mark.parametrize("descending", [False, True])
def test_sort_of_dtypes(dtype, descending):
    def sort(x):
        return torch.sort(x.detach(), dim=0, descending=descending, stable=True)

    assert_as_serial(sort, (draw(9, 2) * 3).to(dtype), (4, 0, 5))
    assert_as_serial(lambda x: x.detach().unique(), (draw(9, 2) * 3).to(dtype), (4, 0, 5))


def test_sort_of_numbers_that_float64_cannot_tell_apart():
    x = torch.tensor([2**62 + 1, 2**62, -(2**63), 2**63 - 1, 2**62 + 1, -(2**63)])
    for descending in (False, True):
        assert_as_serial(
            lambda x, d=descending: torch.sort(x, dim=0, descending=d, stable=True), x, (2, 0, 4)
        )


def test_a_rank_with_few_rows_does_not_skew_the_splitters():
    x = torch.cat([torch.full((40,), -5.0, dtype=torch.float64), draw(3960)])
    found = simulate(3, lambda domain: sorted_elements(x, domain, (40, 3960, 0)))
    assert max(found) <= 4000 / 3 * (1 + 1 / 4)


def sorted_elements(x, domain, sizes):
    """Number of elements that this rank sorts of those that the ranks send each other."""
    received = []
    route = domain.route
    domain.route = lambda *given: received.append(route(*given)) or received[-1]
    torch.sort(shard(x, domain, sizes))
    return len(received[0][0])


@pytest.mark.parametrize("x", [draw(4000), ties(4000), torch.ones(4000), torch.arange(4000.0)])
def test_no_rank_sorts_much_more_than_its_part(x):
    sizes = (1500, 0, 2400, 100)
    found = simulate(4, lambda domain: sorted_elements(x, domain, sizes))
    assert max(found) <= 4000 / 4 * (1 + 1 / 4)


# ------------------------------------------------------------------- functions of distinct numbers
STATISTICS = {
    "msort": torch.msort,
    "topk": lambda x: x.topk(3, 0),
    "smallest": lambda x: x.topk(9, 0, largest=False),
    "topk of none": lambda x: x.topk(0, 0),
    "kthvalue": lambda x: x.kthvalue(4, 0),
    "kthvalue keepdim": lambda x: torch.kthvalue(x, 9, dim=0, keepdim=True),
    "median": lambda x: x.median(0),
    "median keepdim": lambda x: torch.median(x, dim=0, keepdim=True),
    "nanmedian": lambda x: x.nanmedian(0),
    "median of all": torch.median,
    "median of nothing": lambda x: x[:0].median(),
    "median of no integers": lambda x: x[:0].detach().int().median(),
    "nanmedian of all": torch.nanmedian,
    "quantile": lambda x: x.quantile(0.3, 0),
    "quantiles of all": lambda x: x.quantile(row([0.0, 0.21, 0.5, 1.0])),
    "quantiles keepdim": lambda x: x.nanquantile(row([0.2, 0.9]), 0, keepdim=True),
    "quantile of all keepdim": lambda x: torch.quantile(x, 0.7, keepdim=True),
    "quantile along other dim": lambda x: torch.quantile(x, row([0.2, 0.7]), -1),
    "mode": lambda x: torch.mode(x.detach().round(), 0).values,
    "glu": lambda x: F.glu(x[:8], 0),
    "norm 0": lambda x: torch.linalg.vector_norm(x, 0),
    "aminmax": lambda x: torch.aminmax(x, dim=0),
}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", STATISTICS)
def test_statistics(name, sizes):
    assert_as_serial(STATISTICS[name], draw(9, 3), sizes)


@pytest.mark.parametrize("how", ["linear", "lower", "higher", "midpoint", "nearest"])
@pytest.mark.parametrize("function", [torch.quantile, torch.nanquantile])
def test_quantiles_with_nan(function, how):
    q = torch.tensor([0.0, 0.37, 0.5, 1.0], dtype=torch.float64)
    x = ties(3, 9)
    x[0] = draw(9)
    assert_as_serial(lambda x: function(x, q, 1, interpolation=how).detach(), x, (4, 0, 5), 1)


PICKED = {
    "topk": lambda x: x.topk(4, 0),
    "kthvalue": lambda x: x.kthvalue(3, 0, keepdim=True),
    "median": lambda x: x.median(0, keepdim=True),
    "nanmedian": lambda x: x.nanmedian(0, keepdim=True),
    "mode": lambda x: x.nan_to_num().mode(0, keepdim=True),
}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", PICKED)
def test_indices_of_ties_point_to_equal_values(name, sizes):
    x = ties(9, 4)
    wanted = PICKED[name](x).values

    def job(domain):
        values, indices = PICKED[name](shard(x, domain, sizes))
        return values, x.gather(0, indices)

    for values, found in simulate(len(sizes), job):
        torch.testing.assert_close(values, wanted, equal_nan=True)
        torch.testing.assert_close(found, wanted, equal_nan=True)


# ------------------------------------------------------------------------------- unique and counts
def column(x):
    return x[:, 0].nan_to_num().detach().contiguous()


def in_order(x):
    return column(x).sort().values


UNIQUE = {
    "unique": lambda x: torch.unique(x.nan_to_num().detach(), True, True, True),
    "unique NaN": lambda x: torch.unique(x.detach(), return_counts=True),
    "rows": lambda x: torch.unique(
        x.nan_to_num().detach(), dim=0, return_inverse=True, return_counts=True
    ),
    "columns": lambda x: torch.unique(
        x.nan_to_num().detach(), dim=1, return_inverse=True, return_counts=True
    ),
    "consecutive": lambda x: x.detach().unique_consecutive(return_inverse=True, return_counts=True),
    "consecutive rows": lambda x: x.detach().unique_consecutive(True, True, dim=0),
    "values alone": lambda x: x.detach().unique(),
}
COUNTS = {
    "nonzero": torch.nonzero,
    "nonzero as tuple": lambda x: x.nonzero(as_tuple=True),
    "where": lambda x: torch.where(x > 0),
    "argwhere": torch.argwhere,
    "bincount": lambda x: torch.bincount(x[:, 0].nan_to_num().abs().long(), minlength=3),
    "bincount with weights": lambda x: torch.bincount(
        x[:, 0].nan_to_num().abs().long(), weights=x[:, 1].detach()
    ),
    "bincount of one row": lambda x: x[:1, 0].nan_to_num().abs().long().bincount(),
    "histc": lambda x: torch.histc(x.nan_to_num(), 5),
    "histc of equal numbers": lambda x: torch.histc(
        x * 0 + 3 if x.isfinite().all() else x, 4, 0, 2
    ),
    "histogram": lambda x: torch.histogram(x.nan_to_num().detach(), 4, density=True),
    "histogram of edges": lambda x: torch.histogram(
        x.nan_to_num().detach(), torch.tensor([-1.0, 0, 0.5], dtype=x.dtype)
    ),
    "searchsorted": lambda x: torch.searchsorted(torch.arange(-2.0, 2).double(), x.detach()),
    "bucketize right": lambda x: torch.bucketize(
        x.detach(), torch.arange(-2.0, 2).double(), right=True, out_int32=True
    ),
    "sharded sequence": lambda x: torch.searchsorted(in_order(x), draw(5)),
    "both sharded": lambda x: torch.searchsorted(in_order(x), x.detach(), side="right"),
    "sequences": lambda x: torch.searchsorted(x.nan_to_num().sort(1).values.detach(), draw(9, 2)),
    "plain sorter": lambda x: torch.searchsorted(
        draw(9, 4), x.detach(), sorter=draw(9, 4).argsort(1)
    ),
    "sorter": lambda x: torch.searchsorted(column(x), draw(3), sorter=column(x).argsort()),
}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", [*UNIQUE, *COUNTS])
def test_unique_and_counts(name, sizes, dim):
    function = (UNIQUE | COUNTS)[name]
    assert_as_serial(function, ties(9, 3), sizes if dim == 0 else COLUMNS[len(sizes)], dim)


# --------------------------------------------------------------------------------------- distances
PAIRS = {
    "own rows": lambda x: torch.cdist(x, draw(4, 3)),
    "other rows": lambda x: torch.cdist(draw(2, 4, 3), x, p=1.0),
    "all pairs": lambda x: torch.cdist(x, x * 2),
    "batch": lambda x: torch.cdist(x[:, None], draw(9, 4, 3)),
    "pdist": lambda x: F.pdist(x),
    "pdist of p": lambda x: F.pdist(x, 3.0),
    "dist": lambda x: torch.dist(x, x.detach() * x, 1.5),
}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", PAIRS)
def test_distances(name, sizes):
    assert_as_serial(PAIRS[name], draw(9, 3), sizes)


# ------------------------------------------------------------------------------------------- errors
ERRORS = {
    "kthvalue": lambda x: x.kthvalue(10, 0),
    "topk": lambda x: x.topk(10, 0),
    "quantile": lambda x: x.quantile(1.5, 0),
    "median of no rows": lambda x: x[:0].median(0),
    "quantile of no rows": lambda x: x[:0].quantile(0.5),
    "negative bincount": lambda x: torch.bincount(x.nan_to_num().long()),
    "histc": lambda x: torch.histc(x * torch.nan),
    "glu": lambda x: F.glu(x, 0),
    "complex": lambda x: torch.sort(x * 1j),
    "sorter": lambda x: torch.searchsorted(x, x, sorter=torch.arange(9) + 1),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_raised_on_every_rank(name):
    x = draw(9)

    def job(domain):
        with pytest.raises((RuntimeError, IndexError, NotImplementedError)) as caught:
            ERRORS[name](x if domain is None else shard(x, domain, (4, 0, 5)))
        return caught.type

    job(None)
    assert len(set(simulate(3, job))) == 1


def test_median_shares_its_gradient_among_ties():
    x = torch.tensor([1.0, 2, 2, 3, 2], dtype=torch.float64)
    assert_as_serial(lambda x: x.median() * 3, x, (2, 0, 3))
