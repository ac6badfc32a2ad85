"""MeshGraphNet: equal to its maths on the whole graph, and to itself on any ranks."""

import copy

import convs
import pytest
import torch
import torch_geometric.nn as pyg
from convs import divided, farthest, grid, own, sample
from torch import nn
from torch_geometric.nn import MessagePassing

from meshshard.comm import Domain, init_domain, simulate
from meshshard.comm.domain import count_traffic
from meshshard.errors import MeshshardError
from meshshard.models import MeshGraphNet
from meshshard.nn import DeepHalo, convert, knn_graph
from meshshard.tensor import NoShardRule, ShardGraph, Sharding, ShardTensor

NODE, WIDTH = convs.CHANNELS, 8


def reference(model, x, edges, e):
    """The model as its paper says, on a whole graph."""
    x, e = model.encode_nodes(x), model.encode_edges(e)
    for block in model.down[0]:
        e = e + block.edges(torch.cat([x[edges[1]], x[edges[0]], e], -1))
        arrived = torch.zeros_like(x).index_add(0, edges[1], e)
        x = x + block.nodes(torch.cat([x, arrived], -1))
    return model.decode(x)


def made(layers=3, width=WIDTH):
    torch.manual_seed(1)
    return MeshGraphNet(NODE, convs.EDGE, 3, width, layers).double()


def exact_job(directed):
    """Output and every gradient, first and second."""
    domain = init_domain()
    edges, graph, x, e = sample(domain, directed)
    model = made()
    ours = copy.deepcopy(model)
    a, b = x.clone().requires_grad_(), e.clone().requires_grad_()
    out = reference(model, a, edges, b)
    out.square().sum().backward()
    shards = own(x, graph.nodes), graph.take(e).requires_grad_()
    with count_traffic(domain) as forward:
        got = ours(shards[0], graph, shards[1])
    got.square().sum().backward()
    domain.average_gradients(ours)
    found = {
        "output": farthest(got.detach().gather(), out.detach()),
        "x": farthest(shards[0].grad.gather(), a.grad),
        "e": farthest(shards[1].grad.to_local(), b.grad[graph.edges.origin]),
    }
    for (name, p), q in zip(ours.named_parameters(), model.parameters(), strict=True):
        found[name] = farthest(p.grad, q.grad)
    if domain.size > 1:
        assert forward.counts["exchange"].calls == len(model.down[0])
        assert forward.counts["exchange"].rows == 3 * sum(graph.exchange.send)
    return {k: v for k, v in found.items() if v > 1e-10}


@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_model_is_that_of_the_paper(ranks, size, directed):
    found = [exact_job(directed)] if size == 1 else ranks[size].run(exact_job, directed)
    assert found == [{}] * size


def second(model, x, graph, e):
    """A residual of derivatives of the output by the nodes."""
    out = model(x, graph, e)
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    loss = (slope[:, :3] - out).square().mean()
    loss.backward()
    return loss.detach()


def second_job():
    domain = init_domain()
    edges, graph, x, e = sample(domain, directed=True)
    model = made(2)
    ours = copy.deepcopy(model)
    serial = convs.serial(edges)
    want = second(model, own(x, serial.nodes), serial, serial.take(e))
    got = second(ours, own(x, graph.nodes), graph, graph.take(e))
    domain.average_gradients(ours)
    pairs = zip(ours.parameters(), model.parameters(), strict=True)
    return max([farthest(got, want), *[farthest(p.grad, q.grad) for p, q in pairs]])


@pytest.mark.parametrize("size", [2, 3])
def test_second_derivatives(ranks, size):
    assert max(ranks[size].run(second_job)) < 1e-10


def float32_job(metis):
    domain = init_domain()
    edges, nodes, origin = divided(grid(24, 20), 480, domain, metis)
    edges = edges[:, torch.argsort(edges[1], stable=True)]
    graph, whole = ShardGraph.from_edge_index(edges, nodes), convs.serial(edges, 480)
    x = torch.randn(480, NODE, generator=torch.Generator().manual_seed(1))[origin]
    e = torch.rand(edges.shape[1], convs.EDGE, generator=torch.Generator().manual_seed(2))
    model = made(width=32).float()
    with torch.no_grad():
        want = model(x, edges, e)
        got = model(own(x, nodes), graph, graph.take(e)).gather()
        return max(farthest(model(x, whole, e), want), farthest(got, want))


@pytest.mark.parametrize("metis", [True, False], ids=["metis", "random"])
def test_outputs_in_float32_equal_serial_to_rounding(ranks, metis):
    assert max(ranks[3].run(float32_job, metis)) < 1e-5


def trajectory_job():
    """Losses of 30 steps of Adam, serial and sharded."""
    domain = init_domain()
    edges, graph, x, e = sample(domain, directed=True)
    model, losses = made(), []
    target = torch.sin(x[:, :3])
    serial = convs.serial(edges)
    for where, one in ((serial, copy.deepcopy(model)), (graph, model)):
        optimizer = torch.optim.Adam(one.parameters(), lr=1e-2)
        curve = []
        for _ in range(30):
            optimizer.zero_grad()
            out = one(own(x, where.nodes), where, where.take(e))
            loss = nn.functional.mse_loss(out, convs.shard_of(target, where.nodes))
            loss.backward()
            where.domain.average_gradients(one)
            optimizer.step()
            curve.append(loss.item())
        losses.append(curve)
    assert losses[0][-1] < 0.7 * losses[0][0]
    return farthest(torch.tensor(losses[1]), torch.tensor(losses[0]))


@pytest.mark.slow
def test_training_is_that_of_one_rank(ranks):
    assert max(ranks[3].run(trajectory_job)) < 1e-9


DEEP = {
    "MeshGraphNet": (lambda: MeshGraphNet(NODE, convs.EDGE, 3, 8, 3), 3),
    "GCN": (lambda: convert(pyg.GCN(NODE, 8, 2, 3, dropout=0.3)), 3),
    "GATv2": (lambda: convert(pyg.GAT(NODE, 8, 2, 3, dropout=0.3, v2=True)), 2),
    "SAGE": (lambda: convert(pyg.GraphSAGE(NODE, 8, 2, 3)), 2),
}


def deep_job(name):
    """One exchange for three layers: outputs and gradients of one for each."""
    domain = init_domain()
    _, graph, x, e = sample(domain, directed=True)
    torch.manual_seed(2)
    make, depth = DEEP[name]
    model = make().double()
    deep = DeepHalo(copy.deepcopy(model), depth)
    results, more = [], (e,) if name == "MeshGraphNet" else ()
    for one in (model, deep):
        torch.manual_seed(5)
        rows, edges = own(x, graph.nodes), [graph.take(m).requires_grad_() for m in more]
        out = one(rows, graph, *edges)
        out.square().sum().backward()
        domain.average_gradients(one)
        grads = [p.grad for p in one.parameters()]
        results.append([out.detach().gather(), rows.grad.gather(), *grads])
        results[-1] += [edge.grad.gather() for edge in edges]
    with count_traffic(domain) as traffic:
        deep(own(x, graph.nodes), graph, *[graph.take(m) for m in more])
    calls = traffic.counts["exchange"].calls if domain.size > 1 else 1 + len(more)
    assert calls == 1 + len(more)
    return max(farthest(a, b) for a, b in zip(results[1], results[0], strict=True))


@pytest.mark.parametrize("name", ["MeshGraphNet", "GCN", "GATv2", "SAGE"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_one_exchange_for_several_layers(ranks, size, name):
    found = [deep_job(name)] if size == 1 else ranks[size].run(deep_job, name)
    assert max(found) < 1e-10


def test_norms_over_rows_in_a_deep_halo_are_refused():
    with pytest.raises(NoShardRule, match="BatchNorm1d in DeepHalo"):
        DeepHalo(convert(pyg.GCN(4, 4, 2, norm="BatchNorm")), 2)


@pytest.mark.parametrize("name", ["MeshGraphNet", "GCN", "GATv2", "SAGE"])
def test_a_depth_that_is_too_small_is_refused(name):
    def rank(domain):
        _, graph, x, e = sample(domain, directed=True)
        make, depth = DEEP[name]
        torch.manual_seed(2)
        deep = DeepHalo(make().double(), depth - 1)
        with pytest.raises(MeshshardError, match=f"more than {depth - 1} hops? away"):
            deep(own(x, graph.nodes), graph, *([graph.take(e)] if name == "MeshGraphNet" else []))

    simulate(3, rank)


class Coupled(nn.Module):
    """A convolution, and something of all rows."""

    def __init__(self, couple):
        super().__init__()
        self.conv, self.couple = convert(pyg.SAGEConv(NODE, NODE)), couple

    def forward(self, x, graph):
        return self.couple(self.conv(x, graph))


COUPLES = {
    "mean": lambda x: x - x.mean(0),
    "softmax": lambda x: x.softmax(0),
    "pool": lambda x: x + pyg.global_mean_pool(x, None),
    "readout": lambda x: pyg.global_max_pool(x, None),
    "running sums": lambda x: x.cumsum(0),
    "layer norm": lambda x: pyg.LayerNorm(NODE).double()(x),
    "attention": lambda x: nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])[0],
    "latents": lambda x: nn.functional.scaled_dot_product_attention(
        torch.ones(1, 3, NODE).double(), x[None], x[None]
    )[0],
    "grid": lambda x: nn.Conv1d(NODE, NODE, 3, padding=1).double()(x.T[None])[0].T,
    "neighbors": lambda x: convert(pyg.SAGEConv(NODE, NODE).double())(x, knn_graph(x, 3)),
    "mask": lambda x: x[x[:, 0] > 0],
    "slice": lambda x: x[:5],
    "one row": lambda x: x - x[0],
}


@pytest.mark.parametrize("name", COUPLES)
def test_functions_of_all_rows_in_a_deep_halo_are_refused(name):
    def rank(domain):
        _, graph, x, _ = sample(domain, directed=True)
        deep = DeepHalo(Coupled(COUPLES[name]).double(), 1)
        with pytest.raises(MeshshardError, match=r"couples rows|one row for each node"):
            deep(own(x, graph.nodes), graph)

    simulate(2, rank)


class Centered(MessagePassing):
    """A user-defined convolution that subtracts the mean of all rows."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x - x.mean(0))


def test_a_users_convolution_is_checked_in_a_deep_halo():
    def rank(domain):
        _, graph, x, _ = sample(domain, directed=True)
        with pytest.raises(MeshshardError, match="Centered is not exact on shards"):
            DeepHalo(convert(Centered()), 2)(own(x, graph.nodes), graph)

    simulate(3, rank)


def test_edges_of_another_order_are_refused():
    nodes = Sharding(Domain(), [9])
    edges = torch.randint(0, 9, (2, 20), generator=torch.Generator().manual_seed(0))
    graph = ShardGraph.from_edge_index(edges, nodes)
    x = ShardTensor.from_local(torch.randn(9, 2), nodes)
    model = MeshGraphNet(2, 3, 1, hidden=4, layers=1)
    with pytest.raises(MeshshardError, match=r"edges .* are plain; expected .* graph.take"):
        model(x, graph, torch.randn(20, 3))
    with pytest.raises(
        MeshshardError, match=r"nodes .* are sharded on dim 0 with .*; expected the graph's"
    ):
        model(x[:5], graph, graph.take(torch.randn(20, 3)))
    with pytest.raises(
        MeshshardError, match=r"expected a tensor sharded along dim 0 .*redistribute"
    ):
        graph.local(x[:5])
