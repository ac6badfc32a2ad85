"""A user's convolution proves at its first call that it minds what a shard knows alone."""

import convs
import pytest
import torch
import torch_geometric.utils as pyg_utils
from convs import EDGE, C, farthest, own, sample
from torch import nn
from torch_geometric.nn import MessagePassing

from meshshard.comm import DomainError, init_domain
from meshshard.comm.domain import count_traffic
from meshshard.nn import convert
from meshshard.tensor import ShardGraph, Sharding, shard


class Minding(MessagePassing):
    """One that minds something that differs from shard to shard."""

    def __init__(self, what):
        super().__init__()
        self.what, self.names = what, nn.Embedding(200, C)

    def forward(self, x, edge_index):
        n, what = x.size(0), self.what
        if what == "number of rows":
            return self.propagate(edge_index, x=x) / n
        if what == "number of edges":
            return self.propagate(edge_index, x=x) / edge_index.size(1)
        if what == "first row":
            return self.propagate(edge_index, x=x) - x[0]
        if what == "row number":
            return self.propagate(edge_index, x=x + self.names(torch.arange(n)).to(x.dtype))
        if what == "all pairs":
            return self.propagate(edge_index, x=x) + torch.tanh(x[:, None] - x[None]).sum(1)
        if what == "chance":
            return self.propagate(edge_index, x=x + torch.randn_like(x))
        return self.propagate(edge_index.flip(0), x=x)


WHATS = ("number of rows", "number of edges", "first row", "row number", "all pairs", "chance", "")


def minding_job(what):
    domain = init_domain()
    _, graph, x, _ = sample(domain, directed=True)
    rows = own(x, graph.nodes)
    torch.manual_seed(0)
    conv = convert(Minding(what).double())
    with pytest.raises(DomainError, match=r"Minding: (all ranks|rank).*: .*no neighbors"):
        conv(rows, graph)
    with pytest.raises(DomainError, match="no neighbors"):  # not only the first time
        conv(rows, graph)
    assert conv.training


@pytest.mark.parametrize("what", WHATS)
def test_what_a_shard_does_not_know_is_refused_on_every_rank(ranks, what):
    ranks[3].run(minding_job, what)


class Honest(MessagePassing):
    """Loops, degrees, norms over all rows, dropout, two propagates, edges: none of it matters."""

    def __init__(self):
        super().__init__()
        self.norm, self.edge = nn.BatchNorm1d(C), nn.Linear(EDGE, C)

    def forward(self, x, edge_index, edge_attr):
        n = x.size(0)
        loops, weights = pyg_utils.add_self_loops(edge_index, self.edge(edge_attr), 1.0, n)
        degree = pyg_utils.degree(loops[1], n, x.dtype)
        x = self.norm(self.propagate(loops, x=x / degree[:, None], e=weights))
        x = nn.functional.dropout(x, 0.3, self.training)
        return self.propagate(edge_index, x=torch.tanh(x), e=self.edge(edge_attr))

    def message(self, x_j, e):
        return x_j * e


def honest_job():
    """Equal to the whole, and proved once: draws and statistics are those of one call."""
    domain = init_domain()
    edges, graph, x, e = sample(domain, directed=True)
    torch.manual_seed(0)
    model = convert(Honest().double())
    whole, alone = convs.serial(edges), convert(Honest().double())
    alone.load_state_dict(model.state_dict())
    far = []
    for seed in range(2):
        torch.manual_seed(seed)
        want = alone(own(x, whole.nodes), whole, whole.take(e)).detach().gather()
        torch.manual_seed(seed)
        with count_traffic(domain) as traffic:
            got = model(own(x, graph.nodes), graph, graph.take(e)).detach().gather()
        far.append(farthest(got, want))
    far += [farthest(a, b) for a, b in zip(model.buffers(), alone.buffers(), strict=True)]
    return max(far), traffic.counts["exchange"].calls


@pytest.mark.parametrize("size", [2, 3])
def test_an_honest_one_is_proved_once(ranks, size):
    for far, exchanges in ranks[size].run(honest_job):
        assert far < 1e-10
        assert exchanges == 3  # of rows, of edges of the second hop, of rows for the second


class Across(MessagePassing):
    """One between two kinds of rows."""

    def __init__(self, minding):
        super().__init__()
        self.minding = minding

    def forward(self, x, edge_index):
        out = self.propagate(edge_index, x=x, size=(x[0].size(0), x[1].size(0)))
        return (out + x[1]) / (x[0].size(0) if self.minding else 1)


def across_job():
    domain = init_domain()
    generator = torch.Generator().manual_seed(3)
    edges = torch.stack([torch.randint(9, (40,), generator=generator), torch.arange(40) % 12])
    sources = Sharding(domain, [5, 4])
    nodes = Sharding(domain, [7, 5])
    graph = ShardGraph.from_edge_index(edges, nodes, sources)
    a, b = (torch.randn(n, C, dtype=torch.float64, generator=generator) for n in (9, 12))
    pair = shard(a, domain, sources), shard(b, domain, nodes)
    with pytest.raises(DomainError, match="no neighbors"):
        convert(Across(True))(pair, graph)
    return farthest(convert(Across(False))(pair, graph).gather(), Across(False)((a, b), edges))


def test_between_two_kinds_of_rows(ranks):
    assert max(ranks[2].run(across_job)) < 1e-12
