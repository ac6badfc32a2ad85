"""What training puts around a model: checkpoints, hooks, optimizers, scalers, autocast, copies."""

import contextlib
import copy
import io
import warnings

import pytest
import torch
from test_models import Net, device_mesh, far, loss_of, net, sample, whole
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, default_collate

from meshshard.comm import init_domain
from meshshard.tensor import NoShardRule, Sharding, ShardTensor, shard

pytestmark = pytest.mark.slow

SIZES = {2: (137, 863), 4: (137, 0, 400, 463)}
ROWS = 1000
TOLERANCE = 1e-12


def make(domain, step=0, width=5, grad=True):
    x = shard(sample(0, step, ROWS, width), domain, SIZES[domain.size])
    return x.requires_grad_() if grad else x


class Checkpointed(Net):
    """The same model, its blocks run again in backward."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x):
        x = torch.relu(self.batch(self.first(x)))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(self.layer(x))


def checkpoint_job(wrapper, reentrant):
    """Recomputation and hooks inside DDP and FSDP2."""
    domain = init_domain()
    twin, model = net(), Checkpointed(reentrant).double()
    model.load_state_dict(twin.state_dict())
    seen = []
    model.layer.register_forward_hook(lambda m, args, out: seen.append(tuple(out.shape)))
    model.layer.register_full_backward_hook(lambda m, g, h: seen.append(type(h[0]).__name__))
    if wrapper == "ddp":
        wrapped = DistributedDataParallel(model, static_graph=reentrant)
    else:
        mesh = device_mesh(f"1x{domain.size}")[1]
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    x, sx = sample(0, 0, ROWS).requires_grad_(), make(domain)
    want, got = loss_of(twin(x), 0), loss_of(wrapped(sx), 0)
    want.backward()
    got.backward()
    assert seen[0] == (ROWS, 16)
    assert len(seen) == 2
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    errors = [far(got.detach(), want.detach()), far(sx.grad.gather(), x.grad)]
    return errors + [far(whole(p.grad), q.grad) for p, q in pairs]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_and_hooks(ranks, size, wrapper, reentrant):
    for errors in ranks[size].run(checkpoint_job, wrapper, reentrant):
        assert max(errors) <= TOLERANCE, errors


OPTIMIZERS = {
    "SGD": {"momentum": 0.9},
    "Adam": {},
    "AdamW": {"amsgrad": True},
    "RMSprop": {"centered": True},
    "Adagrad": {},
    "NAdam": {},
    "RAdam": {},
    "Adamax": {},
    "Adadelta": {},
    "ASGD": {},
    "Rprop": {},
    "LBFGS": {"max_iter": 3},
}
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")


def optimize(x, target, name, options):
    """A field that is optimized, its gradient clipped."""
    optimizer = getattr(torch.optim, name)([x], lr=0.1, **options)

    def closure():
        optimizer.zero_grad()
        loss = (x - target).square().square().mean() + x.std(0).sum()
        loss.backward()
        return loss

    for _ in range(3):
        if name == "LBFGS":
            optimizer.step(closure)
            continue
        closure()
        norm = nn.utils.clip_grad_norm_([x], 0.3)
        optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    return torch.zeros(()) if name == "LBFGS" else norm


def optimizer_job():
    domain = init_domain()
    errors = {}
    for name, options in OPTIMIZERS.items():
        ways = [{}] if name == "LBFGS" else [{}, {"foreach": True}]
        for way in [*ways, *[{"fused": True}] * (name in FUSED)]:
            x, sx = sample(0, 0, 50).requires_grad_(), shard(sample(0, 0, 50), domain, (8, 42))
            want = optimize(x, sample(0, 1, 50), name, options | way)
            target = shard(sample(0, 1, 50), domain, (8, 42))
            got = optimize(sx.requires_grad_(), target, name, options | way)
            errors[name, *way] = max(far(got, want), far(sx.detach().gather(), x.detach()))
    return errors


def test_a_field_is_optimized(ranks):
    for errors in ranks[2].run(optimizer_job):
        assert max(errors.values()) <= TOLERANCE, errors


def scaler_job(way, infinite):
    """An infinity in the last rank's rows makes all ranks skip the step."""
    domain = init_domain()
    model, leaf = net(), make(domain)
    factor = make(domain, 1, 3, grad=False)
    if infinite and domain.rank == domain.size - 1:
        with torch.no_grad():
            factor.to_local()[-1, 0] = float("inf")
    wrapped = model
    if way == "ddp":
        wrapped = DistributedDataParallel(model)
    elif way == "fsdp":
        wrapped = fully_shard(model, mesh=device_mesh(f"1x{domain.size}")[1])
    tensors = [leaf] if way == "leaf" else list(model.parameters())
    before = [whole(t.gather() if type(t) is ShardTensor else t) for t in tensors]
    optimizer = torch.optim.SGD(tensors, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale((wrapped(leaf) * factor).sum()).backward()
    if way == "alone":
        domain.average_gradients(model)
    scaler.step(optimizer)
    scaler.update()
    after = [whole(t.gather() if type(t) is ShardTensor else t) for t in tensors]
    same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return same, scaler.get_scale()


@pytest.mark.parametrize("way", ["leaf", "ddp", "fsdp", "alone"])
def test_grad_scaler_agrees(ranks, way):
    assert ranks[2].run(scaler_job, way, True) == [(True, 2.0)] * 2
    assert ranks[2].run(scaler_job, way, False) == [(False, 4.0)] * 2


def half_job(dtype, autocast):
    """Distance to serial, and serial's own distance to float64."""
    domain = init_domain()
    ours, own = torch.zeros(4), torch.zeros(4)
    for step in range(3):
        x, y = sample(0, step, ROWS), sample(0, step + 50, ROWS, 3)
        sizes = SIZES[domain.size]
        exact = half_run(net(), x.requires_grad_(), y, False)
        model = net().to(dtype)
        low = x.detach().to(dtype), y.to(dtype)
        serial = half_run(copy.deepcopy(model), low[0].clone().requires_grad_(), low[1], autocast)
        sx, sy = (shard(t, domain, sizes) for t in low)
        got = half_run(model, sx.requires_grad_(), sy, autocast)
        got[2] = domain.all_reduce(got[2]) / domain.size
        got[0], got[3] = got[0].gather(), got[3].gather()
        for i, (a, b, c) in enumerate(zip(got, serial, exact, strict=True)):
            ours[i] += (a.double() - b.double()).square().sum()
            own[i] += (b.double() - c.double()).square().sum()
    return (ours.sqrt() / own.sqrt()).tolist()


def half_run(model, x, y, autocast):
    mode = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
    with mode, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
        out = model(x)
        loss = loss_of(out, y)
    loss.backward()
    grads = torch.cat([p.grad.reshape(-1).double() for p in model.parameters()])
    return [out.detach(), loss.detach(), grads, x.grad]


@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.float32, True), (torch.float32, False), (torch.bfloat16, False)],
    ids=["autocast", "float32", "bfloat16"],
)
@pytest.mark.parametrize("size", [2, 4])
def test_low_precision_is_as_far_off_as_serial(ranks, size, dtype, autocast):
    for ratios in ranks[size].run(half_job, dtype, autocast):
        assert max(ratios) <= 2, ratios


def modules_job():
    """Copies, buffers, functional calls, inference, and what a loader does."""
    domain = init_domain()
    x, sx = sample(0, 0, ROWS), make(domain, grad=False)
    model = net()
    model.register_buffer("field", make(domain, 1, grad=False))
    twin = copy.deepcopy(model)
    assert type(twin.field) is ShardTensor
    assert twin.field.sharding == sx.sharding
    state = model.state_dict()
    state["field"] = sample(0, 2, ROWS)  # a plain tensor of all rows: owned rows are taken
    twin.load_state_dict(state)
    assert far(twin.field.gather(), sample(0, 2, ROWS)) == 0
    assert twin.float().field.dtype == torch.float32
    with pytest.raises(NoShardRule, match=r"save x\.gather\(\)"):
        torch.save(model.state_dict(), io.BytesIO())
    if domain.size > 1:
        with pytest.raises(NoShardRule, match="sharded buffer in DistributedDataParallel"):
            DistributedDataParallel(model)
    model = net()
    errors = [far(copy.deepcopy(model)(sx).detach().gather(), net()(x).detach())]
    state = {n: t.detach() * 2 for n, t in model.named_parameters()}
    called = torch.func.functional_call(model, state, (sx,))
    errors.append(far(called.detach().gather(), torch.func.functional_call(net(), state, (x,))))
    model = net().eval()
    with torch.inference_mode():
        errors.append(far(model(sx).gather(), net().eval()(x)))
        errors.append(far(model(sx).mean(0), net().eval()(x).mean(0)))
    errors.append(far(default_collate([sx, sx]).gather(), default_collate([x, x])))
    (batch,) = DataLoader([sx], batch_size=1, collate_fn=default_collate)
    assert batch.shape == (1, ROWS, 5)
    return max(errors)


REFUSED = {
    "nn.Parameter": (lambda x: nn.Parameter(x), r"a parameter is replicated; .* use a leaf"),
    "all_reduce": (lambda x: torch.distributed.all_reduce(x), "all_reduce has no exact rule"),
    "broadcast": (lambda x: torch.distributed.broadcast(x, 0), "broadcast has no exact rule"),
    "plain target": (
        lambda x: torch.zeros(ROWS, 5).add_(x),
        "a plain tensor cannot be changed in place",
    ),
    "mixed lists": (
        lambda x: torch._foreach_add_([torch.zeros(2), x], [torch.zeros(2), torch.zeros(ROWS, 5)]),
        "the tensors at one position of the lists must all be sharded",
    ),
    "jvp": (
        lambda x: torch.func.jvp(torch.sin, (x,), (x,)),
        "torch.func would take",
    ),
}


def refused_job():
    domain = init_domain()
    for refused, message in REFUSED.values():
        with pytest.raises(NoShardRule, match=message):
            refused(make(domain, grad=False))
    return 0.0


def two_job():
    """Two domains and two partitions live beside each other."""
    mesh = device_mesh("2x2")[0]
    rows, columns = init_domain(mesh, "domain"), init_domain(mesh, "data")
    errors = []
    for domain, sizes in ((rows, (137, 863)), (columns, (0, 1000)), (rows, (600, 400))):
        x = shard(sample(0, 0, ROWS), domain, sizes).requires_grad_()
        y = sample(0, 0, ROWS).requires_grad_()
        for model, t in ((net(), x), (net(), y)):
            loss_of(model(t), 0).backward()
        errors.append(far(x.grad.gather(), y.grad))
    a = shard(sample(0, 0, ROWS), rows, (137, 863))
    with pytest.raises(NoShardRule, match="different domains"):
        a + shard(sample(0, 0, ROWS), columns, (137, 863))
    both = torch.stack([a, shard(sample(0, 0, ROWS), rows, (600, 400))])
    assert both.sharding == a.sharding
    assert torch.equal(both[0].gather(), both[1].gather())
    with pytest.raises(NoShardRule, match="different domains"):
        torch.stack([a, shard(sample(0, 0, ROWS), columns, (137, 863))])
    assert Sharding(rows, (137, 863)) == a.sharding
    return max(errors)


@pytest.mark.parametrize(
    ("size", "job"), [(2, modules_job), (4, modules_job), (2, refused_job), (4, two_job)]
)
def test_around_models(ranks, size, job):
    assert max(ranks[size].run(job)) <= TOLERANCE
