"""ShardTensor: gradients at the API boundary, refused operations, hooks, copies, modules."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshshard.comm import init_domain
from meshshard.tensor import NoShardRule, Sharding, ShardTensor, shard, shard_rule
from meshshard.tensor.shard_tensor import RULES

SIZES = {1: (14,), 2: (3, 11), 4: (5, 0, 7, 2)}


def whole(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(14, 6, dtype=torch.float64, generator=generator)


def mlp():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Tanh(),
        nn.RMSNorm(8), nn.Linear(8, 2),
    ).double()  # fmt: skip


def make(domain, grad=True, seed=0):
    x = shard(whole(seed), domain, SIZES[domain.size])
    return x.requires_grad_() if grad else x


def close(a, b, tolerance=1e-12):
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance)


def average(domain, parameters):
    return [domain.all_reduce(p.grad) / domain.size for p in parameters]


def serial_mlp():
    x, model = whole().requires_grad_(), mlp()
    loss = (model(x) - 1).square().mean()
    loss.backward()
    return loss.detach(), x.grad, [p.grad for p in model.parameters()]


def run_mlp(forward):
    """`forward(model, x)` equals serial: loss, and gradients of inputs and parameters."""
    domain = init_domain()
    loss, x_grad, grads = serial_mlp()
    x, model = make(domain), mlp()
    got = (forward(model, x) - 1).square().mean()
    got.backward()
    assert close(got.detach(), loss)
    assert close(x.grad.gather(), x_grad)
    for mine, theirs in zip(average(domain, model.parameters()), grads, strict=True):
        assert close(mine, theirs)


def plain(model, x):
    return model(x)


def checkpointed(model, x):
    return checkpoint(lambda t: model(t), x, use_reentrant=False)


def reentrant(model, x):
    return model[4:](checkpoint(model[:4], x, use_reentrant=True))


def hooked(model, x):
    seen = []
    model[1].register_full_backward_hook(lambda m, inputs, outputs: seen.append(outputs))
    out = model(x)
    out.register_hook(lambda g: seen.append(g.shape))
    return out


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("forward", [plain, checkpointed, reentrant, hooked])
def test_a_model_equals_serial(ranks, forward, size):
    if size == 1:
        run_mlp(forward)
    else:
        ranks[size].run(run_mlp, forward)


def boundary_job():
    """Gradients given to backward, intermediate and retained gradients have global values."""
    domain = init_domain()
    whole_x, v = whole().requires_grad_(), whole(1)
    mid = whole_x.sin()
    out = mid * whole_x.mean(0)
    (want_x,) = torch.autograd.grad(out, whole_x, v, retain_graph=True)
    (want_mid,) = torch.autograd.grad(out, mid, v, retain_graph=True)
    x = make(domain)
    sharded_mid = x.sin()
    sharded_out = sharded_mid * x.mean(0)
    sv = shard(v, domain, SIZES[domain.size])
    (got,) = torch.autograd.grad(sharded_out, x, sv, retain_graph=True)
    assert close(got.gather(), want_x)
    # a replicated gradient of the output is narrowed to owned rows
    (got,) = torch.autograd.grad(sharded_out, x, v, retain_graph=True)
    assert close(got.gather(), want_x)
    (got,) = torch.autograd.grad(sharded_out, sharded_mid, sv, retain_graph=True)
    assert close(got.gather(), want_mid)
    sharded_mid.retain_grad()
    sharded_out.backward(sv)
    assert close(sharded_mid.grad.gather(), want_mid)
    assert close(x.grad.gather(), want_x)
    y = make(domain)
    torch.autograd.backward([y * 2], [sv])
    assert close(y.grad.gather(), 2 * v)


def residual_job():
    """A physics-informed loss: derivatives of the output with respect to the coordinates."""
    domain = init_domain()
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    twin = copy.deepcopy(model)

    def loss_of(net, x):
        u = net(x) * (1 + net(x).mean())
        (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
        return (second[:, 0] + u[:, 0] - first.square().mean()).square().mean()

    x = whole().requires_grad_()
    serial = loss_of(twin, x)
    serial.backward()
    sx = make(domain)
    loss = loss_of(model, sx)
    loss.backward()
    assert close(loss, serial)
    assert close(sx.grad.gather(), x.grad)
    for mine, theirs in zip(average(domain, model.parameters()), twin.parameters(), strict=True):
        assert close(mine, theirs.grad, 1e-10)


def hooks_job():
    """A user's hook sees the global gradient, sharded, and may change it."""
    domain = init_domain()
    x = make(domain)
    seen = []
    mid = x * 3

    def double(g):
        seen.append((g.shape, g.norm().item()))
        return g * 2

    mid.register_hook(double)
    (mid * whole(1)).sum().backward()
    assert close(x.grad.gather(), 6 * whole(1))
    assert seen[0][0] == (14, 6)
    assert abs(seen[0][1] - whole(1).norm().item()) < 1e-12


def local_leaf_job():
    """A plain leaf of owned rows gets its global gradient, also through to_local and from_local."""
    domain = init_domain()
    sizes = SIZES[domain.size]
    first = sum(sizes[: domain.rank])
    rows = whole()[first : first + sizes[domain.rank]].clone().requires_grad_()
    sharding = Sharding(domain, sizes)
    x = ShardTensor.from_local(rows, sharding)
    y = ShardTensor.from_local(x.to_local().sin(), sharding)
    (y * y).sum().backward()
    want = (2 * whole().sin() * whole().cos())[first : first + sizes[domain.rank]]
    assert close(rows.grad, want)
    w = whole().requires_grad_()  # a replicated leaf
    (shard(w, domain, sizes).square() * 3).sum().backward()
    assert close(w.grad, 6 * whole())
    assert shard(whole() if domain.rank == 0 else None, domain, sizes, root=0).shape == (14, 6)


class Scale(torch.autograd.Function):
    """A user's row-wise function with a parameter."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad * w, (grad * x).sum()


class Center(torch.autograd.Function):
    """A user's function that couples rows, so that its backward on local rows would be wrong."""

    @staticmethod
    def forward(ctx, x):
        return x - x.mean()

    @staticmethod
    def backward(ctx, grad):
        return grad - grad.mean()


def user_function_job():
    domain = init_domain()
    w = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    x = make(domain)
    Scale.apply(x, w).square().mean().backward()
    wx, ww = whole().requires_grad_(), torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    Scale.apply(wx, ww).square().mean().backward()
    assert close(x.grad.gather(), wx.grad)
    assert close(domain.all_reduce(w.grad) / domain.size, ww.grad)
    if domain.size > 1:
        with pytest.raises(NoShardRule, match=r"inside your own autograd\.Function"):
            Center.apply(make(domain))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    "job", [boundary_job, residual_job, hooks_job, local_leaf_job, user_function_job]
)
def test_gradients(ranks, job, size):
    if size == 1:
        job()
    else:
        ranks[size].run(job)


REFUSED = {
    "numpy": lambda x: np.asarray(x),
    "tolist": lambda x: x.tolist(),
    "item": lambda x: x[:1, :1].item(),
    "float": lambda x: float(x),
    "bool": lambda x: bool(x),
    "iteration": lambda x: list(x),
    "dlpack": lambda x: torch.from_dlpack(x),
    "vmap": lambda x: torch.vmap(torch.sin)(x),
    "pickle": lambda x: pickle.dumps(x),
    "torch.save": lambda x: torch.save(x, io.BytesIO()),
    "dist.all_reduce": lambda x: torch.distributed.all_reduce(x),
    "plain in place": lambda x: torch.zeros(14, 6).double().add_(x),
    "no rule": lambda x: torch.linalg.svd(x),
    "all pairs": lambda x: x @ x.T,
    "local rows of a plain tensor": lambda x: x + torch.zeros(5, 6).double(),
    "nuclear norm": lambda x: x.norm("nuc"),
    "out": lambda x: torch.add(x, 1, out=torch.zeros(14, 6).double()),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_inexact_operations_are_refused_by_name(name):
    x = make(init_domain(), grad=False)
    with pytest.raises(NoShardRule) as caught:
        REFUSED[name](x)
    assert isinstance(caught.value, NotImplementedError)
    message = str(caught.value)
    assert "has no exact rule for sharded tensors" in message
    assert "gather()" in message
    assert "\n" not in message


def different_sizes_job():
    domain = init_domain()
    x = make(domain, False)
    other = x.redistribute([0] * (domain.size - 1) + [14])
    assert (x + other).sharding == x.sharding  # rows of the second move
    assert (other + x).sharding == other.sharding
    assert close((x + other).gather(), 2 * whole())
    assert close((x[1:] - x[:-1]).gather(), whole()[1:] - whole()[:-1])
    dropped = x[whole()[:, 0] > 0]
    assert sum(dropped.sharding.sizes) == int((whole()[:, 0] > 0).sum())
    even = dropped.redistribute(even_sizes(dropped.shape[0], domain.size))
    assert close(even.gather(), whole()[whole()[:, 0] > 0])


def even_sizes(n, parts):
    return [n // parts + (r < n % parts) for r in range(parts)]


def random_job(sizes):
    """All random numbers of a sharded tensor, and of the default generator afterwards."""
    domain = init_domain()
    torch.manual_seed(5)
    x = shard(whole(), domain, sizes)
    draws = [nn.functional.dropout(x, 0.4), torch.rand_like(x), torch.randn_like(x)]
    return [d.gather().tolist() for d in draws] + [torch.rand(3).tolist()]


def test_random_numbers_do_not_depend_on_the_sizes(ranks):
    serial = random_job((14,))
    for size in (2, 4):
        for drawn in ranks[size].run(random_job, SIZES[size]):
            assert drawn == serial
    kept = torch.tensor(serial[0]) != 0
    assert 0.4 < kept.double().mean() < 0.8
    assert abs(torch.tensor(serial[1]).mean() - 0.5) < 0.15
    assert abs(torch.tensor(serial[2]).std() - 1) < 0.25


@pytest.mark.parametrize("size", [2, 4])
def test_tensors_of_different_sizes(ranks, size):
    ranks[size].run(different_sizes_job)


def test_copies_and_attributes():
    x = make(init_domain())
    twin = copy.deepcopy(x)
    assert type(twin) is ShardTensor
    assert twin.requires_grad
    assert len(x) == 14
    assert x.shape == (14, 6) == x.size()
    assert (x.ndim, x.numel(), x.dtype, x.device.type) == (2, 84, torch.float64, "cpu")
    assert "shape (14, 6), dim 0 in (14,), rank 0 of 1" in repr(x)
    assert x.to(torch.float32).dtype == torch.float32
    assert x.data.shape == (14, 6)
    assert x.new_zeros(3).shape == (3,)
    assert type(x.new_zeros(3)) is torch.Tensor
    with torch.no_grad():
        assert not (x * 2).requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        assert nn.Linear(6, 2)(x.float()).dtype == torch.bfloat16


def test_a_user_defined_rule():
    @torch.library.custom_op("meshshard_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    twice.register_autograd(lambda ctx, grad: 2 * grad)
    op = torch.ops.meshshard_test.twice.default
    x = make(init_domain())
    with pytest.raises(NoShardRule, match="twice"):
        op(x)

    @shard_rule(op)
    def rule(x):
        return ShardTensor.from_local(op(x.to_local()), x.sharding, x.sharded_dim)

    try:
        op(x).sum().backward()
        assert close(x.grad.gather(), torch.full((14, 6), 2.0).double())
    finally:
        del RULES[op]


def conv_job(sizes, dim, kernel, dilation):
    domain = init_domain()
    torch.manual_seed(3)
    grid = torch.randn(2, 3, *[14 if d == dim else 6 for d in (2, 3)], dtype=torch.float64)
    conv = nn.Conv2d(3, 4, kernel, padding="same", dilation=dilation).double()
    twin = copy.deepcopy(conv)
    x = grid.clone().requires_grad_()
    want = twin(x)
    want.square().mean().backward()
    sx = shard(grid, domain, sizes, dim=dim).requires_grad_()
    got = conv(sx)
    got.square().mean().backward()
    assert close(got.detach().gather(), want.detach())
    assert close(sx.grad.gather(), x.grad)
    for mine, theirs in zip(average(domain, conv.parameters()), twin.parameters(), strict=True):
        assert close(mine, theirs.grad)


@pytest.mark.parametrize(("dim", "kernel", "dilation"), [(2, 3, 1), (3, 3, 1), (2, 5, 2)])
def test_convolutions_on_a_sharded_grid(ranks, dim, kernel, dilation):
    conv_job((14,), dim, kernel, dilation)
    for size in (2, 4):
        ranks[size].run(conv_job, SIZES[size], dim, kernel, dilation)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_means_in_half_precision_do_not_overflow(dtype):
    x = shard(torch.full((14, 6000), 40.0, dtype=dtype), init_domain(), (14,))
    assert x.mean().item() == x.mean(0)[0].item() == x.mean((0, 1)).item() == 40
