"""PyG convolutions on shards: outputs and gradients equal those on the whole graph."""

import copy
import pickle

import convs
import pytest
import torch
import torch_geometric.nn as pyg
from convs import (
    DROPPED,
    EDGE,
    PLAIN,
    WEIGHTED,
    WITH_EDGES,
    C,
    divided,
    farthest,
    grid,
    own,
    sample,
)
from torch import nn
from torch_geometric.nn import MessagePassing

from meshshard.comm import Domain, init_domain
from meshshard.comm.domain import count_traffic
from meshshard.errors import MeshshardError
from meshshard.nn import aggregate, convert
from meshshard.tensor import NoShardRule, ShardGraph, Sharding, ShardTensor

TOLERANCE = 1e-12


def compared(make, whole, parts, name):
    """Differences above the tolerance between a convolution on whole tensors and on shards."""
    torch.manual_seed(1)
    conv = make().double()
    for p in conv.parameters():
        nn.init.normal_(p, std=0.4)
    ours = convert(copy.deepcopy(conv))
    args = [a.clone().requires_grad_() for a in whole[1:]]
    out = conv(args[0], whole[0], *args[1:])
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=out.dtype)
    leaves = [*args, *conv.parameters()]
    want = torch.autograd.grad(out, leaves, seed, allow_unused=True)
    graph, shards = parts[0], parts[1:]
    got = ours(shards[0], graph, *shards[1:])
    ((got * seed).sum()).backward()
    graph.domain.average_gradients(ours)
    found = {"output": farthest(got.detach().gather(), out.detach())}
    for i, shard in enumerate(shards):
        mine = want[i] if i == 0 else want[i][graph.edges.origin]
        grad = shard.grad.gather() if i == 0 else shard.grad.to_local()
        found[f"argument {i}"] = farthest(grad, mine, want[i].abs().max())
    rest = want[len(args) :]
    scale = torch.stack([w.abs().max() for w in rest if w is not None] or [torch.ones(())]).max()
    for (label, p), w in zip(ours.named_parameters(), rest, strict=True):
        found[label] = farthest(p.grad, w, scale)
    wrong = {k: v for k, v in found.items() if v > TOLERANCE}
    return {name: wrong} if wrong else {}


def convs_job(family, directed):
    """Convolutions of a family that are not exact, with their differences."""
    domain = init_domain()
    edges, graph, x, e = sample(domain, directed)
    wrong = {}
    for name, make in getattr(convs, family).items():
        whole, shards = [edges, x], [graph, own(x, graph.nodes)]
        if family != "PLAIN":
            features = e[:, 0] if family == "WEIGHTED" else e
            whole.append(features)
            shards.append(graph.take(features).requires_grad_())
        wrong |= compared(make, whole, shards, name)
    return wrong


@pytest.mark.parametrize("directed", [False, True], ids=["symmetric", "directed"])
@pytest.mark.parametrize("family", ["PLAIN", "WITH_EDGES", "WEIGHTED"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_convolutions_are_exact(ranks, size, family, directed):
    found = (
        [convs_job(family, directed)] if size == 1 else ranks[size].run(convs_job, family, directed)
    )
    assert found == [{}] * size


def dropout_job():
    """Dropout in convolutions: the same random numbers on one rank and on several."""
    domain = init_domain()
    wrong = {}
    for directed in (False, True):
        edges, graph, x, _ = sample(domain, directed)
        serial = ShardGraph.from_edge_index(edges, Sharding(Domain(), [60]))
        for name, make in DROPPED.items():
            torch.manual_seed(2)
            conv = convert(make().double())
            out, grad = [], []
            for where in (serial, graph):
                torch.manual_seed(7)
                rows = own(x, where.nodes)
                y = conv(rows, where)
                y.square().sum().backward()
                out.append(y.detach().gather())
                grad.append(rows.grad.gather())
            again = conv(rows, graph).detach().gather()
            found = farthest(out[1], out[0]), farthest(grad[1], grad[0])
            if max(found) > TOLERANCE or torch.equal(again, out[1]):
                wrong[name] = found
    return wrong


@pytest.mark.parametrize("size", [2, 4])
def test_dropout_inside_does_not_depend_on_the_partition(ranks, size):
    assert ranks[size].run(dropout_job) == [{}] * size


class Updating(MessagePassing):
    """A user's layer that updates nodes and then edges, with norms in its networks."""

    def __init__(self):
        super().__init__("sum")
        self.edges = nn.Sequential(
            nn.Linear(2 * C + EDGE, 16), nn.BatchNorm1d(16), nn.Linear(16, C)
        )
        self.nodes = nn.Sequential(nn.Linear(2 * C, 16), pyg.GraphNorm(16), nn.Linear(16, C))
        self.narrow = nn.Linear(C, EDGE)

    def forward(self, x, edge_index, edge_attr):
        new = x + self.nodes(torch.cat([x, self.propagate(edge_index, x=x, e=edge_attr)], -1))
        return new, edge_attr + self.edge_updater(edge_index, x=new, e=edge_attr)

    def message(self, x_i, x_j, e):
        return self.edges(torch.cat([x_i, x_j, e], -1))

    def edge_update(self, x_i, x_j, e):
        return self.narrow(self.edges(torch.cat([x_j, x_i, e], -1)))


def updating_job(hops):
    """Two `Updating` layers, whose norms count each edge and each node once."""
    domain = init_domain()
    edges, graph, x, e = sample(domain, directed=True)
    torch.manual_seed(4)
    layers = nn.ModuleList([Updating(), Updating()]).double()
    ours = convert(copy.deepcopy(layers), hops)
    a, b = x.clone().requires_grad_(), e.clone().requires_grad_()
    out = a, b
    for layer in layers:
        out = layer(out[0], edges, out[1])
    (out[0].square().sum() + out[1].square().sum()).backward()
    shards = own(x, graph.nodes), graph.take(e).requires_grad_()
    got = shards
    for layer in ours:
        got = layer(got[0], graph, got[1])
    assert got[1].sharding == graph.edges
    (got[0].square().sum() + got[1].square().sum()).backward()
    domain.average_gradients(ours)
    found = {
        "nodes": farthest(got[0].detach().gather(), out[0].detach()),
        "edges": farthest(got[1].detach().to_local(), out[1].detach()[graph.edges.origin]),
        "x": farthest(shards[0].grad.gather(), a.grad),
        "e": farthest(shards[1].grad.to_local(), b.grad[graph.edges.origin]),
    }
    pairs = zip(layers.named_parameters(), ours.named_parameters(), strict=True)
    scale = max(p.grad.abs().max() for p in layers.parameters())
    found |= {name: farthest(q.grad, p.grad, scale) for (name, p), (_, q) in pairs}
    for (name, p), (_, q) in zip(layers.named_buffers(), ours.named_buffers(), strict=True):
        found[name] = farthest(q, p)
    return {k: v for k, v in found.items() if v > 1e-10}


@pytest.mark.parametrize("hops", [1, 2])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_users_layer_that_updates_nodes_and_edges(ranks, size, hops):
    assert ranks[size].run(updating_job, hops) == [{}] * size


def points_job():
    """Point convolutions, whose second argument holds the positions."""
    domain = init_domain()
    edges, graph, x, e = sample(domain, directed=True)
    pos = e[:60, :3].clone()
    makes = {
        "PointNetConv": lambda: pyg.PointNetConv(convs.mlp(C + 3, C), convs.mlp(C, C)),
        "PointTransformerConv": lambda: pyg.PointTransformerConv(C, C),
        "PPFConv": lambda: pyg.PPFConv(convs.mlp(C + 4, C)),
    }
    wrong = {}
    for name, make in makes.items():
        torch.manual_seed(1)
        conv = make().double()
        more = [torch.nn.functional.normalize(pos)] if name == "PPFConv" else []
        a = [t.clone().requires_grad_() for t in (x, pos, *more)]
        out = conv(*a, edges)
        out.square().sum().backward()
        grads = [p.grad.clone() for p in conv.parameters()]
        conv.zero_grad()
        b = [own(t, graph.nodes) for t in (x, pos, *more)]
        got = convert(conv)(*b, graph)
        got.square().sum().backward()
        domain.average_gradients(conv)
        found = [farthest(got.detach().gather(), out.detach())]
        found += [farthest(s.grad.gather(), w.grad) for s, w in zip(b, a, strict=True)]
        found += [farthest(p.grad, g) for p, g in zip(conv.parameters(), grads, strict=True)]
        wrong |= {name: found} if max(found) > 1e-10 else {}
    return wrong


@pytest.mark.parametrize("size", [2, 4])
def test_convolutions_of_points(ranks, size):
    assert ranks[size].run(points_job) == [{}] * size


def bipartite_job():
    """Sources and destinations with different shardings."""
    domain = init_domain()
    nodes = Sharding(domain, convs.SIZES[domain.size])
    sources = Sharding(domain, [2 * n + 1 for n in reversed(nodes.sizes)])
    generator = torch.Generator().manual_seed(2)
    edges = torch.stack([
        torch.randint(n, (90,), generator=generator) for n in (sources.total, nodes.total)
    ])  # fmt: skip
    graph = ShardGraph.from_edge_index(edges, nodes, sources)
    x = torch.randn(sources.total, 5, generator=generator, dtype=torch.float64)
    y = torch.randn(nodes.total, C, generator=generator, dtype=torch.float64)
    makes = {
        "SAGEConv": lambda: pyg.SAGEConv((5, C), C),
        "SAGEConv max": lambda: pyg.SAGEConv((5, C), C, aggr="max"),
        "GraphConv": lambda: pyg.GraphConv((5, C), C),
        "GATv2Conv": lambda: pyg.GATv2Conv((5, C), C, add_self_loops=False),
        "GATConv": lambda: pyg.GATConv((5, C), C, add_self_loops=False, heads=2),
        "TransformerConv": lambda: pyg.TransformerConv((5, C), C),
        "NNConv": lambda: pyg.NNConv((5, C), C, nn.Linear(1, 5 * C)),
    }
    weights = torch.rand(90, 1, generator=generator, dtype=torch.float64)
    wrong = {}
    for name, make in makes.items():
        torch.manual_seed(1)
        conv = make().double()
        more = [weights] if name == "NNConv" else []
        a, b = x.clone().requires_grad_(), y.clone().requires_grad_()
        out = conv((a, b), edges, *more)
        out.square().sum().backward()
        pair = own(x, sources), own(y, nodes)
        got = convert(conv)(pair, graph, *[graph.take(w) for w in more])
        got.square().sum().backward()
        found = [farthest(got.detach().gather(), out.detach())]
        found += [farthest(s.grad.gather(), w.grad) for s, w in zip(pair, (a, b), strict=True)]
        wrong |= {name: found} if max(found) > 1e-10 else {}
    return wrong


@pytest.mark.parametrize("size", [2, 3, 4])
def test_bipartite_graphs(ranks, size):
    assert ranks[size].run(bipartite_job) == [{}] * size


def sources_only_job():
    """(x, None): nodes without rows, of which a rank has more than of the sources."""
    domain = init_domain()
    nodes = Sharding(domain, convs.SIZES[domain.size])
    sources = Sharding(domain, [1 + n // 9 for n in nodes.sizes])
    generator = torch.Generator().manual_seed(2)
    edges = torch.stack([
        torch.randint(n, (90,), generator=generator) for n in (sources.total, nodes.total)
    ])  # fmt: skip
    graph = ShardGraph.from_edge_index(edges, nodes, sources)
    x = torch.randn(sources.total, 5, generator=generator, dtype=torch.float64)
    wrong = {}
    for kind in (pyg.SAGEConv, pyg.GraphConv):
        for aggr in ("mean", "add", "max"):
            conv = kind((5, C), C, aggr=aggr).double()
            ours, a, b = convert(copy.deepcopy(conv)), x.clone().requires_grad_(), own(x, sources)
            out = conv((a, None), edges, size=(sources.total, nodes.total))
            out.square().sum().backward()
            got = ours((b, None), graph)
            got.square().sum().backward()
            domain.average_gradients(ours)
            found = [farthest(got.detach().gather(), out.detach())]
            found.append(farthest(b.grad.gather(), a.grad))
            pairs = zip(ours.parameters(), conv.parameters(), strict=True)
            found += [farthest(p.grad, q.grad) for p, q in pairs]
            wrong |= {(kind.__name__, aggr): found} if max(found) > 1e-10 else {}
    return wrong


@pytest.mark.parametrize("size", [2, 3])
def test_bipartite_graphs_whose_nodes_have_no_rows(ranks, size):
    assert ranks[size].run(sources_only_job) == [{}] * size


def size_job():
    """PyG's argument `size` is the numbers of all sources and nodes."""
    domain = init_domain()
    edges, graph, x, _ = sample(domain, directed=True)
    far = []
    for conv in (pyg.SAGEConv(C, C), pyg.SAGEConv(C, C, aggr="std"), pyg.GATConv(C, C)):
        ours = convert(copy.deepcopy(conv.double()))
        want = conv(x, edges, size=(60, 60)).detach()
        got = ours(own(x, graph.nodes), graph, size=(60, 60)).detach().gather()
        far.append(farthest(got, want))
        with pytest.raises(MeshshardError, match=r"expected size \(60, 60\).* got \(60, 9\)"):
            ours(own(x, graph.nodes), graph, size=(60, 9))
    return max(far)


@pytest.mark.parametrize("size", [1, 3])
def test_the_size_of_a_call_is_that_of_the_whole_graph(ranks, size):
    assert max([size_job()] if size == 1 else ranks[size].run(size_job)) < 1e-12


def labels_job():
    """Labels of which no rank has all, as integers and one-hot."""
    domain = init_domain()
    edges, graph, x, _ = sample(domain, directed=True)
    known, far = torch.arange(60) % 3 > 0, []
    for labels in (torch.arange(60) // 9, (x > 0).double()):
        conv = pyg.LabelPropagation(3, 0.7)
        want = conv(labels, edges, known)
        y, mask = (convs.shard_of(a, graph.nodes) for a in (labels, known))
        far.append(farthest(convert(conv)(y, graph, mask).gather(), want))
    return max(far)


@pytest.mark.parametrize("size", [2, 3])
def test_label_propagation(ranks, size):
    assert max(ranks[size].run(labels_job)) < 1e-6


def bipartite_loops_job():
    """Loops are added by row number: refused; with loops in the graph, it is exact."""
    domain = init_domain()
    nodes = Sharding(domain, convs.SIZES[domain.size])
    sources = Sharding(domain, [n // 2 for n in reversed(nodes.sizes)])
    n, generator = sources.total, torch.Generator().manual_seed(2)
    edges = torch.stack([torch.randint(m, (90,), generator=generator) for m in (n, nodes.total)])
    x, y = (torch.randn(m, C, generator=generator, dtype=torch.float64) for m in (n, nodes.total))
    apart = edges[:, edges[0] != edges[1]]
    looped = torch.cat([apart, torch.arange(n).expand(2, n)], 1)
    pair = own(x, sources), own(y, nodes)
    far = []
    for make, positions in [
        (lambda **k: pyg.GATConv((C, C), C, **k), False),
        (lambda **k: pyg.GATv2Conv((C, C), C, **k), False),
        (lambda **k: pyg.PointTransformerConv((C, C), C, nn.Linear(C, C), **k), True),
        (lambda **k: pyg.PointNetConv(nn.Linear(2 * C, C), **k), True),
    ]:
        conv, given = make().double(), (pair, pair) if positions else (pair,)
        with pytest.raises(NoShardRule, match=f"{type(conv).__name__}.*add_self_loops=False"):
            convert(copy.deepcopy(conv))(*given, ShardGraph.from_edge_index(edges, nodes, sources))
        ours = convert(make(add_self_loops=False).double())
        ours.load_state_dict(conv.state_dict())
        got = ours(*given, ShardGraph.from_edge_index(looped, nodes, sources)).detach().gather()
        far.append(farthest(got, conv(*[(x, y)] * len(given), edges).detach()))
    return max(far)


@pytest.mark.parametrize("size", [1, 3])
def test_self_loops_of_bipartite_graphs_are_refused(ranks, size):
    found = [bipartite_loops_job()] if size == 1 else ranks[size].run(bipartite_loops_job)
    assert max(found) < 1e-10


REDUCTIONS = "sum", "mean", "max"
BITWISE = {"SimpleConv", *REDUCTIONS}


def float32_job(metis):
    """Relative differences of float32 outputs from those on one rank, where not bitwise equal."""
    domain = init_domain()
    edges, nodes, origin = divided(grid(24, 20), 480, domain, metis)
    edges = edges[:, torch.argsort(edges[1], stable=True)]
    graph, whole = ShardGraph.from_edge_index(edges, nodes), convs.serial(edges, 480)
    x = torch.randn(480, C, generator=torch.Generator().manual_seed(1))[origin]
    mine = convs.shard_of(x, nodes)
    e = torch.rand(edges.shape[1], EDGE, generator=torch.Generator().manual_seed(2))
    found = {r: (aggregate(mine, graph, r).gather(), aggregate(x, whole, r)) for r in REDUCTIONS}
    families = [(PLAIN, None), (WITH_EDGES, e), (WEIGHTED, e[:, 0].contiguous())]
    for family, features in families:
        for name, make in family.items():
            torch.manual_seed(1)
            conv = make()
            more = [] if features is None else [features]
            with torch.no_grad():
                out = convert(conv)(x, edges, *more)
                found[name] = conv(mine, graph, *map(graph.take, more)).gather(), out
    return {name: farthest(*pair) for name, pair in found.items() if not torch.equal(*pair)}


@pytest.mark.parametrize("metis", [True, False], ids=["metis", "random"])
@pytest.mark.parametrize("size", [2, 3])
def test_forward_in_float32(ranks, size, metis):
    """Aggregation is bitwise equal on any CPU, because it adds in the order of the whole graph.

    Other convolutions may not be: matrix products and vectorized functions can round differently
    for another number of rows, depending on the CPU.
    """
    found = ranks[size].run(float32_job, metis)[0]
    assert not BITWISE & found.keys()
    assert max(found.values(), default=0) < 1e-5


def traffic_job():
    """Traffic of convolutions of one, two and three hops, forward and backward."""
    domain = init_domain()
    _, graph, x, e = sample(domain, directed=True)
    x, e = own(x, graph.nodes), graph.take(e).requires_grad_()
    makes = {
        "one hop": lambda: pyg.GATv2Conv(C, C, edge_dim=EDGE),
        "two hops": lambda: pyg.PDNConv(C, C, EDGE, 4),
        "three hops": lambda: pyg.TAGConv(C, C, 3),
    }
    found = {}
    for name, make in makes.items():
        conv = convert(make().double())
        more = () if name == "three hops" else (e,)
        conv(x, graph, *more)
        with count_traffic(domain) as forward:
            out = conv(x, graph, *more)
        with count_traffic(domain) as backward:
            out.to_local().sum().backward()
        found[name] = (forward.counts, backward.counts, sum(graph.exchange.send))
    return found


def test_traffic(ranks):
    for found in ranks[3].run(traffic_job):
        forward, backward, sent = found["one hop"]
        assert {kind: c.calls for kind, c in forward.items()} == {"exchange": 1}
        assert {kind: c.calls for kind, c in backward.items()} == {"accumulate": 1}
        assert forward["exchange"].bytes == sent * C * 8
        forward, backward, _ = found["two hops"]
        assert forward["exchange"].calls == backward["accumulate"].calls == 2
        forward, backward, _ = found["three hops"]
        assert forward["exchange"].calls == backward["accumulate"].calls == 3


def test_copies_and_pickles_keep_the_class_of_a_converted_convolution():
    conv = convert(pyg.GCNConv(C, C))
    assert isinstance(conv, pyg.GCNConv)
    assert list(conv.state_dict()) == list(pyg.GCNConv(C, C).state_dict())
    edges, graph, x, _ = sample(Domain(), directed=True)
    for other in (copy.deepcopy(conv), pickle.loads(pickle.dumps(conv)), convert(conv)):
        assert type(other) is type(conv)
        assert torch.equal(other(x.float(), graph), conv(x.float(), graph))
        assert torch.allclose(other(x.float(), edges), conv(x.float(), graph), atol=1e-6)
    with torch.no_grad():
        other = copy.deepcopy(conv)
        other.bias += 1
        assert torch.allclose(other(x.float(), graph), conv(x.float(), graph) + 1, atol=1e-5)


def test_plain_tensors_stay_plain():
    edges, graph, x, e = sample(Domain(), directed=True)
    conv = convert(pyg.GATv2Conv(C, C, edge_dim=EDGE).double())
    out = conv(x, graph, graph.take(e).to_local())
    assert type(out) is torch.Tensor
    assert torch.allclose(out, conv(x, edges, e))


class Truncating(MessagePassing):
    """Returns neither a row per node nor a row per edge."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)[:7]


REFUSED = [
    (lambda: pyg.SAGEConv(C, C, aggr="lstm"), "LSTMAggregation .*order of the edges"),
    (lambda: pyg.SimpleConv(pyg.aggr.LCMAggregation(C, C)), "largest in-degree"),
    (lambda: pyg.SimpleConv(pyg.aggr.PatchTransformerAggregation(C, C, 1, 8)), "largest in-degree"),
    (lambda: pyg.SimpleConv(pyg.aggr.EquilibriumAggregation(C, C, [8])), "of all nodes at once"),
    (lambda: pyg.GCNConv(C, C, flow="target_to_source"), "reverse the edges"),
    (lambda: pyg.SAGEConv(C, C, decomposed_layers=2), "decomposed_layers=2"),
    (lambda: pyg.MeshCNNConv(C, C), "MeshCNNConv .*four in-edges"),
    (lambda: pyg.models.LINKX(9, C, C, C, 2), "LINKX .*parameter row for every node"),
    (lambda: pyg.GPSConv(C, None, heads=2), "GPSConv .*dense matrix"),
    (lambda: pyg.MemPooling(C, C, 2, 2), "MemPooling .*dense matrix"),
    (lambda: pyg.aggr.GraphMultisetTransformer(C, 2), "GraphMultisetTransformer .*dense matrix"),
    (lambda: nn.Sequential(pyg.TopKPooling(C)), "TopKPooling .*selects among all nodes"),
    (lambda: nn.Sequential(pyg.SAGPooling(C)), "SAGPooling .*selects among all nodes"),
    (lambda: nn.Sequential(pyg.aggr.EquilibriumAggregation(C, C, [8])), "replicated on every rank"),
    (lambda: pyg.aggr.MultiAggregation(["mean", "median"]), "MedianAggregation .*orders the rows"),
    (lambda: nn.Sequential(pyg.aggr.SortAggregation(5)), "SortAggregation .*dense matrix"),
]


@pytest.mark.parametrize(("make", "why"), REFUSED)
def test_modules_that_cannot_be_exact_are_refused_by_name(make, why):
    with pytest.raises(NoShardRule, match=why):
        convert(make())


def test_a_refused_model_is_not_changed():
    model = nn.Sequential(pyg.SAGEConv(C, C), pyg.GCNConv(C, C, flow="target_to_source"))
    with pytest.raises(NoShardRule, match="reverse the edges"):
        convert(model)
    assert type(model[0]) is pyg.SAGEConv


def test_arguments_and_results_without_a_row_per_node_are_refused():
    _, graph, x, _ = sample(Domain(), directed=True)
    with pytest.raises(NoShardRule, match=r"Truncating .*neither a row per node"):
        convert(Truncating())(x, graph)
    wrong = ShardTensor.from_local(x[:9], Sharding(Domain(), [9]))
    with pytest.raises(MeshshardError, match=r"GCNConv: edge_weight .* is not sharded like the 60"):
        convert(pyg.GCNConv(C, C))(x, graph, wrong)
    steps = ShardTensor.from_local(torch.stack([x] * 60), graph.nodes, 1)  # as many steps as rows
    with pytest.raises(MeshshardError, match=r"GraphConv: x .* on dim 1, expected dim 0"):
        convert(pyg.GraphConv(C, C))(steps, graph)
    with pytest.raises(MeshshardError, match=r"sharded along dim 0 .* along dim 1"):
        graph.lift(steps)
    with pytest.raises(NoShardRule, match="it returns its edges"):
        convert(pyg.GATConv(C, C).double())(x, graph, return_attention_weights=True)
    with pytest.raises(NoShardRule, match="get_attention_loss"):
        convert(pyg.SuperGATConv(C, C)).get_attention_loss()
    with pytest.raises(NoShardRule, match=r"dropout inside APPNP"):
        convert(pyg.APPNP(2, 0.1, dropout=0.5))(x, graph)


class TwoGraphs(MessagePassing):
    """A user's, on two graphs."""

    def forward(self, x, near, far=None):
        return self.propagate(near, x=x) + 2 * self.propagate(near if far is None else far, x=x)


def several_graphs_job():
    """Every graph but the first would be ignored: all ranks refuse, and so does one."""
    domain = init_domain()
    _, near, x, _ = sample(domain, directed=True)
    edges, far, *_ = sample(domain, directed=False)
    x, serial = own(x, near.nodes), x
    for conv, graphs in [
        (pyg.SignedConv(C, C, True), (near, far)),
        (TwoGraphs(), (near, far)),
        (TwoGraphs(), ([near, near],)),
        (pyg.SAGEConv(C, C), ([near, far],)),
    ]:
        why = "list of graphs" if isinstance(graphs[0], list) else "2 graphs"
        with pytest.raises(NoShardRule, match=f"{type(conv).__name__} .*{why}"):
            convert(conv.double())(x, *graphs)
    with pytest.raises(NoShardRule, match="2 graphs"):
        convert(TwoGraphs())(x, near, far=far)
    same = convert(TwoGraphs())(x, far, far).detach().gather()
    return farthest(same, TwoGraphs()(serial, edges, edges))


@pytest.mark.parametrize("size", [1, 3])
def test_several_graphs_in_one_call_are_refused(ranks, size):
    found = [several_graphs_job()] if size == 1 else ranks[size].run(several_graphs_job)
    assert max(found) < 1e-12


def test_hops_apply_only_to_classes_that_are_not_in_the_table():
    assert convert(pyg.TAGConv(C, C), hops=1)._meshshard_hops == 2
    assert convert(pyg.GCNConv(C, C, normalize=False))._meshshard_hops == 1
    assert convert(MedianConv(), hops=1)._meshshard_hops == 1
    assert convert(MedianConv())._meshshard_hops == 2


def test_every_row_of_the_table_is_a_class_of_pyg():
    from torch_geometric.nn import conv, pool

    from meshshard.nn.conv.pyg import CLASSES

    modules = pyg, pyg.aggr, conv, pool.select
    missing = [n for n in CLASSES if not any(hasattr(m, n) for m in modules)]
    assert missing == []


def plain_job():
    _, graph, x, _ = sample(init_domain(), directed=True)
    with pytest.raises(MeshshardError, match="the features are plain tensors"):
        convert(pyg.SAGEConv(C, C).double())(x, graph)


def test_plain_tensors_on_several_ranks_are_refused(ranks):
    ranks[2].run(plain_job)


class MedianConv(MessagePassing):
    """A user's convolution with median aggregation, for which PyG sorts the rows of all edges."""

    def __init__(self):
        super().__init__(aggr="median")

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)


def median_job():
    domain = init_domain()
    edges, graph, x, _ = sample(domain, directed=True)
    got = convert(MedianConv())(own(x, graph.nodes), graph).gather().detach()
    return farthest(got, MedianConv()(x, edges))


def test_medians_of_a_users_convolution_on_an_empty_shard(ranks):
    assert max(ranks[3].run(median_job)) < 1e-12


class IndexingConv(MessagePassing):
    """A user's convolution whose second message indexes the output of the first propagate."""

    def forward(self, x, edge_index):
        h = self.propagate(edge_index, x=x, rows=x)
        return self.propagate(edge_index, x=x @ torch.eye(C, dtype=x.dtype), rows=h)

    def message(self, x_j, rows, edge_index_j):
        return x_j * rows[edge_index_j]


def indexing_job():
    domain = init_domain()
    edges, graph, x, _ = sample(domain, directed=True)
    got = convert(IndexingConv())(own(x, graph.nodes), graph).gather().detach()
    return farthest(got, IndexingConv()(x, edges))


def test_halo_rows_indexed_in_a_message_are_exchanged_again(ranks):
    assert max(ranks[3].run(indexing_job)) < 1e-12
