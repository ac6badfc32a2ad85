"""Sampling of points: the farthest from each other, or random ones.

The results do not depend on the partition: random keys and ties go by the row in the source.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshshard.comm import Domain
from meshshard.errors import MeshshardError, n_of
from meshshard.graph.neighbors import finite
from meshshard.tensor import Sharding, ShardTensor
from meshshard.tensor.align import unwrap_rows
from meshshard.tensor.keyed_random import hash_uniform
from meshshard.tensor.shard_tensor import wrap

__all__ = ["farthest_points", "mask_of", "random_points"]

BITS = 53  # of a random key
ROUNDS, DIGIT = 4, 14  # of a radix search for the n-th smallest key: rounds, bits in each


def farthest_points(pos: Tensor, n: int, start: int = 0) -> Tensor:
    """Exact farthest-point sampling: each point is the farthest from those chosen before it.

    Source: Eldar et al. (1997). Of equally far points, the first in the source is chosen.

    Args:
        pos: (n_points, dims), sharded by rows or plain; it gets no gradient.
        n: number of points to choose, all different.
        start: row in the source of the first point.

    Returns:
        (n,) int64 rows of `pos`, in the order of choice, replicated. `pos[rows]` are these points
        on every rank; `pos[mask_of(rows, pos)]` are the same points, sharded.

    Raises:
        DomainError: on every rank, if any rank has points that are not finite.
        MeshshardError: n or start is out of range.

    Communication: one gather of objects; for each chosen point one all-gather of a point a rank.
    """
    rows, sharding = unwrap_rows(pos)
    if not 1 <= n <= sharding.total or not 0 <= start < sharding.total:
        raise MeshshardError(
            f"farthest_points: n = {n} from row {start}, but there are "
            f"{n_of(sharding.total, 'points')}; take n from 1 to their number and a row below it"
        )
    columns = rows.detach().to(torch.float64).T.contiguous()
    sharding.domain.run_collectively(lambda: finite(columns.T.cpu().numpy()), "farthest_points")
    source = sharding.sources(rows.device)
    far = torch.full((sharding.own,), torch.inf, dtype=torch.float64, device=rows.device)
    first = torch.where(source == start, torch.inf, 0.0)
    chosen, point = [], _farthest(first.double(), columns, source, sharding)
    for _ in range(n):
        row = int(point[2])
        chosen.append(row)
        squares = torch.zeros_like(far)
        for column, at in zip(columns, point[3:], strict=True):
            squares += (column - at).square_()
        torch.minimum(far, squares, out=far)
        if sharding.first <= row < sharding.first + sharding.own:
            far[row - sharding.first] = -1.0  # chosen once, even if other points coincide with it
        if len(chosen) < n:
            point = _farthest(far, columns, source, sharding)
    return torch.tensor(chosen, device=rows.device)


def _farthest(far: Tensor, columns: Tensor, source: Tensor, sharding: Sharding) -> Tensor:
    """(3 + dims,) of the farthest point of all ranks: distance, -row in the source, row, point."""
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
    """A uniform random choice of rows that does not depend on the partition.

    Args:
        x: (n_rows, …), sharded or plain.
        n: number of rows to choose, without replacement.
        seed: the same seed gives the same rows of the source on any number of ranks.

    Returns:
        (n_rows,) bool, sharded like x: `x[mask]` are the chosen rows, still sharded.

    Raises:
        MeshshardError: n is below 0, or above the number of rows.

    Communication: four all-reduces of 2^14 counts and one gather of objects.
    """
    rows, sharding = unwrap_rows(x)
    if not 0 <= n <= sharding.total:
        raise MeshshardError(
            f"random_points: n = {n}, but there are {n_of(sharding.total, 'rows')}; take n from 0 "
            f"to their number"
        )
    source = sharding.sources(rows.device)
    keys = hash_uniform(0, torch.full_like(source, seed), source)
    keys = (keys * 2.0**BITS).to(torch.int64)
    last, missing = _nth(keys, n, sharding.domain)
    mask = keys < last
    ties = source[keys == last]  # one row, except with a probability of about n^2 / 2^53
    every = sorted(i for part in sharding.domain.share(ties.tolist()) for i in part)
    mask |= (keys == last) & torch.isin(source, torch.tensor(every[:missing], device=rows.device))
    return wrap(mask, sharding, 0) if type(x) is ShardTensor else mask


def _nth(keys: Tensor, n: int, domain: Domain) -> tuple[int, int]:
    """The n-th smallest key of all ranks, and how many rows of this key are among the n smallest.

    A radix search from the highest digit.
    """
    prefix, left = 0, n
    for level in reversed(range(ROUNDS)):
        inside = keys[keys >> DIGIT * (level + 1) == prefix]
        digits = inside >> DIGIT * level & (2**DIGIT - 1)
        counts = domain.all_reduce(torch.bincount(digits, minlength=2**DIGIT))
        ends = counts.cumsum(0)
        digit = int(torch.searchsorted(ends, left)) if left else 0
        left -= int(ends[digit - 1]) if digit else 0
        prefix = (prefix << DIGIT) + digit
    return prefix, left


def mask_of(rows: Tensor, x: Tensor) -> Tensor:
    """A mask of given rows, sharded like x, so that `x[mask]` stays sharded.

    Args:
        rows: (n,) int64 rows of x, replicated.
        x: (n_rows, …), sharded or plain.

    Returns:
        (n_rows,) bool, True for the given rows.

    Communication: none.
    """
    own, sharding = unwrap_rows(x)
    mask = torch.zeros(sharding.own, dtype=torch.bool, device=own.device)
    here = rows - sharding.first
    mask[here[(here >= 0) & (here < sharding.own)]] = True
    return wrap(mask, sharding, 0) if type(x) is ShardTensor else mask
