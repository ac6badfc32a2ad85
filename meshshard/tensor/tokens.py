"""Tokens: many rows reduced to few, which every rank then holds; the second of three mechanisms.

A rank reduces its own rows to partial sums of one shape; what is here makes them those of all rows.
Slice attention, attention over replicated queries, attention pooling and norms are texts over it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshshard.comm import Domain

__all__ = ["reduce_tokens", "reduce_tokens_in_order"]


def reduce_tokens(domain: Domain, sums: Tensor, top: Tensor | None = None) -> Tensor:
    """Partial sums of own rows to those of all rows, replicated.

    Args:
        domain: the ranks.
        sums: (…, width) sums over own rows; numerators and denominators side by side travel in one
            message. Of the form sum_n exp(s_n - top) v_n where `top` is given (a softmax along the
            rows by log-sum-exp, Milakov and Gimelshein 2018).
        top: (…) largest exponent of own rows, -inf where there are none; no gradient flows into it,
            for the quotient of two such sums does not depend on it.

    Returns:
        (…, width) sums over all rows, relative to the largest exponent of all.

    Communication: one all-reduce forward and backward, one more of `top` forward.
    """
    if top is not None:
        highest = domain.all_reduce(top.detach(), "max")
        lower = torch.where(highest.isinf(), torch.zeros_like(highest), top.detach() - highest)
        sums = sums * lower.exp()[..., None]
    return domain.all_reduce(sums)


def reduce_tokens_in_order(domain: Domain, sums: Tensor, shards: Sequence[int]) -> Tensor:
    """The same, shard by shard in their order, so with the same bits on any number of ranks.

    Args:
        domain: the ranks.
        sums: (own shards, …, width).
        shards: how many shards every rank holds.

    Communication: one all-to-all of k sums, forward and backward.
    """
    return domain.all_gather(sums, shards).sum(0)
