"""Ordinary models and their wrappers on shards: training equals serial to 1e-12."""

import contextlib
import copy
import functools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from meshshard.comm import init_domain
from meshshard.tensor import NoShardRule, by_own_rows, shard

pytestmark = pytest.mark.slow

TOLERANCE = 1e-12
GRIDS = {"1x2": (1, 2), "1x4": (1, 4), "2x2": (2, 2)}
SIZES = {  # of the domain of every data group
    "1x2": [(137, 863)],
    "1x4": [(137, 0, 400, 463)],
    "2x2": [(137, 863), (251, 0)],
}
STEPS = 3


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.0), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    """What point-wise models are made of; `spare` is a layer that forward does not use."""

    def __init__(self, spare=False):
        super().__init__()
        self.first = nn.Linear(5, 16, bias=False)
        self.batch = nn.BatchNorm1d(16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(2))
        self.layer = nn.LayerNorm(16)
        self.last = nn.Linear(16, 3)
        self.spare = nn.Linear(3, 3) if spare else None

    def forward(self, x):
        x = torch.relu(self.batch(self.first(x)))
        for block in self.blocks:
            x = block(x)
        return self.last(self.layer(x))


def net(spare=False):
    torch.manual_seed(1)
    return Net(spare).double()


@functools.cache
def device_mesh(grid):
    """Axes data and domain, and both as one; made once a rank, as groups are kept."""
    mesh = init_device_mesh("cpu", GRIDS[grid], mesh_dim_names=("data", "domain"))
    return mesh, mesh._flatten("all")


def sample(group, step, rows, width=5):
    generator = torch.Generator().manual_seed(100 * group + step)
    return torch.randn(rows, width, dtype=torch.float64, generator=generator)


def loss_of(out, target):
    """Not the same for all rows, and with a term that couples them."""
    return (out - target).square().mean() + 0.1 * out.std(0).sum()


def train(model, batches, optimizer, after=lambda: None):
    """What every step has: outputs, loss, and gradients of inputs, of parameters; parameters."""
    found = []
    for samples in batches:
        optimizer.zero_grad()
        outs = [model(x) for x, _ in samples]
        losses = [loss_of(out, y) for out, (_, y) in zip(outs, samples, strict=True)]
        (sum(losses) / len(losses)).backward()
        after()
        grads = [None if p.grad is None else whole(p.grad) for p in model.parameters()]
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        inputs = [x.grad for x, _ in samples]
        parameters = [whole(p) for p in model.parameters()]
        found.append((outs, losses, inputs, grads, whole(norm), parameters))
    return found


def whole(x):
    x = x.detach()
    return (x.full_tensor() if isinstance(x, DTensor) else x).clone()


def serial(grid, spare=False):
    """Mean over the data groups, on one rank."""
    sizes = SIZES[grid]
    batches = [
        [
            (sample(g, step, sum(s)).requires_grad_(), sample(g, step + 50, sum(s), 3))
            for g, s in enumerate(sizes)
        ]
        for step in range(STEPS)
    ]
    model = net(spare)
    return model, train(model, batches, adamw(model))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def far(got, want):
    if want is None:
        return 0.0 if got is None or not got.any() else float("inf")
    assert got.shape == want.shape
    return ((got - want).abs().max() / want.abs().max().clamp_min(1e-2)).item()


def ddp(**options):
    def wrapped(model, grid):
        del grid
        return DistributedDataParallel(model, **options), lambda: None

    return wrapped


def fsdp(nested, axes="all"):
    def wrapped(model, grid):
        both, flat = device_mesh(grid)
        mesh = flat if axes == "all" else both
        for block in model.blocks if nested else ():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, lambda: None

    return wrapped


def alone(model, grid):
    everyone = init_domain(device_mesh(grid)[1])
    return model, lambda: everyone.average_gradients(model)


WRAPPERS = {
    "ddp": ddp(),
    "ddp unused": ddp(find_unused_parameters=True),
    "ddp static": ddp(static_graph=True),
    "fsdp root": fsdp(nested=False),
    "fsdp nested": fsdp(nested=True),
    "hybrid fsdp": fsdp(nested=True, axes="both"),
    "alone": alone,
}


def train_job(grid, wrapper):
    mesh, _ = device_mesh(grid)
    domain, group = init_domain(mesh, "domain"), mesh.get_local_rank("data")
    spare = wrapper == "ddp unused"
    reference, want = serial(grid, spare)
    sizes = SIZES[grid][group]
    batches = []
    for step in range(STEPS):
        x = shard(sample(group, step, sum(sizes)), domain, sizes).requires_grad_()
        batches.append([(x, shard(sample(group, step + 50, sum(sizes), 3), domain, sizes))])
    model, after = WRAPPERS[wrapper](net(spare), grid)
    got = train(model, batches, adamw(model), after)
    groups = len(SIZES[grid])
    errors = {}
    for step, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        outs, losses, inputs, grads, norm, parameters = mine
        errors["output", step] = far(outs[0].detach().gather(), theirs[0][group].detach())
        errors["loss", step] = far(losses[0].detach(), theirs[1][group].detach())
        errors["input", step] = far(inputs[0].gather(), theirs[2][group] * groups)
        errors["gradient", step] = max(map(far, grads, theirs[3]))
        errors["norm", step] = far(norm, theirs[4])
        errors["parameter", step] = max(map(far, parameters, theirs[5]))
    if group == 0 and "fsdp" not in wrapper:
        mine = dict(model.named_buffers())
        for name, value in reference.named_buffers():
            if groups == 1:
                errors[name] = far(mine.get(name, mine.get(f"module.{name}")), value)
    return errors


TRAININGS = [(g, w) for g in GRIDS for w in WRAPPERS if w != "hybrid fsdp" or g == "2x2"]


@pytest.mark.parametrize(("grid", "wrapper"), TRAININGS)
def test_training_equals_serial(ranks, grid, wrapper):
    size = GRIDS[grid][0] * GRIDS[grid][1]
    for errors in ranks[size].run(train_job, grid, wrapper):
        assert max(errors.values()) <= TOLERANCE, errors


def tensor_parallel_job():
    """An MLP's weights over one axis, its points over the other."""
    mesh = device_mesh("2x2")[0]
    domain = init_domain(mesh, "domain")
    torch.manual_seed(1)
    twin = nn.Sequential(nn.Linear(5, 16), nn.GELU(), nn.Linear(16, 3)).double()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallel = parallelize_module(copy.deepcopy(twin), mesh["data"], plan)
    x = sample(0, 0, 1000).requires_grad_()
    sx = shard(sample(0, 0, 1000), domain, (137, 863)).requires_grad_()
    for mode in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
        with (
            mode(),
            pytest.raises(NoShardRule, match="tensor parallelism computes on owned rows"),
        ):
            parallel(sx)
    model = by_own_rows(parallel)
    optimizers = adamw(twin), adamw(model)
    errors = []
    for _ in range(STEPS):
        outs = twin(x), model(sx)
        losses = [loss_of(out, 0) for out in outs]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        domain.average_gradients(model)
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (twin, model)]
        errors += [far(losses[1].detach(), losses[0].detach()), far(sx.grad.gather(), x.grad)]
        errors += [far(whole(norms[1]), norms[0])]
        pairs = list(zip(model.parameters(), twin.parameters(), strict=True))
        errors += [far(whole(p.grad), q.grad) for p, q in pairs]
        for optimizer in optimizers:
            optimizer.step()
        errors += [far(whole(p), q.detach()) for p, q in pairs]
    return errors


def test_tensor_parallel_on_another_axis(ranks):
    for errors in ranks[4].run(tensor_parallel_job):
        assert max(errors) <= TOLERANCE, errors
