"""Interpolation between point clouds by their nearest neighbors."""

from __future__ import annotations

import torch
from torch import Tensor

from meshshard.comm import linear
from meshshard.nn.graph._sparse import Incidence
from meshshard.nn.points.knn import edge_vectors, knn
from meshshard.tensor import ShardGraph, ShardTensor
from meshshard.tensor.shard_tensor import local_of, wrap

__all__ = ["interpolate", "knn_interpolate"]

CLOSEST = 1e-16  # squared distance below which a place is the point itself, as PyG has it


def knn_interpolate(x: Tensor, pos_x: Tensor, pos_y: Tensor, k: int = 3) -> Tensor:
    """Features of one cloud at the places of another, from the k nearest points of each place.

    The mean of the neighbors' rows, weighted by 1 / max(d^2, 1e-16) (PointNet++, Qi et al. 2017,
    and PyG's function of this name). Differentiable in `x` and, where they ask for it, in the
    positions, the neighbors held fixed.

    Args:
        x: (n, …) features of the points.
        pos_x: (n, d) their positions.
        pos_y: (m, d) places, sharded over the same domain, otherwise or alike.
        k: neighbors of each place; all points where that is fewer.

    Returns:
        (m, …) features, sharded like `pos_y`, zero where there are no points at all.

    Raises:
        DomainError: as `knn`.

    Communication: that of `knn`, and of `interpolate`.
    """
    return interpolate(x, pos_x, pos_y, knn(pos_x, pos_y, k))


def interpolate(x: Tensor, pos_x: Tensor, pos_y: Tensor, graph: ShardGraph) -> Tensor:
    """As `knn_interpolate`, over a graph that is there already: for clouds that do not move.

    Communication: two exchanges (positions and features); backward one of features, one more of
    positions that want a gradient.
    """
    vectors = local_of(edge_vectors(pos_x, graph, pos_y))
    source = graph.local(x)[graph.indices]
    kind = torch.promote_types(source.dtype, torch.float32)  # a half holds no weight of 1e16
    vectors = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
    weights = 1 / (vectors * vectors).sum(1).clamp(min=CLOSEST)
    weights = weights.to(kind).view(-1, *[1] * (source.ndim - 1))
    least = torch.finfo(kind).tiny  # of a place without neighbors
    sums = Incidence.of(graph).incoming
    above, below = linear.apply(sums, source * weights), linear.apply(sums, weights)
    out = above / below.clamp(min=least)
    out = out.to(source.dtype)
    return wrap(out, graph.nodes, 0) if isinstance(x, ShardTensor) else out
