"""Subject: what a picture is of, whether it comes from memory, from a folder or from labels."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import numpy as np

from meshshard.errors import RenderError, StoreError
from meshshard.mesh import Array, Mesh
from meshshard.mesh.inspection import weld
from meshshard.partitioning.partition import Partition, partition
from meshshard.store import Folder, load
from meshshard.viz.colors import shard_colors

__all__ = ["Drawable", "Subject", "subject_of"]

Drawable: TypeAlias = Partition | Folder | Mesh | str | Path


@dataclass(frozen=True, eq=False)
class Subject:
    """A cut mesh, as pictures need it.

    Attributes:
        name: of the mesh.
        entity: what a row is: cells, points or nodes.
        labels: (n,) shard of every entity, in the order of the mesh.
        halos: for every shard the rows of its halo, in the order of the mesh.
        traffic: (k, k) rows by (receiver, owner) in one exchange.
        mesh: its points merged where it has a weld map; None for a bare graph without positions.
    """

    name: str
    entity: str
    labels: Array
    halos: list[Array]
    traffic: Array
    mesh: Mesh | None

    @property
    def k(self) -> int:
        """Number of shards."""
        return len(self.halos)

    @cached_property
    def sizes(self) -> Array:
        """(k,) owned rows."""
        return np.bincount(self.labels, minlength=self.k)

    @cached_property
    def colors(self) -> Array:
        """(k, 3) uint8, the same in every picture of this cut."""
        return shard_colors(self.k, self.traffic)

    @cached_property
    def positions(self) -> Array:
        """(n, 3) place of every entity."""
        mesh = self.solid
        return mesh.positions("cells" if self.entity == "cells" else "points") + mesh.offset

    @cached_property
    def centers(self) -> Array:
        """(k, 3) mean place of each shard's entities; NaN for empty shards."""
        total = np.stack(
            [np.bincount(self.labels, weights=c, minlength=self.k) for c in self.positions.T], 1
        )
        owned = self.sizes[:, None]
        return np.asarray(np.where(owned > 0, total / np.maximum(owned, 1), np.nan))

    @property
    def solid(self) -> Mesh:
        """The mesh, where there is one to draw.

        Raises:
            RenderError: a bare graph without positions.
        """
        if self.mesh is None:
            raise RenderError("a bare graph has no place to be drawn at; give Graph(positions=…)")
        return self.mesh

    @cached_property
    def cell_labels(self) -> Array:
        """(n_cells,) shard of every cell; the lowest of its points where points are sharded."""
        mesh = self.solid
        if self.entity == "cells" or not mesh.n_cells:
            return self.labels[: mesh.n_cells]
        return np.minimum.reduceat(self.labels[mesh.connectivity], mesh.offsets[:-1])

    def check_shard(self, shard: int) -> int:
        """The number of a shard, once it is one.

        Raises:
            RenderError: there is no such shard.
        """
        if not 0 <= shard < self.k:
            raise RenderError(f"shard {shard} does not exist; shards are 0 to {self.k - 1}")
        return shard


def subject_of(what: Drawable, labels: Array | None = None) -> Subject:
    """What to draw.

    Args:
        what: a partition, an open folder, the path of a folder, or a mesh.
        labels: (n,) shard of every cell (or point) of a mesh; not with the others.

    Raises:
        RenderError: a mesh without labels, or labels for something that is cut already.
        StoreError: the folder is damaged.
    """
    if isinstance(what, Mesh):
        if labels is None:
            raise RenderError(f"{what.name}: is not cut; partition it, or give labels")
        return _of_partition(_cut(what, np.asarray(labels)))
    if labels is not None:
        raise RenderError("labels belong to a mesh; this is cut already")
    if isinstance(what, Partition):
        return _of_partition(what)
    return _of_folder(what if isinstance(what, Folder) else load(what))


def _cut(mesh: Mesh, labels: Array) -> Partition:
    """The partition that labels mean."""
    on = "cells" if mesh.n_cells and len(labels) == mesh.n_cells else "points"
    return partition(mesh, int(labels.max(initial=0)) + 1, on=on, method=labels)


def _of_partition(made: Partition) -> Subject:
    halo = made.halo
    mesh = made.mesh
    if mesh is None and made.graph.positions is not None:
        place = np.empty((len(made.origin), 3))
        place[made.origin] = made.graph.positions
        mesh = Mesh(points=place, name="graph")
    return Subject(
        name="graph" if mesh is None else mesh.name,
        entity=made.entity,
        labels=made.labels,
        halos=[
            made.origin[halo.ids[a:b]]
            for a, b in zip(halo.offsets[:-1], halo.offsets[1:], strict=True)
        ],
        traffic=made.sends[2],
        mesh=None if mesh is None else _merged(mesh),
    )


def _of_folder(folder: Folder) -> Subject:
    origin = np.concatenate([folder.origin(p) for p in range(folder.k)])
    plans = [folder.plan(p) for p in range(folder.k)]
    mesh = folder.gather().with_fields(**{folder.entity[:-1]: _results(folder)})
    if folder.manifest.get("welded_points"):
        mesh = weld(mesh)
    return Subject(
        name=str(folder.manifest["name"]),
        entity=folder.entity,
        labels=folder.labels(),
        halos=[origin[plan.halo] for plan in plans],
        traffic=np.stack([plan.recv_counts for plan in plans]),
        mesh=_merged(mesh),
    )


def _results(folder: Folder) -> dict[str, Array]:
    """Fields that models have put beside the shards, where all shards have."""
    found: dict[str, Array] = {}
    for name in folder.puts():
        with suppress(StoreError):
            found |= folder.gather_put(name)
    return found


def _merged(mesh: Mesh) -> Mesh:
    """The mesh with cells that meet at merged points, instead of a map that says so."""
    if mesh.weld is None:
        return mesh
    return replace(mesh, connectivity=mesh.weld[mesh.connectivity], weld=None)
