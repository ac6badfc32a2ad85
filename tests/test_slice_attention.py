"""Slice attention: equal to the published code, also on shards and in tiles."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from meshshard.comm import init_domain
from meshshard.comm.domain import count_traffic
from meshshard.errors import MeshshardError
from meshshard.nn import SliceAttention
from meshshard.nn.slices import _tiles
from meshshard.tensor import NoShardRule, Sharding, ShardTensor, shard

DATA = Path(__file__).parent / "data"
TOLERANCE = 1e-10
SIZES = {
    1: [(97,)],
    2: [(60, 37), (0, 97)],
    3: [(50, 0, 47), (1, 95, 1)],
    4: [(0, 40, 7, 50), (97, 0, 0, 0)],
}
VARIANTS = ("v1", "plus", "physicsnemo")


def far(got, want):
    """Largest difference, relative to the largest expected number."""
    return ((got - want).abs().max() / want.abs().max().clamp_min(1e-3)).item()


def attention(variant="v1", **options):
    """A small layer in float64, with parameters that differ from the initial ones."""
    torch.manual_seed(1)
    layer = SliceAttention(24, 4, 5, variant=variant, **options).double()
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return layer


def rows(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


@pytest.fixture(params=["recorded", "tiled"])
def few(request, monkeypatch):
    """Number of rows up to which no tiles are used: more than the tests have, or none."""
    monkeypatch.setattr(_tiles, "FEW", 1000 if request.param == "recorded" else 0)
    return _tiles.FEW


# ------------------------------------------------------------------------------------------- oracle
@pytest.mark.parametrize("variant", ["v1", "plus"])
@pytest.mark.parametrize("keep", [False, True])
def test_equals_the_published_code(few, variant, keep):
    with np.load(DATA / f"physics_attention_{variant}.npz") as file:
        data = {name: torch.from_numpy(file[name]) for name in file}
    layer = SliceAttention(64, 4, 16, variant=variant, tile=50, keep_weights=keep).double().eval()
    layer.load_state_dict({n[6:]: v for n, v in data.items() if n.startswith("param/")})
    x = data["x"].requires_grad_()
    y = layer(x)
    y.backward(data["grad_y"])
    assert far(y.detach(), data["y"]) < TOLERANCE
    assert far(x.grad, data["grad_x"]) < TOLERANCE
    for name, p in layer.named_parameters():
        assert far(p.grad, data[f"grad/{name}"]) < TOLERANCE


def test_physicsnemo_variant_equals_its_formula():
    """Weights normalized first, temperature clamped to [0.5, 5], 1e-2 added to slice weights."""
    layer = attention("physicsnemo")
    with torch.no_grad():
        layer.temperature.copy_(torch.tensor([0.1, 0.7, 4.0, 9.0]).view(1, 4, 1, 1))
    x = rows(1, 97, 24)
    m = layer.in_project_x(x).view(1, 97, 4, 6)
    f = layer.in_project_fx(x).view(1, 97, 4, 6)
    T = layer.temperature.permute(0, 2, 1, 3).clamp(0.5, 5)
    w = (layer.in_project_slice(m) / T).softmax(-1)
    normed = w / (w.sum(1) + 1e-2)[:, None]
    s = normed.permute(0, 2, 3, 1) @ f.permute(0, 2, 1, 3)
    o = F.scaled_dot_product_attention(layer.to_q(s), layer.to_k(s), layer.to_v(s))
    y = layer.to_out((w.transpose(1, 2) @ o).transpose(1, 2).flatten(2))
    assert far(layer(x), y) < TOLERANCE


# ------------------------------------------------------------------------------------------- shards
def loss_of(y):
    return y.sin().mean() + y.square().mean(-2).sum()


def results(layer, x, domain, context=None):
    """Output, gradients of the rows and of the parameters, with noise from a fixed seed."""
    torch.manual_seed(7)
    layer.zero_grad()
    y = layer(x, context)
    loss_of(y).backward()
    domain.average_gradients(layer)
    whole = (lambda t: t.gather()) if isinstance(x, ShardTensor) else (lambda t: t)
    return [whole(y.detach()), whole(x.grad), *(p.grad.clone() for p in layer.parameters())]


def leaf(own, sharding, dim):
    return ShardTensor.from_local(own, sharding, dim).detach().requires_grad_()


def shards_job(sizes, variant, few, options):
    _tiles.FEW = few
    domain = init_domain()
    layer = attention(variant, tile=16, **options)
    context = rows(3, 24) if variant == "v1" else None
    origin = torch.from_numpy(np.random.default_rng(0).permutation(97))
    first = sum(sizes[: domain.rank])
    own = slice(first, first + sizes[domain.rank])
    errors = []
    for shape, dim in (((97, 24), 0), ((2, 97, 24), 1)):
        whole = rows(*shape)
        alone = Sharding(type(domain)(), (97,), origin)  # for the same noise
        sharding = Sharding(domain, sizes, origin[own])
        mine = whole.narrow(dim, first, sizes[domain.rank])
        want = results(layer, leaf(whole, alone, dim), alone.domain, context)
        got = results(layer, leaf(mine, sharding, dim), domain, context)
        errors += map(far, got, want)
    return max(errors)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("options", [{}, {"keep_weights": True}, {"deterministic": True}], ids=str)
def test_sharded_equals_serial(ranks, few, variant, size, options):
    for sizes in SIZES[size]:
        given = sizes, variant, few, options
        errors = [shards_job(*given)] if size == 1 else ranks[size].run(shards_job, *given)
        assert max(errors) < TOLERANCE


def traffic_job(few, deterministic):
    _tiles.FEW = few
    domain = init_domain()
    layer = attention(deterministic=deterministic)
    x = shard(rows(97, 24), domain, (97, 0)).requires_grad_()
    with count_traffic(domain) as forward:
        y = layer(x)
    with count_traffic(domain) as backward:
        y.backward(y.detach())
    return [{n: (c.calls, c.bytes) for n, c in t.counts.items()} for t in (forward, backward)]


def test_one_collective_forward_and_backward(ranks, few):
    column = 4 * 5 * 8
    backward = column * (7 if few else 6)
    for got in ranks[2].run(traffic_job, few, False):
        assert got == [{"all_reduce": (1, 7 * column)}, {"all_reduce": (1, backward)}]
    for got in ranks[2].run(traffic_job, few, True):
        assert sum(n for n, _ in got[0].values()) == 1
        assert "all_reduce" not in got[0]


# ------------------------------------------------------------------------------ second derivatives
def residual_job(sizes, variant, few):
    """Gradients of a loss with second derivatives of the output by the inputs."""
    _tiles.FEW = few
    domain = init_domain()
    layer = attention(variant, tile=16).eval()
    head = rows(24)

    def gradients(x, domain):
        layer.zero_grad()
        u = layer(x) @ head
        (g,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (h,) = torch.autograd.grad(g[:, 0].sum(), x, create_graph=True)
        (h[:, 0].square().mean() + g.square().mean()).backward()
        domain.average_gradients(layer)
        return [p.grad.clone() for p in layer.parameters() if p.grad is not None]

    want = gradients(rows(97, 24).requires_grad_(), type(domain)())
    got = gradients(shard(rows(97, 24), domain, sizes).requires_grad_(), domain)
    return max(map(far, got, want))


@pytest.mark.parametrize("variant", ["v1", "plus"])
def test_second_derivatives(ranks, few, variant):
    assert max(ranks[2].run(residual_job, (60, 37), variant, few)) < 1e-9
    assert max(ranks[3].run(residual_job, (60, 0, 37), variant, few)) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_tiles_pass_gradcheck_and_gradgradcheck(monkeypatch, variant):
    monkeypatch.setattr(_tiles, "FEW", 0)
    layer = SliceAttention(4, 2, 3, variant=variant, tile=2).double().eval()
    x = rows(1, 5, 4).requires_grad_()
    assert torch.autograd.gradcheck(layer, x)
    assert torch.autograd.gradgradcheck(layer, x, fast_mode=True)


# --------------------------------------------------------------------------- noise, dtypes, errors
def test_noise_in_training_only(few):
    layer, x = attention("plus"), rows(97, 24)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_batched_context_equals_each_sample(few):
    layer, x = attention(), rows(2, 97, 24)
    context = rows(2, 3, 24).requires_grad_()
    both = layer(x, context)
    each = torch.stack([layer(x[i], context[i]) for i in range(2)])
    assert far(both, each) < TOLERANCE
    both.sum().backward()
    assert context.grad.abs().min() > 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_are_as_precise_as_recorded_operations(monkeypatch, dtype):
    """The error relative to float64 is at most twice that of recorded operations."""
    monkeypatch.setattr(_tiles, "FEW", 0)
    layer, x = attention(tile=64), rows(3000, 24)
    want = layer(x)
    layer, x = layer.to(dtype), x.to(dtype)
    tiled = far(layer(x).double(), want)
    layer.tile = 0
    assert tiled <= 2 * far(layer(x).double(), want) + 1e-7


def test_frozen_parameters_and_autocast(monkeypatch):
    monkeypatch.setattr(_tiles, "FEW", 0)
    layer = attention(tile=16).float()
    layer.in_project_fx.weight.requires_grad_(False)
    layer.to_out.requires_grad_(False)
    x = rows(97, 24).float()
    layer(x).sum().backward()
    assert layer.in_project_fx.weight.grad is None
    assert layer.in_project_x.weight.grad is not None
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x.requires_grad_())
    y.float().sum().backward()
    assert x.grad.isfinite().all()


def test_invalid_arguments_are_refused():
    with pytest.raises(MeshshardError, match="5 heads do not divide a width of 24"):
        SliceAttention(24, 5)
    with pytest.raises(
        MeshshardError, match="'v2' is unknown; choose one of v1, plus, physicsnemo"
    ):
        SliceAttention(24, 4, variant="v2")
    layer = attention()
    with pytest.raises(MeshshardError, match=r"rows must be \(N, 24\) or .* not \(9, 7\)"):
        layer(rows(9, 7))
    domain = init_domain()
    with pytest.raises(NoShardRule, match="must be sharded along its rows"):
        layer(shard(rows(2, 9, 24), domain, (2,)))
