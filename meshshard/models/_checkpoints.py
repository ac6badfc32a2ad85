"""Names and shapes of a Transolver's parameters in the code of others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from meshshard.errors import MeshshardError

__all__ = ["from_physicsnemo", "sizes_of", "to_physicsnemo"]

# Ours (and the reference's) on the left, PhysicsNeMo's on the right; qkv and temperature besides.
PAIRS = (
    ("preprocess.linear_pre.0.", "preprocess.layers.0."),
    ("preprocess.linear_post.", "preprocess.layers.2."),
    (".mlp.linear_pre.0.", ".ln_mlp1.1.layers.0."),
    (".mlp.linear_post.", ".ln_mlp1.1.layers.2."),
    (".mlp2.", ".ln_mlp2.1."),
    (".ln_2.", ".ln_mlp1.0."),
    (".ln_3.", ".ln_mlp2.0."),
    (".to_out.0.", ".out_linear."),
)
QKV = ("to_q", "to_k", "to_v")
Sizes = tuple[int, int, int, int, int, int]


def sizes_of(state: Mapping[str, Tensor]) -> tuple[Sizes, dict[str, Any]]:
    """Sizes of the Transolver of some parameters: those of its `__init__`, and its options.

    Raises:
        MeshshardError: they are not a Transolver's.
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
        raise MeshshardError(f"parameters of no Transolver: {missing} is not there") from None
    context = state["context.weight"].shape[1] if "context.weight" in state else 0
    options = {"mlp_ratio": ratio, "context_dim": context, "variant": "plus" if plus else "v1"}
    return (in_dim, out_dim, hidden, layers, heads, slices), options


def from_physicsnemo(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """PhysicsNeMo's parameters by the names and in the shapes of the reference.

    It has no placeholder, which adds the same to every row: zero here.
    """
    out: dict[str, Tensor] = {}
    for name, value in state.items():
        for ours, theirs in PAIRS:
            name = name.replace(theirs, ours)
        if name.endswith(".qkv_project.weight"):
            for part, rows in zip(QKV, value.chunk(3), strict=True):
                out[name.replace("qkv_project", part)] = rows
        else:
            turn = name.endswith(".temperature")
            out[name] = value.permute(0, 2, 1, 3) if turn else value
    bias = out.get("preprocess.linear_post.bias")
    return out if bias is None else {**out, "placeholder": torch.zeros_like(bias)}


def to_physicsnemo(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The reference's parameters by the names and in the shapes of PhysicsNeMo.

    The placeholder goes into the bias before it.
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
        turn = name.endswith(".temperature")
        for ours, theirs in PAIRS:
            name = name.replace(ours, theirs)
        out[name] = value.permute(0, 2, 1, 3) if turn else value
    return out
