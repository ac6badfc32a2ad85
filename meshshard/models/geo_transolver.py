"""GeoTransolver: in every block, slices attend to the geometry at several scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from meshshard.errors import MeshshardError
from meshshard.models.transolver import (
    MLP,
    Block,
    TransolverOptions,
    check_context,
    init_weights,
    slice_attention,
)
from meshshard.nn import CrossSliceAttention, ball_query, grouped
from meshshard.nn._unmodified import is_unmodified
from meshshard.nn.slices._forward import map_rows
from meshshard.nn.slices._math import Stage, slice_means, slice_sums
from meshshard.nn.slices._tiles import Tiling
from meshshard.nn.slices.slice_attention import default_tile, local_batch, local_heads
from meshshard.tensor import ShardGraph
from meshshard.tensor.shard_tensor import uncompiled
from meshshard.tensor.tokens import reduce_tokens

__all__ = ["GeoOptions", "GeoTransolver"]


@dataclass(frozen=True)
class GeoOptions(TransolverOptions):
    """Options of a `GeoTransolver` apart from its sizes; those of `TransolverOptions`, and more.

    Attributes:
        slices: number of slices G in each head.
        radii: radii of the balls in which a row sees the geometry, in the units of the positions.
        neighbors: for each radius, the number of nearest points of the geometry in the ball.
        local: width of the features that a row gets from one ball.
        context_dim: width of the context tokens, which describe the sample as a whole; 0 for none.
    """

    slices: int = 64
    radii: tuple[float, ...] = (0.05, 0.25)
    neighbors: tuple[int, ...] = (8, 32)
    local: int = 32


class GeoTransolver(nn.Module):
    """A Transolver whose rows see the geometry around them, and whose slices attend to all of it.

    For each radius, a small network maps the nearest points of the geometry in a ball around a row
    to features of this row. The geometry, these features and the context tokens are each reduced to
    slices. They form a context that is the same on every rank; in every block the slices attend to
    it, in addition to each other.

    Source: GeoTransolver (2512.20399); points in a ball are the nearest, in the order of distance,
    relative to the row and divided by the radius.

    Args:
        in_dim: width of an input row.
        out_dim: width of an output row.
        geometry_dim: width of a row of the geometry: position first, then normals or others.
        hidden: width C of the hidden rows, without the features from the balls.
        layers: number of blocks.
        heads: number of heads H, a divisor of `hidden` and of `options.local` times the number of
            radii.
        options: everything apart from the sizes.

    Communication: for each radius the search of `ball_query`, where graphs are not given, and one
    exchange forward and backward; one all-reduce forward and backward for each radius, for the
    geometry and for each block.

    Raises:
        MeshshardError: no layer, unequal numbers of radii and neighbors, or heads that are not a
            divisor.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        geometry_dim: int = 3,
        hidden: int = 256,
        layers: int = 4,
        heads: int = 8,
        options: GeoOptions = GeoOptions(),
    ) -> None:
        super().__init__()
        if layers < 1:
            raise MeshshardError(f"GeoTransolver: expected 1 layer or more, got {layers}")
        if len(options.radii) != len(options.neighbors):
            raise MeshshardError(
                f"GeoTransolver: {len(options.radii)} radii, {len(options.neighbors)} numbers of "
                f"neighbors; give one number for each radius"
            )
        self.in_dim, self.geometry_dim, self.options = in_dim, geometry_dim, options
        self.preprocess = MLP(in_dim, 2 * hidden, hidden)
        self.balls = nn.ModuleList(
            MLP(k * geometry_dim, options.local, options.local) for k in options.neighbors
        )
        widths = [options.local] * len(options.radii) + [geometry_dim]
        widths += [options.context_dim] if options.context_dim else []
        tokens = (SliceTokens(w, hidden, heads, options.slices) for w in widths)
        self.tokens = nn.ModuleList(tokens)
        full = hidden + options.local * len(options.radii)
        ends = [None] * (layers - 1) + [out_dim]
        sizes = full, heads, options.slices, len(widths) * (hidden // heads)
        self.blocks = nn.ModuleList(
            Block(slice_attention(CrossSliceAttention, sizes, options), n, options.mlp_ratio)
            for n in ends
        )
        self.apply(init_weights)

    def forward(
        self,
        x: Tensor,
        pos: Tensor,
        geometry: Tensor,
        context: Tensor | None = None,
        graphs: Sequence[ShardGraph] | None = None,
    ) -> Tensor:
        """Outputs of all rows.

        Args:
            x: (N, in_dim), sharded by rows or plain.
            pos: (N, 3) positions, with the sharding of x.
            geometry: (M, geometry_dim) points of the geometry, sharded over the same domain with
                any sizes; plain where x is plain.
            context: (K, context_dim), plain, the same on every rank.
            graphs: the result of `balls_of`, to reuse it while positions and geometry stay.

        Returns:
            (N, out_dim), sharded or plain as x.

        Raises:
            MeshshardError: a context that is missing or not expected.
        """
        check_context(context, self.options.context_dim)
        graphs = self.balls_of(pos, geometry) if graphs is None else graphs
        local = [self._local(i, g, pos, geometry) for i, g in enumerate(graphs)]
        parts = [*local, geometry, *([] if context is None else [context])]
        made = [tokens(part) for tokens, part in zip(self.tokens, parts, strict=True)]
        seen = torch.cat(made, -1)
        h = torch.cat([self.preprocess(x), *local], -1)
        for block in self.blocks:
            h = block(h, seen)
        return h

    def balls_of(self, pos: Tensor, geometry: Tensor) -> list[ShardGraph]:
        """For each radius, the graph from points of the geometry to the rows that see them.

        Args:
            pos: (N, 3) positions of the rows, sharded or plain.
            geometry: (M, geometry_dim) points of the geometry, position first.

        Communication: that of `ball_query` for each radius.
        """
        centers = geometry[:, : pos.shape[1]].detach()
        pairs = zip(self.options.radii, self.options.neighbors, strict=True)
        return [ball_query(centers, pos.detach(), r, k) for r, k in pairs]

    def _local(self, i: int, graph: ShardGraph, pos: Tensor, geometry: Tensor) -> Tensor:
        """(N, local) features of rows, from the balls of one radius."""
        k, width = self.options.neighbors[i], pos.shape[1]
        rows, mask = grouped(geometry, graph, k)
        offsets = (rows[..., :width] - pos[:, None]) / self.options.radii[i]
        seen = torch.cat([offsets, rows[..., width:]], -1) * mask[..., None]
        return torch.tanh(self.balls[i](seen.flatten(1)))


class SliceTokens(nn.Module):
    """Reduces rows to slices: the first half of slice attention.

    Args:
        dim: width of a row.
        inner: width of all heads together.
        heads: number of heads H, a divisor of `inner`.
        slices: number of slices G.

    Communication: one all-reduce of (H, G, inner / H + 1) forward and backward, of sharded rows.
    """

    def __init__(self, dim: int, inner: int, heads: int, slices: int) -> None:
        super().__init__()
        self.dim, self.tile = dim, default_tile(None, heads, slices)
        self.in_project_x, self.in_project_fx = nn.Linear(dim, inner), nn.Linear(dim, inner)
        self.in_project_slice = nn.Linear(inner // heads, slices)
        self.temperature = nn.Parameter(torch.full((1, heads, 1, 1), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, dim), sharded or plain, to (1, H, G, inner / H), the same on every rank."""
        return uncompiled(self._forward, x)  # type: ignore[no-any-return]

    def _forward(self, x: Tensor) -> Tensor:
        rows, sharding = local_batch(x, self.dim)
        if not is_unmodified(self):
            own = self._sums_by_modules(x)
        else:
            modules = (self.in_project_x, self.in_project_fx, self.in_project_slice)
            tensors = [p for module in modules for p in module.parameters()]
            stage = Stage(_sums, (*tensors, self.temperature.view(-1, 1)))
            own = map_rows(stage, Tiling.of(sharding, self.tile, False, False), rows, summed=True)
        return slice_means(reduce_tokens(sharding.domain, own), 1e-5, rows.dtype)

    def _sums_by_modules(self, x: Tensor) -> Tensor:
        """Sums over the rows of this rank, with a call of each inner module."""
        heads = self.temperature.shape[1], -1
        m = self.in_project_x(x).unflatten(-1, heads)
        w = (self.in_project_slice(m) / self.temperature.view(-1, 1)).softmax(-1)
        f = self.in_project_fx(x).unflatten(-1, heads)
        return slice_sums(local_heads(w, x), local_heads(f, x))


def _sums(
    x: Tensor, wx: Tensor, bx: Tensor, wf: Tensor, bf: Tensor, ws: Tensor, *rest: Tensor
) -> Tensor:
    bs, T = rest
    shape = *x.shape[:2], len(T), ws.shape[1]
    logits = F.linear(F.linear(x, wx, bx).view(shape), ws, bs)
    w, f = (logits / T).softmax(-1), F.linear(x, wf, bf).view(shape)
    return slice_sums(w.transpose(1, 2), f.transpose(1, 2))
