"""torch.compile: a model's local computation with the exchange inside, and whole models."""

import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from meshshard.comm import DomainError, Exchange, init_domain
from meshshard.comm.domain import count_traffic
from meshshard.models import Transolver, TransolverOptions
from meshshard.nn.slices import _tiles
from meshshard.tensor import ShardTensor, shard

pytestmark = pytest.mark.slow

MESHES = 10


class Layer(nn.Module):
    """A graph layer on owned rows: one exchange of halo rows, one global mean."""

    def __init__(self, domain):
        super().__init__()
        self.domain = domain
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x, plan, edges):
        h = torch.relu(self.first(x))
        local = self.domain.exchange(h, plan)
        h = h + torch.zeros_like(h).index_add(0, edges[1], local[edges[0]])
        out = self.last(h)
        return out - self.domain.all_reduce(out.sum()) / 100


def rows_of(mesh, rank):
    """Number of owned rows: all meshes differ, and rank 1 owns no rows of one."""
    return 0 if (mesh, rank) == (4, 1) else 11 + 3 * mesh + rank


def sent(mesh, a, b):
    """Number of rows that rank a sends to rank b: often none."""
    if a == b or not rows_of(mesh, a) or not rows_of(mesh, b):
        return 0
    return (3 * a + 5 * b + 7 * mesh) % 4 * ((a + b + mesh) % 3)


def mesh_of(domain, mesh):
    n, me, others = rows_of(mesh, domain.rank), domain.rank, range(domain.size)
    send, receive = [sent(mesh, me, b) for b in others], [sent(mesh, b, me) for b in others]
    rows = torch.tensor([i % n for k in send for i in range(k)], dtype=torch.int64)
    plan = Exchange(domain, n, rows, send, receive)
    n_edges = 40 + mesh if n else 0
    sources = torch.randint(0, n + plan.n_halo, (n_edges,)) if n else torch.zeros(0).long()
    return plan, torch.stack([sources, torch.randint(0, max(n, 1), (n_edges,))])


def local_job(backend, dynamic, meshes):
    domain = init_domain()
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Layer(domain).double()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend=counter)
    error, traffic = 0.0, []
    for mesh in range(meshes):
        plan, edges = mesh_of(domain, mesh)
        start = torch.randn(plan.n_owned, 4, dtype=torch.float64)
        results = []
        for run in (model, compiled):
            model.zero_grad()
            x = start.clone().requires_grad_()
            with count_traffic(domain) as counts:
                out = run(x, plan, edges)
                domain.all_reduce(out.square().sum()).backward()
            traffic.append({k: v for k, v in counts.counts.items() if k != "all_reduce"})
            results.append([out.detach(), x.grad, *[p.grad for p in model.parameters()]])
        assert traffic[-1] == traffic[-2]  # the traffic of compiled code is counted too
        pairs = [(a, b) for a, b in zip(*results, strict=True) if a.numel()]
        error = max([error, *[(a - b).abs().max().item() for a, b in pairs]])
    return counter.frame_count, error


@pytest.mark.parametrize("size", [2, 4])
def test_ten_meshes_need_two_compilations(ranks, size):
    for compilations, error in ranks[size].run(local_job, "aot_eager", True, MESHES):
        assert compilations <= 2
        assert error <= 1e-12


def test_sizes_become_dynamic_automatically(ranks):
    for compilations, error in ranks[2].run(local_job, "aot_eager", None, 4):
        assert compilations <= 2
        assert error <= 1e-12


def disagreeing_job():
    """Plans are checked in compiled code too, before their first use."""
    domain = init_domain()
    torch._dynamo.reset()
    n = 4 if domain.rank else 3
    send, receive = [2, 2], [n, n]
    send[domain.rank] = receive[domain.rank] = 0
    plan = Exchange(domain, 5, torch.arange(2), send, receive, "ring")
    run = torch.compile(domain.exchange, fullgraph=True, backend="aot_eager")
    with pytest.raises(DomainError, match="ring: rank 0 sends 2 rows to rank 1, which expects 4"):
        run(torch.zeros(5, 1), plan)
    return True


def test_an_inconsistent_plan_is_an_error(ranks):
    assert all(ranks[2].run(disagreeing_job))


class Mixed(nn.Module):
    """A model with sharded rows, a replicated mean, and sharded rows again."""

    def __init__(self):
        super().__init__()
        self.first, self.batch, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x, scale):
        h = nn.functional.gelu(self.batch(self.first(x)))
        shared = torch.sigmoid(self.last(h.mean(0)) * scale)
        return self.last(h) * shared


def whole(seed):
    return torch.randn(14, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def sharded_job(how):
    """A compiled model runs uncompiled if its input is a ShardTensor."""
    domain = init_domain()
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, scale = Mixed().double(), torch.tensor(0.3).double()
    run = model
    if how == "module":
        model.compile(backend="aot_eager")
    else:
        run = torch.compile(model, backend="aot_eager", dynamic=how == "dynamic" or None)
    error = 0.0
    sizes = {2: [(3, 11), (14, 0)], 4: [(5, 0, 7, 2), (0, 0, 13, 1)]}[domain.size]
    for seed in range(3):
        sx = shard(whole(seed), domain, sizes[seed % 2]).requires_grad_()
        x = whole(seed).requires_grad_()
        model.zero_grad()
        got = run(sx, scale).square().mean()
        got.backward()
        domain.average_gradients(model)
        mine = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        want = run(x, scale).square().mean()  # the same object with a plain tensor: compiled
        want.backward()
        pairs = [(got, want), (sx.grad.gather(), x.grad)]
        pairs += [(g, p.grad) for g, p in zip(mine, model.parameters(), strict=True)]
        error = max([error, *[(a - b).abs().max().item() for a, b in pairs]])
    return error


@pytest.mark.parametrize(("size", "how"), [(2, "default"), (4, "dynamic"), (2, "module")])
def test_a_compiled_model_on_a_sharded_tensor(ranks, size, how):
    assert max(ranks[size].run(sharded_job, how)) <= 1e-12


def tiles_job():
    """A compiled Transolver, in tiles, with a ShardTensor as input."""
    _tiles.FEW = 0
    domain = init_domain()
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Transolver(6, 2, 16, 2, 4, 5, TransolverOptions(tile=4)).double()
    run = torch.compile(model, backend="aot_eager")
    sx, x = shard(whole(1), domain, (3, 11)).requires_grad_(), whole(1).requires_grad_()
    got, want = run(sx).square().mean(), model(x).square().mean()
    got.backward()
    want.backward()
    return max((got - want).abs().item(), (sx.grad.gather() - x.grad).abs().max().item())


def test_a_compiled_model_in_tiles_on_a_sharded_tensor(ranks):
    assert max(ranks[2].run(tiles_job)) <= 1e-12


def rows_job():
    """Compiled functions of owned rows; the result is made sharded outside or inside of them."""
    warnings.filterwarnings(
        "ignore", r"The \.grad attribute of a Tensor that is not a leaf"
    )  # torch
    domain = init_domain()
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8)).double()
    outside = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    inside = torch.compile(
        lambda rows, sharding: ShardTensor.from_local(model(rows), sharding), backend="aot_eager"
    )
    runs = {
        "outside": lambda x: ShardTensor.from_local(outside(x.to_local()), x.sharding),
        "inside": lambda x: inside(x.to_local(), x.sharding),
    }
    errors = []
    for run in runs.values():
        sx, x = shard(whole(1), domain, (3, 11)).requires_grad_(), whole(1).requires_grad_()
        got, want = (run(sx) * run(sx).mean(0)).sum(), (model(x) * model(x).mean(0)).sum()
        got.backward()
        want.backward()
        errors += [(got - want).abs().item(), (sx.grad.gather() - x.grad).abs().max().item()]
    return max(errors)


def test_functions_of_owned_rows_compile(ranks):
    assert max(ranks[2].run(rows_job)) <= 1e-12


def test_fullgraph_with_a_sharded_tensor_is_refused():
    torch._dynamo.reset()
    x = shard(whole(0), init_domain(), (14,))
    run = torch.compile(nn.Linear(6, 2).double(), fullgraph=True, backend="eager")
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match=r"compile a function of the owned rows"
    ):
        run(x)
