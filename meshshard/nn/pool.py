"""Pools: all rows of a sample to one, and choices of a few rows out of all.

Pools have the names and results of PyG's. What they give is replicated: the same on every rank.
Choices do not depend on the partition: chance and ties are decided by the row in the source.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshshard.comm import Domain
from meshshard.errors import MeshshardError
from meshshard.neighbours import finite
from meshshard.nn._slices import wide
from meshshard.tensor import Sharding, ShardTensor
from meshshard.tensor.align import own_rows
from meshshard.tensor.core import wrap
from meshshard.tensor.random import numbers
from meshshard.tensor.tokens import merged

__all__ = [
    "AttentionPool", "attention_pool", "farthest_points", "global_add_pool", "global_max_pool",
    "global_mean_pool", "mask_of", "random_points",
]  # fmt: skip

BITS, ROUNDS = 53, 4  # of a random key, and of the search for the n-th smallest of all


def global_add_pool(x: Tensor, batch: Tensor | None = None, size: int | None = None) -> Tensor:
    """Sum over the rows of each sample.

    Args:
        x: (n, …) floating, sharded by rows or plain.
        batch: (n,) int64 sample of each row in any order, as x or plain; None for one sample.
        size: number of samples, the largest in `batch` and one by default.

    Returns:
        (size, …), replicated.

    Communication: one all-reduce of the result forward and backward; one more for `size`, if it is
    not given.
    """
    rows, sharding = _own(x)
    sums = _sums(rows, *_samples(rows, sharding, batch, size))
    return sharding.domain.all_reduce(sums).to(x.dtype)


def global_mean_pool(x: Tensor, batch: Tensor | None = None, size: int | None = None) -> Tensor:
    """Mean over the rows of each sample, 0 where it has none; as `global_add_pool`.

    Communication: one all-reduce of (size, … and one) forward and backward, as there for `size`.
    """
    rows, sharding = _own(x)
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
    rows, sharding = _own(x)
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

    Communication: one all-reduce of (size, heads) and one of (size, heads, width / heads + 1)
    forward, one backward; as in `global_add_pool` for `size`.

    Li et al., Graph Matching Networks (2019); PyG's AttentionalAggregation.
    """
    rows, sharding = _own(x)
    gates, other = _own(scores)
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
    sums = merged(sharding.domain, sums, top)
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


# ----------------------------------------------------------------------------------------- choices
def farthest_points(pos: Tensor, n: int, start: int = 0) -> Tensor:
    """Farthest-point sampling, exact: each next point is the farthest from all that were chosen.

    Args:
        pos: (n_points, dims), sharded by rows or plain; no gradient flows into it.
        n: how many points to choose, each once.
        start: row in the source of the first.

    Returns:
        (n,) int64 rows of `pos` in the order they were chosen, replicated: `pos[rows]` are these
        points on every rank, `pos[mask_of(rows, pos)]` the same points where they are. Of equally
        far points the first in the source is chosen. Eldar et al. (1997).

    Raises:
        DomainError: on every rank, where any has points that are not finite.

    Communication: one gather of objects; one all-gather of a point a rank for each point.
    """
    rows, sharding = _own(pos)
    if not 1 <= n <= sharding.total or not 0 <= start < sharding.total:
        raise MeshshardError(f"farthest_points: {n} from row {start} of {sharding.total} points")
    columns = rows.detach().to(torch.float64).T.contiguous()
    sharding.domain.together(lambda: finite(columns.T.cpu().numpy()), "farthest_points")
    source = sharding.sources(rows.device)
    far = torch.full((sharding.own,), torch.inf, dtype=torch.float64, device=rows.device)
    first = torch.where(source == start, torch.inf, 0.0)
    chosen, point = [], _farthest(first.double(), columns, source, sharding)
    for _ in range(n):
        row = int(point[2])
        chosen.append(row)
        apart = torch.zeros_like(far)
        for column, at in zip(columns, point[3:], strict=True):
            apart += (column - at).square_()
        torch.minimum(far, apart, out=far)
        if sharding.first <= row < sharding.first + sharding.own:
            far[row - sharding.first] = -1.0  # never twice, though others lie in the same place
        if len(chosen) < n:
            point = _farthest(far, columns, source, sharding)
    return torch.tensor(chosen, device=rows.device)


def _farthest(far: Tensor, columns: Tensor, source: Tensor, sharding: Sharding) -> Tensor:
    """Of all ranks: distance, minus row in the source, row, coordinates of the farthest point."""
    if len(far):
        ties = torch.nonzero(far == far.max())[:, 0]
        at = ties[source[ties].argmin()]
        head = [far[at], -source[at].double(), (at + sharding.first).double()]
        best = torch.cat([torch.stack(head), columns[:, at]])
    else:
        best = columns.new_full((3 + len(columns),), -torch.inf)
    every = sharding.domain.all_gather(best[None], [1] * sharding.domain.size)
    keys = every[:, :2].tolist()
    return every[max(range(len(keys)), key=keys.__getitem__)]


def random_points(x: Tensor, n: int, seed: int) -> Tensor:
    """A random choice of rows that does not depend on the partition.

    Args:
        x: rows, sharded or plain.
        n: how many to choose; each choice of n rows is equally likely.
        seed: the same gives the same rows of the source, on any ranks.

    Returns:
        (n_rows,) bool, as sharded as x: `x[mask]` has the chosen rows, where they are.

    Communication: four all-reduces of 2^14 counts and one gather of objects.
    """
    rows, sharding = _own(x)
    if not 0 <= n <= sharding.total:
        raise MeshshardError(f"random_points: {n} of {sharding.total} rows")
    source = sharding.sources(rows.device)
    keys = numbers(0, torch.full_like(source, seed), source)
    keys = (keys * 2.0**BITS).to(torch.int64)
    last, missing = _nth(keys, n, sharding.domain)
    mask = keys < last
    ties = source[keys == last]  # one row, but for a chance of about n^2 / 2^53
    every = sorted(i for part in sharding.domain.share(ties.tolist()) for i in part)
    mask |= (keys == last) & torch.isin(source, torch.tensor(every[:missing], device=rows.device))
    return wrap(mask, sharding, 0) if type(x) is ShardTensor else mask


def _nth(keys: Tensor, n: int, domain: Domain) -> tuple[int, int]:
    """The n-th smallest key of all ranks, and how many rows with it are among the n smallest."""
    prefix, left = 0, n
    for level in reversed(range(ROUNDS)):
        bits = 14
        inside = keys[keys >> bits * (level + 1) == prefix]
        digits = inside >> bits * level & (2**bits - 1)
        counts = domain.all_reduce(torch.bincount(digits, minlength=2**bits))
        ends = counts.cumsum(0)
        digit = int(torch.searchsorted(ends, left)) if left else 0
        left -= int(ends[digit - 1]) if digit else 0
        prefix = (prefix << bits) + digit
    return prefix, left


def mask_of(rows: Tensor, x: Tensor) -> Tensor:
    """Replicated numbers of rows as a mask (n_rows,), as sharded as x: `x[mask]` stays sharded.

    Communication: none.
    """
    own, sharding = _own(x)
    mask = torch.zeros(sharding.own, dtype=torch.bool, device=own.device)
    here = rows - sharding.first
    mask[here[(here >= 0) & (here < sharding.own)]] = True
    return wrap(mask, sharding, 0) if type(x) is ShardTensor else mask


# --------------------------------------------------------------------------------------- own rows
def _own(x: Any) -> tuple[Tensor, Sharding]:
    """Own rows and how rows are divided, a plain tensor being that of one rank."""
    if type(x) is not ShardTensor:
        return x, Sharding(Domain(), [len(x)])
    if x.sharded_dim != 0:
        raise MeshshardError(f"rows must be the first dim, they are dim {x.sharded_dim}")
    return x.to_local(), x.sharding


def _samples(rows: Tensor, sharding: Sharding, batch: Any, size: int | None) -> tuple[Tensor, int]:
    """Sample of own rows, and how many samples there are."""
    if batch is None:
        return rows.new_zeros(len(rows), dtype=torch.int64), 1 if size is None else size
    sample, other = _own(batch)
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
