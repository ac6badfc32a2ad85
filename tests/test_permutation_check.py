"""The check of a user-defined convolution at its first call: what it refuses, what it lets pass."""

import convs
import pytest
import torch
import torch_geometric.nn as pyg
import torch_geometric.utils as pyg_utils
from convs import EDGE, C, farthest, own, sample
from torch import nn
from torch_geometric.nn import MessagePassing

from meshshard.comm import Domain, DomainError, init_domain
from meshshard.comm.domain import count_traffic
from meshshard.errors import MeshshardError
from meshshard.nn import convert
from meshshard.tensor import NoShardRule, ShardGraph, Sharding, shard


class Coupled(MessagePassing):
    """A user-defined convolution that applies a function to all rows before it propagates."""

    def __init__(self, couple):
        super().__init__()
        self.couple = couple

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.couple(x))


def _ones(x):
    return x.new_zeros(len(x), dtype=torch.int64)


COUPLINGS = {
    "mean": lambda x: x - x.mean(0),
    "sum of squares": lambda x: x / x.norm(),
    "maximum": lambda x: x / x.abs().max(),
    "minimum of positive rows": lambda x: x - x.exp().min(0).values,
    "softmax over rows": lambda x: x.softmax(dim=0),
    "matrix product over rows": lambda x: x @ (x.T @ x),
    "einsum over rows": lambda x: x - torch.einsum("nc->c", x),
    "roll": lambda x: x.roll(1, 0),
    "normalize over rows": lambda x: nn.functional.normalize(x, dim=0),
    "quantile": lambda x: x.quantile(0.5, 0) - x,
    "max pool": lambda x: x - pyg.global_max_pool(x, _ones(x)),
    "min pool": lambda x: x - pyg_utils.scatter(x, _ones(x), 0, 1, "min"),
    "mean pool": lambda x: x - pyg.global_mean_pool(x, _ones(x)),
    "attention": lambda x: nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])[0],
    "multi-head attention": lambda x: _fixed(nn.MultiheadAttention(C, 2))(x, x, x)[0],
    "GRU over rows": lambda x: _fixed(nn.GRU(C, C))(x)[0],
    "LSTM over rows": lambda x: _fixed(nn.LSTM(C, C))(x[:, None])[0][:, 0],
    "convolution over rows": lambda x: _fixed(nn.Conv1d(C, C, 3, padding=1))(x.T[None])[0].T,
    "instance norm": lambda x: nn.InstanceNorm1d(C)(x.T[None])[0].T,
    "group norm": lambda x: nn.GroupNorm(2, C).double()(x.T[None])[0].T,
    "all pairs": lambda x: x + torch.tanh(x[:, None] - x[None]).sum(1),
    "number of rows": lambda x: x / x.size(0),
    "first row": lambda x: x - x[0],
    "row number": lambda x: x + torch.arange(x.size(0))[:, None],
    "random numbers": lambda x: x + torch.randn_like(x),
}
ROW_BY_ROW = {
    "softmax of each row": lambda x: x.softmax(-1) / x.norm(dim=1, keepdim=True),
    "quantile of each row": lambda x: x - x.quantile(0.5, 1, True),
    "group norm of each row": nn.GroupNorm(2, C).double(),
    "GRU along each row": nn.GRU(C, C, batch_first=True).double(),
    "convolution along each row": nn.Conv1d(1, 1, 3, padding=1).double(),
    "normalize and roll each row": lambda x: nn.functional.normalize(x).roll(1, 1),
    "norm of each row": lambda x: x / x.norm(2.0, 1, keepdim=True),
}


def _fixed(module):
    """The same weights at every call."""
    generator = torch.Generator().manual_seed(0)
    for p in module.double().parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return module


class Backwards(MessagePassing):
    """A user-defined convolution that uses edges in the other direction."""

    def __init__(self, way):
        super().__init__()
        self.way = way

    def forward(self, x, edge_index):
        row, col = edge_index
        if self.way == "flipped edges":
            return self.propagate(edge_index.flip(0), x=x)
        if self.way == "edges both ways":
            return self.propagate(torch.cat([edge_index, edge_index.flip(0)], 1), x=x)
        if self.way == "number of edges":
            return self.propagate(edge_index, x=x) / edge_index.size(1)
        if self.way == "scatter to sources":
            return pyg_utils.scatter(x[col], row, 0, x.size(0), "sum")
        if self.way == "softmax at sources":
            return x * pyg_utils.softmax(x[col][:, 0], row, num_nodes=x.size(0)).sum()
        if self.way == "index_add to sources":
            return torch.zeros_like(x).index_add(0, row, x[col])
        out = pyg_utils.degree(row, x.size(0), x.dtype)
        loops, _ = pyg_utils.add_self_loops(edge_index, num_nodes=x.size(0))
        return self.propagate(loops, x=x / (1 + out)[:, None])


WAYS = (
    "flipped edges",
    "edges both ways",
    "number of edges",
    "scatter to sources",
    "softmax at sources",
    "index_add to sources",
)


def refused_job(make, name, hops=None):
    domain = init_domain()
    _, graph, x, _ = sample(domain, directed=True)
    conv = convert(make(name).double(), hops)
    rows = own(x, graph.nodes)
    for _ in range(2):  # the second call too
        with pytest.raises(DomainError, match=r"(all ranks|rank).*is not exact on shards"):
            conv(rows, graph)
    assert conv.training


def coupled(name):
    return Coupled(COUPLINGS[name])


@pytest.mark.parametrize("name", COUPLINGS)
def test_functions_of_all_rows_are_refused_on_every_rank(ranks, name):
    ranks[3].run(refused_job, coupled, name)


@pytest.mark.parametrize("name", COUPLINGS)
def test_functions_of_all_rows_are_refused_on_one_rank(name):
    _, graph, x, _ = sample(Domain(), directed=True)
    for rows in (x, x.exp(), -x.exp()):  # of both signs, positive, negative
        with pytest.raises(NoShardRule, match=r"Coupled is not exact on shards: .* not neighbors"):
            convert(coupled(name))(rows, graph)


@pytest.mark.parametrize("name", ROW_BY_ROW)
def test_functions_of_single_rows_pass(name):
    _, graph, x, _ = sample(Domain(), directed=True)

    def by_row(x):
        if not isinstance(ROW_BY_ROW[name], (nn.GRU, nn.Conv1d)):
            return ROW_BY_ROW[name](x)
        out = ROW_BY_ROW[name](x[:, None])
        return (out[0] if isinstance(out, tuple) else out)[:, 0]

    assert torch.isfinite(convert(Coupled(by_row))(x, graph)).all()


@pytest.mark.parametrize("hops", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_edges_in_the_other_direction_are_refused_on_every_rank(ranks, way, hops):
    ranks[3].run(refused_job, Backwards, way, hops)


@pytest.mark.parametrize("way", [*WAYS, "degree of sources"])
def test_edges_in_the_other_direction_are_refused_on_one_rank_with_one_hop(way):
    """With two hops all edges that leave a node are there on one rank."""
    _, graph, x, _ = sample(Domain(), directed=True)
    with pytest.raises(NoShardRule, match="edges that leave a node"):
        convert(Backwards(way).double(), 1)(x, graph)


def source_degree_job():
    """Degrees of sources and self-loops: exact with two hops, refused with one."""
    domain = init_domain()
    edges, graph, x, _ = sample(domain, directed=True)
    rows = own(x, graph.nodes)
    with pytest.raises(MeshshardError, match="edges that leave a node"):
        convert(Backwards(""), 1)(rows, graph)
    got = convert(Backwards(""))(rows, graph).detach().gather()
    return farthest(got, Backwards("")(x, edges))


def test_degrees_of_sources_need_two_hops(ranks):
    assert max(ranks[3].run(source_degree_job)) < 1e-12


class Embedding(MessagePassing):
    """A user-defined convolution that embeds the number of each row."""

    def __init__(self):
        super().__init__()
        self.names = nn.Embedding(200, C)

    def forward(self, x, edge_index):
        names = self.names(torch.arange(x.size(0)))
        return self.propagate(edge_index, x=x + names.to(x.dtype))


def embedding_job():
    domain = init_domain()
    _, graph, x, _ = sample(domain, directed=True)
    torch.manual_seed(0)
    with pytest.raises(DomainError, match="is not exact on shards"):
        convert(Embedding().double())(own(x, graph.nodes), graph)


def test_row_numbers_as_features_are_refused(ranks):
    ranks[3].run(embedding_job)


class Kinds(MessagePassing):
    """A user-defined convolution of integer features, which the check does not change."""

    def __init__(self):
        super().__init__()
        self.names = nn.Embedding(4, C)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=self.names(x))


def kinds_job():
    domain = init_domain()
    edges, graph, _, _ = sample(domain, directed=True)
    kinds = torch.arange(60) % 4
    torch.manual_seed(0)
    conv = convert(Kinds())
    got = conv(convs.shard_of(kinds, graph.nodes), graph).detach().gather()
    return farthest(got, conv(kinds, edges).detach())


def test_integer_features_pass(ranks):
    assert max(ranks[3].run(kinds_job)) < 1e-6


class Exact(MessagePassing):
    """Loops, degrees, norms over all rows, dropout, two propagates, edge features: all allowed."""

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


def exact_job():
    """Equal to one rank, and checked once: draws and statistics are those of one call."""
    domain = init_domain()
    edges, graph, x, e = sample(domain, directed=True)
    torch.manual_seed(0)
    model = convert(Exact().double())
    whole, alone = convs.serial(edges), convert(Exact().double())
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
def test_an_exact_convolution_is_checked_once(ranks, size):
    for far, exchanges in ranks[size].run(exact_job):
        assert far < 1e-10
        assert exchanges == 3  # rows, edges of the second hop, rows for the second propagate


class Bipartite(MessagePassing):
    """A user-defined convolution from one kind of rows to another."""

    def __init__(self, way):
        super().__init__()
        self.way = way

    def forward(self, x, edge_index):
        out = self.propagate(edge_index, x=x, size=(x[0].size(0), x[1].size(0)))
        if self.way == "number of rows":
            return (out + x[1]) / x[0].size(0)
        if self.way == "degree of sources":
            degree = pyg_utils.degree(edge_index[0], x[0].size(0), x[0].dtype)
            return self.propagate(edge_index, x=(x[0] * degree[:, None], x[1])) + x[1]
        return out + x[1]


def bipartite_job():
    domain = init_domain()
    generator = torch.Generator().manual_seed(3)
    edges = torch.stack([torch.randint(9, (40,), generator=generator), torch.arange(40) % 12])
    sources = Sharding(domain, [5, 4])
    nodes = Sharding(domain, [7, 5])
    graph = ShardGraph.from_edge_index(edges, nodes, sources)
    a, b = (torch.randn(n, C, dtype=torch.float64, generator=generator) for n in (9, 12))
    pair = shard(a, domain, sources), shard(b, domain, nodes)
    for way in ("number of rows", "degree of sources"):
        with pytest.raises(DomainError, match="not neighbors"):
            convert(Bipartite(way))(pair, graph)
    return farthest(convert(Bipartite(""))(pair, graph).gather(), Bipartite("")((a, b), edges))


def test_bipartite_graphs(ranks):
    assert max(ranks[2].run(bipartite_job)) < 1e-12
