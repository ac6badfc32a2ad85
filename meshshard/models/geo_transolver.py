"""GeoTransolver: slices that look at the geometry, at several scales, in every block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from meshshard.errors import MeshshardError
from meshshard.models.transolver import MLP, Block, TransolverOptions, start
from meshshard.nn import CrossSliceAttention, ball_query, grouped
from meshshard.nn._unmodified import is_unmodified
from meshshard.nn.slices._layer import Piece, Run, means, summed
from meshshard.nn.slices._passes import by_rows
from meshshard.nn.slices.slice_attention import batch_of, of_heads, tile_of
from meshshard.tensor import ShardGraph
from meshshard.tensor.shard_tensor import uncompiled
from meshshard.tensor.tokens import reduce_tokens

__all__ = ["GeoOptions", "GeoTransolver"]


@dataclass(frozen=True)
class GeoOptions(TransolverOptions):
    """What is not a size of a `GeoTransolver`, besides the options of a `Transolver`.

    Attributes:
        slices: G.
        radii: of the balls in which a row sees the geometry, in the units of the positions.
        neighbors: how many points of the geometry, the nearest, each ball has room for.
        local: width of what a row learns from one ball.
        context_dim: width of the tokens that hold for the sample as a whole, 0 for none.
    """

    slices: int = 64
    radii: tuple[float, ...] = (0.05, 0.25)
    neighbors: tuple[int, ...] = (8, 32)
    local: int = 32


class GeoTransolver(nn.Module):
    """A Transolver whose rows see the geometry around them, and whose slices see all of it.

    Every row gets, for each radius, what a small network makes of the nearest points of the
    geometry in that ball. The geometry, these features and the tokens of the sample are each
    reduced to slices: a context that is the same on every rank, to which the slices of every block
    attend besides each other.

    Source: GeoTransolver (2512.20399); the neighbors of a ball are the nearest, by distance,
    relative to the row and to the radius.

    Args:
        in_dim: width of the inputs.
        out_dim: width of the outputs.
        geometry_dim: width of the geometry's rows: position first, then normals or others.
        hidden: width C of the hidden rows, before what the balls add.
        layers: number of blocks.
        heads: H, a divisor of `hidden` and of `options.local` times the number of radii.
        options: the rest.

    Communication: for each radius the search of `ball_query`, where graphs are not given, and
    one exchange forward and backward; one all-reduce each way for each radius, for the geometry and
    for each block.

    Raises:
        MeshshardError: radii and neighbors of different number, or sizes that do not fit.
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
            raise MeshshardError(f"a GeoTransolver of {layers} layers; it needs one at least")
        if len(options.radii) != len(options.neighbors):
            raise MeshshardError("GeoTransolver: a number of neighbors for every radius, please")
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
        seen = len(widths) * (hidden // heads)
        self.blocks = nn.ModuleList(
            Block(_attention(full, heads, seen, options), n, options.mlp_ratio) for n in ends
        )
        self.apply(start)

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
            pos: (N, 3) positions, divided as x.
            geometry: (M, geometry_dim) points of the geometry, sharded over the same domain in its
                own way; plain where x is plain.
            context: (K, context_dim) plain, the same on every rank.
            graphs: those of `balls_of`, where positions and geometry are as before.

        Returns:
            (N, out_dim), of the kind of x.

        Raises:
            MeshshardError: context is missing, or not expected.
        """
        if (context is None) != (self.options.context_dim == 0):
            width = self.options.context_dim
            expected = f"tokens {width} wide" if width else "no tokens"
            raise MeshshardError(f"context: the model was built for {expected}")
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
        """For each radius, which points of the geometry each row sees.

        Communication: that of `ball_query`, for each radius.
        """
        centers = geometry[:, : pos.shape[1]].detach()
        pairs = zip(self.options.radii, self.options.neighbors, strict=True)
        return [ball_query(centers, pos.detach(), r, k) for r, k in pairs]

    def _local(self, i: int, graph: ShardGraph, pos: Tensor, geometry: Tensor) -> Tensor:
        """(N, local) what rows learn from the balls of one radius."""
        k, width = self.options.neighbors[i], pos.shape[1]
        rows, mask = grouped(geometry, graph, k)
        away = (rows[..., :width] - pos[:, None]) / self.options.radii[i]
        seen = torch.cat([away, rows[..., width:]], -1) * mask[..., None]
        return torch.tanh(self.balls[i](seen.flatten(1)))


def _attention(dim: int, heads: int, seen: int, options: GeoOptions) -> CrossSliceAttention:
    """Of a block, to tokens of so many numbers in each head."""
    attention = CrossSliceAttention(
        dim,
        heads,
        options.slices,
        seen,
        variant=options.variant,
        tile=options.tile,
        deterministic=options.deterministic,
    )
    attention.keep_weights = options.keep_weights
    return attention


class SliceTokens(nn.Module):
    """Rows reduced to slices: the first half of slice attention.

    Args:
        dim: width of a row.
        inner: width of all heads together.
        heads: H, a divisor of it.
        slices: G.

    Communication: one all-reduce of (H, G, inner / H + 1) each way, of sharded rows.
    """

    def __init__(self, dim: int, inner: int, heads: int, slices: int) -> None:
        super().__init__()
        self.dim, self.tile = dim, tile_of(None, heads, slices)
        self.in_project_x, self.in_project_fx = nn.Linear(dim, inner), nn.Linear(dim, inner)
        self.in_project_slice = nn.Linear(inner // heads, slices)
        self.temperature = nn.Parameter(torch.full((1, heads, 1, 1), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        """(N, dim), sharded or plain, to (1, H, G, inner / H), the same on every rank."""
        return uncompiled(self._forward, x)  # type: ignore[no-any-return]

    def _forward(self, x: Tensor) -> Tensor:
        rows, sharding = batch_of(x, self.dim)
        if not is_unmodified(self):
            sums = reduce_tokens(sharding.domain, self._by_modules(x))
            return means(sums, 1e-5, rows.dtype)
        run = Run.of(sharding, self.tile, False, False)
        modules = (self.in_project_x, self.in_project_fx, self.in_project_slice)
        tensors = [p for module in modules for p in module.parameters()]
        piece = Piece(_sums, (*tensors, self.temperature.view(-1, 1)))
        sums = reduce_tokens(sharding.domain, by_rows(piece, run, rows, summed=True))
        return means(sums, 1e-5, rows.dtype)

    def _by_modules(self, x: Tensor) -> Tensor:
        """Sums over own rows, each module called: some were replaced, or carry hooks."""
        heads = self.temperature.shape[1], -1
        made = self.in_project_x(x).unflatten(-1, heads)
        w = (self.in_project_slice(made) / self.temperature.view(-1, 1)).softmax(-1)
        f = self.in_project_fx(x).unflatten(-1, heads)
        return summed(of_heads(w, x), of_heads(f, x))


def _sums(
    x: Tensor, wx: Tensor, bx: Tensor, wf: Tensor, bf: Tensor, ws: Tensor, *rest: Tensor
) -> Tensor:
    bs, T = rest
    shape = *x.shape[:2], len(T), ws.shape[1]
    logits = F.linear(F.linear(x, wx, bx).view(shape), ws, bs)
    w, f = (logits / T).softmax(-1), F.linear(x, wf, bf).view(shape)
    return summed(w.transpose(1, 2), f.transpose(1, 2))
