"""Points to a regular grid and back, with multilinear weights and exact gradients.

The grid is replicated: it is small, compared with the mesh that is pooled to it for a spectral or
convolutional model. Points are sharded or plain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from meshshard.comm import Domain
from meshshard.errors import MeshshardError
from meshshard.tensor import ShardTensor
from meshshard.tensor.align import require_same_sharding, unwrap_rows
from meshshard.tensor.shard_tensor import wrap

__all__ = ["Box", "grid_from_points", "points_from_grid"]


@dataclass(frozen=True)
class Box:
    """A regular grid in a box: nodes are the corners of its cells, the outermost on the box.

    Attributes:
        low: smallest coordinate in each dim.
        high: largest coordinate in each dim.
        shape: number of nodes in each dim, 2 or more.

    Raises:
        MeshshardError: different numbers of dims, fewer than two nodes in a dim, or a low
            coordinate that is not below the high one.
    """

    low: Sequence[float]
    high: Sequence[float]
    shape: Sequence[int]

    def __post_init__(self) -> None:
        if not len(self.low) == len(self.high) == len(self.shape) or min(self.shape) < 2:
            raise MeshshardError(f"{self}: give one number a dim, and two nodes or more in each")
        if any(a >= b for a, b in zip(self.low, self.high, strict=True)):
            raise MeshshardError(f"{self}: low must be below high")

    def corners(self, pos: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Nodes (n,) int64 around each point and their weights (n,), corner by corner of its cell.

        Points outside the box are moved to its surface; the weights of a NaN are NaN.

        Args:
            pos: (n, dims) coordinates.

        Raises:
            MeshshardError: the points have another number of dims.
        """
        if pos.ndim != 2 or pos.shape[1] != len(self.shape):
            raise MeshshardError(
                f"points must be (n, {len(self.shape)}) for this grid, not {tuple(pos.shape)}"
            )
        pos = pos if pos.is_floating_point() else pos.double()
        low, high, nodes = (pos.new_tensor(list(x)) for x in (self.low, self.high, self.shape))
        place = (pos - low) / (high - low) * (nodes - 1)
        place = torch.minimum(place.clamp_min(0), nodes - 1)
        cell = torch.minimum(place.detach().floor(), nodes - 2).nan_to_num(0)
        part = place - cell
        cell = cell.long()
        for corner in product((0, 1), repeat=len(self.shape)):
            weight, node = torch.ones_like(part[:, 0]), torch.zeros_like(cell[:, 0])
            for d, bit in enumerate(corner):
                weight = weight * (part[:, d] if bit else 1 - part[:, d])
                node = node * self.shape[d] + cell[:, d] + bit
            yield node, weight


def points_from_grid(grid: Tensor, pos: Any, box: Box) -> Any:
    """Multilinear interpolation of a grid at points, as `F.grid_sample` with aligned corners.

    Args:
        grid: `(*box.shape, channels)`, plain, the same on every rank.
        pos: (n, dims) coordinates, sharded by rows or plain.
        box: position and shape of the grid.

    Returns:
        (n, channels), sharded like the points, or plain.

    Raises:
        MeshshardError: the grid is sharded or has another shape, or the points have another number
            of dims.

    Communication: none; the gradient of the grid is partial (see `meshshard.comm`).
    """
    if type(grid) is ShardTensor or tuple(grid.shape[:-1]) != tuple(box.shape):
        raise MeshshardError(
            f"points_from_grid: the grid must be a plain tensor ({', '.join(map(str, box.shape))}, "
            f"channels), not {type(grid).__name__} {tuple(grid.shape)}"
        )
    nodes = grid.reshape(-1, grid.shape[-1])
    out = nodes.new_zeros(())
    for node, weight in box.corners(unwrap_rows(pos)[0]):
        out = out + nodes[node] * weight[:, None]
    return wrap(out, pos.sharding, 0) if type(pos) is ShardTensor else out


def grid_from_points(x: Any, pos: Any, box: Box, mean: bool = True) -> Tensor:
    """Scatter rows to the grid nodes around their points, with multilinear weights.

    Args:
        x: (n, channels), sharded by rows or plain.
        pos: (n, dims) coordinates, sharded or plain like x.
        box: position and shape of the grid.
        mean: whether the sum at a node is divided by the sum of its weights; nodes without points
            are 0.

    Returns:
        `(*box.shape, channels)`, replicated.

    Raises:
        MeshshardError: only one of x and pos is sharded, or the points have another number of dims.
        NoShardRule: x and pos have different shardings.

    Communication: one all-reduce of the grid and its weights, forward and backward.
    """
    if type(x) is not type(pos):
        raise MeshshardError("grid_from_points: x and pos must both be sharded, or both plain")
    domain = Domain()
    if type(x) is ShardTensor:
        domain = require_same_sharding("grid_from_points", (x, pos)).sharding.domain
    rows, points = unwrap_rows(x)[0], unwrap_rows(pos)[0]
    n = torch.Size(box.shape).numel()
    kind = torch.promote_types(rows.dtype, torch.float32)
    sums = rows.new_zeros((n, rows.shape[1] + 1), dtype=kind)
    values = torch.cat([rows, torch.ones_like(rows[:, :1])], 1).to(kind)
    for node, weight in box.corners(points):
        sums = sums.index_add(0, node, values * weight[:, None].to(kind))
    sums = domain.all_reduce(sums)
    values, weights = sums[:, :-1], sums[:, -1:]
    if mean:
        values = values / torch.where(weights > 0, weights, 1.0)
    values = values.to(rows.dtype) if rows.is_floating_point() else values
    return values.reshape(*box.shape, -1)
