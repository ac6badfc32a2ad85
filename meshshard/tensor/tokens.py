"""Tokens: many rows reduced to few that every rank holds; the second of the three mechanisms.

A rank reduces its owned rows to partial sums of a fixed shape; the functions here add those of all
ranks. Slice attention, attention of replicated queries, attention pooling and norms use them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshshard.comm import Domain

__all__ = ["HALF", "accumulation_dtype", "reduce_tokens", "reduce_tokens_in_order"]

HALF = (torch.bfloat16, torch.float16)


def reduce_tokens(domain: Domain, sums: Tensor, top: Tensor | None = None) -> Tensor:
    """Partial sums over owned rows to sums over all rows, replicated.

    Args:
        domain: the ranks.
        sums: (…, width) sums over owned rows; numerators and denominators side by side need one
            collective. With `top` they have the form sum_n exp(s_n - top) v_n: a softmax along the
            rows by log-sum-exp (Milakov and Gimelshein 2018).
        top: (…) largest exponent of owned rows, -inf if there are none. It gets no gradient: the
            quotient of two such sums does not depend on it.

    Returns:
        (…, width) sums over all rows, relative to the largest exponent of all.

    Communication: one all-reduce forward and backward; with `top`, one more forward.
    """
    if top is not None:
        highest = domain.all_reduce(top.detach(), "max")
        lower = torch.where(highest.isinf(), torch.zeros_like(highest), top.detach() - highest)
        sums = sums * lower.exp()[..., None]
    return domain.all_reduce(sums)


def reduce_tokens_in_order(domain: Domain, sums: Tensor, shards: Sequence[int]) -> Tensor:
    """Sums over all rows, added in the order of the shards: bitwise equal on any number of ranks.

    Args:
        domain: the ranks.
        sums: (n_owned_shards, …, width) partial sums of each shard of this rank.
        shards: number of shards of every rank.

    Communication: one all-to-all of k sums, forward and backward.
    """
    return domain.all_gather(sums, shards).sum(0)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over many rows are accumulated: at least float32, as in torch."""
    return torch.float32 if dtype in HALF else dtype
