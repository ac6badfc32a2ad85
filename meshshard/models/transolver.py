"""Transolver: blocks of slice attention and an MLP over the rows of one mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from meshshard.errors import MeshshardError
from meshshard.models._checkpoints import from_physicsnemo, sizes_of, to_physicsnemo
from meshshard.nn import CrossSliceAttention, SliceAttention
from meshshard.nn._eval_mode import eval_mode
from meshshard.nn._unmodified import is_unmodified
from meshshard.nn.slices._forward import apply_layer, apply_layer_in_place, map_rows
from meshshard.nn.slices._math import Noise, SliceLayer, Stage
from meshshard.nn.slices._tiles import Tiling
from meshshard.nn.slices.slice_attention import default_tile, like_input, local_batch
from meshshard.tensor import Sharding
from meshshard.tensor.shard_tensor import uncompiled

__all__ = [
    "MLP", "Block", "Transolver", "TransolverOptions", "check_context", "init_weights",
    "slice_attention",
]  # fmt: skip

A = TypeVar("A", bound=SliceAttention)


@dataclass(frozen=True)
class TransolverOptions:
    """Options of a `Transolver` apart from its sizes.

    Attributes:
        mlp_ratio: width of the hidden layer of the MLPs, as a multiple of the model's width.
        context_dim: width of the context tokens, 0 for a model without context.
        variant: "v1", "plus" or "physicsnemo", as in `nn.SliceAttention`.
        tile: rows of a tile, as in `nn.SliceAttention`.
        keep_weights: keep the weights of the slices, as in `nn.SliceAttention`.
        deterministic: add the sums in the order of the shards, as in `nn.SliceAttention`.
    """

    mlp_ratio: float = 2
    context_dim: int = 0
    variant: str = "v1"
    tile: int | None = None
    keep_weights: bool = False
    deterministic: bool = False


class Transolver(nn.Module):
    """Maps input rows to output rows; each row attends to all others through slices.

    Blocks run in tiles and keep only their input for the gradient. Second derivatives, up to 4,096
    rows a rank, and blocks whose modules were replaced or carry hooks run as ordinary operations.

    Source: Wu et al., Transolver (2402.02366), with the maths and parameter names of its published
    code; for the other variants see `nn.SliceAttention`.

    Args:
        in_dim: width of an input row: coordinates, normals, any other features.
        out_dim: width of an output row.
        hidden: width C of the hidden rows.
        layers: number of blocks.
        heads: number of heads H of the slice attention, a divisor of `hidden`.
        slices: number of slices G in each head, to which the rows are reduced; the slices attend
            to each other, so the cost grows with N * G, not with N^2.
        options: everything apart from the sizes.

    Communication: for each block, that of `nn.SliceAttention`.

    Raises:
        MeshshardError: layers, heads or slices below 1, heads that do not divide `hidden`, or an
            unknown variant.

    Examples:
        >>> import torch
        >>> model = Transolver(3, 1, hidden=32, layers=2, heads=4, slices=16)
        >>> model(torch.randn(100, 3)).shape
        torch.Size([100, 1])
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        hidden: int = 256,
        layers: int = 8,
        heads: int = 8,
        slices: int = 64,
        options: TransolverOptions = TransolverOptions(),
    ) -> None:
        super().__init__()
        if min(layers, heads, slices) < 1:
            counts = f"{layers} layers, {heads} heads, {slices} slices"
            raise MeshshardError(f"Transolver: {counts}; each must be 1 or more")
        self.in_dim, self.options = in_dim, options
        self.tile = default_tile(options.tile, heads, slices)
        self.preprocess = MLP(in_dim, 2 * hidden, hidden)
        self.placeholder = nn.Parameter(torch.rand(hidden) / hidden)
        ends, sizes = [None] * (layers - 1) + [out_dim], (hidden, heads, slices)
        self.blocks = nn.ModuleList(
            Block(slice_attention(SliceAttention, sizes, options), n, options.mlp_ratio)
            for n in ends
        )
        width = options.context_dim
        self.context: nn.Linear | None = nn.Linear(width, hidden) if width else None
        self.apply(init_weights)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Outputs of all rows.

        Args:
            x: (N, in_dim) or (B, N, in_dim), sharded by rows or plain.
            context: (M, context_dim) or (B, M, context_dim), plain, the same on every rank: tokens
                that describe the sample as a whole (an inflow, a latent of the geometry). The
                slices of every block attend to them; they are not copied to the rows.

        Returns:
            (N, out_dim) or (B, N, out_dim), sharded or plain as `x`.

        Raises:
            MeshshardError: rows of another width, or a context that is missing or not expected.
        """
        h, tokens = self._encode(x), self._embed(context)
        for block in self.blocks:
            h = block(h, tokens)
        return h

    @torch.no_grad()
    def predict(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Outputs of all rows without gradients, in evaluation mode, with one hidden state.

        Each block overwrites its input, so memory holds one hidden state (N, C) of all rows.

        Args:
            x: (N, in_dim) or (B, N, in_dim), as in `forward`.
            context: (M, context_dim) or (B, M, context_dim), as in `forward`.

        Returns:
            (N, out_dim) or (B, N, out_dim), sharded or plain as `x`.

        Raises:
            MeshshardError: as `forward`.

        Communication: as the forward pass of the model.
        """
        unmodified = all(map(_is_unmodified, (self.preprocess, *self.blocks)))
        if not unmodified or torch.is_autocast_enabled(x.device.type):
            with eval_mode(self, x.device):
                return self(x, context)  # type: ignore[no-any-return]
        rows, sharding = local_batch(x, self.in_dim)
        tiling, tokens = self._tiling(sharding), self._embed(context)
        h = map_rows(self._encoder(), tiling, rows)
        for block in self.blocks:
            h = apply_layer_in_place(block.layer(None, tokens), tiling, h)  # type: ignore[operator]
        return like_input(h, x)

    @classmethod
    def from_reference(
        cls, state: Mapping[str, Tensor], options: TransolverOptions = TransolverOptions()
    ) -> Transolver:
        """The model of a checkpoint of the published code of Transolver or Transolver++.

        Args:
            state: state dict of the published model.
            options: tile, keep_weights and deterministic; the others follow from the parameters, as
                do the sizes.

        Raises:
            MeshshardError: the parameters are those of another model.
        """
        sizes, found = sizes_of(state)
        return cls(*sizes, replace(options, **found))._loaded(state)

    @classmethod
    def from_physicsnemo(
        cls, state: Mapping[str, Tensor], options: TransolverOptions = TransolverOptions()
    ) -> Transolver:
        """The model of a checkpoint of PhysicsNeMo's Transolver for irregular meshes.

        Args:
            state: state dict of PhysicsNeMo's model.
            options: as in `from_reference`.

        Raises:
            MeshshardError: the parameters are those of another model.
        """
        renamed = from_physicsnemo(state)
        sizes, found = sizes_of(renamed)
        options = replace(options, **{**found, "variant": "physicsnemo"})
        return cls(*sizes, options)._loaded(renamed)

    def to_physicsnemo(self) -> dict[str, Tensor]:
        """Parameters with the names and shapes of PhysicsNeMo's Transolver.

        Raises:
            MeshshardError: the model is of another variant, whose maths differ.
        """
        if self.options.variant != "physicsnemo":
            raise MeshshardError(
                f"to_physicsnemo: the maths of variant {self.options.variant!r} differ from "
                f"PhysicsNeMo's; train a model with variant='physicsnemo'"
            )
        return to_physicsnemo(self.state_dict())

    def _loaded(self, state: Mapping[str, Tensor]) -> Transolver:
        dtype = next(iter(state.values())).dtype
        try:
            self.to(dtype).load_state_dict(state)
        except RuntimeError as error:
            raise MeshshardError(f"Transolver: parameters of another model: {error}") from None
        return self

    def _encode(self, x: Tensor) -> Tensor:
        """The first hidden rows."""
        return uncompiled(self._encode_rows, x)  # type: ignore[no-any-return]

    def _encode_rows(self, x: Tensor) -> Tensor:
        if not _is_unmodified(self.preprocess):
            return self.preprocess(x) + self.placeholder  # type: ignore[no-any-return]
        rows, sharding = local_batch(x, self.in_dim)
        return like_input(map_rows(self._encoder(), self._tiling(sharding), rows), x)

    def _tiling(self, sharding: Sharding) -> Tiling:
        return Tiling.of(sharding, self.tile, False, self.options.deterministic)

    def _encoder(self) -> Stage:
        return Stage(_mlp_plus, (*self.preprocess.parameters(), self.placeholder))

    def _embed(self, context: Tensor | None) -> Tensor | None:
        """Context tokens in the width of the hidden rows."""
        check_context(context, self.options.context_dim)
        return None if self.context is None or context is None else self.context(context)


def check_context(context: Tensor | None, width: int) -> None:
    """Refuse a context that is missing, or that the model was not built for.

    Raises:
        MeshshardError: a context for a `width` of 0, or none for another width.
    """
    if (context is None) == (width == 0):
        return
    expected = f"context tokens of width {width}" if width else "no context"
    given = "none" if context is None else f"one of shape {tuple(context.shape)}"
    raise MeshshardError(f"context: the model was built for {expected}, but was given {given}")


class MLP(nn.Module):
    """Two linear layers with a GELU between them, with the parameter names of the reference.

    Args:
        in_dim: width of an input row.
        hidden: width between the layers.
        out_dim: width of an output row.
    """

    def __init__(self, in_dim: int, hidden: int, out_dim: int) -> None:
        super().__init__()
        self.linear_pre = nn.Sequential(nn.Linear(in_dim, hidden), nn.GELU())
        self.linear_post = nn.Linear(hidden, out_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, in_dim) to (…, out_dim)."""
        return self.linear_post(self.linear_pre(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Slice attention and an MLP, each with a norm before and a residual; the last one projects.

    Args:
        attention: the slice attention, of width C.
        out_dim: width of the output of a last block, which ends in a norm and a linear layer; None
            for other blocks.
        mlp_ratio: width of the hidden layer of the MLP, as a multiple of C.
    """

    def __init__(self, attention: SliceAttention, out_dim: int | None, mlp_ratio: float) -> None:
        super().__init__()
        hidden = attention.dim
        self.ln_1 = nn.LayerNorm(hidden)
        self.Attn = attention
        self.ln_2 = nn.LayerNorm(hidden)
        self.mlp = MLP(hidden, int(hidden * mlp_ratio), hidden)
        self.last = out_dim is not None
        if out_dim is not None:
            self.ln_3 = nn.LayerNorm(hidden)
            self.mlp2 = nn.Linear(hidden, out_dim)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Map (…, N, C) to (…, N, C), or to (…, N, out_dim) in a last block."""
        return uncompiled(self._forward, x, context)  # type: ignore[no-any-return]

    def _forward(self, x: Tensor, context: Tensor | None) -> Tensor:
        if not _is_unmodified(self):
            return self._forward_by_modules(x, context)
        rows, sharding = local_batch(x, self.Attn.dim)
        layer = self.layer(self.Attn._noise(rows, sharding), context)
        return like_input(apply_layer(layer, self.Attn._tiling(sharding), rows), x)

    def layer(self, noise: Noise | None, context: Tensor | None) -> SliceLayer:
        """The block as pure functions of rows."""
        inner: list[nn.Module] = [self.ln_2, self.mlp.linear_pre]
        inner += [self.mlp.linear_post, self.ln_3] if self.last else []
        rest = Stage(_rest_of_block, tuple(p for module in inner for p in module.parameters()))
        last = self.mlp2 if self.last else self.mlp.linear_post
        end = Stage(F.linear, tuple(last.parameters()))
        return self.Attn._layer(noise, context, self.ln_1, rest, end)

    def _forward_by_modules(self, x: Tensor, context: Tensor | None) -> Tensor:
        x = x + self.Attn(self.ln_1(x), context)
        x = x + self.mlp(self.ln_2(x))
        return self.mlp2(self.ln_3(x)) if self.last else x


def slice_attention(kind: type[A], sizes: Sequence[int], options: TransolverOptions) -> A:
    """A slice attention of the sizes that its class takes first, and the options of a model."""
    attention = kind(
        *sizes, variant=options.variant, tile=options.tile, deterministic=options.deterministic
    )
    attention.keep_weights = options.keep_weights
    return attention


def _mlp_plus(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, add: Tensor) -> Tensor:
    """An MLP of rows, plus the same vector for every row."""
    return F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2) + add


def _rest_of_block(x: Tensor, out: Tensor, *parameters: Tensor) -> tuple[Tensor | None, Tensor]:
    """A block after its attention `out`, up to its last linear layer: residual, layer input."""
    norm, bias, w, b = parameters[:4]
    width = x.shape[-1:]
    h = x + out
    u = F.gelu(F.linear(F.layer_norm(h, width, norm, bias), w, b))
    if len(parameters) == 4:
        return h, u
    w, b, norm, bias = parameters[4:]
    return None, F.layer_norm(h + F.linear(u, w, b), width, norm, bias)


def init_weights(module: nn.Module) -> None:
    """The reference's initialization of linear layers."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def _is_unmodified(module: nn.Module) -> bool:
    """Whether nothing inside was replaced or hooked, so that pure functions are equivalent."""
    return is_unmodified(module, (MLP, SliceAttention, CrossSliceAttention))
