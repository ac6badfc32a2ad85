"""Choices of a few points out of all: the farthest from each other, or any.

They do not depend on the partition: chance and ties are decided by the row in the source.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshshard.comm import Domain
from meshshard.errors import MeshshardError, n_of
from meshshard.graph.neighbors import finite
from meshshard.tensor import Sharding, ShardTensor
from meshshard.tensor.align import unwrap_rows
from meshshard.tensor.rules.random import hash_uniform
from meshshard.tensor.shard_tensor import wrap

__all__ = ["farthest_points", "mask_of", "random_points"]

BITS, ROUNDS = 53, 4  # of a random key, and of the search for the n-th smallest of all


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
        MeshshardError: more points than there are, or a start that is none of them.

    Communication: one gather of objects; one all-gather of a point a rank for each point.
    """
    rows, sharding = unwrap_rows(pos)
    if not 1 <= n <= sharding.total or not 0 <= start < sharding.total:
        raise MeshshardError(
            f"farthest_points: {n} from row {start} of {n_of(sharding.total, 'points')}"
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

    Raises:
        MeshshardError: more than there are, or less than none.

    Communication: four all-reduces of 2^14 counts and one gather of objects.
    """
    rows, sharding = unwrap_rows(x)
    if not 0 <= n <= sharding.total:
        raise MeshshardError(f"random_points: {n} of {n_of(sharding.total, 'rows')}")
    source = sharding.sources(rows.device)
    keys = hash_uniform(0, torch.full_like(source, seed), source)
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
    own, sharding = unwrap_rows(x)
    mask = torch.zeros(sharding.own, dtype=torch.bool, device=own.device)
    here = rows - sharding.first
    mask[here[(here >= 0) & (here < sharding.own)]] = True
    return wrap(mask, sharding, 0) if type(x) is ShardTensor else mask
