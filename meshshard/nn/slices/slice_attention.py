"""Slice attention: rows are reduced to tokens, which attend to each other, and back to rows."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from meshshard.comm import Domain
from meshshard.errors import MeshshardError
from meshshard.nn._unmodified import is_unmodified
from meshshard.nn.slices import _math
from meshshard.nn.slices._forward import apply_layer
from meshshard.nn.slices._math import HeadTemperature, Noise, RowTemperature, SliceLayer, Stage
from meshshard.nn.slices._tiles import SliceSums, Tiling
from meshshard.tensor import Sharding, ShardTensor
from meshshard.tensor._torch_private import unsafe_view
from meshshard.tensor.keyed_random import hash_uniform
from meshshard.tensor.shard_tensor import refuse, uncompiled, wrap

__all__ = ["CrossSliceAttention", "SliceAttention"]

VARIANTS = {"v1": 1e-5, "plus": 1e-5, "physicsnemo": 1e-2}  # added to the weight of a slice
WEIGHTS = 2**18  # weights in a tile: 1 MiB, which stays in the cache; benchmarks/slices.py


class SliceAttention(nn.Module):
    """Physics-Attention on an irregular mesh: each row belongs, softly, to G slices in H heads.

    The sums over all rows are exact on any number of ranks. Many rows are processed in tiles, of
    which only the input is kept for the gradient. Second derivatives, and inner modules that were
    replaced or carry hooks (adapters, probes), run as ordinary operations that autograd records.

    Source: Wu et al., Transolver (2402.02366), with the maths and parameter names of its published
    code ("v1"); Luo et al., Transolver++ (2502.02414, "plus": a temperature for each row, and
    Gumbel noise in training only, the same for any partition); PhysicsNeMo's form ("physicsnemo":
    a clamped temperature, and 1e-2 added to the weight of a slice).

    Args:
        dim: width C of a row.
        heads: number of heads H, a divisor of C.
        slices: number of slices G.
        variant: "v1", "plus" or "physicsnemo".
        tile: rows of a tile; by default as many as have 2^18 weights; 0 for recorded operations
            always. Up to 4,096 rows a rank, and under autocast, tiles are not used.
        keep_weights: keep the weights (H, n, G) for the second pass and backward: faster, with more
            memory.
        deterministic: add the sums shard by shard, in the order of the shards: bitwise equal
            results on any number of ranks that hold these shards.

    Communication: forward one all-reduce of (B, H, G, C / H + 1); backward one of (B, H, G, C / H),
    with one more column without tiles. If deterministic, forward one all-to-all of the sums of
    every shard in place of the all-reduce.

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
            raise MeshshardError(
                f"SliceAttention: {heads} heads do not divide a width of {dim}; take a divisor"
            )
        if variant not in VARIANTS:
            raise MeshshardError(
                f"SliceAttention: variant {variant!r} is unknown; choose one of "
                f"{', '.join(VARIANTS)}"
            )
        width = dim // heads
        self.dim, self.heads, self.slices, self.variant = dim, heads, slices, variant
        self.tile = default_tile(tile, heads, slices)
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
        self.to_out = nn.Sequential(nn.Linear(dim, dim))  # named to_out.0 in the reference

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Attention of all rows to all rows.

        Args:
            x: (N, C) or (B, N, C), sharded by rows or plain.
            context: (M, C) or (B, M, C), plain, the same on every rank: tokens that the slices
                attend to, in addition to each other.

        Returns:
            A tensor of the shape and kind of `x`.

        Raises:
            MeshshardError: `x` has another number of dims or another width.
            NoShardRule: `x` is sharded along another dim than its rows.
        """
        return uncompiled(self._forward, x, context)  # type: ignore[no-any-return]

    def _forward(self, x: Tensor, context: Tensor | None) -> Tensor:
        if not is_unmodified(self):
            return self._forward_by_modules(x, context)
        rows, sharding = local_batch(x, self.dim)
        layer = self._layer(self._noise(rows, sharding), context)
        return like_input(apply_layer(layer, self._tiling(sharding), rows), x)

    def _forward_by_modules(self, x: Tensor, context: Tensor | None) -> Tensor:
        """The same with a call of each inner module, on all rows at once."""
        rows, sharding = local_batch(x, self.dim)
        m = self.in_project_x(x).unflatten(-1, (self.heads, -1))
        logits = self.in_project_slice(m)
        if self.variant == "plus":
            T = (self.proj_temperature(m) + self.bias.view(-1, 1)).clamp(min=0.01)
            noise, values = self._noise(rows, sharding), m
            if noise is not None:
                every = noise(slice(0, rows.shape[1]))
                logits = logits + like_input(every[0] if x.ndim == 2 else every, x)
        else:
            T, values = self._temperature(), self.in_project_fx(x).unflatten(-1, (self.heads, -1))
        w, f = (local_heads(a, x) for a in ((logits / T).softmax(-1), values))
        sums = SliceSums(replace(self._tiling(sharding), tile=0))
        for shard, part in sums.tiling.tiles():
            sums.add(shard, w[:, :, part], f[:, :, part])
        s = _math.slice_means(sums.total(), VARIANTS[self.variant], rows.dtype)
        return self.to_out(like_input(_math.deslice(w, self._attend_by_modules(s, context)), x))  # type: ignore[no-any-return]

    def _attend_by_modules(self, s: Tensor, context: Tensor | None) -> Tensor:
        """Attention among the slices, with a call of each module."""
        return _math.attend(s, (self.to_q, self.to_k, self.to_v), context)

    def _tiling(self, sharding: Sharding) -> Tiling:
        """How rows of this sharding are processed."""
        return Tiling.of(sharding, self.tile, self.keep_weights, self.deterministic)

    def _noise(self, rows: Tensor, sharding: Sharding) -> Noise | None:
        """One draw of Gumbel noise for the logits, computed where it is used; None in evaluation.

        Keyed by the row in the source, so it does not depend on the partition.
        """
        if self.variant != "plus" or not self.training:
            return None
        seed = sharding.domain.shared_seed()
        keys = sharding.sources(rows.device).view(1, -1, 1, 1)
        shape = len(rows), self.heads, self.slices
        counters = torch.arange(math.prod(shape), device=rows.device).view(shape)[:, None]

        def _draw(at: slice) -> Tensor:
            u = hash_uniform(seed, keys[:, at], counters)
            return -torch.log(-torch.log(u + 1e-8) + 1e-8).to(rows.dtype)

        return _draw

    def _layer(
        self,
        noise: Noise | None = None,
        context: Tensor | None = None,
        norm: nn.LayerNorm | None = None,
        rest: Stage | None = None,
        last: Stage | None = None,
    ) -> SliceLayer:
        """This attention as pure functions, with a norm before and stages of a block after it."""
        weight: Tensor = self.in_project_x.weight
        bias: Tensor = self.in_project_x.bias
        if self.variant != "plus":  # 1 / T is folded into the input of the logits
            T = self._temperature()
            weight = (weight.view(self.heads, -1) / T).view_as(weight)
            bias = (bias.view(self.heads, -1) / T).view(-1)
        return SliceLayer(
            _math.normalize(norm),
            Stage(F.linear, (weight, bias)),
            self._slice_stage(noise),
            self._attention_stage(context),
            Stage(F.linear, tuple(self.to_out.parameters())),
            rest,
            last,
            VARIANTS[self.variant],
        )

    def _attention_stage(self, context: Tensor | None) -> Stage:
        own = (self.to_q.weight, self.to_k.weight, self.to_v.weight)
        return Stage(_math.attention, own if context is None else (*own, context))

    def _temperature(self) -> Tensor:
        T = self.temperature.view(self.heads, 1)
        return T.clamp(0.5, 5) if self.variant == "physicsnemo" else T

    def _slice_stage(self, noise: Noise | None) -> Stage:
        s = self.in_project_slice
        if self.variant == "plus":
            temperature = (*self.proj_temperature.parameters(), self.bias.view(-1, 1))
            return Stage(RowTemperature(noise), (s.weight, s.bias, *temperature))
        values = self.in_project_fx.weight, self.in_project_fx.bias
        return Stage(HeadTemperature(), (s.weight, s.bias / self._temperature(), *values))


class CrossSliceAttention(SliceAttention):
    """Slice attention whose slices also attend to a context, separately; the results are mixed.

    Source: GeoTransolver (2512.20399): sigmoid(a) * attention + (1 - sigmoid(a)) * cross-attention,
    with a learned number a.

    Args:
        dim: width C of a row.
        heads: number of heads H, a divisor of C.
        slices: number of slices G.
        context_dim: width of a context token in each head. `forward` takes the context as
            (B, H, S, context_dim), plain, the same on every rank.
        variant: "v1", "plus" or "physicsnemo", as in `SliceAttention`.
        tile: rows of a tile, as in `SliceAttention`.
        deterministic: add the sums in the order of the shards, as in `SliceAttention`.

    Communication: as `SliceAttention`; the context needs none.

    Raises:
        MeshshardError: the width is not a multiple of the heads, or the variant is unknown.
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

    def _attention_stage(self, context: Tensor | None) -> Stage:
        if context is None:
            return super()._attention_stage(None)
        own = (self.to_q.weight, self.to_k.weight, self.to_v.weight)
        cross = [p for m in (self.cross_q, self.cross_k, self.cross_v) for p in m.parameters()]
        return Stage(_math.mixed_attention, (*own, *cross, self.state_mixing, context))

    def _attend_by_modules(self, s: Tensor, context: Tensor | None) -> Tensor:
        own = super()._attend_by_modules(s, None)
        if context is None:
            return own
        q, k, v = self.cross_q(s), self.cross_k(context), self.cross_v(context)
        return _math.mix(own, _math.dot_product_attention(q, k, v), self.state_mixing)


def local_heads(a: Tensor, x: Tensor) -> Tensor:
    """Local rows (B, H, n, …) of a tensor (…, N, H, …) that was computed from `x`."""
    local = a.to_local() if isinstance(a, ShardTensor) else a
    return (local if x.ndim == 3 else local[None]).transpose(1, 2)


def default_tile(tile: int | None, heads: int, slices: int) -> int:
    """Rows of a tile: as given, or as many as have `WEIGHTS` weights."""
    return max(WEIGHTS // (heads * slices), 1) if tile is None else tile


def local_batch(x: Tensor, dim: int) -> tuple[Tensor, Sharding]:
    """Local rows as a plain (B, n, C), and their sharding; a plain tensor has all rows.

    Raises:
        MeshshardError: `x` has another shape.
        NoShardRule: `x` is sharded along another dim than its rows.
    """
    if x.ndim not in (2, 3) or x.shape[-1] != dim:
        raise MeshshardError(
            f"slice attention: rows must be (N, {dim}) or (B, N, {dim}), not {tuple(x.shape)}"
        )
    local, sharding = x, None
    if isinstance(x, ShardTensor):
        if x.sharded_dim != x.ndim - 2:
            raise refuse("slice attention", (x,), None, "the input must be sharded along its rows")
        local, sharding = x.to_local(), x.sharding
    rows = local if x.ndim == 3 else local[None]
    return rows, sharding or Sharding(Domain(device=x.device), (rows.shape[1],))


def like_input(rows: Tensor, x: Tensor) -> Tensor:
    """New local rows (B, n, …) in the shape and kind of `x`.

    Not a view: FSDP2 would lose its hook on a view that is changed in place.
    """
    out: Tensor = rows if x.ndim == 3 else unsafe_view(rows, rows.shape[1:])
    return wrap(out, x.sharding, x.ndim - 2) if isinstance(x, ShardTensor) else out
