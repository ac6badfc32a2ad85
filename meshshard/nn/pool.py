"""Pools: reduce all rows of a sample to one; the result is replicated.

The global pools have the names and results of PyG's, which also take sharded tensors. These need no
PyG, one all-reduce instead of one each for sums and counts, and add and count in float32 or wider.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshshard.comm import Domain
from meshshard.errors import MeshshardError
from meshshard.tensor import Sharding
from meshshard.tensor.align import narrow_to_owned, unwrap_rows
from meshshard.tensor.tokens import accumulation_dtype, reduce_tokens

__all__ = [
    "AttentionPool", "attention_pool", "global_add_pool", "global_max_pool", "global_mean_pool",
]  # fmt: skip


def global_add_pool(x: Tensor, batch: Tensor | None = None, size: int | None = None) -> Tensor:
    """Sum over the rows of each sample.

    Args:
        x: (n, …) floating point, sharded by rows or plain.
        batch: (n,) int64 index of the sample of each row, in any order; sharded like x, or plain
            with all n rows. None for one sample.
        size: number of samples; by default one more than the largest index in `batch`.

    Returns:
        (size, …), replicated.

    Raises:
        MeshshardError: x is sharded along another dim than its rows, or `batch` has another number
            of rows or another sharding.

    Communication: one all-reduce of the result, forward and backward; one more of a number if
    `size` is not given.
    """
    rows, sharding = unwrap_rows(x)
    sums = _sums(rows, *_samples(rows, sharding, batch, size))
    return sharding.domain.all_reduce(sums).to(x.dtype)


def global_mean_pool(x: Tensor, batch: Tensor | None = None, size: int | None = None) -> Tensor:
    """Mean over the rows of each sample; 0 for a sample without rows.

    Args:
        x: (n, …), as in `global_add_pool`.
        batch: (n,) int64, as in `global_add_pool`.
        size: number of samples, as in `global_add_pool`.

    Returns:
        (size, …), replicated.

    Raises:
        MeshshardError: as `global_add_pool`.

    Communication: one all-reduce of sums and counts, forward and backward; one more of a number if
    `size` is not given.
    """
    rows, sharding = unwrap_rows(x)
    flat = rows.reshape(len(rows), rows.shape[1:].numel())
    sample, size = _samples(rows, sharding, batch, size)
    sums = _sums(flat, sample, size)
    counts = torch.bincount(sample, minlength=size)[
        :, None
    ]  # a sum of ones stops at 2^24 in float32, 256 in bfloat16
    sums = sharding.domain.all_reduce(torch.cat([sums, counts.to(sums.dtype)], 1))
    mean = sums[:, :-1] / sums[:, -1:].clamp_min(1)
    mean = mean.to(rows.dtype) if rows.is_floating_point() else mean
    return mean.reshape(-1, *rows.shape[1:])


def global_max_pool(x: Tensor, batch: Tensor | None = None, size: int | None = None) -> Tensor:
    """Maximum over the rows of each sample; 0 for a sample without rows.

    All rows that equal the maximum, on any rank, share its gradient. (PyG loses a part of the
    gradient where the maximum is 0.)

    Args:
        x: (n, …), as in `global_add_pool`.
        batch: (n,) int64, as in `global_add_pool`.
        size: number of samples, as in `global_add_pool`.

    Returns:
        (size, …), replicated.

    Raises:
        MeshshardError: as `global_add_pool`.

    Communication: forward one all-reduce of maxima and one of (size, 2, …), backward one; one more
    of a number if `size` is not given.
    """
    rows, sharding = unwrap_rows(x)
    sample, size = _samples(rows, sharding, batch, size)
    top = _maxima(rows.detach(), sample, size, sharding.domain)
    hit = rows == top[sample]
    finite = hit & top[sample].isfinite()  # inf - inf would be NaN
    zeros = torch.where(finite, rows - top[sample], 0.0)  # 0, with the gradient of the rows
    sums = _sums(torch.stack([zeros, hit.to(rows.dtype)], 1), sample, size)
    sums = sharding.domain.all_reduce(sums)
    top = torch.where((sums[:, 1] == 0) & (top == -torch.inf), 0.0, top)
    return top + (sums[:, 0] / sums[:, 1].detach().clamp_min(1)).to(top.dtype)


def attention_pool(
    x: Tensor, scores: Tensor, batch: Tensor | None = None, size: int | None = None
) -> Tensor:
    """Sum of rows weighted by a softmax of scores over the rows of each sample.

    Source: Li et al., Graph Matching Networks (2019); PyG's AttentionalAggregation.

    Args:
        x: (n, width), sharded by rows or plain.
        scores: (n, heads), sharded like x. Each head weights width / heads columns of x: one head
            weights whole rows, `width` heads weight every number separately.
        batch: (n,) int64, as in `global_add_pool`.
        size: number of samples, as in `global_add_pool`.

    Returns:
        (size, width), replicated; 0 for a sample without rows.

    Raises:
        MeshshardError: scores with another number of rows or another sharding, or heads that do not
            divide the width.

    Communication: forward one all-reduce of (size, heads) and one of (size, heads, width / heads +
    1), backward one; one more of a number if `size` is not given.
    """
    rows, sharding = unwrap_rows(x)
    gates, other = unwrap_rows(scores)
    if other != sharding or gates.ndim != 2 or rows.ndim != 2 or rows.shape[1] % gates.shape[1]:
        raise MeshshardError(
            f"attention_pool: scores {tuple(scores.shape)} for x {tuple(x.shape)}; they must be "
            "(n, heads) with the sharding of x, and heads must divide the width of x"
        )
    sample, size = _samples(rows, sharding, batch, size)
    heads = gates.shape[1]
    top = _maxima(gates.detach(), sample, size, None)
    weights = torch.exp(gates - top[sample])[..., None]
    columns = rows.reshape(len(rows), heads, rows.shape[1] // heads)
    sums = _sums(torch.cat([weights * columns, weights], -1), sample, size)
    sums = reduce_tokens(sharding.domain, sums, top)
    total = torch.where(sums[..., -1:] > 0, sums[..., -1:], 1.0)
    return (sums[..., :-1] / total).to(x.dtype).reshape(size, rows.shape[1])


class AttentionPool(nn.Module):
    """`attention_pool` with learned scores: the sum over rows of softmax(gate(x)) * values(x).

    Args:
        gate: module from (n, width) to scores (n, heads).
        values: module from (n, width) to the rows (n, width') to be summed; x itself by default.

    Communication: as `attention_pool`.
    """

    def __init__(self, gate: nn.Module, values: nn.Module | None = None) -> None:
        super().__init__()
        self.gate = gate
        self.values = values

    def forward(self, x: Tensor, batch: Tensor | None = None, size: int | None = None) -> Tensor:
        """Pool the rows of each sample.

        Args:
            x: (n, width), sharded by rows or plain.
            batch: (n,) int64, as in `global_add_pool`.
            size: number of samples, as in `global_add_pool`.

        Returns:
            (size, width'), replicated.
        """
        values = x if self.values is None else self.values(x)
        return attention_pool(values, self.gate(x), batch, size)


# ---------------------------------------------------------------------------------------- samples
def _samples(rows: Tensor, sharding: Sharding, batch: Any, size: int | None) -> tuple[Tensor, int]:
    """Index of the sample of each local row, and the number of samples."""
    if batch is None:
        return rows.new_zeros(len(rows), dtype=torch.int64), 1 if size is None else size
    sample, other = unwrap_rows(batch)
    if type(batch) is Tensor and len(batch) == sharding.total:
        sample, other = narrow_to_owned(batch, sharding, 0), sharding
    if other != sharding:
        raise MeshshardError(
            f"batch has {len(batch)} rows in {other}, x has {sharding.total} in {sharding}; give "
            f"batch the sharding of x, or a plain tensor with all rows"
        )
    if size is None:
        top = sample.max() if len(sample) else sample.new_tensor(-1)
        size = int(sharding.domain.all_reduce(top, "max")) + 1
    return sample, size


def _sums(rows: Tensor, sample: Tensor, size: int) -> Tensor:
    """Sum over the local rows of each sample, in float32 or wider."""
    kind = accumulation_dtype(rows.dtype)
    if size == 1 and not sample.any():  # pairwise; one by one, float32 stops at 2^24
        return rows.sum(0, keepdim=True, dtype=kind)
    return rows.new_zeros((size, *rows.shape[1:]), dtype=kind).index_add(0, sample, rows.to(kind))


def _maxima(rows: Tensor, sample: Tensor, size: int, domain: Domain | None) -> Tensor:
    """Maximum over the local rows of each sample, or over those of a domain; -inf without rows."""
    top = rows.new_full((size, *rows.shape[1:]), -torch.inf)
    at = sample.view(-1, *[1] * (rows.ndim - 1)).expand_as(rows)
    top = top.scatter_reduce(0, at, rows, "amax")
    return top if domain is None else domain.all_reduce(top, "max")
