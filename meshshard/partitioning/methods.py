"""Partitioners: (graph, parts) -> a label 0..parts-1 for every node.

Each is a small frozen object that is called; a function of your own with the same two arguments
(and `targets`, where they are asked for) does as well.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Protocol

import numpy as np

from meshshard.errors import MeshWarning, PartitionError, n_of
from meshshard.graph import Graph
from meshshard.graph.morton import morton_order
from meshshard.mesh import Array
from meshshard.partitioning import metis_child

__all__ = ["NAMED", "RCB", "Given", "Metis", "Morton", "Partitioner", "Random", "label"]

FEW = 5  # nodes a part; below it METIS' k-way leaves parts empty
SEEDS = 2**31
LOOSEST = 100  # thousandths of imbalance that METIS may use to make up for coarse loads
MEAN_WEIGHT = 1000  # METIS counts in integers: loads are scaled to this mean


class Partitioner(Protocol):
    """What `partition` takes as its method."""

    def __call__(self, graph: Graph, parts: int, targets: Array | None = None) -> Array:
        """Labels (n_nodes,) of integers 0..parts-1."""


@dataclass(frozen=True)
class Metis:
    """METIS on the graph: multilevel k-way, for few rows to exchange and equal loads.

    Attributes:
        objective: "volume" counts the rows that shards exchange, "cut" the edges between them.
        imbalance: largest load over the mean; 1.005 allows half a percent.
        seed: the same seed gives the same labels with the same build of METIS only.
        recursive: recursive bisection instead of k-way; by default where a part has fewer than
            five nodes. It knows the objective "cut" only.
        contiguous: ask for connected parts (the graph must be connected).
        timeout: seconds for METIS; by default two minutes, and two more per million nodes.
    """

    objective: Literal["volume", "cut"] = "volume"
    imbalance: float = 1.005
    seed: int = 0
    recursive: bool | None = None
    contiguous: bool = False
    timeout: float | None = None
    geometric: ClassVar[bool] = False

    def __call__(self, graph: Graph, parts: int, targets: Array | None = None) -> Array:
        """Labels (n_nodes,) int64; every part has a node wherever there are enough."""
        if self.objective not in ("volume", "cut"):
            raise PartitionError(f"objective {self.objective!r} is unknown: volume or cut")
        if not self.imbalance > 1:
            raise PartitionError(f"imbalance {self.imbalance} must be above 1, 1.005 for 0.5 %")
        _check_seed(self.seed)
        if self.timeout is not None and not self.timeout > 0:
            raise PartitionError(f"timeout {self.timeout}: seconds above 0 are needed")
        weights = _whole_numbers(graph.weights)
        loads = np.broadcast_to(1.0, graph.n_nodes) if weights is None else weights.astype(float)
        few = graph.n_nodes < FEW * parts and not self.contiguous
        graph = graph.symmetrized()
        allowed = _reachable(self.imbalance, loads, parts)
        tried: list[tuple[tuple[float, float, int], Array]] = []
        for attempt in self._attempts(few if self.recursive is None else self.recursive, allowed):
            labels = metis_child.k_way(
                graph.indptr,
                graph.indices,
                parts,
                attempt,
                weights=weights,
                targets=targets,
                timeout=self.timeout,
            )
            _verify(labels, graph.n_nodes, parts, "METIS")
            empty, imbalance = _score(labels, loads, parts, targets)
            if not empty and imbalance <= allowed:
                return labels
            tried.append(((empty, max(imbalance, allowed), _cut(graph, labels)), labels))
        return min(tried, key=lambda found: found[0])[1]

    def _attempts(self, few: bool, allowed: float) -> list[metis_child.Options]:
        """What is tried, until a result is balanced and has no empty part."""
        first = metis_child.Options(
            self.objective,
            few,
            min(max(1, round((allowed - 1) * 1000)), LOOSEST),
            self.seed,
            self.contiguous and not few,
        )
        others = [
            first._replace(seed=self.seed + 2),  # glibc seeds 0 and 1 alike
            first._replace(objective="cut", recursive=False),
            first._replace(recursive=True, contiguous=False),
        ]
        return [first, *(o for o in others if o != first)]


@dataclass(frozen=True)
class Morton:
    """Equal runs along a Z-curve: no graph needed, fast at any size, 1.1 to 7 times the halo."""

    geometric: ClassVar[bool] = True

    def __call__(self, graph: Graph, parts: int, targets: Array | None = None) -> Array:
        """Labels (n_nodes,) int64 by position."""
        return _cut_along(morton_order(_positions(graph, "Morton")), graph, parts, targets)


@dataclass(frozen=True)
class RCB:
    """Recursive coordinate bisection: halve the longest side again and again.

    Berger and Bokhari, IEEE Transactions on Computers C-36 (1987).
    """

    geometric: ClassVar[bool] = True

    def __call__(self, graph: Graph, parts: int, targets: Array | None = None) -> Array:
        """Labels (n_nodes,) int64 by position."""
        positions = _positions(graph, "RCB")
        weights = _whole_numbers(graph.weights)
        loads = np.ones(graph.n_nodes) if weights is None else weights
        shares = np.full(parts, 1 / parts) if targets is None else targets
        labels = np.zeros(graph.n_nodes, np.int64)
        todo = [(np.arange(graph.n_nodes), 0, parts)]
        while todo:
            rows, first, last = todo.pop()
            if last - first < 2 or not len(rows):
                labels[rows] = first
                continue
            middle = (first + last) // 2
            place = positions[rows]
            axis = int(np.argmax(np.ptp(place, axis=0)))
            rows = rows[np.argsort(place[:, axis], kind="stable")]
            left = shares[first:middle].sum() / shares[first:last].sum()
            load = np.cumsum(loads[rows]) - loads[rows] / 2
            cut = int(np.searchsorted(load, left * loads[rows].sum()))
            todo += [(rows[:cut], first, middle), (rows[cut:], middle, last)]
        return labels


@dataclass(frozen=True)
class Random:
    """Balanced random labels: the worst halo there is, for tests and for chunking by chance."""

    seed: int = 0
    geometric: ClassVar[bool] = False

    def __call__(self, graph: Graph, parts: int, targets: Array | None = None) -> Array:
        """Labels (n_nodes,) int64."""
        _check_seed(self.seed)
        order = np.random.default_rng(self.seed).permutation(graph.n_nodes)
        return _cut_along(order, graph, parts, targets)


@dataclass(frozen=True, eq=False)
class Given:
    """Labels made elsewhere: an array, or a file of one label a line as gpmetis writes it.

    Parts may be empty.
    """

    labels: Array | Sequence[int] | str | Path
    geometric: ClassVar[bool] = False

    def __call__(self, graph: Graph, parts: int, targets: Array | None = None) -> Array:
        """The labels as given.

        Raises:
            PartitionError: the file has a line that is no integer.
        """
        if not isinstance(self.labels, (str, Path)):
            return np.asarray(self.labels)
        try:
            words = Path(self.labels).read_text().split()
        except (OSError, UnicodeDecodeError) as error:
            raise PartitionError(f"{self.labels}: labels could not be read: {error}") from None
        for line, word in enumerate(words, 1):
            if not re.fullmatch("-?[0-9]{1,18}", word):
                raise PartitionError(f"{self.labels}: line {line}: {word[:40]!r} is not a label")
        return np.array(words, np.int64)


NAMED: dict[str, Partitioner] = {
    "metis": Metis(), "morton": Morton(), "rcb": RCB(), "random": Random(),
}  # fmt: skip


def label(
    graph: Graph,
    parts: int,
    method: Partitioner | Callable[..., Array],
    targets: Array | None = None,
) -> Array:
    """Run a partitioner and prove its labels: one for each node, whole numbers below `parts`.

    One part never reaches the method. More parts than nodes leave the last shards empty, with a
    warning. Parts that a method of this module leaves empty are given a node of the largest part;
    labels that are given, or come from a function of your own, are taken as they are.

    Returns:
        (n_nodes,) int64.

    Raises:
        PartitionError: labels, parts or targets that cannot be right.
    """
    n = graph.n_nodes
    targets = _shares(targets, parts)
    ours = isinstance(method, (Metis, Morton, RCB, Random))
    if parts == 1 and ours:
        return np.zeros(n, np.int64)
    if parts > n:
        warnings.warn(
            f"{n_of(parts, 'parts')} for {n_of(n, 'nodes')}, so {n_of(parts - n, 'shards')} "
            "without rows; ask for fewer parts",
            MeshWarning,
            stacklevel=3,
        )
        if ours:
            return np.arange(n, dtype=np.int64)
    labels = method(graph, parts) if targets is None else method(graph, parts, targets=targets)
    labels = _verify(labels, n, parts, type(method).__name__)
    return _fill_empty(labels, parts) if ours else labels


def _verify(labels: Array, n: int, parts: int, source: str) -> Array:
    """Labels as (n,) int64, or an error that says what is wrong with them."""
    labels = np.asarray(labels)
    if labels.shape != (n,):
        raise PartitionError(f"{source} gave labels of shape {labels.shape} for {n} nodes")
    if labels.dtype.kind not in "iu":
        raise PartitionError(f"{source} gave labels of type {labels.dtype}; integers are needed")
    bad = np.flatnonzero((labels < 0) | (labels >= parts))
    if len(bad):
        raise PartitionError(
            f"{source} gave node {bad[0]} the label {labels[bad[0]]}; "
            f"labels of {parts} parts are 0 to {parts - 1}"
        )
    return labels.astype(np.int64, copy=False)


def _fill_empty(labels: Array, parts: int) -> Array:
    """Give every empty part one node of the part that has most."""
    sizes = np.bincount(labels, minlength=parts)
    empty = np.flatnonzero(sizes == 0)
    if len(empty):
        labels = labels.copy()
    for part in empty:
        donor = int(sizes.argmax())
        labels[np.flatnonzero(labels == donor)[-1]] = part
        sizes[donor] -= 1
        sizes[part] += 1
    return labels


def _score(labels: Array, loads: Array, parts: int, targets: Array | None) -> tuple[float, float]:
    """Empty parts, then the largest load over its target: smaller is better."""
    load = np.bincount(labels, loads, parts)
    aim = load.sum() * (np.full(parts, 1 / parts) if targets is None else targets)
    empty = int((np.bincount(labels, minlength=parts) == 0).sum())
    return empty, float((load / aim).max()) if load.sum() else 1.0


def _reachable(imbalance: float, loads: Array, parts: int) -> float:
    """The asked imbalance, or what two nodes more in a part come to, if that is larger.

    Held to less, METIS scatters small parts to make their counts equal.
    """
    mean = loads.sum() / parts
    return max(imbalance, 1 + 2 * float(loads.max()) / mean) + 1e-9 if mean else np.inf


def _cut(graph: Graph, labels: Array) -> int:
    """Edges between parts."""
    return int((labels[graph.destinations()] != labels[graph.indices]).sum())


def _check_seed(seed: int) -> None:
    if not 0 <= seed < SEEDS:
        raise PartitionError(f"seed {seed}: a whole number from 0 to {SEEDS - 1} is needed")


def _whole_numbers(weights: Array | None) -> Array | None:
    """Loads as int64 of mean 1000, which METIS can add up without overflow."""
    if weights is None:
        return None
    bad = np.flatnonzero(~np.isfinite(weights) | (weights < 0))
    if len(bad):
        raise PartitionError(
            f"weight {weights[bad[0]]} at row {bad[0]} ({len(bad)} in all): "
            "weights must be finite and not negative"
        )
    total = float(weights.sum(dtype=np.float64))
    if total <= 0:
        raise PartitionError("all weights are zero; leave them out to count every entity as one")
    scaled = np.asarray(weights, np.float64) * (MEAN_WEIGHT * len(weights) / total)
    return np.rint(scaled).astype(np.int64)


def _shares(targets: Array | None, parts: int) -> Array | None:
    """Targets as shares that sum to 1."""
    if targets is None:
        return None
    targets = np.asarray(targets, np.float64)
    if targets.shape != (parts,) or not (targets > 0).all() or not np.isfinite(targets).all():
        raise PartitionError(
            f"targets must be {parts} positive numbers, one for each part, not {targets.tolist()}"
        )
    return np.asarray(targets / targets.sum())


def _positions(graph: Graph, who: str) -> Array:
    if graph.positions is None:
        raise PartitionError(f"{who} cuts by position, and this graph has none; take Metis()")
    return graph.positions


def _cut_along(order: Array, graph: Graph, parts: int, targets: Array | None) -> Array:
    """Labels of consecutive runs along `order`, as equal in load as whole nodes allow."""
    weights = _whole_numbers(graph.weights)
    loads = np.ones(len(order)) if weights is None else weights[order].astype(float)
    shares = np.full(parts, 1 / parts) if targets is None else targets
    middle = np.cumsum(loads) - loads / 2
    bounds = np.cumsum(shares)[:-1] * loads.sum()
    labels = np.empty(len(order), np.int64)
    labels[order] = np.searchsorted(bounds, middle, side="right")
    return labels
