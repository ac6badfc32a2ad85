"""Methods of partitioning: (graph, parts) -> a label 0..parts-1 for every node.

`METHODS` is the table of methods by name, for `partition(method=…)`, `meshshard partition --method`
and the documentation. To add a method, write a frozen dataclass with its options as fields and a
`__call__` as in `Partitioner`, and add a row. A function with the same arguments can be passed as
`method` without a row.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np

from meshshard.errors import MeshWarning, PartitionError, n_of
from meshshard.graph import Graph
from meshshard.graph.morton import morton_order
from meshshard.mesh import Array
from meshshard.partitioning import metis_child

__all__ = [
    "MAX_PARTS",
    "METHODS",
    "RCB",
    "Given",
    "Method",
    "Metis",
    "Morton",
    "Partitioner",
    "Random",
    "label",
    "partitioner_of",
    "record_of",
    "too_many",
]

FEW = 5  # nodes per part; with fewer, k-way METIS leaves parts empty
SEEDS = 2**31
MAX_PARTS = 2**15  # the exchange counts are a (k, k) table
MAX_UFACTOR = 100  # thousandths of imbalance allowed to METIS where loads are coarse
MEAN_WEIGHT = 1000  # METIS takes integer weights: loads are scaled to this mean


class Partitioner(Protocol):
    """A callable that partitions a graph.

    A class may set `geometric = False` if it does not use `graph.positions`; otherwise they are
    computed from the mesh before the call.
    """

    def __call__(self, graph: Graph, parts: int, targets: Array | None = None) -> Array:
        """Labels (n_nodes,) of integers 0..parts-1; `targets` (parts,) are shares of the load."""


@dataclass(frozen=True)
class Metis:
    """METIS: multilevel k-way partitioning of the graph (Karypis and Kumar, 1998).

    Attributes:
        objective: what is minimized: "volume", the rows that shards exchange, or "cut", the edges
            between them.
        imbalance: allowed largest load over the mean; 1.005 allows half a percent.
        seed: seed of METIS; the same seed gives the same labels only with the same build of METIS.
        recursive: recursive bisection instead of k-way, with the objective "cut" only; None uses it
            for fewer than five nodes per part.
        contiguous: ask for connected parts; the graph must be connected.
        timeout: seconds; None for two minutes plus two per million nodes.
    """

    objective: Literal["volume", "cut"] = "volume"
    imbalance: float = 1.005
    seed: int = 0
    recursive: bool | None = None
    contiguous: bool = False
    timeout: float | None = None
    geometric: ClassVar[bool] = False

    def __call__(self, graph: Graph, parts: int, targets: Array | None = None) -> Array:
        """Labels (n_nodes,) int64; no part is empty if there are enough nodes.

        Raises:
            PartitionError: an option is out of range, or METIS failed or timed out.
        """
        if self.objective not in ("volume", "cut"):
            raise PartitionError(f"objective {self.objective!r} is unknown; use volume or cut")
        if not self.imbalance > 1:
            raise PartitionError(f"imbalance {self.imbalance} must be above 1; 1.005 is 0.5 %")
        _check_seed(self.seed)
        if self.timeout is not None and not self.timeout > 0:
            raise PartitionError(f"timeout {self.timeout} must be a number of seconds above 0")
        weights = _integer_weights(graph.weights)
        loads = np.broadcast_to(1.0, graph.n_nodes) if weights is None else weights.astype(float)
        few = graph.n_nodes < FEW * parts and not self.contiguous
        graph = graph.symmetrized()
        allowed = _attainable(self.imbalance, loads, parts)
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
        """Options to try in turn, until the result is balanced and no part is empty."""
        first = metis_child.Options(
            self.objective,
            few,
            min(max(1, round((allowed - 1) * 1000)), MAX_UFACTOR),
            self.seed,
            self.contiguous and not few,
        )
        others = [
            first._replace(seed=self.seed + 2),  # seeds 0 and 1 are the same to glibc
            first._replace(objective="cut", recursive=False),
            first._replace(recursive=True, contiguous=False),
        ]
        return [first, *(o for o in others if o != first)]


@dataclass(frozen=True)
class Morton:
    """Equal runs along a Morton (Z-order) curve: fast; 1.1 to 7 times the halo of METIS.

    Uses positions only. Morton, 1966.
    """

    geometric: ClassVar[bool] = True

    def __call__(self, graph: Graph, parts: int, targets: Array | None = None) -> Array:
        """Labels (n_nodes,) int64."""
        return _cut_along(morton_order(_positions(graph, "Morton")), graph, parts, targets)


@dataclass(frozen=True)
class RCB:
    """Recursive coordinate bisection: split along the longest side of the bounding box.

    Uses positions only. Berger and Bokhari, IEEE Transactions on Computers C-36 (1987).
    """

    geometric: ClassVar[bool] = True

    def __call__(self, graph: Graph, parts: int, targets: Array | None = None) -> Array:
        """Labels (n_nodes,) int64."""
        positions = _positions(graph, "RCB")
        weights = _integer_weights(graph.weights)
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
    """Balanced random labels, which give the largest halo; for tests."""

    seed: int = 0
    geometric: ClassVar[bool] = False

    def __call__(self, graph: Graph, parts: int, targets: Array | None = None) -> Array:
        """Labels (n_nodes,) int64."""
        _check_seed(self.seed)
        order = np.random.default_rng(self.seed).permutation(graph.n_nodes)
        return _cut_along(order, graph, parts, targets)


@dataclass(frozen=True, eq=False)
class Given:
    """Labels from elsewhere: an array, or a file with one label per line as gpmetis writes it.

    Parts may be empty.
    """

    labels: Array | Sequence[int] | str | Path
    geometric: ClassVar[bool] = False

    def __call__(self, graph: Graph, parts: int, targets: Array | None = None) -> Array:
        """The labels as given.

        Raises:
            PartitionError: the file cannot be read, or a line is not an integer.
        """
        if not isinstance(self.labels, (str, Path)):
            return np.asanyarray(self.labels)
        try:
            words = Path(self.labels).read_text().split()
        except (OSError, UnicodeDecodeError) as error:
            raise PartitionError(f"{self.labels}: labels could not be read: {error}") from None
        for line, word in enumerate(words, 1):
            if not re.fullmatch("-?[0-9]{1,18}", word):
                raise PartitionError(f"{self.labels}: line {line}: {word[:40]!r} is not a label")
        return np.array(words, np.int64)


class Method(NamedTuple):
    """A row of the table of methods.

    Attributes:
        make: class of the partitioner; its fields are the options of the method.
        help: one line for the command line and the documentation.
    """

    make: type[Any]
    help: str

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the options, which are the fields of the class."""
        return tuple(f.name for f in fields(self.make))


METHODS: dict[str, Method] = {
    "metis": Method(Metis, "multilevel k-way on the graph, the smallest halo"),
    "morton": Method(Morton, "equal runs along a Z-curve, fast"),
    "rcb": Method(RCB, "recursive coordinate bisection, boxes"),
    "random": Method(Random, "balanced random labels, for tests"),
}


def partitioner_of(method: Any = None, options: Mapping[str, Any] | None = None) -> Any:
    """The partitioner that the argument `method` of `partition` stands for.

    Args:
        method: a name in `METHODS`, METIS if None; labels, or the path of a file of labels; other
            objects are returned as they are.
        options: options of a method that is given by name; those that it does not have are ignored.

    Raises:
        PartitionError: a string that is neither a name nor the path of a file.
    """
    if method is None:
        method = "metis"
    if isinstance(method, str) and method in METHODS:
        row, given = METHODS[method], options or {}
        return row.make(**{name: given[name] for name in row.options if name in given})
    if isinstance(method, str) and not Path(method).is_file():
        near = get_close_matches(method.lower(), METHODS, n=1)
        meant = f"; did you mean {near[0]!r}? Methods are" if near else "; use"
        names = ", ".join(METHODS)
        raise PartitionError(f"method {method!r} is unknown{meant} {names}, or a file of labels")
    is_labels = isinstance(method, (np.ndarray, list, str, Path)) or hasattr(method, "__array__")
    return Given(method) if is_labels else method


def too_many(parts: int) -> str:
    """The message for more than `MAX_PARTS`: what they would take."""
    return (
        f"parts {parts:,}: at most {MAX_PARTS:,} are supported; this would write {parts:,} files "
        f"and need {8 * parts**2 / 1e9:,.0f} GB for the table of what shards exchange"
    )


def record_of(method: Any) -> dict[str, Any]:
    """Name and options of a partitioner, for the manifest."""
    name = getattr(method, "__name__", type(method).__name__)
    named = fields(method) if is_dataclass(method) else ()
    options = {f.name: getattr(method, f.name) for f in named}
    plain = {f: str(v) if isinstance(v, Path) else v for f, v in options.items()}
    kept = {f: v for f, v in plain.items() if v is None or isinstance(v, (str, int, float))}
    return {"name": name} | {
        f: v for f, v in kept.items() if not isinstance(v, float) or v < np.inf
    }


def label(
    graph: Graph,
    parts: int,
    method: Partitioner | Callable[..., Array],
    targets: Array | None = None,
) -> Array:
    """Call a partitioner and validate its labels: one per node, integers 0..parts-1.

    With more parts than nodes the last shards are empty, with a warning. If a method of `METHODS`
    leaves a part empty, the part gets a node of the largest one; other labels are not changed.

    Returns:
        (n_nodes,) int64.

    Raises:
        PartitionError: invalid labels or targets.
    """
    n = graph.n_nodes
    targets = _shares(targets, parts)
    in_table = isinstance(method, tuple(row.make for row in METHODS.values()))
    if parts == 1 and in_table:
        return np.zeros(n, np.int64)
    if parts > n:
        warnings.warn(
            f"{n_of(parts, 'parts')} for {n_of(n, 'nodes')}: {n_of(parts - n, 'shards')} will be "
            "empty; ask for fewer parts",
            MeshWarning,
            stacklevel=3,
        )
        if in_table:
            return np.arange(n, dtype=np.int64)
    labels = method(graph, parts) if targets is None else method(graph, parts, targets=targets)
    labels = _verify(labels, n, parts, type(method).__name__)
    return _fill_empty(labels, parts) if in_table else labels


def _verify(labels: Array, n: int, parts: int, source: str) -> Array:
    """Labels as (n,) int64, validated."""
    if np.ma.is_masked(labels):
        raise PartitionError(f"{source} gave masked labels; replace with .filled(…)")
    labels = np.asarray(labels)
    if labels.shape != (n,):
        raise PartitionError(f"{source} gave labels of shape {labels.shape}, expected ({n},)")
    if labels.dtype.kind not in "iu":
        raise PartitionError(f"{source} gave labels of dtype {labels.dtype}, expected integers")
    bad = np.flatnonzero((labels < 0) | (labels >= parts))
    if len(bad):
        raise PartitionError(
            f"{source} gave node {bad[0]} the label {labels[bad[0]]}, "
            f"expected 0 to {parts - 1} for {parts} parts"
        )
    return labels.astype(np.int64, copy=False)


def _fill_empty(labels: Array, parts: int) -> Array:
    """Move one node of the largest part to each empty part."""
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
    """Number of empty parts, and the largest load over its target; smaller is better."""
    load = np.bincount(labels, loads, parts)
    aim = load.sum() * (np.full(parts, 1 / parts) if targets is None else targets)
    empty = int((np.bincount(labels, minlength=parts) == 0).sum())
    return empty, float((load / aim).max()) if load.sum() else 1.0


def _attainable(imbalance: float, loads: Array, parts: int) -> float:
    """The requested imbalance, or that of two extra nodes in a part if it is larger.

    With a tighter bound METIS scatters small parts to make their counts equal.
    """
    mean = loads.sum() / parts
    return max(imbalance, 1 + 2 * float(loads.max()) / mean) + 1e-9 if mean else np.inf


def _cut(graph: Graph, labels: Array) -> int:
    """Number of edges between parts."""
    return int((labels[graph.destinations()] != labels[graph.indices]).sum())


def _check_seed(seed: int) -> None:
    if not 0 <= seed < SEEDS:
        raise PartitionError(f"seed {seed} must be an integer from 0 to {SEEDS - 1}")


def _integer_weights(weights: Array | None) -> Array | None:
    """Loads as int64 with mean 1000; METIS can sum them without overflow."""
    if weights is None:
        return None
    bad = np.flatnonzero(~np.isfinite(weights) | (weights < 0))
    if len(bad):
        raise PartitionError(
            f"weight {weights[bad[0]]} at row {bad[0]} ({len(bad)} such rows): "
            "weights must be finite and not negative"
        )
    total = float(weights.sum(dtype=np.float64))
    if total <= 0:
        raise PartitionError("all weights are zero; omit them to give every entity the load 1")
    scaled = np.asarray(weights, np.float64) * (MEAN_WEIGHT * len(weights) / total)
    return np.rint(scaled).astype(np.int64)


def _shares(targets: Array | None, parts: int) -> Array | None:
    """Targets normalized to sum 1."""
    if targets is None:
        return None
    targets = np.asarray(targets, np.float64)
    if targets.shape != (parts,) or not (targets > 0).all() or not np.isfinite(targets).all():
        raise PartitionError(
            f"targets must be {parts} positive numbers, one per part, not {targets.tolist()}"
        )
    return np.asarray(targets / targets.sum())


def _positions(graph: Graph, method: str) -> Array:
    if graph.positions is None:
        raise PartitionError(f"{method} needs positions; pass Graph(positions=…), or use Metis()")
    return graph.positions


def _cut_along(order: Array, graph: Graph, parts: int, targets: Array | None) -> Array:
    """Labels of consecutive runs along `order`, as equal in load as possible."""
    weights = _integer_weights(graph.weights)
    loads = np.ones(len(order)) if weights is None else weights[order].astype(float)
    shares = np.full(parts, 1 / parts) if targets is None else targets
    middle = np.cumsum(loads) - loads / 2
    bounds = np.cumsum(shares)[:-1] * loads.sum()
    labels = np.empty(len(order), np.int64)
    labels[order] = np.searchsorted(bounds, middle, side="right")
    return labels
