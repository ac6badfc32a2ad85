"""Quality of a partition: balance and communication, as a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from html import escape
from typing import Any

import numpy as np

from meshshard.errors import MeshshardError, n_of
from meshshard.graph import Graph
from meshshard.graph.plan import Halo
from meshshard.mesh import Array
from meshshard.mesh.ragged import offsets_of

__all__ = ["Quality", "quality_of"]

MIN_ROWS_PER_SHARD = 4096  # measured by benchmarks/exchange.py --only crossover


@dataclass(frozen=True)
class Quality:
    """Balance and communication of a partition.

    Attributes:
        entity: what is sharded: cells, points or nodes.
        owned: owned rows of every shard.
        halo: halo rows of every shard.
        sent: rows that every shard sends; a row sent to two peers counts twice.
        peers: number of shards that every shard exchanges rows with.
        pieces: connected components of the owned rows of every shard; 1 is best.
        load: share of the total load of every shard.
        edge_cut: edges between shards; undirected edges if the graph is symmetric.
        volume: rows sent in one exchange, over all shards.
        imbalance: largest load over its target (over the mean, if no targets were given).
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
        """Bytes sent in one exchange of `width` channels of `itemsize` bytes."""
        return self.volume * width * itemsize

    def as_dict(self) -> dict[str, Any]:
        """All attributes as a dict of numbers and lists, for JSON."""
        return asdict(self)

    def as_frame(self) -> Any:
        """A pandas DataFrame of numbers with one row per shard; totals are in its `attrs`.

        Raises:
            MeshshardError: pandas is not installed.
        """
        try:
            import pandas  # type: ignore[import-untyped,import-not-found,unused-ignore]
        except ImportError:
            raise MeshshardError("as_frame needs pandas; pip install 'meshshard[pandas]'") from None
        values = self.as_dict()
        columns = {name: column for name, column in values.items() if isinstance(column, list)}
        frame = pandas.DataFrame(columns).rename_axis("shard")
        frame.attrs |= {name: value for name, value in values.items() if name not in columns}
        return frame

    def rows(self) -> list[list[str]]:
        """The table as text: the header, then one row per shard."""
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
        """Totals, in a few lines of text."""
        n, mb = sum(self.owned), self.bytes_per_exchange(128) / 1e6
        mean, most = sum(self.peers) / max(len(self.peers), 1), max(self.peers, default=0)
        split, k = sum(p > 1 for p in self.pieces), len(self.owned)
        most_ranks = n // MIN_ROWS_PER_SHARD
        enough = f"{most_ranks} ranks or fewer" if most_ranks > 1 else "one rank"
        warning = (
            f"warning: with fewer than about {MIN_ROWS_PER_SHARD:,} {self.entity} per rank, "
            f"communication costs more time than it saves; use {enough}"
        )
        return [
            f"{n_of(n, self.entity)} in {n_of(k, 'shards')}, imbalance {self.imbalance:.4f}",
            f"halo {n_of(self.volume, 'rows')} ({100 * self.volume / max(n, 1):.2f} %), "
            f"edge cut {self.edge_cut:,}, peers {mean:.1f} on average, at most {most}",
            f"one exchange of 128 float32 channels sends {mb:.2f} MB"
            + (f"; {n_of(split, 'shards')} not connected" if split else ""),
            *([warning] if k > 1 and n < k * MIN_ROWS_PER_SHARD else []),
        ]

    def __str__(self) -> str:
        """The table and the totals; of more than 16 shards the first and last six."""
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
        """The table as HTML, for notebooks."""
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
    """Quality of a partition whose rows are in shard order.

    Args:
        graph: the graph in shard order.
        sizes: (k,) owned rows of every shard.
        halo: the halo of every shard.
        counts: (k, k) halo rows by (receiver, owner), of all hops.
        targets: (k,) shares of the load, None for equal shares.
        entity: what is sharded: cells, points or nodes.
    """
    k = len(sizes)
    offsets = offsets_of(sizes)
    load = np.array([_load(graph, offsets[p], offsets[p + 1]) for p in range(k)])
    total = load.sum() or 1.0
    target = np.full(k, 1 / k) if targets is None else targets
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
        imbalance=float((load / total / target).max()),
    )


def _load(graph: Graph, first: int, last: int) -> float:
    if graph.weights is None:
        return float(last - first)
    return float(graph.weights[first:last].sum(dtype=np.float64))


def _pieces(graph: Graph, first: int, last: int) -> tuple[int, int]:
    """Connected components of the rows first:last, and the edges from other rows into them."""
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
    bounds = bounds.astype(sources.dtype)  # with another dtype scipy would copy the ids
    local = sources[inside]
    local -= sources.dtype.type(first)
    block = csr_array((np.ones(len(local)), local, bounds), shape=(last - first, last - first))
    # In a symmetric graph the strong components are the same and take half the memory.
    if graph.symmetric:
        count, _ = connected_components(block, directed=True, connection="strong")
    else:
        count, _ = connected_components(block, directed=True, connection="weak")
    return int(count), len(entering)
