"""Partition: a mesh cut into shards, with the halo and the exchange plan of every shard."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from meshshard.errors import MeshWarning, PartitionError, StoreError, n_of
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
from meshshard.mesh.checks import is_count
from meshshard.mesh.inspection import weld_and_match
from meshshard.mesh.ragged import offsets_of
from meshshard.partitioning.methods import (
    MAX_PARTS,
    Partitioner,
    label,
    partitioner_of,
    record_of,
    too_many,
)
from meshshard.partitioning.objects import source_of
from meshshard.partitioning.pieces import pieces_of_cells, pieces_of_points
from meshshard.partitioning.quality import Quality, quality_of

if TYPE_CHECKING:
    from meshshard.viz import Style, Subject

__all__ = ["Partition", "entity_of", "partition"]

CLOUD_NEIGHBORS = 16  # nearest neighbors of a point of a cloud, if no graph is given
MAX_HOPS = 255  # hops are uint8
UNEVEN = 1.05  # largest load over its target above which a warning is issued


@dataclass(frozen=True, eq=False)
class Partition:
    """A mesh, cloud or graph cut into k shards; row order is shard order.

    Rows are renumbered so that those of a shard are contiguous: shard p owns the rows
    offsets[p]:offsets[p + 1], and the owner of an id follows from a search in `offsets`.

    Attributes:
        graph: the graph in shard order; the in-edges of a row keep their order.
        sizes: (k,) int64 owned rows of every shard: the sharding shapes.
        origin: (n,) source row of every row: its row in the mesh (or graph) before partitioning.
        halo: the halo rows of every shard.
        entity: what is sharded: "cells", "points", or "nodes" of a bare graph.
        mesh: the mesh or cloud; None for a bare graph.
        targets: (k,) requested shares of the load; None for equal shares.
        method: name and options of the method, as recorded in the manifest.
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
        """(k + 1,) int64; shard p owns the rows offsets[p]:offsets[p + 1]."""
        return offsets_of(self.sizes)

    @cached_property
    def labels(self) -> Array:
        """(n,) int64 shard of every entity, in source order."""
        out = np.empty(len(self.origin), np.int64)
        out[self.origin] = np.repeat(np.arange(self.k), self.sizes)
        return out

    @cached_property
    def quality(self) -> Quality:
        """Owned and halo rows, peers, pieces, edge cut, volume, imbalance; prints as a table."""
        return quality_of(
            self.graph, self.sizes, self.halo, self.sends[2], self.targets, self.entity
        )

    @cached_property
    def sends(self) -> tuple[Array, Array, Array]:
        """Rows to send by (owner, receiver), see `meshshard.graph.plan.send_lists`."""
        return send_lists(self.halo, self.sizes)

    def plan(self, shard: int) -> Plan:
        """The exchange plan and local graph of one shard."""
        return plan_of(self.graph, self.sizes, self.halo, self.sends, shard)

    def edge_attributes(self, shard: int) -> tuple[Array, Array]:
        """Relative positions and lengths of the local edges of one shard.

        Returns:
            (n_edges, 3) position of the source minus that of the destination, and (n_edges,) its
            length; float64, in the units of the mesh, in the order of `plan(shard).indices`.

        Raises:
            PartitionError: a bare graph without positions.
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
            raise PartitionError("the graph has no positions; pass Graph(positions=…)")
        return self.mesh.positions(self.entity)

    def merge(self, ranks: int) -> Partition:
        """Merge the shards to fewer: each rank takes a run of consecutive shards.

        The runs minimize the largest number of owned rows. Ids keep their order; halo rows within
        a run become interior.

        Args:
            ranks: number of ranks, 1 to k.

        Raises:
            PartitionError: `ranks` is out of range.
        """
        if not 1 <= ranks <= self.k:
            raise PartitionError(f"{n_of(self.k, 'shards')} for {ranks} ranks; use 1 to {self.k}")
        cuts = runs(self.sizes, ranks)
        sizes = np.add.reduceat(self.sizes, cuts[:-1])
        uneven = sizes.max() * ranks / max(sizes.sum(), 1)
        if uneven > UNEVEN:
            warnings.warn(
                f"{self.k} shards on {ranks} ranks: the largest owns {100 * (uneven - 1):.0f} % "
                "more rows than the mean; partition into a multiple of the ranks",
                MeshWarning,
                stacklevel=2,
            )
        targets = None if self.targets is None else np.add.reduceat(self.targets, cuts[:-1])
        return _planned(replace(self, sizes=sizes, targets=targets))

    def reordered(self, order: str) -> Partition:
        """The same shards with their rows in another order, for memory locality.

        Args:
            order: "morton" (Z-order curve), "rcm" (reverse Cuthill-McKee) or "file" (source order).

        Raises:
            PartitionError: `order` is unknown, or "morton" without positions.
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
            raise PartitionError(f"order {order!r} is unknown; use file, morton or rcm")
        shard = np.repeat(np.arange(self.k), self.sizes)
        by = np.lexsort((rank, shard))
        return _planned(replace(self, graph=self.graph.permuted(by), origin=self.origin[by]))

    def check(self) -> Partition:
        """Verify the partition, and return it.

        Every row has one owner; the ids that every shard receives through the plan are compared
        with its halo, and its local edges with the graph.

        Raises:
            PartitionError: naming the shard and row that is wrong.
        """
        n = len(self.origin)
        if int(self.sizes.sum()) != n or (np.bincount(self.origin, minlength=n) != 1).any():
            raise PartitionError(f"shards own {self.sizes.sum()} rows; expected each of {n} once")
        plans = [self.plan(p) for p in range(self.k)]
        for plan, ids in zip(plans, received(plans, self.sizes), strict=True):
            if not np.array_equal(ids, plan.halo):
                raise PartitionError(f"shard {plan.shard}: it does not receive its halo rows")
            check_edges(plan, self.graph, int(self.offsets[plan.shard]))
        return self

    def save(
        self,
        path: str | Path,
        *,
        source: str | Path | None = None,
        request: Mapping[str, Any] | None = None,
        command: str = "",
        force: bool = False,
    ) -> Path:
        """Write a folder of shards that each rank can open separately.

        Args:
            path: the folder; its name usually ends with `.shards`.
            source: the file that was read; its path, size and sha256 are recorded.
            request: options to record, so that the same request can be recognized later.
            command: command line to record.
            force: replace an existing folder of shards.

        Returns:
            The folder.

        Raises:
            StoreError: it exists, cannot be written, or the partition is of a bare graph.

        Examples:
            >>> parts = partition("datasets/ahmed/run_8/boundary_8.vtp", 2)
            >>> folder = parts.save("two.shards")
            >>> sorted(file.name for file in folder.iterdir())
            ['manifest.json', 'shard_00000.safetensors', 'shard_00001.safetensors']
        """
        from meshshard import store

        if self.mesh is None:
            raise StoreError("a bare graph has no geometry to store; partition a mesh or a cloud")
        cut = {
            "entity": self.entity,
            "sizes": self.sizes.tolist(),
            "targets": None if self.targets is None else self.targets.tolist(),
            "halo_depth": self.halo.depth,
            "method": self.method,
            "quality": self.quality.as_dict(),
            "request": dict(request or {}),
            "command": command,
        }
        pieces_of = pieces_of_cells if self.entity == "cells" else pieces_of_points
        pieces = pieces_of(self.mesh, self.origin, self.offsets)
        shards = ((self.plan(p), piece) for p, piece in enumerate(pieces))
        return store.write(path, self.mesh, cut, shards, source=source, force=force)

    def save_labels(self, path: str | Path) -> None:
        """Write the shard of every entity in source order, one per line, as gpmetis does.

        `partition(mesh, k, method=path)` reads the file.

        Raises:
            MeshshardError: the file cannot be written.
        """
        from meshshard.io.writers import write_labels

        write_labels(self.labels, Path(path))

    def subject(self) -> Subject:
        """What pictures need of it, see `meshshard.viz`."""
        from meshshard.viz import Subject

        mesh, halo = self.mesh, self.halo
        if mesh is None and self.graph.positions is not None:
            mesh = Mesh(points=self._positions, name="graph")
        return Subject(
            name="graph" if mesh is None else mesh.name,
            entity=self.entity,
            labels=self.labels,
            halos=np.split(self.origin[halo.ids], halo.offsets[1:-1]),
            traffic=self.sends[2],
            mesh=mesh,
        )

    def plot(
        self,
        *,
        field: str | None = None,
        explode: float = 0.0,
        halo: int | None = None,
        style: Style | None = None,
    ) -> Any:
        """Draw the shards in a notebook or a window.

        Args:
            field: color by this field; by default a color for each shard.
            explode: move shards away from the middle, by this factor times their distance to it.
            halo: also draw the halo of this shard.
            style: sizes, colors and camera; see `meshshard.viz.Style`.
        """
        from meshshard.viz import plot_shards, show

        return show(plot_shards(self, field=field, explode=explode, halo=halo, style=style))

    def __repr__(self) -> str:
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
    method: str | Path | Partitioner | Callable[..., Array] | Array | None = None,
    weights: Array | str | None = None,
    halo: int = 1,
    graph: Graph | None = None,
) -> Partition:
    """Cut a mesh, cloud or graph into shards, and plan the exchange between them.

    Args:
        mesh: a Mesh, the path of a file, a PyVista dataset, a Trimesh, a meshio.Mesh, points (n, 3)
            as an array or a tensor; a Graph, a scipy sparse matrix (the entries of row i are the
            sources of edges into node i), or a PyG Data with `pos`, `edge_index` or both.
        parts: number of shards, or the share of the load of each, e.g. [2, 1, 1].
        on: what to shard: "cells", "points", or "auto", which takes points if only points have
            fields or the mesh has no cells, else cells.
        method: a name ("metis", "morton", "rcb", "random"); a partitioner such as
            Metis(objective="cut"); labels (n,) or the path of a file of labels; or a function
            (graph, parts) -> labels. METIS if None.
        weights: load of every entity: an array (n,), the name of a field, or "area".
        halo: hops of halo rows; 1 for layers that exchange once each.
        graph: the graph that the model uses, if it is not the adjacency in the mesh (of a cloud:
            the 16 nearest neighbors).

    Returns:
        The partition, with halo and plan.

    Raises:
        PartitionError: parts, weights, halo, method or labels are invalid, or METIS failed.
        MeshError: the mesh or graph is inconsistent.

    Examples:
        >>> parts = partition("datasets/ahmed/run_8/boundary_8.vtp", 4)
        >>> parts.k, int(parts.sizes.sum())
        (4, 4778)
        >>> by_area = partition("datasets/ahmed/run_8/boundary_8.vtp", 4, weights="area")
    """
    k, targets = _parts(parts)
    if k > MAX_PARTS:
        raise PartitionError(too_many(k))
    if not is_count(halo) or halo > MAX_HOPS:
        raise PartitionError(f"halo {halo!r} must be 1 to {MAX_HOPS} hops")
    partitioner = partitioner_of(method)
    source, of_item = source_of(mesh)
    if source is not None:
        entity = entity_of(source, on)
        source, graph = _graph_of(source, entity, of_item if graph is None else graph)
    else:
        entity, graph = "nodes", cast("Graph", of_item).check()
    if weights is not None:
        graph = replace(graph, weights=_weights(source, entity, weights, graph.n_nodes))
    if getattr(partitioner, "geometric", True) and graph.positions is None and source is not None:
        graph = replace(graph, positions=source.positions(entity))
    if not graph.n_nodes:
        name = "graph" if source is None else source.name
        raise PartitionError(f"{name}: has no {entity} to partition")
    labels = label(graph, k, partitioner, targets)
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
        record_of(partitioner),
    )
    _warn_if_uneven(labels, graph, k, targets)
    return _planned(made)


def entity_of(mesh: Mesh, on: str = "auto") -> str:
    """What to shard: "cells" or "points".

    "auto" is points if only points have fields or the mesh has no cells, else cells.

    Raises:
        PartitionError: `on` is unknown, or "cells" for a mesh without cells.
    """
    if on not in ("auto", "cells", "points"):
        raise PartitionError(f"on {on!r} is unknown; use cells, points or auto")
    if on == "cells" and not mesh.n_cells:
        raise PartitionError(f"{mesh.name}: has no cells; use points")
    if on != "auto":
        return on
    only_points = bool(mesh.point_fields) and not mesh.cell_fields
    return "points" if only_points or not mesh.n_cells else "cells"


def _graph_of(mesh: Mesh, entity: str, graph: Graph | None) -> tuple[Mesh, Graph]:
    """The mesh, with a weld map if it has duplicate points, and the graph of its entities."""
    if not mesh.n_cells:
        if graph is None:
            return mesh, knn_graph(mesh.points, CLOUD_NEIGHBORS)
        return mesh, _checked(mesh, entity, graph)
    mesh, found = weld_and_match(mesh)
    if graph is not None:
        return mesh, _checked(mesh, entity, graph)
    if entity == "cells":
        return mesh, cell_graph(mesh, found)
    return mesh, point_graph(mesh)


def _checked(mesh: Mesh, entity: str, graph: Any) -> Graph:
    """A graph that was passed as an argument, validated."""
    n = mesh.n_cells if entity == "cells" else mesh.n_points
    if not isinstance(graph, Graph):
        raise PartitionError(f"{mesh.name}: graph is a {type(graph).__name__}; pass a Graph")
    if graph.n_nodes != n:
        raise PartitionError(
            f"{mesh.name}: the graph has {graph.n_nodes} nodes, expected {n} ({entity})"
        )
    return graph.check()


def _warn_if_uneven(labels: Array, graph: Graph, k: int, targets: Array | None) -> None:
    """Warn if the loads are uneven, which single heavy entities can make inevitable."""
    if graph.weights is None:
        return
    load = np.bincount(labels, graph.weights, k)
    aim = load.sum() * (1 / k if targets is None else targets)
    worst = float((load / aim).max())
    if worst > UNEVEN:
        row = int(graph.weights.argmax())
        warnings.warn(
            f"imbalance {worst:.2f}: the weights do not divide evenly; row {row} has "
            f"{100 * graph.weights[row] / load.sum():.3g} % of the load",
            MeshWarning,
            stacklevel=3,
        )


def _parts(parts: int | Sequence[float]) -> tuple[int, Array | None]:
    """Number of shards, and their shares if given."""
    if isinstance(parts, (int, np.integer)):
        if parts < 1:
            raise PartitionError(f"parts {parts} must be at least 1")
        return int(parts), None
    shares = np.asarray(parts)
    positive = shares.dtype.kind in "fiu" and (shares > 0).all() and np.isfinite(shares).all()
    if shares.ndim != 1 or not len(shares) or not positive:
        raise PartitionError(f"parts {parts!r} must be a number, or a positive share for each part")
    return len(shares), shares / shares.sum()


def _weights(mesh: Mesh | None, entity: str, weights: Array | str, n: int) -> Array:
    """(n,) load of every entity."""
    if isinstance(weights, str):
        if mesh is None:
            raise PartitionError(f"weights {weights!r}: a bare graph has no fields; pass an array")
        weights = _field(mesh, entity, weights)
    masked, weights = np.ma.is_masked(weights), np.asarray(weights)
    if masked or weights.dtype.kind not in "fiub":
        what = "masked" if masked else f"of type {weights.dtype}"
        raise PartitionError(f"weights are {what}; expected a number for each of the {entity}")
    if weights.shape != (n,):
        raise PartitionError(f"weights have shape {weights.shape}, expected ({n},)")
    return weights


def _field(mesh: Mesh, entity: str, name: str) -> Array:
    """A field of the entities, or the areas of the cells."""
    fields = mesh.cell_fields if entity == "cells" else mesh.point_fields
    if name in fields:
        return fields[name]
    if name == "area" and entity == "cells":
        return mesh.areas()
    raise PartitionError(
        f"{mesh.name}: no field {name!r} on {entity}; fields: {', '.join(fields) or 'none'}"
    )


def _planned(made: Partition) -> Partition:
    """The partition with the halo of its graph and sizes."""
    return replace(made, halo=halo_of(made.graph, made.sizes, made.halo.depth))
