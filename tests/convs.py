"""Graphs, partitions and the convolutions of PyG that tests run on them, and the comparison.

A sharded graph is divided in the numbering of its source, so a partition is its sizes and a
renumbered graph, which are the same on every rank.
"""

import numpy as np
import torch
import torch_geometric.nn as pyg
from torch import nn

from meshshard.comm import Domain
from meshshard.graph import Graph
from meshshard.partitioning.methods import Metis
from meshshard.tensor import ShardGraph, Sharding, ShardTensor

CHANNELS, EDGE = 8, 4
SIZES = {1: [60], 2: [23, 37], 3: [0, 41, 19], 4: [20, 0, 39, 1]}
C = CHANNELS


def mlp(a, b):
    return nn.Sequential(nn.Linear(a, b), nn.Tanh(), nn.Linear(b, b))


def _pna():
    return pyg.PNAConv(
        C, C, ["mean", "max", "std"], ["identity", "amplification"],
        deg=torch.tensor([0, 0, 1, 5, 10, 30, 20, 5, 2]), edge_dim=EDGE,
    )  # fmt: skip


PLAIN = {
    "GCNConv": lambda: pyg.GCNConv(C, C),
    "GCNConv improved": lambda: pyg.GCNConv(C, C, improved=True),
    "GCNConv bare": lambda: pyg.GCNConv(C, C, normalize=False),
    "SAGEConv mean": lambda: pyg.SAGEConv(C, C),
    "SAGEConv max": lambda: pyg.SAGEConv(C, C, aggr="max"),
    "SAGEConv projected": lambda: pyg.SAGEConv(C, C, aggr="max", project=True),
    "SAGEConv std": lambda: pyg.SAGEConv(C, C, aggr="std"),
    "SAGEConv softmax": lambda: pyg.SAGEConv(C, C, aggr="softmax"),
    "SAGEConv median": lambda: pyg.SAGEConv(C, C, aggr="median"),
    "GraphConv": lambda: pyg.GraphConv(C, C),
    "GATConv": lambda: pyg.GATConv(C, C // 4, heads=4),
    "GATv2Conv": lambda: pyg.GATv2Conv(C, C // 4, heads=4),
    "EdgeConv": lambda: pyg.EdgeConv(mlp(2 * C, C)),
    "GINConv": lambda: pyg.GINConv(mlp(C, C)),
    "LEConv": lambda: pyg.LEConv(C, C),
    "ResGatedGraphConv": lambda: pyg.ResGatedGraphConv(C, C),
    "GatedGraphConv": lambda: pyg.GatedGraphConv(C, 3),
    "ChebConv": lambda: pyg.ChebConv(C, C, 3),
    "ChebConv weights": lambda: pyg.ChebConv(C, C, 3, normalization="rw"),
    "ChebConv bare": lambda: pyg.ChebConv(C, C, 3, normalization=None),
    "TAGConv": lambda: pyg.TAGConv(C, C, 2),
    "SGConv": lambda: pyg.SGConv(C, C, 2),
    "APPNP": lambda: pyg.APPNP(3, 0.1),
    "ARMAConv": lambda: pyg.ARMAConv(C, C),
    "ARMAConv stacks": lambda: pyg.ARMAConv(C, C, num_stacks=2, num_layers=2),
    "FeaStConv": lambda: pyg.FeaStConv(C, C, heads=2),
    "GeneralConv": lambda: pyg.GeneralConv(C, C),
    "ClusterGCNConv": lambda: pyg.ClusterGCNConv(C, C),
    "MFConv": lambda: pyg.MFConv(C, C),
    "FiLMConv": lambda: pyg.FiLMConv(C, C),
    "SuperGATConv": lambda: pyg.SuperGATConv(C, C // 4, heads=4),
    "AGNNConv": lambda: pyg.AGNNConv(),
    "EGConv": lambda: pyg.EGConv(C, C, num_heads=4),
    "EGConv several": lambda: pyg.EGConv(C, C, num_heads=4, aggregators=["mean", "max", "std"]),
    "SSGConv": lambda: pyg.SSGConv(C, C, alpha=0.1, K=2),
    "SimpleConv": lambda: pyg.SimpleConv("mean", combine_root="sum"),
    "MixHopConv": lambda: pyg.MixHopConv(C, C, [0, 1, 2]),
    "LGConv": lambda: pyg.LGConv(),
    "AntiSymmetricConv": lambda: pyg.AntiSymmetricConv(C),
}
WITH_EDGES = {
    "GATv2Conv": lambda: pyg.GATv2Conv(C, C // 4, heads=4, edge_dim=EDGE),
    "GATv2Conv no loops": lambda: pyg.GATv2Conv(
        C, C // 4, heads=4, edge_dim=EDGE, add_self_loops=False
    ),
    "TransformerConv": lambda: pyg.TransformerConv(C, C // 4, heads=4, edge_dim=EDGE),
    "GINEConv": lambda: pyg.GINEConv(mlp(C, C), edge_dim=EDGE),
    "NNConv": lambda: pyg.NNConv(C, C, nn.Linear(EDGE, C * C)),
    "PNAConv": _pna,
    "GENConv": lambda: pyg.GENConv(C, C, edge_dim=EDGE),
    "GENConv layer": lambda: pyg.GENConv(C, C, edge_dim=EDGE, norm="layer"),
    "CGConv": lambda: pyg.CGConv(C, dim=EDGE),
    "GMMConv": lambda: pyg.GMMConv(C, C, dim=EDGE, kernel_size=3),
}
WEIGHTED = {
    "GCNConv": lambda: pyg.GCNConv(C, C),
    "GCNConv improved": lambda: pyg.GCNConv(C, C, improved=True),
    "GraphConv": lambda: pyg.GraphConv(C, C),
    "ChebConv": lambda: pyg.ChebConv(C, C, 3),
    "TAGConv": lambda: pyg.TAGConv(C, C, 2),
    "ARMAConv": lambda: pyg.ARMAConv(C, C),
    "SSGConv": lambda: pyg.SSGConv(C, C, alpha=0.1, K=2),
}
DROPPED = {
    "GATConv dropout": lambda: pyg.GATConv(C, C // 4, heads=4, dropout=0.4),
    "GATv2Conv dropout": lambda: pyg.GATv2Conv(C, C // 4, heads=4, dropout=0.4),
    "TransformerConv dropout": lambda: pyg.TransformerConv(C, C // 4, heads=4, dropout=0.4),
    "ARMAConv dropout": lambda: pyg.ARMAConv(C, C, dropout=0.4, num_layers=2),
    "FeaStConv in GIN": lambda: pyg.GINConv(nn.Sequential(nn.Linear(C, C), nn.Dropout(0.3))),
    "EdgeConv dropout": lambda: pyg.EdgeConv(nn.Sequential(nn.Linear(2 * C, C), nn.Dropout(0.3))),
}  # fmt: skip


def grid(n, m):
    """(2, n_edges) the edges of a triangulated grid, both ways, by destination."""
    at = np.arange(n * m).reshape(n, m)
    pairs = [(at[:, :-1], at[:, 1:]), (at[:-1], at[1:]), (at[:-1, :-1], at[1:, 1:])]
    ends = np.concatenate([np.stack([a.ravel(), b.ravel()]) for a, b in pairs], 1)
    both = np.concatenate([ends, ends[::-1]], 1)
    return both[:, np.lexsort(both)]


def divided(edges, n, domain, metis):
    """A graph renumbered by a partition, and the sharding of its nodes with their first numbers."""
    if metis and domain.size > 1:
        indptr = np.concatenate([[0], np.cumsum(np.bincount(edges[1], minlength=n))])
        graph = Graph(indptr=indptr, indices=edges[0][np.argsort(edges[1], kind="stable")])
        labels = Metis()(graph, domain.size)
    else:
        labels = np.random.default_rng(3).integers(0, domain.size, n)
    origin = np.argsort(labels, kind="stable")
    place = np.argsort(origin)
    sizes = np.bincount(labels, minlength=domain.size).tolist()
    nodes = Sharding(domain, sizes)
    own = origin[nodes.first : nodes.first + nodes.own]
    nodes.origin = torch.from_numpy(own)
    return torch.from_numpy(place[edges]), nodes, torch.from_numpy(origin)


def sample(domain, directed):
    """Random edges among 60 nodes with loops, empty shards, features of nodes and edges."""
    generator = torch.Generator().manual_seed(3)
    edges = torch.randint(60, (2, 150), generator=generator)
    if not directed:
        edges = torch.cat([edges, edges.flip(0)], 1)
    nodes = Sharding(domain, SIZES[domain.size])
    x = torch.randn(60, C, generator=generator, dtype=torch.float64)
    e = torch.rand(edges.shape[1], EDGE, generator=generator, dtype=torch.float64)
    return edges, ShardGraph.from_edge_index(edges, nodes), x, e


def own(x, sharding):
    """A whole tensor as a sharded leaf."""
    rows = x[sharding.first : sharding.first + sharding.own].clone()
    return ShardTensor.from_local(rows, sharding).requires_grad_()


def farthest(a, b, scale=None):
    """Largest difference, relative to the largest number."""
    if b is None:
        return 0.0 if a is None else float(a.abs().max())
    if not b.numel():
        return 0.0
    a = torch.zeros_like(b) if a is None else a
    scale = b.abs().max() if scale is None else scale
    return float((a - b).abs().max() / scale.clamp(min=1e-30))


def serial(edges, n=60):
    """The graph on one rank."""
    return ShardGraph.from_edge_index(edges, Sharding(Domain(), [n]))


def shard_of(x, sharding):
    """A whole tensor as a sharded one."""
    return ShardTensor.from_local(x[sharding.first : sharding.first + sharding.own], sharding)
