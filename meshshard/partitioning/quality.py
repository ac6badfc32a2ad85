"""Quality: what a partition costs, as a table for people and as JSON for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from html import escape
from typing import Any

import numpy as np

from meshshard.errors import n_of
from meshshard.graph import Graph
from meshshard.graph.plan import Halo
from meshshard.mesh import Array

__all__ = ["PAYS_FROM", "Quality", "quality_of"]

PAYS_FROM = 4096  # rows a shard; measured by benchmarks/exchange.py --only crossover


@dataclass(frozen=True)
class Quality:
    """Sizes and costs of a partition.

    Attributes:
        entity: what a row is: cells, points or nodes.
        owned: rows of every shard.
        halo: rows that every shard needs from others.
        sent: rows that every shard sends, a row to two peers counted twice.
        peers: shards that each exchanges with.
        pieces: connected pieces of each shard's owned rows; 1 is best.
        load: share of the whole load of every shard.
        edge_cut: edges between shards (undirected where the graph is symmetric).
        volume: rows that travel in one exchange, all shards together.
        imbalance: largest load over its target (over the mean, where targets are equal).
    """

    entity: str
    owned: list[int]
    halo: list[int]
    sent: list[int]
    peers: list[int]
    pieces: list[int]
    load: list[float]
    edge_cut: int
    volume: int
    imbalance: float

    def bytes_per_exchange(self, width: int, itemsize: int = 4) -> int:
        """Bytes that travel in one exchange of rows of `width` numbers of `itemsize` bytes."""
        return self.volume * width * itemsize

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers and lists, for JSON."""
        return asdict(self)

    def rows(self) -> list[list[str]]:
        """The table: a heading, then a row for each shard, all as text."""
        heading = ["shard", "owned", "halo", "halo %", "sent", "peers", "pieces", "load %"]
        columns = zip(
            self.owned, self.halo, self.sent, self.peers, self.pieces, self.load, strict=True
        )
        return [heading] + [
            [
                str(shard),
                f"{owned:,}",
                f"{halo:,}",
                f"{100 * halo / owned:.1f}" if owned else "-",
                f"{sent:,}",
                str(peers),
                str(pieces),
                f"{100 * load:.2f}",
            ]
            for shard, (owned, halo, sent, peers, pieces, load) in enumerate(columns)
        ]

    def summary(self) -> list[str]:
        """Totals, in a few lines."""
        n, mb = sum(self.owned), self.bytes_per_exchange(128) / 1e6
        mean, most = sum(self.peers) / max(len(self.peers), 1), max(self.peers, default=0)
        split, k = sum(p > 1 for p in self.pieces), len(self.owned)
        few = n // PAYS_FROM
        small = (
            f"warning: below about {PAYS_FROM:,} {self.entity} a rank, ranks cost more time than "
            f"they save; use {f'{few} or fewer' if few > 1 else 'one'} for speed"
        )
        return [
            f"{n_of(n, self.entity)} in {n_of(k, 'shards')}, imbalance {self.imbalance:.4f}",
            f"halo {n_of(self.volume, 'rows')} ({100 * self.volume / max(n, 1):.2f} %), "
            f"edge cut {self.edge_cut:,}, peers {mean:.1f} on average, {most} at most",
            f"one exchange of 128 float32 channels moves {mb:.2f} MB"
            + (f"; {n_of(split, 'shards')} in several pieces" if split else ""),
            *([small] if k > 1 and n < k * PAYS_FROM else []),
        ]

    def __str__(self) -> str:
        """The table and the totals; beyond 16 shards only the extremes."""
        heading, *rows = self.rows()
        if len(rows) > 16:
            rows = [*rows[:6], ["…"] * len(heading), *rows[-6:]]
        table = [heading, *rows]
        width = [max(len(row[i]) for row in table) for i in range(len(heading))]
        lines = [
            "  ".join(cell.rjust(w) for cell, w in zip(row, width, strict=True)) for row in table
        ]
        return "\n".join([*lines, *self.summary()])

    def _repr_html_(self) -> str:
        """The table for a notebook."""
        heading, *rows = self.rows()
        head = "".join(f"<th style='text-align:right'>{escape(c)}</th>" for c in heading)
        body = "".join(
            "<tr>" + "".join(f"<td style='text-align:right'>{c}</td>" for c in row) + "</tr>"
            for row in rows
        )
        foot = "<br>".join(escape(line) for line in self.summary())
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{foot}</p>"


def quality_of(
    graph: Graph, sizes: Array, halo: Halo, counts: Array, targets: Array | None, entity: str
) -> Quality:
    """Measure a partition whose rows are in shard order.

    Args:
        graph: the renumbered graph.
        sizes: (k,) owned rows.
        halo: of every shard.
        counts: (k, k) rows by (receiver, owner), first hop or deeper.
        targets: (k,) shares of the load, None for equal ones.
        entity: what a row is.
    """
    k = len(sizes)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    load = np.array([_load(graph, offsets[p], offsets[p + 1]) for p in range(k)])
    total = load.sum() or 1.0
    aim = np.full(k, 1 / k) if targets is None else targets
    pieces, cut = zip(*(_pieces(graph, offsets[p], offsets[p + 1]) for p in range(k)), strict=True)
    return Quality(
        entity=entity,
        owned=[int(s) for s in sizes],
        halo=[int(h) for h in np.diff(halo.offsets)],
        sent=[int(c) for c in counts.sum(axis=0)],
        peers=[int(p) for p in ((counts > 0) | (counts > 0).T).sum(axis=1)],
        pieces=list(pieces),
        load=[float(x) for x in load / total],
        edge_cut=sum(cut) // (2 if graph.symmetric else 1),
        volume=int(counts.sum()),
        imbalance=float((load / total / aim).max()),
    )


def _load(graph: Graph, first: int, last: int) -> float:
    if graph.weights is None:
        return float(last - first)
    return float(graph.weights[first:last].sum(dtype=np.float64))


def _pieces(graph: Graph, first: int, last: int) -> tuple[int, int]:
    """Connected pieces among the rows first:last, and the edges that enter them from outside."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    indptr = graph.indptr[first : last + 1]
    sources = graph.indices[indptr[0] : indptr[-1]]
    if last == first:
        return 0, 0
    inside = (sources >= first) & (sources < last)
    entering = np.flatnonzero(~inside)
    rows = np.searchsorted(indptr, entering + indptr[0], side="right") - 1
    bounds = indptr - indptr[0]
    bounds[1:] -= np.cumsum(np.bincount(rows, minlength=last - first))
    bounds = bounds.astype(sources.dtype)  # else scipy copies the ids
    local = sources[inside]
    local -= sources.dtype.type(first)
    block = csr_array((np.ones(len(local)), local, bounds), shape=(last - first, last - first))
    # In a symmetric graph the strong components are the connected ones, at half the memory.
    if graph.symmetric:
        count, _ = connected_components(block, directed=True, connection="strong")
    else:
        count, _ = connected_components(block, directed=True, connection="weak")
    return int(count), len(entering)
