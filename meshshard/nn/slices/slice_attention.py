"""Slice attention: rows reduced to a few slices, attention among these, and back to the rows."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from meshshard.comm import Domain
from meshshard.errors import MeshshardError
from meshshard.nn._unmodified import is_unmodified
from meshshard.nn.slices._layer import Layer, Piece, Run, Sums, collected, means, only_answer, same
from meshshard.nn.slices._passes import apply
from meshshard.nn.slices._stages import (
    Adaptive,
    Fixed,
    Noise,
    attended,
    attention,
    looked_up,
    mixed,
    norm_of,
)
from meshshard.tensor import Sharding, ShardTensor
from meshshard.tensor.rules.random import hash_uniform
from meshshard.tensor.shard_tensor import refuse, uncompiled, wrap

__all__ = [
    "VARIANTS",
    "CrossSliceAttention",
    "SliceAttention",
    "batch_of",
    "of_heads",
    "tile_of",
    "with_rows",
]

VARIANTS = {"v1": 1e-5, "plus": 1e-5, "physicsnemo": 1e-2}  # what is added to a slice's weight
WEIGHTS = 2**18  # of a tile: a megabyte, which stays in the cache; benchmarks/slices.py


class SliceAttention(nn.Module):
    """Physics-Attention on an irregular mesh: each row belongs, softly, to G slices in H heads.

    The sum over all rows is exact on any number of ranks. Many rows are run through in tiles, which
    keep only the input for the gradient; second derivatives, and modules inside that were replaced
    or carry hooks (adapters, a probe), run as ordinary operations.

    Source: Wu et al., Transolver (2402.02366), names of parameters and maths of its published code
    ("v1"); Luo et al., Transolver++ (2502.02414, "plus": a temperature for every row, and Gumbel
    noise in training only, the same on any partition); PhysicsNeMo's form ("physicsnemo": clamped
    temperature, 1e-2 added to the weight of a slice).

    Args:
        dim: width C of a row.
        heads: H, a divisor of C.
        slices: G.
        variant: "v1", "plus" or "physicsnemo".
        tile: rows of a tile, by default as many as have 2^18 weights; 0 for ordinary operations
            always. Up to 4,096 rows a rank, and under autocast, there are no tiles.
        keep_weights: keep the weights (H, n, G) from one pass to the next: faster, more memory.
        deterministic: sum slices shard by shard in the order of the shards: the same bits on any
            number of ranks that hold these shards.

    Communication: forward one all-reduce of (B, H, G, C / H + 1); backward one of (B, H, G, C / H),
    with one more column without tiles. If deterministic, forward one all-to-all of every shard's.

    Raises:
        MeshshardError: the width is not a multiple of the heads, or the variant is unknown.
    """

    def __init__(
        self,
        dim: int,
        heads: int = 8,
        slices: int = 64,
        *,
        variant: str = "v1",
        tile: int | None = None,
        keep_weights: bool = False,
        deterministic: bool = False,
    ) -> None:
        super().__init__()
        if heads < 1 or dim % heads:
            raise MeshshardError(f"{heads} heads do not divide a width of {dim}")
        if variant not in VARIANTS:
            raise MeshshardError(
                f"variant {variant!r} is unknown; there are: {', '.join(VARIANTS)}"
            )
        width = dim // heads
        self.dim, self.heads, self.slices, self.variant = dim, heads, slices, variant
        self.tile = tile_of(tile, heads, slices)
        self.keep_weights, self.deterministic = keep_weights, deterministic
        self.in_project_x = nn.Linear(dim, dim)
        self.in_project_slice = nn.Linear(width, slices)
        nn.init.orthogonal_(self.in_project_slice.weight)
        if variant == "plus":
            self.bias = nn.Parameter(torch.full((1, heads, 1, 1), 0.5))
            self.proj_temperature = nn.Sequential(
                nn.Linear(width, slices), nn.GELU(), nn.Linear(slices, 1), nn.GELU()
            )
        else:
            self.temperature = nn.Parameter(torch.full((1, heads, 1, 1), 0.5))
            self.in_project_fx = nn.Linear(dim, dim)
        self.to_q = nn.Linear(width, width, bias=False)
        self.to_k = nn.Linear(width, width, bias=False)
        self.to_v = nn.Linear(width, width, bias=False)
        self.to_out = nn.Sequential(nn.Linear(dim, dim))  # the name of the reference is to_out.0

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Attention of all rows to all rows.

        Args:
            x: (N, C) or (B, N, C), sharded by rows or plain.
            context: (M, C) or (B, M, C) plain, the same on every rank: tokens that slices attend to
                besides each other.

        Returns:
            Of the shape and kind of `x`.
        """
        return uncompiled(self._forward, x, context)  # type: ignore[no-any-return]

    def _forward(self, x: Tensor, context: Tensor | None) -> Tensor:
        if not is_unmodified(self):
            return self._by_modules(x, context)
        rows, sharding = batch_of(x, self.dim)
        layer = self.layer(self.noise(rows, sharding), context)
        return with_rows(apply(layer, self.run(sharding), rows), x)

    def _by_modules(self, x: Tensor, context: Tensor | None) -> Tensor:
        """The same, each module called; by ordinary operations on all rows."""
        rows, sharding = batch_of(x, self.dim)
        whole, run = slice(0, rows.shape[1]), replace(self.run(sharding), tile=0)
        made = self.in_project_x(x).unflatten(-1, (self.heads, -1))
        logits = self.in_project_slice(made)
        if self.variant == "plus":
            T = (self.proj_temperature(made) + self.bias.view(-1, 1)).clamp(min=0.01)
            noise, values = self.noise(rows, sharding), made
            if noise is not None:
                logits = logits + with_rows(noise(whole)[0 if x.ndim == 2 else None], x)
        else:
            T, values = self._temperature(), self.in_project_fx(x).unflatten(-1, (self.heads, -1))
        w, f = (of_heads(a, x) for a in ((logits / T).softmax(-1), values))
        sums = Sums(run)
        for shard, part in run.tiles():
            sums.add(shard, w[:, :, part], f[:, :, part])
        s = means(sums.total(), VARIANTS[self.variant], rows.dtype)
        return self.to_out(with_rows(collected(w, self._answered(s, context)), x))  # type: ignore[no-any-return]

    def _answered(self, s: Tensor, context: Tensor | None) -> Tensor:
        """What slices answer, each module called."""
        return attended(s, (self.to_q, self.to_k, self.to_v), context)

    def run(self, sharding: Sharding) -> Run:
        """How rows so divided are run through."""
        return Run.of(sharding, self.tile, self.keep_weights, self.deterministic)

    def noise(self, rows: Tensor, sharding: Sharding) -> Noise | None:
        """One draw of Gumbel noise for the weights, made where it is needed; None in evaluation."""
        if self.variant != "plus" or not self.training:
            return None
        seed = sharding.domain.shared_seed()
        keys = sharding.sources(rows.device).view(1, -1, 1, 1)
        shape = len(rows), self.heads, self.slices
        places = torch.arange(math.prod(shape), device=rows.device).view(shape)[:, None]

        def _noise(at: slice) -> Tensor:
            u = hash_uniform(seed, keys[:, at], places)
            return -torch.log(-torch.log(u + 1e-8) + 1e-8).to(rows.dtype)

        return _noise

    def layer(
        self,
        noise: Noise | None = None,
        context: Tensor | None = None,
        norm: nn.LayerNorm | None = None,
        after: Piece = Piece(only_answer),  # noqa: B008 - frozen
        end: Piece = Piece(same),  # noqa: B008
    ) -> Layer:
        """It as pure functions of rows, with a norm before and what follows it."""
        weight: Tensor = self.in_project_x.weight
        bias: Tensor = self.in_project_x.bias
        if self.variant != "plus":  # 1 / T is folded into all that the weights are made of
            T = self._temperature()
            weight = (weight.view(self.heads, -1) / T).view_as(weight)
            bias = (bias.view(self.heads, -1) / T).view(-1)
        return Layer(
            norm_of(norm),
            Piece(F.linear, (weight, bias)),
            self._slices(noise),
            self._answers(context),
            Piece(F.linear, tuple(self.to_out.parameters())),
            after,
            end,
            VARIANTS[self.variant],
        )

    def _answers(self, context: Tensor | None) -> Piece:
        own = (self.to_q.weight, self.to_k.weight, self.to_v.weight)
        return Piece(attention, own if context is None else (*own, context))

    def _temperature(self) -> Tensor:
        T = self.temperature.view(self.heads, 1)
        return T.clamp(0.5, 5) if self.variant == "physicsnemo" else T

    def _slices(self, noise: Noise | None) -> Piece:
        s = self.in_project_slice
        if self.variant == "plus":
            temperature = (*self.proj_temperature.parameters(), self.bias.view(-1, 1))
            return Piece(Adaptive(noise), (s.weight, s.bias, *temperature))
        values = self.in_project_fx.weight, self.in_project_fx.bias
        return Piece(Fixed(), (s.weight, s.bias / self._temperature(), *values))


class CrossSliceAttention(SliceAttention):
    """Slice attention whose slices look at a context besides each other, and mix what they see.

    Source: GeoTransolver (2512.20399): sigmoid(a) * attention + (1 - sigmoid(a)) * cross-attention.

    Args:
        dim: width C of a row.
        heads: H, a divisor of C.
        slices: G.
        context_dim: width of a token of the context, in each head.
        variant, tile, deterministic: as in `SliceAttention`.

    Communication: that of `SliceAttention`; the context is the same on every rank.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        slices: int,
        context_dim: int,
        *,
        variant: str = "v1",
        tile: int | None = None,
        deterministic: bool = False,
    ) -> None:
        super().__init__(
            dim, heads, slices, variant=variant, tile=tile, deterministic=deterministic
        )
        width = dim // heads
        self.cross_q = nn.Linear(width, width)
        self.cross_k = nn.Linear(context_dim, width)
        self.cross_v = nn.Linear(context_dim, width)
        self.state_mixing = nn.Parameter(torch.zeros(()))

    def _answers(self, context: Tensor | None) -> Piece:
        """As functions of slices and the context (B, H, S, context_dim)."""
        if context is None:
            return super()._answers(None)
        own = (self.to_q.weight, self.to_k.weight, self.to_v.weight)
        cross = [p for m in (self.cross_q, self.cross_k, self.cross_v) for p in m.parameters()]
        return Piece(mixed, (*own, *cross, self.state_mixing, context))

    def _answered(self, s: Tensor, context: Tensor | None) -> Tensor:
        own = super()._answered(s, None)
        if context is None:
            return own
        q, k, v = self.cross_q(s), self.cross_k(context), self.cross_v(context)
        share = self.state_mixing.sigmoid()
        return share * own + (1 - share) * looked_up(q, k, v)


def of_heads(a: Tensor, x: Tensor) -> Tensor:
    """Own rows (B, H, n, …) of what was made of `x`, (…, N, H, …)."""
    local = a.to_local() if isinstance(a, ShardTensor) else a
    return (local if x.ndim == 3 else local[None]).transpose(1, 2)


def tile_of(tile: int | None, heads: int, slices: int) -> int:
    """Rows of a tile, as given or for so many weights a row."""
    return max(WEIGHTS // (heads * slices), 1) if tile is None else tile


def batch_of(x: Tensor, dim: int) -> tuple[Tensor, Sharding]:
    """Own rows as a plain (B, n, C), and how all are divided; a plain tensor is all of them.

    Raises:
        MeshshardError: of another shape.
        NoShardRule: sharded by another dim than the rows.
    """
    if x.ndim not in (2, 3) or x.shape[-1] != dim:
        raise MeshshardError(f"rows must be (N, {dim}) or (B, N, {dim}), not {tuple(x.shape)}")
    local, sharding = x, None
    if isinstance(x, ShardTensor):
        if x.sharded_dim != x.ndim - 2:
            raise refuse("slice attention", (x,), None, "its rows are not what is sharded")
        local, sharding = x.to_local(), x.sharding
    rows = local if x.ndim == 3 else local[None]
    return rows, sharding or Sharding(Domain(device=x.device), (rows.shape[1],))


def with_rows(rows: Tensor, x: Tensor) -> Tensor:
    """Fresh rows (B, n, …) in the shape and kind of `x`.

    Not as a view: FSDP2 would lose its hook on one that is changed in place.
    """
    out: Tensor = rows if x.ndim == 3 else torch.ops.aten._unsafe_view(rows, rows.shape[1:])
    return wrap(out, x.sharding, x.ndim - 2) if isinstance(x, ShardTensor) else out
