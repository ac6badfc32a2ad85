"""Transolver: blocks of slice attention and an MLP on the rows of one mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from meshshard.errors import MeshshardError
from meshshard.models._checkpoints import from_physicsnemo, sizes_of, to_physicsnemo
from meshshard.nn import CrossSliceAttention, SliceAttention
from meshshard.nn._eval_mode import eval_mode
from meshshard.nn._unmodified import is_unmodified
from meshshard.nn.slices._layer import Layer, Piece, Run
from meshshard.nn.slices._passes import apply, by_rows, infer
from meshshard.nn.slices._stages import Noise
from meshshard.nn.slices.slice_attention import batch_of, tile_of, with_rows
from meshshard.tensor import Sharding
from meshshard.tensor.shard_tensor import uncompiled

__all__ = ["MLP", "Block", "Transolver", "TransolverOptions", "start"]


@dataclass(frozen=True)
class TransolverOptions:
    """What is not a size of a `Transolver`.

    Attributes:
        mlp_ratio: width of the MLPs' hidden layer, by that of the model.
        context_dim: width of the tokens of context, 0 for a model without.
        variant: "v1", "plus" or "physicsnemo", as in `nn.SliceAttention`.
        tile, keep_weights, deterministic: as in `nn.SliceAttention`.
    """

    mlp_ratio: float = 2
    context_dim: int = 0
    variant: str = "v1"
    tile: int | None = None
    keep_weights: bool = False
    deterministic: bool = False


class Transolver(nn.Module):
    """Rows of inputs to rows of outputs, each attending to all others through slices.

    Blocks run in tiles and keep only their input for the gradient; second derivatives, up to 4,096
    rows a rank, and blocks whose modules were replaced or carry hooks run as ordinary operations.

    Source: Wu et al., Transolver (2402.02366), names of parameters and maths of its published code;
    its other forms as in `nn.SliceAttention`.

    Args:
        in_dim: width of the inputs: coordinates, normals, whatever a row has.
        out_dim: width of the outputs.
        hidden: width C of the hidden rows.
        layers: number of blocks.
        heads: H, a divisor of C.
        slices: G.
        options: the rest.

    Communication: for each block, that of `nn.SliceAttention`.

    Raises:
        MeshshardError: sizes that do not fit, or an unknown variant.
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
            raise MeshshardError(f"a Transolver of {counts}; it needs one of each at least")
        self.in_dim, self.options = in_dim, options
        self.tile = tile_of(options.tile, heads, slices)
        self.preprocess = MLP(in_dim, 2 * hidden, hidden)
        self.placeholder = nn.Parameter(torch.rand(hidden) / hidden)
        ends = [None] * (layers - 1) + [out_dim]
        self.blocks = nn.ModuleList(
            Block(_attention(hidden, heads, slices, options), n, options.mlp_ratio) for n in ends
        )
        width = options.context_dim
        self.context: nn.Linear | None = nn.Linear(width, hidden) if width else None
        self.apply(start)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Outputs of all rows.

        Args:
            x: (N, in_dim) or (B, N, in_dim), sharded by rows or plain.
            context: (M, context_dim) or (B, M, context_dim) plain, the same on every rank: what
                holds for the sample as a whole, as tokens that the slices of every block attend to
                (an inflow, a geometry's latent). It is not copied to the rows.

        Returns:
            (N, out_dim) or (B, N, out_dim), of the kind of `x`.

        Raises:
            MeshshardError: rows of another width; context is missing, or not expected.
        """
        h, tokens = self._first(x), self._tokens(context)
        for block in self.blocks:
            h = block(h, tokens)
        return h

    @torch.no_grad()
    def predict(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """The same without gradients, in one pass over the rows more than there are blocks.

        Each pass ends one block and begins the next on the same tile; of all rows only one hidden
        state is kept. Exact; without the noise of training.

        Raises:
            MeshshardError: as forward.

        Communication: forward, as the model's.
        """
        if not all(map(_as_built, (self.preprocess, *self.blocks))):
            return self._evaluated(x, context)
        rows, sharding = batch_of(x, self.in_dim)
        run = self._run(sharding)
        tokens = self._tokens(context)
        layers = [block.layer(None, tokens) for block in self.blocks]  # type: ignore[operator]
        return with_rows(infer(self._beginning(), layers, run, rows), x)

    @classmethod
    def from_reference(
        cls, state: Mapping[str, Tensor], options: TransolverOptions = TransolverOptions()
    ) -> Transolver:
        """The model of a checkpoint of the published code, Transolver or Transolver++.

        Sizes, MLP ratio and variant are those of its parameters.

        Raises:
            MeshshardError: parameters of another model.
        """
        sizes, found = sizes_of(state)
        return cls(*sizes, replace(options, **found))._loaded(state)

    @classmethod
    def from_physicsnemo(
        cls, state: Mapping[str, Tensor], options: TransolverOptions = TransolverOptions()
    ) -> Transolver:
        """The model of a checkpoint of PhysicsNeMo's Transolver on irregular meshes.

        Raises:
            MeshshardError: parameters of another model.
        """
        named = from_physicsnemo(state)
        sizes, found = sizes_of(named)
        options = replace(options, **{**found, "variant": "physicsnemo"})
        return cls(*sizes, options)._loaded(named)

    def to_physicsnemo(self) -> dict[str, Tensor]:
        """Its parameters by the names and in the shapes of PhysicsNeMo's Transolver.

        Raises:
            MeshshardError: it is of another variant, whose maths differ.
        """
        if self.options.variant != "physicsnemo":
            raise MeshshardError(
                f"a Transolver of variant {self.options.variant!r} has other maths than "
                f"PhysicsNeMo's; train one with variant='physicsnemo'"
            )
        return to_physicsnemo(self.state_dict())

    def _loaded(self, state: Mapping[str, Tensor]) -> Transolver:
        kept = next(iter(state.values())).dtype
        try:
            self.to(kept).load_state_dict(state)
        except RuntimeError as error:
            raise MeshshardError(f"parameters of another model: {error}") from None
        return self

    def _evaluated(self, x: Tensor, context: Tensor | None) -> Tensor:
        """Forward as in evaluation, for models that were changed."""
        with eval_mode(self, x.device):
            return self(x, context)  # type: ignore[no-any-return]

    def _first(self, x: Tensor) -> Tensor:
        """The first hidden rows."""
        return uncompiled(self._begun, x)  # type: ignore[no-any-return]

    def _begun(self, x: Tensor) -> Tensor:
        if not _as_built(self.preprocess):
            return self.preprocess(x) + self.placeholder  # type: ignore[no-any-return]
        rows, sharding = batch_of(x, self.in_dim)
        run = self._run(sharding)
        return with_rows(by_rows(self._beginning(), run, rows), x)

    def _run(self, sharding: Sharding) -> Run:
        return Run.of(sharding, self.tile, False, self.options.deterministic)

    def _beginning(self) -> Piece:
        return Piece(_first, (*self.preprocess.parameters(), self.placeholder))

    def _tokens(self, context: Tensor | None) -> Tensor | None:
        embed = self.context
        if (context is None) != (embed is None):
            expected = f"tokens {self.options.context_dim} wide" if embed else "no tokens"
            raise MeshshardError(f"context: the model was built for {expected}")
        return None if embed is None or context is None else embed(context)


class MLP(nn.Module):
    """Two linear layers with a GELU between them, as the reference names them."""

    def __init__(self, in_dim: int, hidden: int, out_dim: int) -> None:
        super().__init__()
        self.linear_pre = nn.Sequential(nn.Linear(in_dim, hidden), nn.GELU())
        self.linear_post = nn.Linear(hidden, out_dim)

    def forward(self, x: Tensor) -> Tensor:
        """(…, in_dim) to (…, out_dim)."""
        return self.linear_post(self.linear_pre(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Slice attention and an MLP, each on normed rows and added to them; the last one projects."""

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
        """(…, N, C) to the same, or to (…, N, out_dim)."""
        return uncompiled(self._forward, x, context)  # type: ignore[no-any-return]

    def _forward(self, x: Tensor, context: Tensor | None) -> Tensor:
        if not _as_built(self):
            return self._by_modules(x, context)
        rows, sharding = batch_of(x, self.Attn.dim)
        layer = self.layer(self.Attn.noise(rows, sharding), context)
        return with_rows(apply(layer, self.Attn.run(sharding), rows), x)

    def layer(self, noise: Noise | None, context: Tensor | None) -> Layer:
        """It as pure functions of rows."""
        inner: list[nn.Module] = [self.ln_2, self.mlp.linear_pre]
        inner += [self.mlp.linear_post, self.ln_3] if self.last else []
        tensors = tuple(p for module in inner for p in module.parameters())
        last = self.mlp2 if self.last else self.mlp.linear_post
        end = Piece(F.linear, tuple(last.parameters()))
        return self.Attn.layer(noise, context, self.ln_1, Piece(_after, tensors), end)

    def _by_modules(self, x: Tensor, context: Tensor | None) -> Tensor:
        x = x + self.Attn(self.ln_1(x), context)
        x = x + self.mlp(self.ln_2(x))
        return self.mlp2(self.ln_3(x)) if self.last else x


def _attention(hidden: int, heads: int, slices: int, options: TransolverOptions) -> SliceAttention:
    return SliceAttention(
        hidden,
        heads,
        slices,
        variant=options.variant,
        tile=options.tile,
        keep_weights=options.keep_weights,
        deterministic=options.deterministic,
    )


def _first(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, add: Tensor) -> Tensor:
    """The first hidden rows of inputs."""
    return _mlp(x, w1, b1, w2, b2) + add


def _after(x: Tensor, answer: Tensor, *given: Tensor) -> tuple[Tensor | None, Tensor]:
    """The rest of a block but for its last linear layer, given what its attention answers."""
    norm, bias, w, b = given[:4]
    width = x.shape[-1:]
    h = x + answer
    u = F.gelu(F.linear(F.layer_norm(h, width, norm, bias), w, b))
    if len(given) == 4:
        return h, u
    w, b, norm, bias = given[4:]
    return None, F.layer_norm(h + F.linear(u, w, b), width, norm, bias)


def _mlp(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)


def start(module: nn.Module) -> None:
    """The reference's first parameters."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def _as_built(module: nn.Module) -> bool:
    """Whether nothing inside was replaced or hooked, so that functions may stand for modules."""
    return is_unmodified(module, (MLP, SliceAttention, CrossSliceAttention))
