"""coarsen: coarse levels of a graph, in which a node stands for a cluster of the finer level.

A level consists of three ordinary graphs: between clusters, from nodes to their clusters, and back.
Clusters and edges are keyed by labels, so a level does not depend on the partition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshshard.comm import Domain
from meshshard.errors import MeshshardError
from meshshard.nn.graph.aggregate import aggregate
from meshshard.tensor import ShardGraph, Sharding, ShardTensor
from meshshard.tensor.shard_graph import offsets_of
from meshshard.tensor.shard_tensor import local_of

__all__ = ["Level", "cluster", "cluster_around", "coarsen"]


@dataclass(frozen=True, eq=False)
class Level:
    """A coarse graph, and the bipartite graphs to it and back.

    Attributes:
        graph: between clusters that an edge joins. A cluster is owned by the lowest rank that owns
            one of its nodes; its label is its row in the source.
        down: an edge from every node to its cluster.
        up: an edge from every cluster to each of its nodes.
    """

    graph: ShardGraph
    down: ShardGraph
    up: ShardGraph

    def coarse(self, x: Any, reduce: str = "mean") -> Any:
        """(n_clusters, …) mean, sum or maximum over the nodes of every cluster.

        Communication: one exchange, forward and backward.
        """
        return aggregate(x, self.down, reduce)

    def fine(self, x: Any) -> Any:
        """(n_nodes, …) the row of each node's cluster.

        Communication: one exchange, forward and backward.
        """
        return aggregate(x, self.up, "sum")


def cluster(graph: ShardGraph, size: int) -> ShardTensor:
    """(n_nodes,) int64 labels of clusters of about `size` nodes, by METIS on the whole graph.

    Rank 0 partitions the graph in the numbering of the source, so labels do not depend on the
    ranks. Compute them once and keep them.

    Raises:
        MeshshardError: `size` is less than 1.

    Communication: three all-to-all: edges and rows to rank 0, labels back.
    """
    from meshshard.graph import Graph
    from meshshard.partitioning.methods import Metis

    if size < 1:
        raise MeshshardError(f"cluster: clusters of {size} nodes; size must be 1 or more")
    domain, nodes = graph.domain, graph.nodes
    rows = nodes.sources(domain.device)
    edges = torch.stack([graph.origins[graph.indices], rows[graph.destinations]], 1)
    every = domain.gather(edges, graph.edges.sizes)
    places = domain.gather(rows, nodes.sizes)
    labels = rows[:0]
    if domain.rank == 0:
        both = torch.unique(torch.cat([every, every.flip(1)]), dim=0)
        both = both[both[:, 0] != both[:, 1]]
        indptr = offsets_of(torch.bincount(both[:, 0], minlength=nodes.total))
        whole = Graph(indptr.cpu().numpy(), both[:, 1].cpu().numpy(), symmetric=True)
        parts = max(1, round(nodes.total / size))
        labels = torch.from_numpy(Metis()(whole, parts)).to(places)[places]
    return ShardTensor.from_local(domain.scatter(labels, nodes.sizes), nodes)


def cluster_around(pos: Any, rows: Tensor) -> Any:
    """(n_nodes,) int64 labels: the nearest of some chosen points.

    Args:
        pos: (n_nodes, dims) positions, sharded or plain.
        rows: (n_clusters,) rows of the chosen points, replicated, for example those of
            `farthest_points`. No two of the points may coincide.

    Communication: one all-reduce of the chosen points.
    """
    from scipy.spatial import cKDTree

    own = local_of(pos)
    chosen = pos.detach()[rows]
    _, nearest = cKDTree(chosen.double().cpu().numpy()).query(own.detach().double().cpu().numpy())
    labels = torch.from_numpy(nearest.astype("int64")).to(own.device)
    return ShardTensor.from_local(labels, pos.sharding) if type(pos) is ShardTensor else labels


def coarsen(graph: ShardGraph, labels: Any) -> Level:
    """The coarse level given by the cluster of every node.

    Args:
        graph: the graph whose nodes are clustered, not bipartite.
        labels: (n_nodes,) int64 clusters from 0 without gaps, sharded like the nodes; plain on one
            rank.

    Raises:
        MeshshardError: a label is negative; raised on every rank.
        DomainError: a number below the largest label is unused; raised on every rank.

    Communication: one all-reduce of a number per cluster, three all-to-all of edges, and that of
    three graphs.
    """
    domain, nodes = graph.domain, graph.nodes
    own = local_of(labels)
    clusters, number = _number_clusters(domain, own)
    seen = domain.exchange(own, graph.exchange)
    pairs = torch.stack([seen[graph.indices], own[graph.destinations]], 1)
    pairs = torch.unique(pairs[pairs[:, 0] != pairs[:, 1]], dim=0)
    between = _send_to_clusters(pairs, clusters, number)
    between = torch.unique(between, dim=0)
    coarse = _graph_from(between, number[between[:, 0]], clusters, clusters, number)
    rows = torch.stack([nodes.sources(domain.device), own], 1)
    ids = torch.arange(nodes.own, device=domain.device) + nodes.first
    members = _send_to_clusters(torch.cat([rows, ids[:, None]], 1), clusters, number)
    down = _graph_from(members, members[:, 2], clusters, nodes, number)
    one = torch.arange(nodes.own + 1, device=domain.device)
    up = ShardGraph.from_ids(number[own], one, nodes, clusters, rows[:, 0])
    return Level(coarse, down, up)


def _number_clusters(domain: Domain, labels: Tensor) -> tuple[Sharding, Tensor]:
    """The sharding of the clusters, and the id of every label."""
    most = torch.zeros(2, dtype=torch.int64, device=domain.device)
    if len(labels):
        most = torch.stack([labels.max() + 1, -labels.min()])
    total, below = domain.all_reduce(most, "max").tolist()
    if below > 0:
        raise MeshshardError(
            f"coarsen: label {-below} is negative; number clusters from 0 without gaps"
        )
    here = torch.zeros(total, dtype=torch.int64, device=domain.device)
    here[labels] = domain.size - domain.rank
    owner = domain.size - domain.all_reduce(here, "max")
    domain.run_collectively(lambda: _without_gaps(owner, domain.size), "coarsen")
    order, sizes = domain.group_by_rank(owner)
    clusters = Sharding(domain, sizes)
    clusters.origin = order[clusters.first : clusters.first + clusters.own]
    number = torch.empty_like(order)
    number[order] = torch.arange(total, device=domain.device)
    return clusters, number


def _without_gaps(owner: Tensor, size: int) -> None:
    gaps = torch.nonzero(owner == size)
    if len(gaps):
        raise MeshshardError(
            f"no node has label {int(gaps[0])}; number clusters from 0 without gaps"
        )


def _send_to_clusters(rows: Tensor, clusters: Sharding, number: Tensor) -> Tensor:
    """Rows (source, label, …) sent to the ranks that own the clusters."""
    order, send = clusters.domain.group_by_rank(clusters.owners(number[rows[:, 1]]))
    return clusters.domain.route(rows[order], send)[0]


def _graph_from(
    edges: Tensor, ids: Tensor, clusters: Sharding, sources: Sharding, number: Tensor
) -> ShardGraph:
    """The graph of rows (key of the source, label, …), sorted by cluster, then by key."""
    to = number[edges[:, 1]] - clusters.first
    order = torch.argsort(edges[:, 0], stable=True)
    order = order[torch.argsort(to[order], stable=True)]
    indptr = offsets_of(torch.bincount(to, minlength=clusters.own))
    keys = ((edges[:, 1] << 32) + edges[:, 0])[order]
    return ShardGraph.from_ids(ids[order], indptr, clusters, sources, keys)
