"""Neighbors: exact k-nearest and radius graphs of sharded points, as graphs of their own.

Every result equals that of one search over all points: neighbors by distance (float64, coordinates
squared and added in their order, so that ties are ties everywhere), then by row in the source
(`sharding.origin`; the id where there is none), which no partition changes. A point is never its
own neighbor, others at its place are. The search itself has no gradient; `edge_vectors` has.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from meshshard.errors import MeshshardError
from meshshard.nn.points._search import Side, around, nearest, side
from meshshard.tensor import ShardGraph, ShardTensor
from meshshard.tensor.shard_tensor import local_of, wrap

__all__ = ["ball_query", "edge_vectors", "grouped", "knn", "knn_graph", "radius_graph"]


def knn_graph(pos: Tensor, k: int, loop: bool = False) -> ShardGraph:
    """Every point hears its k nearest others.

    Args:
        pos: (n, d) positions or features, sharded along their rows, or plain: a graph on one rank.
            Points that spread in up to eight dims are searched by a k-d tree on a CPU; others, and
            on another device, by looking at all points that other ranks cannot exclude.
        k: neighbors of each point; all others where there are fewer.
        loop: whether a point is among its own neighbors, as PyG's `DynamicEdgeConv` has it.

    Returns:
        The graph, the edges of a point by distance, then row in the source of the neighbor.

    Raises:
        DomainError: on every rank, where any has points that are not finite (naming rank and ids),
            or not the memory for so many edges.

    Communication: that of `knn`.
    """
    points = side(pos, "knn_graph")
    return _nearest(points, points if loop else None, k, "knn_graph")


def knn(x: Tensor, y: Tensor, k: int) -> ShardGraph:
    """Every row of y hears its k nearest of x: a bipartite graph from x to y.

    Args:
        x: (n, d) points.
        y: (m, d) places, sharded over the same domain, otherwise or alike.
        k: neighbors of each place; n where that is fewer.

    Raises:
        DomainError: as `knn_graph`.
        MeshshardError: the clouds live on different domains or have different d.

    Communication: four gathers of objects, two all-to-alls of counts, one of cells and one of
    points: those that may be nearer than what a rank has itself, d + 2 numbers each, two to three
    times the halo that results; then that of `ShardGraph.from_ids`. None backward.
    """
    return _nearest(side(x, "knn"), side(y, "knn"), k, "knn")


def radius_graph(
    pos: Tensor, r: float, max_neighbors: int | None = None, max_edges: int | None = None
) -> ShardGraph:
    """Every point hears all others within r, or the nearest `max_neighbors` of them.

    Args:
        pos: (n, d) positions as in `knn_graph`.
        r: the largest distance; d^2 <= r^2 decides.
        max_neighbors: the most that a point hears, None for all. (PyG takes any so many, not the
            nearest.)
        max_edges: more are refused.

    Returns:
        The graph, ordered as that of `knn_graph`.

    Raises:
        DomainError: as `knn_graph`. Without `max_neighbors` edges are counted before they are
            made; with it there is room for so many of each point.

    Communication: that of `knn`.
    """
    return _within(side(pos, "radius_graph"), None, r, max_neighbors, max_edges)


def ball_query(x: Tensor, y: Tensor, r: float, max_neighbors: int | None = None) -> ShardGraph:
    """Every row of y hears all of x within r, or the nearest `max_neighbors` of them.

    (PointNet++'s takes the first so many in memory, which would depend on the numbering.)

    Args:
        x: (n, d) points.
        y: (m, d) places, sharded over the same domain.
        r: the largest distance.
        max_neighbors: the most that a place hears, None for all.

    Raises:
        DomainError: as `radius_graph`.
        MeshshardError: as `knn`, or a radius or number that cannot be.

    Communication: that of `knn`.
    """
    points, places = side(x, "ball_query"), side(y, "ball_query")
    return _within(points, places, r, max_neighbors, None)


def edge_vectors(pos: Tensor, graph: ShardGraph, to: Tensor | None = None) -> Tensor:
    """Position of every edge's source relative to its destination: (n_edges, d).

    Differentiable in both; its norm is the edge's length.

    Args:
        pos: (n, d) positions of the sources, sharded, or plain where the graph has one rank.
        graph: the graph.
        to: (m, d) positions of the destinations, where they are others.

    Returns:
        A ShardTensor over `graph.edges`, a plain tensor where `pos` is plain.

    Communication: one exchange, forward and backward.
    """
    ends = local_of(pos if to is None else to)
    vectors = graph.local(pos)[graph.indices] - ends[graph.destinations]
    return wrap(vectors, graph.edges, 0) if isinstance(pos, ShardTensor) else vectors


def grouped(x: Tensor, graph: ShardGraph, width: int | None = None) -> tuple[Tensor, Tensor]:
    """Rows of the sources side by side for each destination, as PointNet++ groups them.

    Args:
        x: (n, …) rows of the sources.
        graph: the graph, from `ball_query` or `knn`.
        width: neighbors to make room for; by default as many as the fullest row of all has.

    Returns:
        (m, width, …) rows, zero where there are fewer; (m, width) bool, where there is one. Both
        sharded like the destinations, plain where `x` is plain.

    Raises:
        MeshshardError: on every rank, where a destination has more than `width`.

    Communication: one exchange forward and backward, one gather of objects.
    """
    count = graph.indptr.diff()
    fullest = max(graph.domain.share(int(count.max()) if len(count) else 0))
    width = fullest if width is None else width
    if fullest > width:
        raise MeshshardError(f"grouped: {fullest} neighbors do not fit into a width of {width}")
    mask = torch.arange(width, device=count.device) < count[:, None]
    at = torch.nonzero(mask.view(-1)).view(-1)
    local = graph.local(x)
    room = local.new_zeros(len(count) * width, *local.shape[1:])
    rows = room.index_copy(0, at, local[graph.indices]).view(len(count), width, *local.shape[1:])
    if not isinstance(x, ShardTensor):
        return rows, mask
    return wrap(rows, graph.nodes, 0), wrap(mask, graph.nodes, 0)


def _counted(k: int, what: str) -> int:
    try:
        count = operator.index(k)
    except TypeError:
        count = 0
    if count < 1:
        raise MeshshardError(f"{what}: {k!r} neighbors; take a whole number, one or more")
    return count


def _nearest(x: Side, y: Side | None, k: int, what: str) -> ShardGraph:
    ids, starts = nearest(x, y, _counted(k, what), what)
    return ShardGraph.from_ids(ids, starts, (y or x).sharding, x.sharding)


def _within(
    x: Side, y: Side | None, r: float, most: int | None, max_edges: int | None
) -> ShardGraph:
    what = "radius_graph" if y is None else "ball_query"
    if not r >= 0:
        raise MeshshardError(f"{what}: a radius of {r}; take a number of 0 or more")
    if most is None:
        ids, starts = around(x, y, r, max_edges, what)
    else:
        ids, starts = nearest(x, y, _counted(most, what), what, r, max_edges)
    return ShardGraph.from_ids(ids, starts, (y or x).sharding, x.sharding)
