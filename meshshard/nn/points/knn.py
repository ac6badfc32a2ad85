"""Neighbors: exact k-nearest-neighbor and radius graphs of sharded points.

Every result equals that of one search over all points. Neighbors are ordered by distance (float64,
squared coordinates added in their order, so that ties are the same on every rank), then by row in
the source (`sharding.origin`; the id where there is none), which does not depend on the partition.
A point is not its own neighbor unless asked for; other points at the same position are. The search
has no gradient; `edge_vectors` has.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from meshshard.errors import MeshshardError
from meshshard.nn.points._search import Side, nearest, side, within_radius
from meshshard.tensor import ShardGraph, ShardTensor
from meshshard.tensor.shard_tensor import local_of, wrap

__all__ = ["ball_query", "edge_vectors", "grouped", "knn", "knn_graph", "radius_graph"]


def knn_graph(pos: Tensor, k: int, loop: bool = False) -> ShardGraph:
    """Each point receives edges from its k nearest neighbors.

    Args:
        pos: (n, d) positions or features, sharded along their rows, or plain for a graph on one
            rank. On a CPU, points whose intrinsic dimension is up to eight are searched by a k-d
            tree; others, and points on another device, by brute force.
        k: number of neighbors of each point; all other points where there are fewer.
        loop: whether a point is among its own neighbors, as in PyG's `DynamicEdgeConv`.

    Returns:
        The graph. The edges of a point are ordered by distance, then row in the source.

    Raises:
        DomainError: on every rank, if any rank has points that are not finite (the message names
            rank and ids), or too little memory for the edges.
        MeshshardError: k is not an integer of 1 or more, or `pos` is not a tensor (n, d).

    Communication: that of `knn`.

    Examples:
        >>> import torch
        >>> graph = knn_graph(torch.tensor([[0.0], [1.0], [3.0]]), 1)
        >>> graph.edge_index.tolist()  # sources, destinations
        [[1, 0, 1], [0, 1, 2]]
    """
    points = side(pos, "knn_graph")
    return _nearest(points, points if loop else None, k, "knn_graph")


def knn(x: Tensor, y: Tensor, k: int) -> ShardGraph:
    """Each row of y receives edges from its k nearest points of x: a bipartite graph from x to y.

    Args:
        x: (n, d) points, sharded or plain.
        y: (m, d) query points, sharded over the same domain with any sizes.
        k: number of neighbors of each query; all n points where there are fewer.

    Returns:
        The graph. The edges of a query are ordered by distance, then row in the source.

    Raises:
        DomainError: as `knn_graph`.
        MeshshardError: as `knn_graph`, or x and y are sharded over different domains or differ in
            d.

    Communication: four gathers of objects; two all-to-alls of counts, one of range queries and one
    of points that can be nearer than those of this rank (d + 2 numbers each, two to three times
    the resulting halo); then that of `ShardGraph.from_ids`. None backward.
    """
    return _nearest(side(x, "knn"), side(y, "knn"), k, "knn")


def radius_graph(
    pos: Tensor, r: float, max_neighbors: int | None = None, max_edges: int | None = None
) -> ShardGraph:
    """Each point receives edges from all others within r, or the nearest `max_neighbors` of them.

    Args:
        pos: (n, d) positions, as in `knn_graph`.
        r: radius; points at a distance of r are included.
        max_neighbors: largest number of neighbors of a point, None for all. (PyG keeps an
            arbitrary subset, not the nearest.)
        max_edges: largest number of edges on all ranks, None for no limit.

    Returns:
        The graph, with edges ordered as in `knn_graph`.

    Raises:
        DomainError: as `knn_graph`, or more than `max_edges` edges. Without `max_neighbors`, edges
            are counted before they are made; with it, memory is checked for `max_neighbors` each.
        MeshshardError: a negative radius, or as `knn_graph`.

    Communication: that of `knn`.
    """
    return _within(side(pos, "radius_graph"), None, r, max_neighbors, max_edges)


def ball_query(x: Tensor, y: Tensor, r: float, max_neighbors: int | None = None) -> ShardGraph:
    """Each row of y receives edges from points of x within r, or the nearest `max_neighbors`.

    (PointNet++'s function keeps the first points in memory, which depends on the numbering.)

    Args:
        x: (n, d) points, sharded or plain.
        y: (m, d) query points, sharded over the same domain with any sizes.
        r: radius; points at a distance of r are included.
        max_neighbors: largest number of neighbors of a query, None for all.

    Returns:
        The bipartite graph from x to y, with edges ordered as in `knn`.

    Raises:
        DomainError: as `radius_graph`.
        MeshshardError: as `knn`, or a negative radius.

    Communication: that of `knn`.
    """
    points, queries = side(x, "ball_query"), side(y, "ball_query")
    return _within(points, queries, r, max_neighbors, None)


def edge_vectors(pos: Tensor, graph: ShardGraph, to: Tensor | None = None) -> Tensor:
    """Position of every edge's source relative to its destination: (n_edges, d).

    Differentiable in the positions of both ends; the norm is the length of the edge.

    Args:
        pos: (n, d) positions of the sources, sharded, or plain on one rank.
        graph: the graph, from sources to destinations.
        to: (m, d) positions of the destinations of a bipartite graph; `pos` by default.

    Returns:
        (n_edges, d), sharded as `graph.edges`, or plain where `pos` is plain.

    Communication: one exchange, forward and backward.
    """
    ends = local_of(pos if to is None else to)
    vectors = graph.local(pos)[graph.indices] - ends[graph.destinations]
    return wrap(vectors, graph.edges, 0) if isinstance(pos, ShardTensor) else vectors


def grouped(x: Tensor, graph: ShardGraph, width: int | None = None) -> tuple[Tensor, Tensor]:
    """Neighbors of each destination as a dense, zero-padded tensor, as grouped in PointNet++.

    Args:
        x: (n, …) rows of the sources.
        graph: the graph, from `ball_query` or `knn`.
        width: size of the dim of the neighbors; by default the largest number of neighbors of any
            destination on any rank.

    Returns:
        (m, width, …) rows of the neighbors, padded with zeros; (m, width) bool, True for
        neighbors, False for padding. Both sharded like the destinations, plain where `x` is plain.

    Raises:
        MeshshardError: on every rank, if a destination has more than `width` neighbors.

    Communication: one exchange forward and backward, one gather of objects.
    """
    count = graph.indptr.diff()
    fullest = max(graph.domain.share(int(count.max()) if len(count) else 0))
    width = fullest if width is None else width
    if fullest > width:
        raise MeshshardError(
            f"grouped: a row has {fullest} neighbors, more than the width of {width}; take a "
            f"larger width, or a graph with max_neighbors={width}"
        )
    mask = torch.arange(width, device=count.device) < count[:, None]
    at = torch.nonzero(mask.view(-1)).view(-1)
    local = graph.local(x)
    padded = local.new_zeros(len(count) * width, *local.shape[1:])
    rows = padded.index_copy(0, at, local[graph.indices]).view(len(count), width, *local.shape[1:])
    if not isinstance(x, ShardTensor):
        return rows, mask
    return wrap(rows, graph.nodes, 0), wrap(mask, graph.nodes, 0)


def _checked_k(k: int, what: str) -> int:
    try:
        count = operator.index(k)
    except TypeError:
        count = 0
    if count < 1:
        raise MeshshardError(f"{what}: {k!r} neighbors; take an integer of 1 or more")
    return count


def _nearest(x: Side, y: Side | None, k: int, what: str) -> ShardGraph:
    ids, starts = nearest(x, y, _checked_k(k, what), what)
    return ShardGraph.from_ids(ids, starts, (y or x).sharding, x.sharding)


def _within(
    x: Side, y: Side | None, r: float, max_neighbors: int | None, max_edges: int | None
) -> ShardGraph:
    what = "radius_graph" if y is None else "ball_query"
    if not r >= 0:
        raise MeshshardError(f"{what}: a radius of {r}; take 0 or more")
    if max_neighbors is None:
        ids, starts = within_radius(x, y, r, max_edges, what)
    else:
        ids, starts = nearest(x, y, _checked_k(max_neighbors, what), what, r, max_edges)
    return ShardGraph.from_ids(ids, starts, (y or x).sharding, x.sharding)
