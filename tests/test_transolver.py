"""Transolver: published code, shards, prediction, memory, checkpoints of other implementations."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import meshshard as ms
from meshshard import io
from meshshard.comm import Domain, init_domain
from meshshard.comm.domain import count_traffic
from meshshard.errors import MeshshardError
from meshshard.models import Transolver, TransolverOptions
from meshshard.nn.slices import _tiles
from meshshard.partitioning.partition import partition
from meshshard.tensor import Sharding, ShardTensor, shard

pytestmark = pytest.mark.slow

DATA = Path(__file__).parent / "data"
AHMED = Path(__file__).parent.parent / "datasets" / "ahmed"
TOLERANCE = 1e-10
SIZES = {2: (60, 37), 3: (50, 0, 47), 4: (0, 40, 7, 50)}
VARIANTS = ("v1", "plus", "physicsnemo")


def far(got, want):
    """Largest difference, relative to the largest expected number."""
    return ((got - want).abs().max() / want.abs().max().clamp_min(1e-3)).item()


def rows(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def small(variant="v1", **options):
    """A small model in float64, with parameters that differ from the initial ones."""
    torch.manual_seed(1)
    model = Transolver(3, 2, 24, 3, 4, 5, TransolverOptions(variant=variant, **options)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model


@pytest.fixture(params=["recorded", "tiled"])
def few(request, monkeypatch):
    """Number of rows up to which no tiles are used: more than the tests have, or none."""
    monkeypatch.setattr(_tiles, "FEW", 1000 if request.param == "recorded" else 0)
    return _tiles.FEW


# ------------------------------------------------------------------------------------------- oracle
def oracle(name):
    with np.load(DATA / f"{name}.npz") as file:
        data = {name: torch.from_numpy(file[name]) for name in file}
    return data, {n[6:]: v for n, v in data.items() if n.startswith("param/")}


def test_equals_the_published_code(few):
    data, state = oracle("transolver_v1")
    model = Transolver.from_reference(state)
    assert set(model.state_dict()) == set(state)
    x = data["x"].requires_grad_()
    y = model(x)
    y.backward(data["grad_y"])
    assert far(y.detach(), data["y"]) < TOLERANCE
    assert far(model.predict(x), data["y"]) < TOLERANCE
    assert far(x.grad, data["grad_x"]) < TOLERANCE
    for name, p in model.named_parameters():
        assert far(p.grad, data[f"grad/{name}"]) < TOLERANCE


def test_equals_physicsnemo(few):
    data, state = oracle("transolver_physicsnemo")
    model = Transolver.from_physicsnemo(state)
    x = data["x"].requires_grad_()
    y = model(x)
    y.backward(data["grad_y"])
    assert far(y.detach(), data["y"]) < TOLERANCE
    assert far(model.predict(x), data["y"]) < TOLERANCE
    assert far(x.grad, data["grad_x"]) < TOLERANCE
    back = model.to_physicsnemo()
    assert set(back) == set(state)
    assert all(torch.equal(back[name], state[name]) for name in state)
    for name, p in model.named_parameters():
        if name.endswith(("mlp2.weight", "ln_1.weight", "ln_2.bias")):
            theirs = name.replace("mlp2", "ln_mlp2.1").replace("ln_2", "ln_mlp1.0")
            assert far(p.grad, data[f"grad/{theirs}"]) < TOLERANCE


def test_checkpoints_of_other_models_are_refused():
    with pytest.raises(
        MeshshardError, match="not the parameters of a Transolver: 'placeholder' is missing"
    ):
        Transolver.from_reference({"weight": torch.zeros(3)})
    state = small().state_dict()
    del state["blocks.1.ln_2.bias"]
    with pytest.raises(MeshshardError, match="parameters of another model"):
        Transolver.from_reference(state)
    with pytest.raises(MeshshardError, match="variant='physicsnemo'"):
        small().to_physicsnemo()
    with pytest.raises(MeshshardError, match="built for no context"):
        small()(rows(97, 3), rows(1, 4))
    with pytest.raises(MeshshardError, match="built for context tokens of width 4"):
        small(context_dim=4)(rows(97, 3))


@pytest.mark.parametrize("variant", VARIANTS)
def test_sizes_and_options_follow_from_the_parameters(variant):
    model = small(variant, context_dim=4, mlp_ratio=1.5)
    twin = Transolver.from_reference(model.state_dict())
    if variant != "physicsnemo":
        assert twin.options == model.options
        x, context = rows(97, 3), rows(2, 4)
        assert torch.equal(twin.eval()(x, context), model.eval()(x, context))


# ------------------------------------------------------------------------------------------- shards
def loss_of(y):
    return y.sin().mean() + y.square().mean(-2).sum()


def trained(model, x, context, average, steps=2):
    """Losses, gradients of the inputs and final parameters of a few training steps."""
    torch.manual_seed(7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model(x, context))
        loss.backward()
        average()
        optimizer.step()
        losses.append(loss.detach())
    whole = x.grad.gather() if isinstance(x, ShardTensor) else x.grad
    parameters = [p.detach() for p in model.parameters()]
    parameters = [p.full_tensor() if isinstance(p, DTensor) else p.clone() for p in parameters]
    return [torch.stack(losses), whole, *parameters]


def training_job(sizes, variant, few, wrapper, batched):
    _tiles.FEW = few
    domain = init_domain()
    shape, dim = ((2, 97, 3), 1) if batched else ((97, 3), 0)
    context = rows(2, 4) if variant == "v1" else None
    model = small(variant, tile=16, context_dim=4 if variant == "v1" else 0)
    alone = shard(rows(*shape), Domain(), (97,), dim=dim).requires_grad_()
    want = trained(copy.deepcopy(model), alone, context, lambda: None)
    x = shard(rows(*shape), domain, sizes, dim=dim).requires_grad_()
    if wrapper == "ddp":
        got = trained(DistributedDataParallel(model), x, context, lambda: None)
    else:
        got = trained(model, x, context, lambda: domain.average_gradients(model))
    prediction = model.predict(x, context).gather()
    return [*map(far, got, want), far(prediction, model.eval()(x.gather(), context).detach())]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", SIZES)
def test_training_equals_serial(ranks, few, variant, size):
    wrapper, batched = ("ddp", False) if size == 3 else ("alone", size == 4)
    job = training_job, SIZES[size], variant, few, wrapper, batched
    assert max(map(max, ranks[size].run(*job))) < TOLERANCE


def fsdp_job(sizes, few):
    """Parameters sharded by FSDP2 over the ranks of the domain, each block separately."""
    _tiles.FEW = few
    domain, model = init_domain(), small(tile=16)
    alone = shard(rows(97, 3), Domain(), (97,)).requires_grad_()
    want = trained(copy.deepcopy(model), alone, None, lambda: None)
    mesh = init_device_mesh("cpu", (domain.size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = shard(rows(97, 3), domain, sizes).requires_grad_()
    return [*map(far, trained(model, x, None, lambda: None), want)]


def test_training_with_sharded_parameters(ranks, few):
    assert max(map(max, ranks[2].run(fsdp_job, SIZES[2], few))) < TOLERANCE


def traffic_job(few):
    _tiles.FEW = few
    domain = init_domain()
    model = small()
    x = shard(rows(97, 3), domain, (97, 0)).requires_grad_()
    with count_traffic(domain) as forward:
        y = model(x)
    with count_traffic(domain) as backward:
        y.backward(y.detach())
    with count_traffic(domain) as predicted:
        model.predict(x)
    return [{n: c.calls for n, c in t.counts.items()} for t in (forward, backward, predicted)]


def test_one_all_reduce_a_layer_forward_and_backward(ranks, few):
    for found in ranks[2].run(traffic_job, few):
        assert found == [{"all_reduce": 3}] * 3


# -------------------------------------------------------------------------------- bitwise equality
@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A surface in six shards."""
    mesh = io.read(AHMED / "run_8/boundary_8.vtp")
    return partition(mesh, 6).save(tmp_path_factory.mktemp("six") / "six.shards")


def bits_job(folder, dtype):
    """Outputs of `predict` and of the model, in the order of the shards."""
    shards = ms.load(folder, init_domain())
    x = shards["center"].to(dtype)
    torch.manual_seed(1)
    model = Transolver(3, 2, 32, 3, 4, 8, TransolverOptions(deterministic=True)).to(dtype)
    with torch.no_grad():
        return [y.gather().numpy() for y in (model.predict(x), model(x))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_deterministic_outputs_are_bitwise_equal_on_any_ranks(ranks, folder, dtype):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    want = bits_job(folder, dtype)
    torch.set_num_threads(threads)
    for size in (2, 3):
        for got in ranks[size].run(bits_job, folder, dtype):
            assert all(map(np.array_equal, got, want))


def test_sharding_knows_the_shards_of_each_rank(folder):
    sharding = ms.load(folder, Domain()).sharding
    assert sharding.shards == (tuple(ms.store.load(folder).sizes.tolist()),)
    assert Sharding(Domain(), (7,)).shards == ((7,),)
    with pytest.raises(MeshshardError, match=r"add up to sizes \(7,\), got \(\(2, 4\),\)"):
        Sharding(Domain(), (7,), shards=[(2, 4)])


# ------------------------------------------------------------ defaults, memory, second derivatives
def test_default_sizes_run():
    model = ms.models.Transolver(3, 1, layers=2)
    x = torch.randn(50, 3)
    assert model(x).shape == (50, 1)
    assert torch.allclose(model.predict(x), model(x), atol=1e-6)


def test_tiles_save_only_the_input_of_a_block(monkeypatch):
    """Tensors with rows that autograd saves: the inputs of the encoder and of the blocks."""
    monkeypatch.setattr(_tiles, "FEW", 0)
    model, n = small(tile=16), 640
    saved = {}

    def pack(t):
        if t.numel() >= 3 * n:
            saved[t.data_ptr()] = t.numel() / n
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(rows(n, 3))
    assert sorted(saved.values()) == [3, 24, 24, 24]


def test_second_derivatives_equal_those_of_the_modules(few):
    """A loss with second derivatives of the output by the coordinates."""
    losses = []
    for hooked in (False, True):
        model = small(tile=16)
        if hooked:  # then each module is called
            for block in model.blocks:
                block.mlp.register_forward_hook(lambda module, given, out: None)
        x = rows(97, 3).requires_grad_()
        (g,) = torch.autograd.grad(model(x)[:, 0].sum(), x, create_graph=True)
        (h,) = torch.autograd.grad(g[:, 0].sum(), x, create_graph=True)
        h[:, 0].square().mean().backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        losses.append(torch.cat([g.flatten() for g in grads]))
    assert far(*losses) < TOLERANCE


def test_replaced_modules_and_hooks_are_used(few):
    model, x = small(), rows(97, 3)
    want = model(x)
    model.blocks[1].mlp = nn.Sequential(model.blocks[1].mlp, nn.Identity())
    assert far(model(x), want) < TOLERANCE
    assert far(model.predict(x), want) < TOLERANCE
    model.preprocess.linear_post.register_forward_hook(lambda module, given, out: 0 * out)
    assert far(model(x), want) > 1e-3
    assert torch.equal(model.predict(x), model(x))


def test_training_noise_is_keyed_by_the_row_in_the_source(few):
    """Rows in another order get the same noise, if the sharding knows their rows in the source."""
    model, x = small("plus"), rows(97, 3)
    order = torch.from_numpy(np.random.default_rng(0).permutation(97))
    domain = Domain()
    outs = []
    for origin in (torch.arange(97), order):
        torch.manual_seed(3)
        mine = ShardTensor.from_local(x[origin], Sharding(domain, (97,), origin))
        outs.append(torch.empty(97, 2, dtype=x.dtype).index_copy(0, origin, model(mine).gather()))
    assert far(outs[1], outs[0]) < TOLERANCE
    assert not torch.equal(model(x), model(x))
    assert torch.equal(model.predict(x), model.predict(x))


# --------------------------------------------------------------------------------- modified modules
class Adapted(nn.Linear):
    """A linear layer with a low-rank adapter, as for fine-tuning."""

    def __init__(self, base):
        super().__init__(base.in_features, base.out_features, base.bias is not None)
        self.double().load_state_dict(base.state_dict())
        self.down = nn.Parameter(rows(2, base.in_features) / 3)
        self.up = nn.Parameter(rows(base.out_features, 2) / 3)

    def forward(self, x):
        return super().forward(x) + x @ self.down.T @ self.up.T


def adapt(where, name):
    setattr(where, name, Adapted(getattr(where, name)))


CHANGES = {
    "adapter of the weights' input": lambda b: adapt(b.Attn, "in_project_x"),
    "adapter among the slices": lambda b: adapt(b.Attn, "to_q"),
    "adapter of the output": lambda b: adapt(b.Attn.to_out, "0"),
    "one more module": lambda b: b.Attn.to_out.append(nn.Hardtanh(-0.05, 0.05)),
    "no bias": lambda b: b.Attn.register_module("in_project_x", nn.Linear(24, 24, False).double()),
    "hook": lambda b: b.Attn.in_project_slice.register_forward_hook(lambda m, i, o: 2 * o),
    "hook of gradients": lambda b: b.mlp.linear_post.register_full_backward_hook(
        lambda m, given, out: (2 * given[0],)
    ),
    "eps": lambda b: setattr(b.ln_2, "eps", 0.1),
    "activation": lambda b: setattr(b.mlp.linear_pre[1], "approximate", "tanh"),
    "forward": lambda b: setattr(b.mlp, "forward", lambda x: 0 * x),
}


def by_hand(block, x):
    """A block of the published code with a call of each module, on one rank."""
    attn = block.Attn
    z = block.ln_1(x)
    made = attn.in_project_x(z).unflatten(-1, (4, -1)).transpose(-2, -3)
    if attn.variant == "plus":
        f, T = made, (attn.proj_temperature(made) + attn.bias[0]).clamp(min=0.01)
    else:
        f = attn.in_project_fx(z).unflatten(-1, (4, -1)).transpose(-2, -3)
        T = attn.temperature[0]
        T = T.clamp(0.5, 5) if attn.variant == "physicsnemo" else T
    w = (attn.in_project_slice(made) / T).softmax(-1)
    eps = 1e-2 if attn.variant == "physicsnemo" else 1e-5
    s = w.mT @ f / (w.sum(-2) + eps)[..., None]
    q, k, v = attn.to_q(s), attn.to_k(s), attn.to_v(s)
    out = w @ (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
    h = x + attn.to_out(out.transpose(-2, -3).flatten(-2))
    return h + block.mlp(block.ln_2(h))


def modified_job(change, variant):
    """Largest difference of a modified block to a call of each module: rows and gradients."""
    domain = init_domain()
    block = small(variant).eval().blocks[0]
    CHANGES[change](block)
    twin = copy.deepcopy(block)
    x = rows(97, 24)
    seen = x.clone().requires_grad_()
    mine = shard(x, domain, SIZES.get(domain.size, [97])).requires_grad_()
    want, got = by_hand(twin, seen), block(mine)
    want.sin().sum().backward(), got.sin().sum().backward()
    domain.average_gradients(block)
    found = [far(got.gather().detach(), want.detach()), far(mine.grad.gather(), seen.grad)]
    pairs = zip(block.parameters(), twin.parameters(), strict=True)
    return max(*found, *(far(p.grad, q.grad) for p, q in pairs if q.grad is not None))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_modified_modules_are_used(few, change, variant):
    assert modified_job(change, variant) < TOLERANCE


@pytest.mark.parametrize("change", ["adapter among the slices", "hook", "one more module"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_modified_modules_are_used_on_shards(ranks, change, variant):
    assert max(ranks[3].run(modified_job, change, variant)) < TOLERANCE


def test_predict_of_a_modified_model_restores_training_modes():
    model = Transolver(3, 1, 16, 2, 2, 4).train()
    model.blocks[0].eval()  # frozen by its user
    model.blocks[1].mlp.register_forward_hook(lambda module, given, out: out * 2)
    x = torch.randn(40, 3)
    with torch.no_grad():
        assert torch.equal(model.predict(x), model(x))
    assert (model.training, model.blocks[0].training, model.blocks[1].training) == (1, 0, 1)


@pytest.mark.parametrize("tile", [None, 0])
def test_predict_under_autocast_equals_the_model(monkeypatch, tile):
    monkeypatch.setattr(_tiles, "FEW", 0)
    model, x = small(tile=tile).float().eval(), rows(97, 3).float()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert torch.equal(model.predict(x), model(x))
