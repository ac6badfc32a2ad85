"""The maths of slice attention as pure functions of rows, slices and parameters.

Shapes: B samples of n rows of width C, in H heads of width D = C / H, with G slices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from meshshard.tensor.tokens import accumulation_dtype

__all__ = [
    "HeadTemperature", "Noise", "RowTemperature", "SliceLayer", "Stage", "attend", "attention",
    "by_heads", "deslice", "dot_product_attention", "mix", "mixed_attention", "normalize",
    "slice_means", "slice_sums",
]  # fmt: skip

Noise = Callable[[slice], Tensor]  # rows to what is added to their logits, (B, n, H, G)
Projections = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]  # to q, k, v


@dataclass(frozen=True)
class Stage:
    """A pure function and its last arguments: the tensors that it can be differentiated by."""

    function: Callable[..., Any]
    tensors: tuple[Tensor, ...] = ()

    def __call__(self, *inputs: Any) -> Any:
        """Value of the function at the inputs and the tensors."""
        return self.function(*inputs, *self.tensors)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Stage:
        """The same function of other tensors."""
        return replace(self, tensors=tuple(tensors))

    def linear(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """A linear stage of rows (B, n, C), written to `out` where given (then not recorded)."""
        if out is None:
            return self(x)  # type: ignore[no-any-return]
        weight, bias = self.tensors
        for to, rows in zip(out, x, strict=True):
            torch.addmm(bias, rows, weight.t(), out=to)
        return out


@dataclass(frozen=True)
class SliceLayer:
    """Slice attention, and what surrounds it in a block, as stages.

    Attributes:
        norm: rows x (B, n, C) to z (B, n, C).
        project: linear, z to m (B, n, C), from which the weights of the slices are computed.
        slices: (z, m, rows) to weights (B, H, n, G) and values (B, H, n, D); without values where
            z is None. The `deslice` of its function maps (m, rows, tokens) to desliced rows: the
            weighted sums of the tokens, (B, n, C).
        attention: weighted means of the values in each slice, (B, H, G, D), to tokens of this shape
            that have attended to each other.
        out: linear, desliced rows to the attention output.
        rest: (x, attention output) to a residual (B, n, C), or None, and the input of `last`; None
            for an attention that is not part of a block.
        last: linear, added to the residual.
        eps: added to the sums of the weights.
    """

    norm: Stage
    project: Stage
    slices: Stage
    attention: Stage
    out: Stage
    rest: Stage | None
    last: Stage | None
    eps: float

    @property
    def stages(self) -> dict[str, Stage]:
        """All stages by name, in the order of the forward pass."""
        names = ("norm", "project", "slices", "attention", "out", "rest", "last")
        pairs = ((name, getattr(self, name)) for name in names)
        return {name: stage for name, stage in pairs if stage is not None}

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors of all stages: all that can have a gradient, apart from the rows."""
        return tuple(t for stage in self.stages.values() for t in stage.tensors)

    @property
    def width(self) -> int:
        """Width of an output row."""
        return len((self.last or self.out).tensors[0])

    def with_tensors(self, tensors: Sequence[Tensor]) -> SliceLayer:
        """The same functions of other tensors, in the order of `tensors`."""
        left = iter(tensors)
        stages = {
            name: stage.with_tensors([next(left) for _ in stage.tensors])
            for name, stage in self.stages.items()
        }
        return replace(self, **stages)  # type: ignore[arg-type]

    def projected(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """The input m (B, n, C) of the weights; written to `out` where given."""
        return self.project.linear(self.norm(x), out)

    def weights(self, m: Tensor, rows: slice) -> Tensor:
        """Weights (B, H, n, G) without the values."""
        return self.slices(None, m, rows)[0]  # type: ignore[no-any-return]

    def sliced(self, x: Tensor, rows: slice, m: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights (B, H, n, G) and values (B, H, n, D); the weights' input is written to `m`."""
        z = self.norm(x)
        return self.slices(z, self.project.linear(z, m), rows)  # type: ignore[no-any-return]

    def deslice(self, m: Tensor, rows: slice, tokens: Tensor) -> Tensor:
        """Weighted sums of tokens (B, H, G, D) for each row, (B, n, C), without a gradient."""
        function: Any = self.slices.function
        return function.deslice(m, rows, tokens, *self.slices.tensors)  # type: ignore[no-any-return]

    def output(self, x: Tensor, desliced: Tensor, out: Tensor | None = None) -> Tensor:
        """Output rows, given desliced rows; written to `out`, which may be x, where given."""
        if self.rest is None or self.last is None:
            return self.out.linear(desliced, out)
        h, u = self.rest(x, self.out(desliced))
        y = self.last.linear(u, out)
        return y if h is None else y + h if out is None else y.add_(h)


# ------------------------------------------------------------------------------ rows to slices
class HeadTemperature:
    """Weights and values with one temperature a head, which is folded into the parameters."""

    def __call__(
        self, z: Tensor | None, m: Tensor, rows: slice, *parameters: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Weights (B, H, n, G) and, unless z is None, values (B, H, n, D)."""
        ws, bs, wf, bf = parameters
        h = by_heads(m, len(bs))
        bias = bs[:, None].expand(len(m), -1, -1, -1).flatten(0, 1)
        keys = ws.t().expand(len(bias), -1, -1)
        logits = torch.baddbmm(bias, h.flatten(0, 1), keys)
        w = logits.softmax(-1).view(*h.shape[:3], len(ws))
        return w, None if z is None else by_heads(F.linear(z, wf, bf), len(bs))

    def deslice(self, m: Tensor, rows: slice, tokens: Tensor, *parameters: Tensor) -> Tensor:
        """Weighted sums of tokens (B, H, G, D) for each row, (B, n, C), without a gradient.

        One fused attention: rows are the queries, the linear map to the slices holds the keys.
        """
        ws, bs = (t.detach() for t in parameters[:2])  # with a gradient torch takes a slower kernel
        q = by_heads(m, len(bs))
        shape = *q.shape[:3], len(ws)
        k, bias = ws.expand(*q.shape[:2], -1, -1), bs[:, None].expand(shape)
        o = F.scaled_dot_product_attention(q, k, tokens, attn_mask=bias, scale=1.0)
        return o.transpose(1, 2).flatten(2)


@dataclass(frozen=True)
class RowTemperature:
    """Weights and values with a temperature for each row and head, and noise in training."""

    noise: Noise | None

    def __call__(
        self, z: Tensor | None, m: Tensor, rows: slice, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Weights (B, H, n, G) and values (B, H, n, D)."""
        ws, bs, w0, b0, w2, b2, bias = parameters
        f = m.view(*m.shape[:2], len(bias), ws.shape[1])
        T = F.gelu(F.linear(F.gelu(F.linear(f, w0, b0)), w2, b2)) + bias
        logits = F.linear(f, ws, bs)
        if self.noise is not None:
            logits = logits + self.noise(rows)
        w = (logits / T.clamp(min=0.01)).softmax(-1)
        return w.transpose(1, 2), f.transpose(1, 2)

    def deslice(self, m: Tensor, rows: slice, tokens: Tensor, *parameters: Tensor) -> Tensor:
        """Weighted sums of tokens (B, H, G, D) for each row, (B, n, C)."""
        return deslice(self(None, m, rows, *parameters)[0], tokens)


def by_heads(x: Tensor, heads: int) -> Tensor:
    """Rows (B, n, H * D) as (B, H, n, D)."""
    return x.view(*x.shape[:2], heads, x.shape[2] // heads).transpose(1, 2)


def slice_sums(w: Tensor, f: Tensor) -> Tensor:
    """Sums over rows of weights times values, and in the last column of weights: (B, H, G, D + 1).

    Args:
        w: weights (B, H, n, G).
        f: values (B, H, n, D).
    """
    tokens = torch.matmul(w.transpose(-1, -2), f).to(accumulation_dtype(f.dtype))
    return torch.cat([tokens, w.sum(-2, dtype=accumulation_dtype(w.dtype))[..., None]], -1)


def slice_means(sums: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Weighted means of the values in each slice, (B, H, G, D), from `slice_sums`."""
    return (sums[..., :-1] / (sums[..., -1:] + eps)).to(dtype)


def deslice(w: Tensor, tokens: Tensor) -> Tensor:
    """Weighted sums of tokens (B, H, G, D) for each row, heads side by side: (B, n, H * D)."""
    return torch.matmul(w, tokens).transpose(1, 2).flatten(2)


# ------------------------------------------------------------------------------ among the slices
def attention(s: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, *context: Tensor) -> Tensor:
    """As `attend`, given the weights of the projections."""
    q, k, v = (partial(F.linear, weight=w) for w in (wq, wk, wv))
    return attend(s, (q, k, v), *context)


def attend(s: Tensor, projections: Projections, context: Tensor | None = None) -> Tensor:
    """Slices (B, H, G, D) attend to each other and to context tokens (M, C) or (B, M, C)."""
    to, (query, key, value) = s, projections
    if context is not None:
        heads = context.reshape(-1, context.shape[-2], s.shape[1], s.shape[3]).transpose(1, 2)
        to = torch.cat([to, heads.expand(len(s), -1, -1, -1)], 2)
    return dot_product_attention(query(s), key(to), value(to))


def dot_product_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v of a few tokens, differentiable to any order."""
    return torch.matmul((q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1), v)


def mixed_attention(s: Tensor, *parameters: Tensor) -> Tensor:
    """Attention among slices, mixed with cross-attention to a context (B, H, S, context_dim)."""
    wq, bq, wk, bk, wv, bv, mixing, context = parameters[3:]
    q, k, v = F.linear(s, wq, bq), F.linear(context, wk, bk), F.linear(context, wv, bv)
    return mix(attention(s, *parameters[:3]), dot_product_attention(q, k, v), mixing)


def mix(own: Tensor, cross: Tensor, mixing: Tensor) -> Tensor:
    """sigmoid(mixing) * own + (1 - sigmoid(mixing)) * cross."""
    share = mixing.sigmoid()
    return share * own + (1 - share) * cross


# ------------------------------------------------------------------------------ before the slices
def normalize(norm: nn.LayerNorm | None) -> Stage:
    """A layer norm as a stage; the identity for None."""
    if norm is None:
        return Stage(_identity)
    return Stage(partial(_layer_norm, norm.eps), (norm.weight, norm.bias))


def _layer_norm(eps: float, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _identity(x: Tensor) -> Tensor:
    return x
