"""DGCNN: a new graph in each layer; sharded equals serial in outputs, gradients and training."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshshard.comm import init_domain
from meshshard.comm.domain import count_traffic
from meshshard.models import DGCNN, DynamicEdgeConv
from meshshard.nn import knn_graph
from meshshard.tensor import Sharding, shard
from meshshard.tensor.shard_tensor import MeshshardError

SIZES = {1: [60], 2: [19, 41], 3: [0, 38, 22], 4: [1, 30, 0, 29]}


def model_and_points(norm, seed=0):
    torch.manual_seed(seed)
    model = DGCNN(5, 2, k=6, hidden=8, layers=3, norm=norm).double()
    x = torch.randn(60, 5, dtype=torch.float64)
    x[7] = x[50]  # coincident points
    return model, x, torch.randn(60, 2, dtype=torch.float64)


def step(model, x, y):
    loss = (model(x) - y).square().mean()
    loss.backward()
    return loss.detach()


def gradient_job(norm):
    domain = init_domain()
    model, whole, y = model_and_points(norm)
    serial, a = copy.deepcopy(model), whole.clone().requires_grad_()
    sharding = Sharding(domain, SIZES[domain.size])
    x = shard(whole, domain, sharding).detach().requires_grad_()
    want = step(serial, a, y)
    got = step(model, x, shard(y, domain, sharding))
    domain.average_gradients(model)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    torch.testing.assert_close(x.grad.gather(), a.grad, rtol=1e-9, atol=1e-12)
    for p, q in zip(model.parameters(), serial.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12)
    for p, q in zip(model.buffers(), serial.buffers(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("norm", ["batch", "layer", None])
@pytest.mark.parametrize("size", SIZES)
def test_sharded_equals_serial(ranks, size, norm):
    if size == 1:
        gradient_job(norm)
    else:
        ranks[size].run(gradient_job, norm)


def training_job():
    """Compare 20 training steps under DDP with one rank; the last loss."""
    domain = init_domain()
    model, whole, y = model_and_points("batch")
    serial = copy.deepcopy(model)
    model = DistributedDataParallel(model)
    sharding = Sharding(domain, SIZES[domain.size])
    x, target = shard(whole, domain, sharding), shard(y, domain, sharding)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, serial)]
    for _ in range(20):
        losses = step(model, x, target), step(serial, whole, y)
        torch.testing.assert_close(*losses, rtol=1e-9, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return float(losses[0])


@pytest.mark.slow
def test_training_under_ddp_equals_serial(ranks):
    losses = ranks[3].run(training_job)
    assert len(set(losses)) == 1
    assert losses[0] < 1.2


def test_edge_convolution_equals_pyg_including_ties():
    from torch_geometric.nn import EdgeConv

    torch.manual_seed(1)
    h = nn.Sequential(nn.Linear(6, 4), nn.ReLU()).double()
    x = torch.randint(3, (40, 3)).double().requires_grad_()  # ReLU and lattice: ties everywhere
    graph = knn_graph(x, 5, loop=True)
    v = torch.randn(40, 4, dtype=torch.float64)
    want = EdgeConv(h, aggr="max")(x, graph.edge_index)
    got = DynamicEdgeConv(h, 5)(x)
    assert torch.equal(got, want)
    inputs = (x, *h.parameters())
    pairs = zip(
        torch.autograd.grad(got, inputs, v), torch.autograd.grad(want, inputs, v), strict=True
    )
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)


def positions_job():
    domain = init_domain()
    model, whole, _ = model_and_points("layer")
    pos = torch.rand(60, 3, dtype=torch.float64)
    sharding = Sharding(domain, SIZES[domain.size])
    got = model(shard(whole, domain, sharding), shard(pos, domain, sharding))
    torch.testing.assert_close(got.gather(), model(whole, pos), rtol=1e-12, atol=1e-13)
    with count_traffic(domain) as traffic:
        got.sum().backward()
    return {kind: count.calls for kind, count in traffic.counts.items()}


def test_neighbors_by_position_and_collectives_of_backward(ranks):
    assert ranks[2].run(positions_job)[0] == {"accumulate": 2, "all_reduce": 2}


def test_an_unknown_norm_is_refused():
    with pytest.raises(
        MeshshardError, match="expected a norm of batch, layer or None, got 'group'"
    ):
        DGCNN(3, 1, norm="group")
