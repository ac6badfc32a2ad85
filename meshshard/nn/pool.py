"""Pools: all rows of a sample to one.

They have the names and results of PyG's. What they give is replicated: the same on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshshard.comm import Domain
from meshshard.errors import MeshshardError
from meshshard.tensor import Sharding
from meshshard.tensor.align import own_rows, unwrap_rows
from meshshard.tensor.rules.reductions import wide
from meshshard.tensor.tokens import reduce_tokens

__all__ = [
    "AttentionPool", "attention_pool", "global_add_pool", "global_max_pool", "global_mean_pool",
]  # fmt: skip


def global_add_pool(x: Tensor, batch: Tensor | None = None, size: int | None = None) -> Tensor:
    """Sum over the rows of each sample.

    Args:
        x: (n, …) floating, sharded by rows or plain.
        batch: (n,) int64 sample of each row in any order, as x or plain; None for one sample.
        size: number of samples, the largest in `batch` and one by default.

    Returns:
        (size, …), replicated.

    Raises:
        MeshshardError: rows along another dim than the first, or a `batch` of other rows.

    Communication: one all-reduce of the result forward and backward; one more for `size`, if it is
    not given.
    """
    rows, sharding = unwrap_rows(x)
    sums = _sums(rows, *_samples(rows, sharding, batch, size))
    return sharding.domain.all_reduce(sums).to(x.dtype)


def global_mean_pool(x: Tensor, batch: Tensor | None = None, size: int | None = None) -> Tensor:
    """Mean over the rows of each sample, 0 where it has none; as `global_add_pool`.

    Communication: one all-reduce of (size, … and one) forward and backward, as there for `size`.
    """
    rows, sharding = unwrap_rows(x)
    flat = rows.reshape(len(rows), rows.shape[1:].numel())
    sample, size = _samples(rows, sharding, batch, size)
    sums = _sums(flat, sample, size)
    counts = torch.bincount(sample, minlength=size)[:, None]  # ones added up stop at 2^24, or 256
    sums = sharding.domain.all_reduce(torch.cat([sums, counts.to(sums.dtype)], 1))
    mean = sums[:, :-1] / sums[:, -1:].clamp_min(1)
    mean = mean.to(rows.dtype) if rows.is_floating_point() else mean
    return mean.reshape(-1, *rows.shape[1:])


def global_max_pool(x: Tensor, batch: Tensor | None = None, size: int | None = None) -> Tensor:
    """Maximum over the rows of each sample, 0 where it has none.

    All global ties share its gradient (PyG's own loses a part of it where the maximum is 0).

    Communication: one all-reduce of maxima and one of (size, 2, …) forward, one backward, as in
    `global_add_pool` for `size`.
    """
    rows, sharding = unwrap_rows(x)
    sample, size = _samples(rows, sharding, batch, size)
    top = _tops(rows.detach(), sample, size, sharding.domain)
    hit = rows == top[sample]
    inside = hit & top[sample].isfinite()  # inf - inf is none of 0
    above = torch.where(inside, rows - top[sample], 0.0)  # 0, with the gradient of the rows
    sums = _sums(torch.stack([above, hit.to(rows.dtype)], 1), sample, size)
    sums = sharding.domain.all_reduce(sums)
    top = torch.where((sums[:, 1] == 0) & (top == -torch.inf), 0.0, top)
    return top + (sums[:, 0] / sums[:, 1].detach().clamp_min(1)).to(top.dtype)


def attention_pool(
    x: Tensor, scores: Tensor, batch: Tensor | None = None, size: int | None = None
) -> Tensor:
    """Sum of rows weighted by a softmax of scores along the rows of each sample.

    Args:
        x: (n, width), sharded by rows or plain.
        scores: (n, heads), alike; each head has width / heads columns of x, so that 1 head weights
            rows and `width` heads every number.
        batch: as in `global_add_pool`.
        size: as in `global_add_pool`.

    Returns:
        (size, width), replicated; 0 for a sample without rows.

    Raises:
        MeshshardError: scores of other rows, or heads that do not divide the width.

    Communication: one all-reduce of (size, heads) and one of (size, heads, width / heads + 1)
    forward, one backward; as in `global_add_pool` for `size`.

    Li et al., Graph Matching Networks (2019); PyG's AttentionalAggregation.
    """
    rows, sharding = unwrap_rows(x)
    gates, other = unwrap_rows(scores)
    if other != sharding or gates.ndim != 2 or rows.ndim != 2 or rows.shape[1] % gates.shape[1]:
        raise MeshshardError(
            f"attention_pool: scores {tuple(scores.shape)} for rows {tuple(x.shape)}: "
            "the same rows, and heads that divide the width"
        )
    sample, size = _samples(rows, sharding, batch, size)
    heads = gates.shape[1]
    top = _tops(gates.detach(), sample, size, None)
    weights = torch.exp(gates - top[sample])[..., None]
    parts = rows.reshape(len(rows), heads, rows.shape[1] // heads)
    sums = _sums(torch.cat([weights * parts, weights], -1), sample, size)
    sums = reduce_tokens(sharding.domain, sums, top)
    below = torch.where(sums[..., -1:] > 0, sums[..., -1:], 1.0)
    return (sums[..., :-1] / below).to(x.dtype).reshape(size, rows.shape[1])


class AttentionPool(nn.Module):
    """`attention_pool` with learned scores: the sum over rows of softmax(gate(x)) values(x).

    Args:
        gate: a module from (n, width) to (n, heads) scores.
        values: a module of x whose rows are summed; x itself by default.

    Communication: as `attention_pool`.
    """

    def __init__(self, gate: nn.Module, values: nn.Module | None = None) -> None:
        super().__init__()
        self.gate = gate
        self.values = values

    def forward(self, x: Tensor, batch: Tensor | None = None, size: int | None = None) -> Tensor:
        """(size, width), replicated."""
        values = x if self.values is None else self.values(x)
        return attention_pool(values, self.gate(x), batch, size)


# ---------------------------------------------------------------------------------------- samples
def _samples(rows: Tensor, sharding: Sharding, batch: Any, size: int | None) -> tuple[Tensor, int]:
    """Sample of own rows, and how many samples there are."""
    if batch is None:
        return rows.new_zeros(len(rows), dtype=torch.int64), 1 if size is None else size
    sample, other = unwrap_rows(batch)
    if type(batch) is Tensor and len(batch) == sharding.total:
        sample, other = own_rows(batch, sharding, 0), sharding
    if other != sharding:
        raise MeshshardError(
            f"batch has {len(batch)} rows in {other}, x has {sharding.total} in {sharding}"
        )
    if size is None:
        top = sample.max() if len(sample) else sample.new_tensor(-1)
        size = int(sharding.domain.all_reduce(top, "max")) + 1
    return sample, size


def _sums(rows: Tensor, sample: Tensor, size: int) -> Tensor:
    """Sum over own rows of each sample, in float32 at least."""
    kind = wide(rows.dtype)
    if size == 1 and not sample.any():  # by pairs: one after the other, float32 stops at 2^24 ones
        return rows.sum(0, keepdim=True, dtype=kind)
    return rows.new_zeros((size, *rows.shape[1:]), dtype=kind).index_add(0, sample, rows.to(kind))


def _tops(rows: Tensor, sample: Tensor, size: int, domain: Domain | None) -> Tensor:
    """Largest own number of each sample, or that of all ranks; -inf without rows."""
    top = rows.new_full((size, *rows.shape[1:]), -torch.inf)
    at = sample.view(-1, *[1] * (rows.ndim - 1)).expand_as(rows)
    top = top.scatter_reduce(0, at, rows, "amax")
    return top if domain is None else domain.all_reduce(top, "max")
