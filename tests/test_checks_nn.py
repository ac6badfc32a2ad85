"""Checks of convolutions and of models, on ranks that are threads."""

import pytest
import torch
import torch_geometric.nn as pyg
from convs import C, grid, mlp
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import degree

from meshshard.comm import Domain, DomainError, simulate
from meshshard.models import MeshGraphNet
from meshshard.nn import check_consistency, check_conv, convert


@pytest.fixture(autouse=True)
def _one_thread():
    """Ranks are threads already."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Weighed(MessagePassing):
    """Weights a neighbor by its degree, which needs two hops."""

    def forward(self, x, edge_index):
        out = degree(edge_index[0], len(x), x.dtype).clamp(min=1)
        return self.propagate(edge_index, x=x / out[:, None])


class Centered(MessagePassing):
    """Subtracts the row of the first of all nodes, which no number of hops brings."""

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x - x[:1])


def test_check_conv_finds_how_many_hops_are_needed():
    found = check_conv(pyg.GATv2Conv(C, C))
    assert (found.exact, found.hops) == (True, 1)
    assert str(check_conv(Weighed(), C)) == "Weighed: exact with 2 hops"
    assert check_conv(pyg.TAGConv(C, C, 2)).hops == 2
    assert check_conv(pyg.GINEConv(mlp(C, C), edge_dim=4), C, 4).hops == 1
    assert check_conv(pyg.GCNConv(C, C), weights=True).hops == 2


def test_check_conv_finds_a_convolution_that_is_not_exact():
    found = check_conv(Centered(), C)
    assert not found.exact
    assert "Centered: NOT exact" in str(found)
    assert "depends on the number or the order of rows" in found.error
    assert 1 not in check_conv(Weighed(), C).differences  # refused with one hop
    assert check_conv(pyg.TAGConv(C, C, 2)).differences[1] > 1e-3
    assert "LSTM" in check_conv(pyg.SAGEConv(C, C, aggr="lstm")).error


def test_check_consistency_of_models():
    edges = torch.from_numpy(grid(9, 7))
    x = torch.randn(63, C, generator=torch.Generator().manual_seed(0))
    data = {"x": x, "edge_index": edges, "y": torch.sin(x[:, :3]), "edge_attr": x[edges[0], :4]}
    report = check_consistency(MeshGraphNet(C, 4, 3, 8, 2), data, (1, 3), steps=4)
    assert report.exact
    assert [row["ranks"] for row in report.rows] == [1, 3]
    assert "ranks  ids  bitwise" in str(report)
    del data["edge_attr"]
    model = convert(pyg.GraphSAGE(C, 8, 2, 3, dropout=0.3, norm="BatchNorm"))
    assert check_consistency(model, data, (2,), steps=2).exact


def failing(domain):
    if domain.rank == 1:
        raise ValueError("no")
    domain.share(1)


def test_a_thread_that_fails_ends_all():
    with pytest.raises(DomainError, match="simulated rank 1: no"):
        simulate(3, failing)
    assert simulate(1, lambda domain: domain.size) == [1]
    draws = simulate(3, lambda domain: domain.shared_seed())
    assert len(set(draws)) == 1
    assert isinstance(Domain().shared_seed(), int)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["GCN", "GATv2", "MeshGraphNet"])
def test_many_simulated_ranks(kind):
    edges = torch.from_numpy(grid(16, 14))
    x = torch.randn(224, C, generator=torch.Generator().manual_seed(0))
    data = {"x": x, "edge_index": edges, "y": torch.sin(x[:, :3])}
    if kind == "MeshGraphNet":
        data["edge_attr"] = x[edges[0], :4]
        model = MeshGraphNet(C, 4, 3, 8, 2)
    else:
        model = convert(pyg.GCN(C, 8, 2, 3) if kind == "GCN" else pyg.GAT(C, 8, 2, 3, v2=True))
    report = check_consistency(model, data, (8, 20), steps=1)
    assert report.exact, str(report)
