"""Stages of slice attention as pure functions: weights of rows, what slices answer, the norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from meshshard.nn.slices._layer import Piece, by_heads, collected, same

__all__ = ["Adaptive", "Fixed", "Noise", "attended", "attention", "looked_up", "mixed", "norm_of"]

Noise = Callable[[slice], Tensor]
Parts = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]  # to q, k, v


class Fixed:
    """Weights and values of rows, of one temperature for each head."""

    def __call__(
        self, z: Tensor | None, m: Tensor, rows: slice, wanted: bool, *given: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """(B, H, n, G) and, where wanted, (B, H, n, D)."""
        ws, bs, wf, bf = given
        h = by_heads(m, len(bs))
        bias = bs[:, None].expand(len(m), -1, -1, -1).flatten(0, 1)
        keys = ws.t().expand(len(bias), -1, -1)
        logits = torch.baddbmm(bias, h.flatten(0, 1), keys)
        w = logits.softmax(-1).view(*h.shape[:3], len(ws))
        return w, by_heads(F.linear(z, wf, bf), len(bs)) if wanted and z is not None else None

    def collected(self, m: Tensor, rows: slice, answers: Tensor, *given: Tensor) -> Tensor:
        """What rows collect, (B, n, C), without a gradient.

        Rows attend to the slices, whose keys are the weights' linear map: one fused attention.
        """
        ws, bs = (t.detach() for t in given[:2])  # else torch would take its slower way
        q = by_heads(m, len(bs))
        shape = *q.shape[:3], len(ws)
        k, bias = ws.expand(*q.shape[:2], -1, -1), bs[:, None].expand(shape)
        o = F.scaled_dot_product_attention(q, k, answers, attn_mask=bias, scale=1.0)
        return o.transpose(1, 2).flatten(2)


@dataclass(frozen=True)
class Adaptive:
    """Weights and values of rows, with a temperature for every row and head, and noise."""

    noise: Noise | None

    def __call__(
        self, z: Tensor | None, m: Tensor, rows: slice, wanted: bool, *given: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(B, H, n, G) and (B, H, n, D)."""
        ws, bs, w0, b0, w2, b2, bias = given
        f = m.view(*m.shape[:2], len(bias), ws.shape[1])
        T = F.gelu(F.linear(F.gelu(F.linear(f, w0, b0)), w2, b2)) + bias
        logits = F.linear(f, ws, bs)
        if self.noise is not None:
            logits = logits + self.noise(rows)
        w = (logits / T.clamp(min=0.01)).softmax(-1)
        return w.transpose(1, 2), f.transpose(1, 2)

    def collected(self, m: Tensor, rows: slice, answers: Tensor, *given: Tensor) -> Tensor:
        """What rows collect: (B, n, C)."""
        return collected(self(None, m, rows, False, *given)[0], answers)


def norm_of(norm: nn.LayerNorm | None) -> Piece:
    """A norm before the attention, or none."""
    return (
        Piece(same) if norm is None else Piece(partial(_normed, norm.eps), (norm.weight, norm.bias))
    )


def _normed(eps: float, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def attention(s: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, *context: Tensor) -> Tensor:
    """`attended` by weights."""
    q, k, v = (partial(F.linear, weight=w) for w in (wq, wk, wv))
    return attended(s, (q, k, v), *context)


def attended(s: Tensor, parts: Parts, context: Tensor | None = None) -> Tensor:
    """Slices (B, H, G, D) attend to each other, and to tokens (M, C) or (B, M, C) besides."""
    to, (query, key, value) = s, parts
    if context is not None:
        heads = context.reshape(-1, context.shape[-2], s.shape[1], s.shape[3]).transpose(1, 2)
        to = torch.cat([to, heads.expand(len(s), -1, -1, -1)], 2)
    return looked_up(query(s), key(to), value(to))


def looked_up(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Plain attention of few to few."""
    answers: Tensor = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1) @ v
    return answers


def mixed(s: Tensor, *given: Tensor) -> Tensor:
    """Slices attend to each other, and apart from that to a context (B, H, S, context_dim)."""
    wq, bq, wk, bk, wv, bv, mixing, context = given[3:]
    q, k, v = F.linear(s, wq, bq), F.linear(context, wk, bk), F.linear(context, wv, bv)
    share = mixing.sigmoid()
    both: Tensor = share * attention(s, *given[:3]) + (1 - share) * looked_up(q, k, v)
    return both
