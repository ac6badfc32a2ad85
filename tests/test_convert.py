"""Whole models of PyG on shards: converted in one call, equal to the whole graph, and trained."""

import copy

import convs
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import torch_geometric.nn as pyg
import torch_geometric.utils as pyg_utils
from convs import C, farthest, own, sample
from samples import surface
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshshard.comm import Domain, init_domain
from meshshard.nn import convert
from meshshard.partitioning.partition import partition
from meshshard.ranks.shard import load
from meshshard.tensor import NoShardRule, ShardTensor


class GCN(nn.Module):
    """PyG's introduction by example: two layers with dropout."""

    def __init__(self):
        super().__init__()
        self.conv1 = pyg.GCNConv(C, 16)
        self.conv2 = pyg.GCNConv(16, 4)

    def forward(self, x, edge_index):
        x = F.relu(self.conv1(x, edge_index))
        x = F.dropout(x, training=self.training)
        return F.log_softmax(self.conv2(x, edge_index), dim=1)


class GAT(nn.Module):
    """PyG's examples/gat.py with GATv2, norms and a skip connection."""

    def __init__(self):
        super().__init__()
        self.conv1 = pyg.GATv2Conv(C, 8, heads=4, dropout=0.3)
        self.norm = pyg.BatchNorm(32)
        self.skip = nn.Linear(C, 32)
        self.conv2 = pyg.GATv2Conv(32, 4, heads=1, concat=False, dropout=0.3)

    def forward(self, x, edge_index):
        x = F.dropout(x, p=0.3, training=self.training)
        x = F.elu(self.norm(self.conv1(x, edge_index)) + self.skip(x))
        return F.log_softmax(self.conv2(x, edge_index), dim=-1)


class EdgeNet(nn.Module):
    """Layers of PyG's examples/dgcnn_segmentation.py on a given graph, with a global readout."""

    def __init__(self):
        super().__init__()
        self.conv1 = pyg.EdgeConv(pyg.MLP([2 * C, 16, 16]), "max")
        self.conv2 = pyg.EdgeConv(pyg.MLP([32, 16]), "mean")
        self.mlp = pyg.MLP([64, 16, 4], dropout=0.3, norm=None)

    def forward(self, x, edge_index):
        a = self.conv1(x, edge_index)
        b = self.conv2(a, edge_index)
        all_of = pyg.global_max_pool(torch.cat([a, b], 1), None)
        return F.log_softmax(self.mlp(torch.cat([a, b, all_of.expand(len(a), -1)], 1)), -1)


class Stack(nn.Module):
    """A jumping-knowledge model that PyG ships."""

    def __init__(self):
        super().__init__()
        self.net = pyg.GraphSAGE(C, 16, 3, 4, dropout=0.2, norm="GraphNorm", jk="cat")

    def forward(self, x, edge_index):
        return F.log_softmax(self.net(x, edge_index), -1)


class Memory(nn.Module):
    """Jumping knowledge by an LSTM over what each node was, layer by layer."""

    def __init__(self):
        super().__init__()
        self.net = pyg.GCN(C, 16, 3, 4, jk="lstm")

    def forward(self, x, edge_index):
        return F.log_softmax(self.net(x, edge_index), -1)


class Isomorphism(nn.Module):
    """Nets inside convolutions, with batch norm, and a pool of groups."""

    def __init__(self):
        super().__init__()
        self.net = pyg.GIN(C, 16, 2, 4, norm="PairNorm")

    def forward(self, x, edge_index):
        return F.log_softmax(self.net(x, edge_index), -1)


MODELS = {model.__name__: model for model in (GCN, GAT, EdgeNet, Stack, Memory, Isomorphism)}


def trained(model, x, graph, labels, steps=4):
    """Losses of a few steps of Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = F.nll_loss(model(x, graph), labels)
        loss.backward()
        if isinstance(x, ShardTensor):
            graph.domain.average_gradients(model)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def model_job(name):
    """Trained on shards and on one rank: with dropout the same draws; then evaluated as by PyG."""
    domain = init_domain()
    edges, graph, x, _ = sample(domain, directed=True)
    labels = torch.arange(60) % 4
    torch.manual_seed(0)
    model = MODELS[name]().double()
    for p in model.parameters():
        nn.init.normal_(p, std=0.2)
    serial = convert(copy.deepcopy(model))
    whole = convs.serial(edges)
    ours = convert(model)
    want = trained(serial, own(x, whole.nodes), whole, convs.shard_of(labels, whole.nodes))
    got = trained(ours, own(x, graph.nodes), graph, convs.shard_of(labels, graph.nodes))
    serial.eval(), ours.eval()
    with torch.no_grad():
        plain = serial(x, edges)
        mine = ours(own(x, graph.nodes), graph).gather()
    return farthest(torch.tensor(got), torch.tensor(want)), farthest(mine, plain)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_small_models_of_pyg(ranks, name, size):
    for found in ranks[size].run(model_job, name):
        assert max(found) < 1e-9


NORMS = {
    "BatchNorm": lambda: pyg.BatchNorm(C),
    "GraphNorm": lambda: pyg.GraphNorm(C),
    "PairNorm": lambda: pyg.PairNorm(),
    "PairNorm individually": lambda: pyg.PairNorm(scale_individually=True),
    "InstanceNorm": lambda: pyg.InstanceNorm(C, affine=True),
    "LayerNorm graph": lambda: pyg.LayerNorm(C),
    "LayerNorm node": lambda: pyg.LayerNorm(C, mode="node"),
    "MeanSubtractionNorm": lambda: pyg.MeanSubtractionNorm(),
    "DiffGroupNorm": lambda: pyg.DiffGroupNorm(C, 3),
    "GraphSizeNorm": lambda: pyg.GraphSizeNorm(),
    "nn.BatchNorm1d": lambda: nn.BatchNorm1d(C),
}
BATCHED = {"GraphNorm", "PairNorm", "InstanceNorm", "LayerNorm graph", "MeanSubtractionNorm"}


def norms_job():
    """Norms of PyG over the nodes of one graph and of several."""
    domain = init_domain()
    _, graph, x, _ = sample(domain, directed=True)
    batch = torch.arange(60) // 13
    wrong = {}
    for name, make in NORMS.items():
        for groups in (None, batch):
            if groups is not None and name not in BATCHED:
                continue
            norm = make().double()
            ours = convert(copy.deepcopy(norm))
            a, b = x.clone().requires_grad_(), own(x, graph.nodes)
            given = () if groups is None else (groups,)
            mine = () if groups is None else (convs.shard_of(groups, graph.nodes),)
            out, got = norm(a, *given), ours(b, *mine)
            (out**3).sum().backward()
            (got**3).sum().backward()
            domain.average_gradients(ours)
            found = [farthest(got.detach().gather(), out.detach())]
            found.append(farthest(b.grad.gather(), a.grad, a.detach().abs().max()))
            pairs = zip(norm.parameters(), ours.parameters(), strict=True)
            found += [farthest(q.grad, p.grad) for p, q in pairs]
            if max(found) > 1e-10:
                wrong[name, groups is None] = found
    return wrong


@pytest.mark.parametrize("size", [2, 4])
def test_norms_over_nodes(ranks, size):
    assert ranks[size].run(norms_job) == [{}] * size


POOLS = {
    "mean": lambda x, b: pyg.global_mean_pool(x, b),
    "sum": lambda x, b: pyg.global_add_pool(x, b),
    "max": lambda x, b: pyg.global_max_pool(x, b),
    "max of ties": lambda x, b: pyg.global_max_pool(F.relu(x), b),
    "min": lambda x, b: pyg_utils.scatter(x, b, 0, None, "min"),
    "aggr": lambda x, b: pyg.MultiAggregation(["mean", "max", "std"])(x, b),
    "softmax": lambda x, b: pyg.SoftmaxAggregation()(x, b),
    "attention": lambda x, b: _attention(x, b),
}


def _attention(x, b):
    torch.manual_seed(3)
    return pyg.AttentionalAggregation(nn.Linear(C, 1).double())(x, b)


def pools_job():
    """Readouts of several graphs in one, and of one."""
    domain = init_domain()
    _, graph, x, _ = sample(domain, directed=True)
    batch = torch.arange(60) // 13
    wrong = {}
    for name, pool in POOLS.items():
        a, b = x.clone().requires_grad_(), own(x, graph.nodes)
        out, got = pool(a, batch), pool(b, convs.shard_of(batch, graph.nodes))
        (out**3).sum().backward()
        (got**3).sum().backward()
        found = [farthest(got.detach(), out.detach()), farthest(b.grad.gather(), a.grad)]
        if max(found) > 1e-12:
            wrong[name] = found
    return wrong


@pytest.mark.parametrize("size", [2, 4])
def test_global_pools(ranks, size):
    assert ranks[size].run(pools_job) == [{}] * size


def test_an_edge_index_that_is_a_graph_is_refused_by_name():
    edges, graph, x, _ = sample(Domain(), directed=True)
    for use, name in [
        (lambda g: [*g], "row, col = edge_index"),
        (lambda g: g[0], r"edge_index\[0\]"),
        (lambda g: g.flip(0), "edge_index.flip"),
        (lambda g: torch.cat([g, g], 1), "cat"),
        (lambda g: pyg_utils.add_self_loops(g, num_nodes=60), "edge_index"),
        (lambda g: pyg_utils.degree(g[1]), "edge_index"),
        (lambda g: convert(pyg.DirGNNConv(pyg.SAGEConv(C, C)).double())(x, g), "edge_index.flip"),
    ]:
        with pytest.raises(NoShardRule, match=name):
            use(graph)
    row, col = graph.lift(x)
    order = graph.edges.origin
    assert torch.equal(row.to_local(), x[edges[0][order]])
    assert torch.equal(col.to_local(), x[edges[1][order]])
    assert torch.equal(graph.degree().to_local(), torch.bincount(edges[1], minlength=60))
    assert not hasattr(graph, "unheard_of")


SECOND = {
    "GCNConv": lambda: pyg.GCNConv(C, C),
    "SAGEConv max": lambda: pyg.SAGEConv(C, C, aggr="max"),
    "GATv2Conv": lambda: pyg.GATv2Conv(C, C),
    "EdgeConv max": lambda: pyg.EdgeConv(convs.mlp(2 * C, C), aggr="max"),
    "TAGConv": lambda: pyg.TAGConv(C, C, 2),
}


def second_job():
    """Gradients of a loss of derivatives of the output by the nodes."""
    domain = init_domain()
    edges, graph, x, _ = sample(domain, directed=True)
    far = []
    for make in SECOND.values():
        torch.manual_seed(1)
        plain = make().double()
        ours = convert(copy.deepcopy(plain))
        for conv, leaf, where in (
            (plain, x.clone().requires_grad_(), edges),
            (ours, own(x, graph.nodes), graph),
        ):
            out = torch.sin(conv(leaf, where)).sum()
            (slope,) = torch.autograd.grad(out, leaf, create_graph=True)
            slope.square().mean().backward()
        domain.average_gradients(ours)
        pairs = zip(ours.parameters(), plain.parameters(), strict=True)
        far += [farthest(p.grad, q.grad) for p, q in pairs]
    return max(far)


def test_second_derivatives(ranks):
    assert max(ranks[3].run(second_job)) < 1e-12


def wrapped_job():
    """Under DDP, and compiled."""
    domain = init_domain()
    edges, graph, x, _ = sample(domain, directed=True)
    torch.manual_seed(1)
    plain = pyg.GCN(C, 8, 2, 3).double()
    ours = convert(copy.deepcopy(plain))
    plain(x, edges).square().mean().backward()
    parallel = DistributedDataParallel(ours)
    parallel(own(x, graph.nodes), graph).square().mean().backward()
    pairs = zip(ours.parameters(), plain.parameters(), strict=True)
    far = [farthest(p.grad, q.grad) for p, q in pairs]
    for make in (lambda: pyg.TAGConv(C, C, 2), lambda: pyg.GATv2Conv(C, C)):
        conv = convert(make().double())
        results = []
        for one in (conv, torch.compile(conv, backend="aot_eager")):
            rows = own(x, graph.nodes)
            out = one(rows, graph)
            out.square().sum().backward()
            results.append((out.detach().gather(), rows.grad.gather()))
        far += [farthest(a, b) for a, b in zip(*results, strict=True)]
    return max(far)


def test_under_ddp_and_compiled(ranks):
    assert max(ranks[2].run(wrapped_job)) < 1e-12


def folder_job(folder):
    """Three layers on the shards of a folder, in the order of the file."""
    shard = load(folder, init_domain())
    torch.manual_seed(0)
    layers = nn.ModuleList([pyg.SAGEConv(3, 16), pyg.GATv2Conv(16, 16), pyg.GCNConv(16, 4)])
    x = shard["center"].float()
    for layer in convert(layers):
        x = torch.tanh(layer(x, shard.graph))
    rows = ShardTensor.from_local(shard.sharding.origin, shard.sharding).gather()
    out = torch.empty(x.shape)
    out[rows] = x.detach().gather()
    return out


@pytest.mark.slow
def test_a_folder_of_shards_on_any_number_of_ranks(ranks, tmp_path):
    path = tmp_path / "surface.shards"
    partition(surface(30, 28, orphans=0), 4).save(path)
    one = folder_job(path)
    for size in (2, 3, 4):
        assert all(torch.equal(one, out) for out in ranks[size].run(folder_job, path))
