"""Attention on sharded rows: values and gradients equal those of torch on whole tensors."""

import contextlib
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from meshshard.comm import init_domain, ring
from meshshard.comm.domain import count_traffic
from meshshard.tensor import NoShardRule, Sharding, ShardTensor, shard
from meshshard.tensor.attention import tiles

TOLERANCE = 1e-10
B, H, N, M, D, V = 2, 4, 14, 9, 6, 5
SIZES = {  # of queries and of keys
    1: [((14,), (9,))],
    2: [((3, 11), (5, 4)), ((14, 0), (0, 9))],
    3: [((0, 6, 8), (9, 0, 0))],
    4: [((5, 0, 7, 2), (0, 3, 1, 5))],
}


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def without_keys(mask):
    """The mask, in which one query attends to no key."""
    mask[..., 2, :] = False
    return mask


PLACES = {  # which of queries, keys, values are sharded
    "all sharded": (True, True, True),
    "keys replicated": (True, False, False),
    "queries replicated": (False, True, True),
    "values plain": (True, True, False),
    "queries and keys plain": (False, False, True),
}
CASES = {  # options of one call, and how many heads keys have
    "plain": {},
    "scale": {"scale": 0.3},
    "causal": {"is_causal": True},
    "bool mask": {"attn_mask": without_keys(draw(N, M) > 0.3)},
    "added mask": {"attn_mask": draw(N, M)},
    "mask of heads": {"attn_mask": draw(H, N, M) > 0},
    "mask of all": {"attn_mask": draw(B, H, N, M)},
    "padding of keys": {"attn_mask": draw(B, 1, 1, M) > 0},
    "mask of queries": {"attn_mask": without_keys(draw(N, 1) > -9)},
    "gqa": {"enable_gqa": True},
}


@contextlib.contextmanager
def small_blocks(rows=3, queries=4, pairs=40):
    """Context manager: few rows have many blocks and tiles."""
    before = ring.ROWS, tiles.COLUMNS, tiles.FLASH_ROWS, tiles.PAIRS
    ring.ROWS, tiles.COLUMNS, tiles.FLASH_ROWS, tiles.PAIRS = rows, rows, queries, pairs
    try:
        yield
    finally:
        ring.ROWS, tiles.COLUMNS, tiles.FLASH_ROWS, tiles.PAIRS = before


def far(got, wanted):
    if got is None or wanted is None:
        return 0.0 if got is wanted else float("inf")
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    return ((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-3)).item()


def leaf(domain, x, sizes, is_sharded, dim=2):
    x = x.detach()
    return (shard(x, domain, sizes, dim=dim) if is_sharded else x.clone()).requires_grad_()


def global_grad(domain, x):
    if x.grad is None:
        return None
    return x.grad.gather() if type(x) is ShardTensor else domain.all_reduce(x.grad) / domain.size


def whole(x):
    return x.detach().gather() if type(x) is ShardTensor else x.detach()


def weighted(x, coefficients, domain):
    """The weighted sum of all elements."""
    if type(x) is ShardTensor:
        coefficients = shard(coefficients, domain, x.sharding, dim=x.sharded_dim)
    return (x * coefficients).sum()


def operands(gqa=False, width=D):
    heads = H // 2 if gqa else H
    return draw(B, H, N, D), draw(B, heads, M, D, seed=1), draw(B, heads, M, width, seed=2)


def call_job(case, place, sizes, width):
    domain, options = init_domain(), CASES[case]
    every = [x.requires_grad_() for x in operands(case == "gqa", width)]
    out = F.scaled_dot_product_attention(*every, **options)
    coefficients = draw(*out.shape, seed=7)
    wanted = torch.autograd.grad((out * coefficients).sum(), every)
    divided = (sizes[0], sizes[1], sizes[1])
    mine = [leaf(domain, *given) for given in zip(every, divided, PLACES[place], strict=True)]
    with small_blocks():
        got = F.scaled_dot_product_attention(*mine, **options)
        weighted(got, coefficients, domain).backward()
    assert got.shape == out.shape
    assert (type(got) is ShardTensor) == PLACES[place][0]
    errors = [far(whole(got), out.detach())]
    return errors + [far(global_grad(domain, a), b) for a, b in zip(mine, wanted, strict=True)]


def run(ranks, size, job, *args):
    return [job(*args)] if size == 1 else ranks[size].run(job, *args)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", CASES)
def test_attention(ranks, case, place, size):
    for sizes in SIZES[size]:
        for width in (D, V):  # with and without torch's flash kernel
            for errors in run(ranks, size, call_job, case, place, sizes, width):
                assert max(errors) <= TOLERANCE, (sizes, errors)


@pytest.mark.slow
@settings(max_examples=25)
@given(st.data())
def test_on_any_sizes(ranks, data):
    size = data.draw(st.sampled_from([2, 3, 4]))

    def cut(n):
        cuts = st.lists(st.integers(0, n), min_size=size - 1, max_size=size - 1)
        return tuple(b - a for a, b in pairwise([0, *sorted(data.draw(cuts)), n]))

    case, place = data.draw(st.sampled_from(list(CASES))), data.draw(st.sampled_from(list(PLACES)))
    sizes = cut(N), cut(M)
    for errors in ranks[size].run(call_job, case, place, sizes, D):
        assert max(errors) <= TOLERANCE, (case, place, sizes, errors)


def twice_job(case, place, sizes):
    """A loss that depends on gradients, and its gradients."""
    domain, options = init_domain(), CASES[case]
    every = [x.requires_grad_() for x in operands(case == "gqa")]
    coefficients = draw(B, H, N, D, seed=7)

    def penalty(q, k, v, reduced):
        out = F.scaled_dot_product_attention(q, k, v, **options).square()
        sharded = [x for x, is_sharded in zip((q, k, v), PLACES[place], strict=True) if is_sharded]
        first = torch.autograd.grad(reduced(out), sharded, create_graph=True)
        return sum(x.square().sum() for x in first)

    with sdpa_kernel(SDPBackend.MATH):
        loss = penalty(*every, lambda out: (out * coefficients).sum())
        wanted = torch.autograd.grad(loss, every)
    divided = (sizes[0], sizes[1], sizes[1])
    mine = [leaf(domain, *given) for given in zip(every, divided, PLACES[place], strict=True)]
    with small_blocks():
        got = penalty(*mine, lambda out: weighted(out, coefficients, domain))
        got.backward()
    errors = [far(got.detach(), loss.detach())]
    return errors + [far(global_grad(domain, a), b) for a, b in zip(mine, wanted, strict=True)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("place", ["all sharded", "keys replicated", "queries replicated"])
@pytest.mark.parametrize("case", ["plain", "causal", "bool mask", "gqa"])
def test_second_derivatives(ranks, case, place, size):
    for sizes in SIZES[size]:
        for errors in run(ranks, size, twice_job, case, place, sizes):
            assert max(errors) <= TOLERANCE, (sizes, errors)


# ----------------------------------------------------------------------------------------- dropout
def made(make):
    torch.manual_seed(5)
    return make().double()


def permuted(domain, x, order, sizes):
    """Rows of x in another order, with their rows in the source."""
    first = sum(sizes[: domain.rank])
    own = order[first : first + sizes[domain.rank]]
    local = x.detach()[own].clone().requires_grad_()
    return ShardTensor.from_local(local, Sharding(domain, sizes, own)), local


def restored(x, order):
    rows = x.detach().gather()
    out = torch.empty_like(rows)
    out[order] = rows
    return out


def dropped_job(sizes, need_weights, seed):
    """Output and gradient in the order of the source, for rows in any order on any ranks."""
    domain = init_domain()
    order = torch.randperm(N, generator=torch.Generator().manual_seed(seed))
    x, local = permuted(domain, draw(N, 8), order, sizes)
    model = made(lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.4, batch_first=True))
    torch.manual_seed(3)
    with small_blocks():
        if need_weights is None:
            out = model(x[None])[0]
        else:
            out = model.self_attn(x, x, x, need_weights=need_weights)[0]
    (out.square().sum()).backward()
    grad = ShardTensor.from_local(local.grad, x.sharding)
    return restored(out, order), restored(grad, order)


@pytest.mark.parametrize("need_weights", [None, False, True])
def test_dropout_does_not_depend_on_the_partition(ranks, need_weights):
    wanted = dropped_job((N,), need_weights, 0)
    again = dropped_job((N,), need_weights, 5)
    assert max(far(a, b) for a, b in zip(again, wanted, strict=True)) <= TOLERANCE
    for sizes in ((3, 11), (14, 0)), ((0, 6, 8),), ((5, 0, 7, 2),):
        for each in sizes:
            for found in ranks[len(each)].run(dropped_job, each, need_weights, 8):
                assert max(far(a, b) for a, b in zip(found, wanted, strict=True)) <= TOLERANCE


def test_dropout_drops():
    domain = init_domain()
    x = shard(torch.ones(1, 1, 200, 4).double(), domain, (200,), dim=2)
    out = F.scaled_dot_product_attention(x, x, x, dropout_p=0.25)
    assert 0.9 < out.detach().mean() < 1.1
    assert out.detach().to_local().std() > 0.01
    assert not F.scaled_dot_product_attention(x, x, x, dropout_p=1.0).detach().any()


# ----------------------------------------------------------------------------------------- refusals
def refused_job(case):
    domain = init_domain()
    x = shard(draw(B, H, N, D), domain, (3, 11), dim=2)
    other = shard(draw(B, H, N, D), domain, (5, 9), dim=2)
    with pytest.raises(NoShardRule, match=REFUSED[case][0]):
        REFUSED[case][1](x, other, domain)


def features(x, other, domain):
    wide = shard(draw(B, H, N, D), domain, (2, 4), dim=3)
    F.scaled_dot_product_attention(wide, wide, wide)


def extra(**options):
    def call(x, other, domain):
        rows = x.select(0, 0).select(0, 0)
        nn.MultiheadAttention(D, 2, **options).double()(rows, rows, rows)

    return call


REFUSED = {
    "features": ("features are sharded", features),
    "keys and values": (
        "keys and values are sharded differently",
        lambda x, other, domain: F.scaled_dot_product_attention(x, x, other),
    ),
    "samples and rows": (
        "do not line up",
        lambda x, other, domain: F.scaled_dot_product_attention(
            x, *[shard(draw(B, H, N, D), domain, (1, 1))] * 2
        ),
    ),
    "mask by keys": (
        "attn_mask must be plain, or",
        lambda x, other, domain: F.scaled_dot_product_attention(
            x, x, x, attn_mask=shard(draw(N, N), domain, (3, 11), dim=1)
        ),
    ),
    "mask of other rows": (
        "attn_mask has 3 rows",
        lambda x, other, domain: F.scaled_dot_product_attention(x, x, x, attn_mask=draw(3, N)),
    ),
    "mask of other keys": (
        "attn_mask has 3 columns",
        lambda x, other, domain: F.scaled_dot_product_attention(x, x, x, attn_mask=draw(N, 3)),
    ),
    "bias_k": ("add a row to sharded keys", extra(add_bias_kv=True)),
    "add_zero_attn": ("add a row to sharded keys", extra(add_zero_attn=True)),
}


def unfit_job():
    """An empty rank raises as the others do, before the first collective."""
    domain = init_domain()
    q, k = (shard(draw(B, H, N, n), domain, (14, 0), dim=2) for n in (D, D + 1))
    for keys, why in ((k, "one width"), (q.float(), "one dtype")):
        with pytest.raises(RuntimeError, match=why):
            F.scaled_dot_product_attention(q, keys, keys)
    with pytest.raises(RuntimeError, match=r"got .4, 3, 3. heads"):
        F.scaled_dot_product_attention(q, *[q[:, :3]] * 2, enable_gqa=True)


def test_wrong_shapes_and_dtypes_raise_on_every_rank(ranks):
    ranks[2].run(unfit_job)


@pytest.mark.parametrize("case", REFUSED)
def test_refused_calls(ranks, case):
    ranks[2].run(refused_job, case)


# ------------------------------------------------------------------------------------------- masks
def masks_job(kind, sizes):
    """Masks that are sharded, or learned."""
    domain = init_domain()
    every = operands()
    q, k, v = (x.requires_grad_() for x in every)
    mask = {"by queries": draw(N, M) > 0, "by keys": draw(1, M), "learned": draw(H, N, M)}[kind]
    learned = kind == "learned"
    mask = mask.requires_grad_() if learned else mask
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    coefficients = draw(*out.shape, seed=7)
    leaves = [q, k, v] + [mask] * learned
    wanted = torch.autograd.grad((out * coefficients).sum(), leaves)
    mine = [leaf(domain, x, s, True) for x, s in zip((q, k, v), sizes + sizes[1:], strict=True)]
    if learned:
        given_mask = leaf(domain, mask, (), False)
    else:
        at = 0 if kind == "by queries" else 1
        given_mask = shard(mask, domain, sizes[at], dim=at)
    got = F.scaled_dot_product_attention(*mine, attn_mask=given_mask)
    weighted(got, coefficients, domain).backward()
    errors = [far(whole(got), out.detach())]
    mine += [given_mask] * learned
    return errors + [far(global_grad(domain, a), b) for a, b in zip(mine, wanted, strict=True)]


@pytest.mark.parametrize("kind", ["by queries", "by keys", "learned"])
def test_sharded_and_learned_masks(ranks, kind):
    for size, every in SIZES.items():
        for sizes in every:
            for errors in run(ranks, size, masks_job, kind, sizes):
                assert max(errors) <= TOLERANCE, (sizes, errors)


# -------------------------------------------------------------------------- shapes, counts, numbers
def shapes_job(shape):
    domain = init_domain()
    x = draw(*shape)
    wanted = F.scaled_dot_product_attention(x, x, x)
    mine = shard(x, domain, (3, 11), dim=len(shape) - 2)
    got = F.scaled_dot_product_attention(mine, mine, mine)
    return far(got.gather(), wanted)


@pytest.mark.parametrize("shape", [(14, 6), (2, 14, 6), (2, 3, 2, 14, 6)])
def test_shapes(ranks, shape):
    assert max(ranks[2].run(shapes_job, shape)) <= TOLERANCE


def counts_job(place):
    """Collectives of a call, forward and backward."""
    domain = init_domain()
    sizes = (3, 4, 0, 7)[: domain.size] if domain.size == 4 else (3, 11)
    n = sum(sizes)
    every = [draw(1, 2, n, 4, seed=i) for i in range(3)]
    mine = [leaf(domain, x, sizes, s) for x, s in zip(every, PLACES[place], strict=True)]
    with count_traffic(domain) as traffic:
        out = F.scaled_dot_product_attention(*mine)
        forward = {k: c.calls for k, c in traffic.counts.items()}
    loss = out.sum() if type(out) is ShardTensor else domain.all_reduce(out.sum() / domain.size)
    with count_traffic(domain) as traffic:
        loss.backward()
        backward = {k: c.calls for k, c in traffic.counts.items()}
        backward["all_reduce"] -= 1  # of the loss
    return forward, {k: n for k, n in backward.items() if n}


@pytest.mark.parametrize("size", [2, 4])
def test_communication(ranks, size):
    steps = size - 1
    expected = {
        "all sharded": ({"ring": steps}, {"ring": steps, "ring back": steps}),
        "keys replicated": ({}, {}),
        "queries replicated": ({"all_reduce": 2}, {"all_reduce": 1}),
    }
    for place, wanted in expected.items():
        for found in ranks[size].run(counts_job, place):
            assert found == wanted, place


class Largest(TorchDispatchMode):
    """Dispatch mode: the largest number of elements of any result."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.most = max(self.most, x.numel())
        return out


def largest_job(width, options):
    domain = init_domain()
    n = 300
    sizes = (100, 200)
    every = [draw(1, 2, n, 4), draw(1, 2, n, 4, seed=1), draw(1, 2, n, width, seed=2)]
    mine = [leaf(domain, x, sizes, True) for x in every]
    torch.manual_seed(0)
    with small_blocks(rows=20, queries=20, pairs=800), Largest() as seen:
        F.scaled_dot_product_attention(*mine, **options).square().sum().backward()
    return seen.most


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.1}])
def test_no_matrix_of_all_pairs_is_stored(ranks, options):
    for width in (4, 5):
        own = 200 * 2 * (width + 1)
        assert max(ranks[2].run(largest_job, width, options)) <= own


def numbers_job(dtype, sizes):
    """Errors relative to float64: ours, and those of torch on whole tensors."""
    domain = init_domain()
    every = [x.requires_grad_() for x in operands()]
    coefficients = draw(B, H, N, D, seed=7)

    def results(q, k, v):
        out = F.scaled_dot_product_attention(q, k, v)
        loss = weighted(out, coefficients.to(out.dtype), domain)
        return [out, *torch.autograd.grad(loss, (q, k, v))]

    exact = results(*every)
    serial = results(*(x.detach().to(dtype).requires_grad_() for x in every))
    divided = (sizes[0], sizes[1], sizes[1])
    mine = results(
        *(leaf(domain, x.to(dtype), s, True) for x, s in zip(every, divided, strict=True))
    )
    mine = [x.detach().gather().double() for x in mine]
    return [
        (far(a, c.detach()), far(b.detach().double(), c.detach()))
        for a, b, c in zip(mine, serial, exact, strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_single_and_half_precision(ranks, dtype):
    with_noise = torch.finfo(dtype).eps
    for found in ranks[2].run(numbers_job, dtype, SIZES[2][0]):
        for ours, theirs in found:
            assert ours <= 2 * theirs + with_noise
