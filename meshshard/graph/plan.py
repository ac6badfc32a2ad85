"""Halo and exchange plan of a partitioned graph: which shard sends which rows to which.

Arrays only, computed for all shards at once; `meshshard.comm` sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from meshshard.errors import PartitionError
from meshshard.graph.graph import Graph
from meshshard.mesh import Array
from meshshard.mesh.ragged import offsets_of, ranges

__all__ = [
    "Halo",
    "Plan",
    "check_edges",
    "check_plan",
    "halo_of",
    "plan_of",
    "received",
    "runs",
    "send_lists",
]


class Halo(NamedTuple):
    """The halo rows of every shard: copies of rows that other shards own.

    Attributes:
        offsets: (k + 1,) the halo of shard p is offsets[p]:offsets[p + 1].
        ids: (n_halo,) id of every halo row, ascending within a shard, hence grouped by owner.
        hops: (n_halo,) uint8 distance from the owned rows, 1 to `depth`.
        depth: number of hops.
    """

    offsets: Array
    ids: Array
    hops: Array
    depth: int


@dataclass(frozen=True, eq=False)
class Plan:
    """The local graph and the exchange of one shard; local rows are owned rows, then halo rows.

    Attributes:
        shard: number of the shard.
        n_owned: number of owned rows.
        halo: (n_halo,) int64 ids of the halo rows, ascending, hence grouped by owner.
        hops: (n_halo,) uint8 distance of each halo row from the owned rows.
        indptr: (n_owned + n_halo + 1,) CSR offsets of the in-edges of local rows. Owned rows have
            all their in-edges; halo rows have copies of theirs, except those of the last hop, which
            have none.
        indices: (n_edges,) source of every edge, as a local row.
        send_rows: owned rows to send, grouped by receiver, ascending within a group.
        send_counts: (k,) rows to send to each shard.
        recv_counts: (k,) halo rows to receive from each shard.
    """

    shard: int
    n_owned: int
    halo: Array
    hops: Array
    indptr: Array
    indices: Array
    send_rows: Array
    send_counts: Array
    recv_counts: Array

    @property
    def n_local(self) -> int:
        """Number of owned and halo rows."""
        return self.n_owned + len(self.halo)

    def cut_edges(self) -> Array:
        """(n_edges,) bool: edges whose source is a halo row."""
        return np.asarray(self.indices >= self.n_owned)

    def interior(self) -> Array:
        """(n_owned,) bool: owned rows without halo sources, to be computed during the exchange."""
        crossing = offsets_of(self.cut_edges())
        bounds = crossing[self.indptr[: self.n_owned + 1]]
        return np.asarray(np.diff(bounds) == 0)


def halo_of(graph: Graph, sizes: Array, depth: int) -> Halo:
    """The halo of every shard.

    Args:
        graph: the graph in shard order.
        sizes: (k,) owned rows of every shard.
        depth: number of hops; 1 for one exchange per layer, L for one exchange in L layers.
    """
    offsets = offsets_of(sizes)
    near = [np.unique(_outside(graph, offsets, p)) for p in range(len(sizes))]
    ids, hops = list(near), [np.ones(len(i), np.uint8) for i in near]
    for step in range(2, depth + 1):
        for p, border in enumerate(near):
            far = np.unique(graph.indices[ranges(graph.indptr[border], graph.indptr[border + 1])])
            owned = (far >= offsets[p]) & (far < offsets[p + 1])
            near[p] = np.setdiff1d(far[~owned], ids[p], assume_unique=True)
            ids[p] = np.concatenate([ids[p], near[p]])
            hops[p] = np.concatenate([hops[p], np.full(len(near[p]), step, np.uint8)])
    by = [np.argsort(i) for i in ids]
    none = np.zeros(0, graph.indices.dtype)
    return Halo(
        offsets_of(np.array([len(i) for i in ids])),
        np.concatenate([none, *(i[o] for i, o in zip(ids, by, strict=True))]),
        np.concatenate([none, *(r[o] for r, o in zip(hops, by, strict=True))]).astype(np.uint8),
        depth,
    )


def _outside(graph: Graph, offsets: Array, shard: int) -> Array:
    """Sources of the edges into one shard that other shards own, with duplicates."""
    first, last = offsets[shard], offsets[shard + 1]
    sources = graph.indices[graph.indptr[first] : graph.indptr[last]]
    return np.asarray(sources[(sources < first) | (sources >= last)])


def send_lists(halo: Halo, sizes: Array) -> tuple[Array, Array, Array]:
    """The rows that every shard sends: the halos of all shards, grouped by (owner, receiver).

    Returns:
        (k + 1,) offsets of each owner's rows; the owned rows to send, ascending for each receiver;
        and (k, k) counts by (receiver, owner).
    """
    k = len(sizes)
    offsets = offsets_of(sizes)
    owner = np.searchsorted(offsets, halo.ids, side="right") - 1
    receiver = np.repeat(np.arange(k), np.diff(halo.offsets))
    counts = np.bincount(receiver * k + owner, minlength=k * k).reshape(k, k)
    order = np.argsort(owner, kind="stable")
    rows = halo.ids[order] - offsets[owner[order]]
    return offsets_of(counts.sum(axis=0)), rows, counts


def received(plans: Sequence[Plan], sizes: Array) -> list[Array]:
    """Ids that every shard receives, by owner; in consistent plans they equal its halo.

    Args:
        plans: the plans of all shards, in order.
        sizes: (k,) owned rows of every shard.
    """
    first = offsets_of(sizes)
    ids = [p.send_rows.astype(np.int64) + first[p.shard] for p in plans]
    to = np.concatenate([np.repeat(np.arange(len(plans)), p.send_counts) for p in plans])
    order = np.argsort(to, kind="stable")
    counts = np.bincount(to, minlength=len(plans))
    return np.split(np.concatenate(ids)[order], np.cumsum(counts)[:-1])


def plan_of(
    graph: Graph, sizes: Array, halo: Halo, sends: tuple[Array, Array, Array], shard: int
) -> Plan:
    """The plan of one shard, from the arrays of all shards."""
    first = int(sizes[:shard].sum())
    n_owned = int(sizes[shard])
    mine = slice(halo.offsets[shard], halo.offsets[shard + 1])
    ids, hops = halo.ids[mine], halo.hops[mine]
    indptr = graph.indptr[first : first + n_owned + 1]
    sources = graph.indices[indptr[0] : indptr[-1]]
    inner = ids[hops < halo.depth]
    degree = np.zeros(len(ids), np.int64)
    if len(inner):
        starts, stops = graph.indptr[inner], graph.indptr[inner + 1]
        sources = np.concatenate([sources, graph.indices[ranges(starts, stops)]])
        degree[hops < halo.depth] = stops - starts
    local = sources - sources.dtype.type(first)
    away = np.flatnonzero((local < 0) | (local >= n_owned))
    local[away] = n_owned + np.searchsorted(ids, sources[away])
    starts, rows, counts = sends
    return Plan(
        shard=shard,
        n_owned=n_owned,
        halo=ids.astype(np.int64),
        hops=hops,
        indptr=np.concatenate([indptr - indptr[0], indptr[-1] - indptr[0] + np.cumsum(degree)]),
        indices=local,
        send_rows=rows[starts[shard] : starts[shard + 1]],
        send_counts=counts[:, shard],
        recv_counts=counts[shard],
    )


def check_plan(plan: Plan, sizes: Array) -> Plan:
    """Verify the values of a plan by themselves, and return it.

    Args:
        plan: arrays of the right lengths.
        sizes: (k,) owned rows of every shard.

    Raises:
        PartitionError: naming the shard and what is wrong.
    """
    first = offsets_of(sizes)
    halo, indptr, sent = plan.halo, plan.indptr, plan.send_counts.astype(np.int64)
    own = (halo >= first[plan.shard]) & (halo < first[plan.shard + 1])
    owners = np.diff(np.searchsorted(halo, first))
    rules = {
        "halo ids are not ascending": (np.diff(halo) > 0).all(),
        "a halo id is not a row of another shard": _within(halo, int(first[-1])) and not own.any(),
        "indptr are not offsets": indptr[0] == 0 and (np.diff(indptr) >= 0).all(),
        "indptr does not end at the number of edges": indptr[-1] == len(plan.indices),
        "the source of an edge is not a local row": _within(plan.indices, plan.n_local),
        "a row to send is not an owned row": _within(plan.send_rows, plan.n_owned),
        "send_counts are not the rows to send": (
            _within(sent, len(plan.send_rows) + 1) and sent.sum() == len(plan.send_rows)
        ),
        "recv_counts are not the halo rows": np.array_equal(plan.recv_counts, owners),
    }
    for what, right in rules.items():
        if not right:
            raise PartitionError(f"shard {plan.shard}: {what}")
    return plan


def _within(values: Array, end: int) -> bool:
    """Whether all values are 0 or more and below `end`."""
    return not len(values) or bool(values.min() >= 0 and values.max() < end)


def check_edges(plan: Plan, graph: Graph, first: int) -> None:
    """Check that the local edges of a shard are those of the graph.

    Args:
        plan: the plan of the shard.
        graph: the graph in shard order.
        first: id of the first owned row.

    Raises:
        PartitionError: naming the shard and the edge that is wrong.
    """
    own = np.arange(first, first + plan.n_owned)
    ids = np.concatenate([own, plan.halo])
    if len(plan.indices) and not 0 <= plan.indices.min() <= plan.indices.max() < len(ids):
        raise PartitionError(f"shard {plan.shard}: the source of an edge is not a local row")
    known = np.diff(plan.indptr) > 0
    known[: plan.n_owned] = True
    for row in (known, np.arange(len(ids)) < plan.n_owned):
        starts, stops = graph.indptr[ids[row]], graph.indptr[ids[row] + 1]
        if (np.diff(plan.indptr)[row] != stops - starts).any():
            raise PartitionError(f"shard {plan.shard}: a row does not have all its in-edges")
    sources = graph.indices[graph.indptr[first] :] if len(own) else own
    count = plan.indptr[plan.n_owned]
    wrong = np.flatnonzero(ids[plan.indices[:count]] != sources[:count])
    if len(wrong):
        raise PartitionError(
            f"shard {plan.shard}: edge {wrong[0]} has another source than in the graph"
        )


def runs(sizes: Array, ranks: int) -> Array:
    """Cut k shards into `ranks` runs that minimize the largest number of owned rows.

    Every run has at least one shard; of equal solutions the leftmost cuts are taken.

    Returns:
        (ranks + 1,) offsets of the runs.
    """
    k = len(sizes)
    total = offsets_of(sizes)
    low, high = int(np.max(sizes, initial=0)), int(total[-1])
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _fill(total, ranks, middle)[0] == 0 else (middle + 1, high)
    cuts = _fill(total, ranks, low)
    cuts[0], cuts[-1] = 0, k
    return cuts


def _fill(total: Array, ranks: int, most: int) -> Array:
    """Fill runs from the right up to `most` rows; the first cut is 0 if the runs suffice."""
    cuts = np.empty(ranks + 1, np.int64)
    cuts[ranks] = len(total) - 1
    for r in range(ranks - 1, -1, -1):
        lowest = int(np.searchsorted(total, total[cuts[r + 1]] - most))
        cuts[r] = max(lowest, r)  # each of the r runs on the left needs a shard
    return cuts
