"""Partition: a mesh in shard order, and everything about who owns, reads and sends what."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from meshshard.errors import MeshWarning, PartitionError, n_of
from meshshard.graph import Graph, cell_graph, knn_graph, point_graph
from meshshard.graph.graph import cuthill_mckee
from meshshard.graph.plan import (
    Halo,
    Plan,
    check_edges,
    halo_of,
    plan_of,
    received,
    runs,
    send_lists,
)
from meshshard.mesh import Array, Mesh
from meshshard.mesh.inspection import weld_and_match
from meshshard.partitioning.methods import NAMED, Given, Metis, Partitioner, label
from meshshard.partitioning.quality import Quality, quality_of

if TYPE_CHECKING:
    from meshshard.viz import Style

__all__ = ["Partition", "entity_of", "partition"]

CLOUD_NEIGHBORS = 16  # in-edges of a point of a cloud, where no graph is given
MOST_PARTS = 2**15  # there is a table of who sends how much to whom
MOST_HOPS = 255  # a hop is a uint8
UNEVEN = 1.05  # largest over mean owned rows, above which merged ranks get a warning


@dataclass(frozen=True, eq=False)
class Partition:
    """One mesh, cloud or graph cut into k shards; row order is shard order.

    Rows are renumbered so that the rows of a shard are contiguous: `sizes` and `origin` are the
    whole partition, the owner of an id is its place in `offsets`.

    Attributes:
        graph: the graph in shard order; in-edges of a row keep the order they had.
        sizes: (k,) int64 owned rows of every shard: the sharding shapes.
        origin: (n,) row in the mesh (or the graph) of every row here.
        halo: the rows every shard needs.
        entity: what a row is: "cells", "points", or "nodes" of a bare graph.
        mesh: what was cut; None for a bare graph.
        targets: (k,) shares of the load that were asked for; None for equal ones.
        method: how it was cut, for the record.
    """

    graph: Graph
    sizes: Array
    origin: Array
    halo: Halo
    entity: str
    mesh: Mesh | None = None
    targets: Array | None = None
    method: dict[str, Any] = field(default_factory=dict)

    @property
    def k(self) -> int:
        """Number of shards."""
        return len(self.sizes)

    @cached_property
    def offsets(self) -> Array:
        """(k + 1,) shard p owns the rows offsets[p]:offsets[p + 1]."""
        return np.concatenate([[0], np.cumsum(self.sizes)])

    @cached_property
    def labels(self) -> Array:
        """(n,) int64 shard of every entity, in the order of the mesh."""
        out = np.empty(len(self.origin), np.int64)
        out[self.origin] = np.repeat(np.arange(self.k), self.sizes)
        return out

    @cached_property
    def quality(self) -> Quality:
        """Owned, halo, peers, pieces, cut, volume, imbalance; prints as a table."""
        return quality_of(
            self.graph, self.sizes, self.halo, self.sends[2], self.targets, self.entity
        )

    @cached_property
    def sends(self) -> tuple[Array, Array, Array]:
        """Rows to send by (owner, receiver), see `plan.send_lists`."""
        return send_lists(self.halo, self.sizes)

    def plan(self, shard: int) -> Plan:
        """The exchange plan and local edges of one shard."""
        return plan_of(self.graph, self.sizes, self.halo, self.sends, shard)

    def edge_attributes(self, shard: int) -> tuple[Array, Array]:
        """Relative position (n_edges, 3) source minus destination, and length, float64.

        In the order of the plan's edges, in the units of the mesh.
        """
        plan = self.plan(shard)
        owned = np.arange(self.offsets[shard], self.offsets[shard + 1])
        place = self._positions[self.origin[np.concatenate([owned, plan.halo])]]
        to = np.repeat(np.arange(plan.n_local), np.diff(plan.indptr))
        relative = place[plan.indices] - place[to]
        return relative, np.linalg.norm(relative, axis=1)

    @cached_property
    def _positions(self) -> Array:
        if self.graph.positions is not None:
            back = np.empty_like(self.graph.positions)
            back[self.origin] = self.graph.positions
            return back
        if self.mesh is None:
            raise PartitionError("this graph has no positions; give it some: Graph(positions=…)")
        return self.mesh.positions(self.entity)

    def merge(self, ranks: int) -> Partition:
        """The same rows on fewer ranks: each takes a run of shards, their mutual halo is interior.

        The runs make the largest owned count smallest. Ids and their order stay as they are.

        Raises:
            PartitionError: more ranks than shards, or none.
        """
        if not 1 <= ranks <= self.k:
            raise PartitionError(f"{n_of(self.k, 'shards')} for {ranks} ranks; take 1 to {self.k}")
        cuts = runs(self.sizes, ranks)
        sizes = np.add.reduceat(self.sizes, cuts[:-1])
        uneven = sizes.max() * ranks / max(sizes.sum(), 1)
        if uneven > UNEVEN:
            warnings.warn(
                f"{self.k} shards on {ranks} ranks: the fullest holds {100 * (uneven - 1):.0f} % "
                "more than the mean; a multiple of the ranks divides evenly",
                MeshWarning,
                stacklevel=2,
            )
        targets = None if self.targets is None else np.add.reduceat(self.targets, cuts[:-1])
        return _planned(replace(self, sizes=sizes, targets=targets))

    def reordered(self, order: str) -> Partition:
        """The same shards with their rows in another order, for locality in memory.

        "morton" along a Z-curve, "rcm" by reverse Cuthill-McKee, "file" as in the mesh.
        """
        n = len(self.origin)
        if order == "morton":
            from meshshard.graph.morton import morton_order

            first = np.empty(n, np.int64)
            first[morton_order(self._positions)] = np.arange(n)
            rank = first[self.origin]
        elif order == "rcm":
            rank = cuthill_mckee(self.graph)
        elif order == "file":
            rank = self.origin
        else:
            raise PartitionError(f"order {order!r} is unknown: file, morton or rcm")
        shard = np.repeat(np.arange(self.k), self.sizes)
        by = np.lexsort((rank, shard))
        return _planned(replace(self, graph=self.graph.permuted(by), origin=self.origin[by]))

    def check(self) -> Partition:
        """The partition itself, once its plan is proved: shapes tile, sent is received.

        Every shard's ids are sent through the plan and compared with its halo, row for row, and
        local edges are compared with the graph.

        Raises:
            PartitionError: naming the shard and row that do not close.
        """
        n = len(self.origin)
        if int(self.sizes.sum()) != n or (np.bincount(self.origin, minlength=n) != 1).any():
            raise PartitionError(f"shards own {self.sizes.sum()} rows, not each of {n} once")
        plans = [self.plan(p) for p in range(self.k)]
        for plan, ids in zip(plans, received(plans, self.sizes), strict=True):
            if not np.array_equal(ids, plan.halo):
                raise PartitionError(f"shard {plan.shard}: rows sent are not the rows it needs")
            check_edges(plan, self.graph, int(self.offsets[plan.shard]))
        return self

    def save(
        self, path: str | Path, *, source: str | Path | None = None, force: bool = False
    ) -> Path:
        """Write the folder of shards, see `meshshard.store.save`."""
        from meshshard.store import save

        return save(self, path, source=source, force=force)

    def plot(
        self,
        *,
        field: str | None = None,
        explode: float = 0.0,
        halo: int | None = None,
        style: Style | None = None,
    ) -> Any:
        """Show it, in a notebook or a window; see `meshshard.viz.plot_shards`."""
        from meshshard.viz import plot_shards, show

        return show(plot_shards(self, field=field, explode=explode, halo=halo, style=style))

    def __repr__(self) -> str:
        """One line: how many of what, in how many shards."""
        name = "graph" if self.mesh is None else self.mesh.name
        rows = n_of(len(self.origin), self.entity)
        return f"Partition({name}: {rows} in {n_of(self.k, 'shards')})"

    def _repr_html_(self) -> str:
        return f"<b>{escape(repr(self))}</b>{self.quality._repr_html_()}"


def partition(
    mesh: Mesh | Graph | Any,
    parts: int | Sequence[float],
    *,
    on: str = "auto",
    method: Partitioner | Callable[..., Array] | Array | None = None,
    weights: Array | str | None = None,
    halo: int = 1,
    graph: Graph | None = None,
) -> Partition:
    """Cut a mesh, cloud or graph into shards, and plan the exchange between them.

    Args:
        mesh: a Mesh, a Graph, a PyVista dataset, or the path of a file.
        parts: number of shards, or a share for each (2:1:1 for one fast device of three).
        on: "cells", "points", or "auto": cells where they have fields or nothing has, else points.
        method: a partitioner or its name; labels or their file; or (graph, parts) -> labels.
        weights: load of every entity: an array, the name of a field, or "area".
        halo: hops of halo rows, 1 for layers that exchange once each.
        graph: the graph that the layers use, instead of neighbors in the mesh (16 nearest for a
            cloud): partition what you run.

    Returns:
        The partition, with its halo and plan.

    Raises:
        PartitionError: parts, weights, halo or labels that cannot be right; METIS failed.
        MeshError: the mesh cannot be cut this way.
    """
    k, targets = _parts(parts)
    if k > MOST_PARTS:
        raise PartitionError(f"parts {k}: at most {MOST_PARTS} are planned; ask for fewer")
    if not 1 <= halo <= MOST_HOPS:
        raise PartitionError(f"halo {halo}: 1 to {MOST_HOPS} hops can be kept")
    cutter = _method(method)
    if isinstance(mesh, Graph):
        source, entity, graph = None, "nodes", mesh.check()
    else:
        source = _as_mesh(mesh)
        entity = entity_of(source, on)
        source, graph = _graph_of(source, entity, graph)
    if weights is not None:
        graph = replace(graph, weights=_weights(source, entity, weights, graph.n_nodes))
    if getattr(cutter, "geometric", True) and graph.positions is None and source is not None:
        graph = replace(graph, positions=source.positions(entity))
    if not graph.n_nodes:
        name = "graph" if source is None else source.name
        raise PartitionError(f"{name}: there is nothing to cut, it has no {entity}")
    labels = label(graph, k, cutter, targets)
    origin = np.argsort(labels.astype(np.uint16 if k < 2**16 else np.int64), kind="stable")
    sizes = np.bincount(labels, minlength=k)
    made = Partition(
        graph.permuted(origin),
        sizes,
        origin,
        Halo(np.zeros(k + 1, np.int64), origin[:0], origin[:0].astype(np.uint8), halo),
        entity,
        source,
        targets,
        _record(cutter),
    )
    _warn_if_uneven(labels, graph, k, targets)
    return _planned(made)


def entity_of(mesh: Mesh, on: str = "auto") -> str:
    """What to shard: "cells" or "points".

    By itself: cells where cells have fields, points where only points have, and the points of a
    cloud; cells where nothing has a field.

    Raises:
        PartitionError: an unknown word, or cells of a mesh that has none.
    """
    if on not in ("auto", "cells", "points"):
        raise PartitionError(f"on {on!r} is unknown: cells, points or auto")
    if on == "cells" and not mesh.n_cells:
        raise PartitionError(f"{mesh.name}: has no cells; shard its points")
    if on != "auto":
        return on
    only_points = bool(mesh.point_fields) and not mesh.cell_fields
    return "points" if only_points or not mesh.n_cells else "cells"


def _graph_of(mesh: Mesh, entity: str, graph: Graph | None) -> tuple[Mesh, Graph]:
    """The mesh, its points merged where that glues cells, and the graph of its entities."""
    if not mesh.n_cells:
        if graph is None:
            return mesh, knn_graph(mesh.points, CLOUD_NEIGHBORS)
        return mesh, _given(mesh, entity, graph)
    mesh, found = weld_and_match(mesh)
    if graph is not None:
        return mesh, _given(mesh, entity, graph)
    if entity == "cells":
        return mesh, cell_graph(mesh, found)
    return mesh, point_graph(mesh)


def _given(mesh: Mesh, entity: str, graph: Graph) -> Graph:
    """A graph of the caller's, once it fits the mesh."""
    n = mesh.n_cells if entity == "cells" else mesh.n_points
    if graph.n_nodes != n:
        raise PartitionError(f"{mesh.name}: the graph has {graph.n_nodes} nodes for {n} {entity}")
    return graph.check()


def _warn_if_uneven(labels: Array, graph: Graph, k: int, targets: Array | None) -> None:
    """Say so where single heavy entities make equal loads impossible."""
    if graph.weights is None:
        return
    load = np.bincount(labels, graph.weights, k)
    aim = load.sum() * (1 / k if targets is None else targets)
    worst = float((load / aim).max())
    if worst > UNEVEN:
        row = int(graph.weights.argmax())
        warnings.warn(
            f"imbalance {worst:.2f}: the weights do not divide evenly; row {row} alone weighs "
            f"{100 * graph.weights[row] / load.sum():.3g} % of all",
            MeshWarning,
            stacklevel=3,
        )


def _parts(parts: int | Sequence[float]) -> tuple[int, Array | None]:
    """Number of shards and their shares."""
    if isinstance(parts, (int, np.integer)):
        if parts < 1:
            raise PartitionError(f"parts {parts}: at least one is needed")
        return int(parts), None
    shares = np.asarray(parts, np.float64)
    if shares.ndim != 1 or not len(shares) or not (shares > 0).all():
        raise PartitionError(f"parts {parts!r}: a number, or a positive share for each part")
    return len(shares), shares / shares.sum()


def _method(method: Any) -> Any:
    if method is None:
        return Metis()
    method = NAMED.get(method, method) if isinstance(method, str) else method
    return Given(method) if isinstance(method, (np.ndarray, list, str, Path)) else method


def _record(method: Any) -> dict[str, Any]:
    """Name and options of a method, for the manifest."""
    name = getattr(method, "__name__", type(method).__name__)
    named = fields(method) if is_dataclass(method) else ()
    options = {f.name: getattr(method, f.name) for f in named}
    plain = {f: str(v) if isinstance(v, Path) else v for f, v in options.items()}
    kept = {f: v for f, v in plain.items() if v is None or isinstance(v, (str, int, float))}
    return {"name": name} | {
        f: v for f, v in kept.items() if not isinstance(v, float) or v < np.inf
    }


def _as_mesh(mesh: Any) -> Mesh:
    """A Mesh from whatever can be one."""
    if isinstance(mesh, Mesh):
        return mesh
    from meshshard import io

    return io.read(mesh) if isinstance(mesh, (str, Path)) else io.from_pyvista(mesh)


def _weights(mesh: Mesh | None, entity: str, weights: Array | str, n: int) -> Array:
    """Load of every entity."""
    if isinstance(weights, str):
        if mesh is None:
            raise PartitionError(f"weight {weights!r}: a bare graph has no fields; give an array")
        weights = _field(mesh, entity, weights)
    weights = np.asarray(weights)
    if weights.shape != (n,):
        raise PartitionError(f"weights of shape {weights.shape}; one number for {n} entities")
    return weights


def _field(mesh: Mesh, entity: str, name: str) -> Array:
    """A field of the entities, or their area."""
    fields = mesh.cell_fields if entity == "cells" else mesh.point_fields
    if name in fields:
        return fields[name]
    if name == "area" and entity == "cells":
        return mesh.areas()
    raise PartitionError(
        f"{mesh.name}: no field {name!r} on {entity}; there are: {', '.join(fields) or 'none'}"
    )


def _planned(made: Partition) -> Partition:
    """The same partition with its halo."""
    return replace(made, halo=halo_of(made.graph, made.sizes, made.halo.depth))
