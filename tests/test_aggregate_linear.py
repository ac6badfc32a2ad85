"""Convolutions whose sums are multiplied part by part: values, bits, gradients on small parts."""

import convs
import pytest
import torch
import torch_geometric.nn as pyg
from convs import C, divided, farthest, grid, own, sample
from test_graph_conv import compared

from meshshard.comm import init_domain
from meshshard.comm.domain import count_traffic
from meshshard.nn import convert
from meshshard.nn.graph import _sparse
from meshshard.tensor import ShardGraph, ShardTensor

MADE = {
    "GCNConv": lambda: pyg.GCNConv(C, C),
    "GCNConv wider": lambda: pyg.GCNConv(C, 12, bias=False),
    "GCNConv narrower": lambda: pyg.GCNConv(C, 3),
    "SAGEConv mean": lambda: pyg.SAGEConv(C, C),
    "SAGEConv max": lambda: pyg.SAGEConv(C, C, aggr="max"),
    "SAGEConv projected": lambda: pyg.SAGEConv(C, C, project=True),
    "SAGEConv without root": lambda: pyg.SAGEConv(C, C, root_weight=False, bias=False),
    "GraphConv": lambda: pyg.GraphConv(C, 5),
    "GraphConv max": lambda: pyg.GraphConv(C, 5, aggr="max"),
}


def in_parts(job, *given):
    """A job on parts of few rows."""
    before = _sparse.TILE, _sparse.RUN
    _sparse.TILE, _sparse.RUN = 8, 11
    try:
        return job(*given)
    finally:
        _sparse.TILE, _sparse.RUN = before


def exact_job(directed):
    """Those that differ from PyG's."""
    edges, graph, x, _ = sample(init_domain(), directed)
    wrong = {}
    for name, make in MADE.items():
        wrong |= compared(make, [edges, x], [graph, own(x, graph.nodes)], name)
    return wrong


@pytest.mark.parametrize("directed", [False, True], ids=["symmetric", "directed"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_parts_are_exact(ranks, size, directed):
    job = in_parts, exact_job, directed
    assert (ranks[size].run(*job) if size > 1 else [in_parts(*job[1:])]) == [{}] * size


def bitwise_job():
    """Those whose bits are not the ones of the whole on one rank, in one part."""
    domain = init_domain()
    edges, nodes, origin = divided(grid(24, 20), 480, domain, metis=True)
    edges = edges[:, torch.argsort(edges[1], stable=True)]
    whole = convs.serial(edges, 480)
    x = torch.randn(480, C, generator=torch.Generator().manual_seed(1))[origin]
    mine = ShardTensor.from_local(x[nodes.first :][: nodes.own], nodes)
    differ = []
    for name, make in MADE.items():
        torch.manual_seed(1)
        conv = convert(make())
        with torch.no_grad():
            out = conv(x, whole)
            graph = ShardGraph.from_edge_index(edges, nodes)
            got = in_parts(conv, mine, graph).gather()
        if not torch.equal(got, out):
            differ.append((name, farthest(got, out)))
    return differ


@pytest.mark.parametrize("size", [2, 3])
def test_parts_have_the_bits_of_the_whole(ranks, size):
    assert ranks[size].run(bitwise_job) == [[]] * size


def traffic_job():
    """One exchange forward, one backward; none backward where features want no gradient."""
    domain = init_domain()
    _, graph, x, _ = sample(domain, directed=True)
    found = []
    for leaf in (own(x, graph.nodes), own(x, graph.nodes).detach()):
        for make in MADE.values():
            conv = convert(make().double())
            conv(leaf, graph)
            with count_traffic(domain) as forward:
                out = conv(leaf, graph)
            with count_traffic(domain) as backward:
                out.to_local().sum().backward()
            counts = forward.counts, backward.counts
            found.append([{kind: c.calls for kind, c in part.items()} for part in counts])
    return found


def test_traffic(ranks):
    with_gradient = [{"exchange": 1}, {"accumulate": 1}]
    for found in ranks[2].run(traffic_job):
        assert found[: len(MADE)] == [with_gradient] * len(MADE)
        for made, counts in zip(MADE, found[len(MADE) :], strict=True):
            back = {"accumulate": 1} if made in ("SAGEConv projected", "GCNConv narrower") else {}
            assert counts == [{"exchange": 1}, back]


class Adapter(torch.nn.Module):
    """As adapters are: it shows the weight of the layer that it adds to."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.more = layer, torch.nn.Linear(C, C, bias=False)

    @property
    def weight(self):
        return self.layer.weight

    @property
    def bias(self):
        return self.layer.bias

    def forward(self, x):
        return self.layer(x) + self.more(x)


Adapter.__name__ = "Linear"


@pytest.mark.parametrize(("make", "name"), [(pyg.SAGEConv, "lin_l"), (pyg.GCNConv, "lin")])
@pytest.mark.parametrize("change", ["adapter", "forward"])
def test_changed_layers_are_heeded(make, name, change):
    edges, graph, x, _ = sample(init_domain(), True)
    plain = make(C, C).double()
    layer = getattr(plain, name)
    if change == "adapter":
        setattr(plain, name, Adapter(layer).double())
    else:
        forward = layer.forward
        layer.forward = lambda rows: 2 * forward(rows)
    want = plain(x, edges)
    assert farthest(convert(plain)(x, graph).detach(), want.detach()) <= 1e-12
