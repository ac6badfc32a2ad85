"""Interpolation between point clouds by nearest neighbors."""

from __future__ import annotations

import torch
from torch import Tensor

from meshshard.comm import linear
from meshshard.nn.graph._sparse import Incidence
from meshshard.nn.points.knn import edge_vectors, knn
from meshshard.tensor import ShardGraph, ShardTensor
from meshshard.tensor.shard_tensor import local_of, wrap

__all__ = ["interpolate", "knn_interpolate"]

CLOSEST = 1e-16  # smallest squared distance, as in PyG


def knn_interpolate(x: Tensor, pos_x: Tensor, pos_y: Tensor, k: int = 3) -> Tensor:
    """Features of one cloud at the positions of another, from the k nearest points.

    The mean of the neighbors' features, weighted by 1 / max(d^2, 1e-16) (PointNet++, Qi et al.
    2017, and PyG's function of this name). Differentiable in `x` and, if they require a gradient,
    in the positions; the choice of the neighbors has no gradient.

    Args:
        x: (n, …) features of the points.
        pos_x: (n, d) positions of the points.
        pos_y: (m, d) query points, sharded over the same domain with any sizes.
        k: number of neighbors of each query; all points if there are fewer.

    Returns:
        (m, …) features, sharded like `pos_y`; zero if there are no points.

    Raises:
        DomainError: as `knn`.
        MeshshardError: as `knn`.

    Communication: that of `knn`, and of `interpolate`.
    """
    return interpolate(x, pos_x, pos_y, knn(pos_x, pos_y, k))


def interpolate(x: Tensor, pos_x: Tensor, pos_y: Tensor, graph: ShardGraph) -> Tensor:
    """As `knn_interpolate`, with a given graph; for clouds that do not move.

    Communication: two exchanges (positions and features); backward one of features, and one of
    positions that require a gradient.
    """
    vectors = local_of(edge_vectors(pos_x, graph, pos_y))
    source = graph.local(x)[graph.indices]
    dtype = torch.promote_types(source.dtype, torch.float32)  # a weight of 1e16 overflows float16
    vectors = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
    weights = 1 / (vectors * vectors).sum(1).clamp(min=CLOSEST)
    weights = weights.to(dtype).view(-1, *[1] * (source.ndim - 1))
    sums = Incidence.of(graph).incoming
    total, weight = linear.apply(sums, source * weights), linear.apply(sums, weights)
    out = total / weight.clamp(min=torch.finfo(dtype).tiny)  # a query without neighbors: 0 / tiny
    out = out.to(source.dtype)
    return wrap(out, graph.nodes, 0) if isinstance(x, ShardTensor) else out
