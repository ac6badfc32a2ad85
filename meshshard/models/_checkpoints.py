"""Names and shapes of a Transolver's parameters in other implementations."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from meshshard.errors import MeshshardError

__all__ = ["from_physicsnemo", "sizes_of", "to_physicsnemo"]

# Parts of names here and in the reference, and in PhysicsNeMo. Besides, PhysicsNeMo stacks the
# weights of q, k and v, and its temperature is (1, 1, H, 1) instead of (1, H, 1, 1).
TO_PHYSICSNEMO = {
    "preprocess.linear_pre.0.": "preprocess.layers.0.",
    "preprocess.linear_post.": "preprocess.layers.2.",
    ".mlp.linear_pre.0.": ".ln_mlp1.1.layers.0.",
    ".mlp.linear_post.": ".ln_mlp1.1.layers.2.",
    ".mlp2.": ".ln_mlp2.1.",
    ".ln_2.": ".ln_mlp1.0.",
    ".ln_3.": ".ln_mlp2.0.",
    ".to_out.0.": ".out_linear.",
}
FROM_PHYSICSNEMO = {theirs: ours for ours, theirs in TO_PHYSICSNEMO.items()}
QKV = ("to_q", "to_k", "to_v")
Sizes = tuple[int, int, int, int, int, int]


def sizes_of(state: Mapping[str, Tensor]) -> tuple[Sizes, dict[str, Any]]:
    """Sizes and options of the Transolver that these parameters belong to.

    Raises:
        MeshshardError: they are not those of a Transolver.
    """
    try:
        hidden, in_dim = len(state["placeholder"]), state["preprocess.linear_pre.0.weight"].shape[1]
        numbers = [int(m[1]) for name in state if (m := re.match(r"blocks\.(\d+)\.", name))]
        layers = max(numbers, default=-1) + 1
        out_dim = len(state[f"blocks.{layers - 1}.mlp2.weight"])
        plus = "blocks.0.Attn.bias" in state
        heads = state[f"blocks.0.Attn.{'bias' if plus else 'temperature'}"].shape[1]
        slices = len(state["blocks.0.Attn.in_project_slice.weight"])
        ratio = len(state["blocks.0.mlp.linear_pre.0.weight"]) / hidden
    except KeyError as missing:
        raise MeshshardError(f"not the parameters of a Transolver: {missing} is missing") from None
    context = state["context.weight"].shape[1] if "context.weight" in state else 0
    options = {"mlp_ratio": ratio, "context_dim": context, "variant": "plus" if plus else "v1"}
    return (in_dim, out_dim, hidden, layers, heads, slices), options


def from_physicsnemo(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """PhysicsNeMo's parameters with the names and shapes of the reference.

    PhysicsNeMo has no placeholder (a vector added to every row); it becomes zero.
    """
    out: dict[str, Tensor] = {}
    for theirs, value in state.items():
        name = _renamed(theirs, FROM_PHYSICSNEMO)
        if name.endswith(".qkv_project.weight"):
            for part, rows in zip(QKV, value.chunk(3), strict=True):
                out[name.replace("qkv_project", part)] = rows
        else:
            out[name] = _reshaped(name, value)
    bias = out.get("preprocess.linear_post.bias")
    return out if bias is None else {**out, "placeholder": torch.zeros_like(bias)}


def to_physicsnemo(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The reference's parameters with the names and shapes of PhysicsNeMo.

    The placeholder is added to the bias before it.
    """
    out: dict[str, Tensor] = {}
    post = "preprocess.linear_post.bias"
    state = {**state, post: state[post] + state["placeholder"]}
    del state["placeholder"]
    for name, value in state.items():
        if name.endswith((".to_k.weight", ".to_v.weight")):
            continue
        if name.endswith(".to_q.weight"):
            parts = [state[name.replace("to_q", part)] for part in QKV]
            out[name.replace("to_q", "qkv_project")] = torch.cat(parts)
            continue
        out[_renamed(name, TO_PHYSICSNEMO)] = _reshaped(name, value)
    return out


def _renamed(name: str, parts: Mapping[str, str]) -> str:
    for old, new in parts.items():
        name = name.replace(old, new)
    return name


def _reshaped(name: str, value: Tensor) -> Tensor:
    return value.permute(0, 2, 1, 3) if name.endswith(".temperature") else value
