"""GeoTransolver: its parts against formulas, and sharded against serial."""

import numpy as np
import pytest
import torch

from meshshard.comm import Domain, init_domain
from meshshard.comm.domain import count_traffic
from meshshard.errors import MeshshardError
from meshshard.models import GeoOptions, GeoTransolver
from meshshard.models.geo_transolver import SliceTokens
from meshshard.nn.slices import _tiles
from meshshard.tensor import Sharding, ShardTensor

N, M = 60, 45
SIZES = {2: ((40, 20), (0, 45)), 3: ((25, 0, 35), (20, 20, 5)), 4: ((15, 15, 0, 30), (0, 40, 5, 0))}


def far(got, want):
    """Largest difference, relative to the largest expected number."""
    return ((got - want).abs().max() / want.abs().max().clamp_min(1e-3)).item()


def numbers(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.rand(*shape, dtype=torch.float64, generator=generator)


def small():
    torch.manual_seed(1)
    options = GeoOptions(slices=5, radii=(0.2, 0.5), neighbors=(4, 7), local=8, context_dim=2,
                         tile=16)  # fmt: skip
    model = GeoTransolver(4, 2, 6, 16, 2, 4, options).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model


def sharded(x, domain, sizes, origin):
    """The rows of this rank of a tensor whose rows were permuted."""
    first = sum(sizes[: domain.rank])
    rows = origin[first : first + sizes[domain.rank]]
    return ShardTensor.from_local(x[rows].requires_grad_(), Sharding(domain, sizes, rows))


def results(model, given, domain, orders):
    model.zero_grad()
    given = [x.detach().requires_grad_() for x in given]
    y = model(*given, numbers(3, 2))
    (y.sin().mean() + y.square().mean(0).sum()).backward()
    domain.average_gradients(model)
    out = []
    for x, order in zip([y.detach(), *(x.grad for x in given)], orders, strict=True):
        whole = x.gather() if isinstance(x, ShardTensor) else x
        out.append(torch.empty_like(whole).index_copy(0, order, whole))
    return [*out, *(p.grad.clone() for p in model.parameters())]


def shards_job(sizes, few):
    _tiles.FEW = few
    domain, model = init_domain(), small()
    given = numbers(N, 4), numbers(N, 3), numbers(M, 6)
    same = torch.arange(N), torch.arange(M)
    want = results(model, given, Domain(), (same[0], same[0], same[0], same[1]))
    order = [torch.from_numpy(np.random.default_rng(n).permutation(n)) for n in (N, M)]
    mine = [sharded(x, domain, sizes[i], order[i]) for x, i in zip(given, (0, 0, 1), strict=True)]
    got = results(model, mine, domain, (order[0], order[0], order[0], order[1]))
    graphs = model.balls_of(*mine[1:])
    with count_traffic(domain) as forward:
        again = model(*mine, numbers(3, 2), graphs).detach().gather()
    back = torch.empty_like(again).index_copy(0, order[0], again)
    sums = forward.counts["all_reduce"].calls
    return max(map(far, [*got, back], [*want, want[0]])), sums


@pytest.mark.parametrize("few", [1000, 0], ids=["recorded", "tiled"])
@pytest.mark.parametrize("size", SIZES)
def test_sharded_equals_serial(ranks, size, few):
    for error, sums in ranks[size].run(shards_job, SIZES[size], few):
        assert error < 1e-10
        assert sums == 2 + 1 + 2  # radii, geometry, blocks; none for the context tokens


def test_features_of_a_ball_equal_the_formula():
    """The nearest points relative to the row, divided by the radius, padded with zeros."""
    model, pos, geometry = small(), numbers(N, 3), numbers(M, 6)
    graphs = model.balls_of(pos, geometry)
    got = model._local(0, graphs[0], pos, geometry)
    for row in range(0, N, 7):
        d = ((geometry[:, :3] - pos[row]) ** 2).sum(1)
        near = [int(i) for i in d.argsort()[:4] if d[i] <= 0.2**2]
        seen = torch.zeros(4, 6, dtype=torch.float64)
        for place, i in enumerate(near):
            seen[place] = torch.cat([(geometry[i, :3] - pos[row]) / 0.2, geometry[i, 3:]])
        assert far(got[row], torch.tanh(model.balls[0](seen.flatten()))) < 1e-12


def test_output_depends_on_geometry_and_context():
    model, x, pos, geometry = small(), numbers(N, 4), numbers(N, 3), numbers(M, 6)
    y = model(x, pos, geometry, numbers(3, 2))
    assert far(model(x, pos, geometry * 0.9, numbers(3, 2)), y) > 1e-3
    assert far(model(x, pos, geometry, numbers(3, 2) * 2), y) > 1e-4
    with pytest.raises(MeshshardError, match="built for context tokens of width 2"):
        model(x, pos, geometry)


@pytest.mark.slow
def test_hooked_modules_are_called(monkeypatch):
    """A hook that changes nothing keeps the output; a hook that doubles a value changes it."""
    monkeypatch.setattr(_tiles, "FEW", 0)
    model, given = small(), (numbers(N, 4), numbers(N, 3), numbers(M, 6), numbers(3, 2))
    want = model(*given)
    found = [m for m in model.modules() if isinstance(m, SliceTokens)]
    assert found
    for m in found:
        hook = m.in_project_fx.register_forward_hook(lambda *_: None)
        assert far(model(*given), want) <= 1e-12
        hook.remove()
        hook = m.in_project_fx.register_forward_hook(lambda m, x, y: 2 * y)
        assert far(model(*given), want) > 1e-6
        hook.remove()


def test_kept_weights_do_not_change_results(monkeypatch):
    monkeypatch.setattr(_tiles, "FEW", 8)
    found = []
    for keep in (False, True):
        torch.manual_seed(0)
        options = GeoOptions(slices=4, tile=8, keep_weights=keep)
        model = GeoTransolver(3, 1, hidden=16, heads=2, layers=1, options=options).double()
        assert model.blocks[0].Attn.keep_weights is keep
        x = torch.rand(40, 3, dtype=torch.float64).requires_grad_()
        out = model(x, x.detach(), x.detach())
        found.append((out, torch.autograd.grad(out.sum(), x)[0]))
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted)


def test_an_unexpected_context_is_refused():
    x = torch.rand(5, 3)
    with pytest.raises(MeshshardError, match="the model was built for no context"):
        GeoTransolver(3, 1, hidden=16, heads=2, layers=1)(x, x, x, torch.rand(2, 3))
