"""Subject: a partitioned mesh as pictures need it, from memory or from a folder of shards."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np

from meshshard.errors import RenderError, StoreError, n_of
from meshshard.mesh import Array, Mesh
from meshshard.mesh.cells import LINE
from meshshard.mesh.inspection import weld
from meshshard.store import Folder, load
from meshshard.viz.colors import shard_colors

__all__ = ["Drawable", "HasSubject", "Subject", "subject_of"]


@dataclass(frozen=True, eq=False)
class Subject:
    """A partitioned mesh, as pictures need it.

    Attributes:
        name: name of the mesh.
        entity: what is sharded: cells, points or nodes.
        labels: (n,) shard of every entity, in source order.
        halos: for every shard, the source rows of its halo.
        traffic: (k, k) rows by (receiver, owner) in one exchange.
        mesh: the mesh or cloud; None for a bare graph without positions.
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
        """(k, 3) uint8 color of every shard, the same in all pictures of this partition."""
        return shard_colors(self.k, self.traffic)

    @cached_property
    def positions(self) -> Array:
        """(n, 3) position of every entity."""
        mesh = self.solid
        return mesh.positions("cells" if self.entity == "cells" else "points") + mesh.offset

    @cached_property
    def centers(self) -> Array:
        """(k, 3) mean position of the entities of each shard; NaN for empty shards."""
        total = np.stack(
            [np.bincount(self.labels, weights=c, minlength=self.k) for c in self.positions.T], 1
        )
        owned = self.sizes[:, None]
        return np.asarray(np.where(owned > 0, total / np.maximum(owned, 1), np.nan))

    @cached_property
    def solid(self) -> Mesh:
        """The mesh with its weld map applied: cells share the points that it merges.

        Lines whose points are sharded are split into segments, so that each shows its shard.

        Raises:
            RenderError: a bare graph without positions.
        """
        if self.mesh is None:
            raise RenderError("a graph without positions cannot be drawn; pass Graph(positions=…)")
        mesh = self.mesh
        if mesh.weld is not None:
            mesh = replace(mesh, connectivity=mesh.weld[mesh.connectivity], weld=None)
        return _segments(mesh) if mesh.dim == 1 and self.entity == "points" else mesh

    @cached_property
    def cell_labels(self) -> Array:
        """(n_cells,) shard of every cell; the lowest shard of its points if points are sharded."""
        mesh = self.solid
        if self.entity == "cells" or not mesh.n_cells:
            return self.labels[: mesh.n_cells]
        return np.minimum.reduceat(self.labels[mesh.connectivity], mesh.offsets[:-1])

    @property
    def title(self) -> str:
        """What is drawn, in one line."""
        whole = f"{Path(self.name).name}: {n_of(len(self.labels), self.entity)}"
        return f"{whole} in {n_of(self.k, 'shards')}" if self.k > 1 else whole

    def values(self, field: str | Array) -> Array:
        """(n, …) float64 values of every cell (point of a cloud); points are averaged on cells.

        Args:
            field: name of a field, or values of all cells or points.

        Raises:
            RenderError: the field does not exist, or the values have another length.
        """
        mesh = self.solid
        if isinstance(field, str):
            known = {**mesh.point_fields, **mesh.cell_fields}
            if field not in known:
                have = ", ".join(known) or "none"
                raise RenderError(f"{self.name}: field {field!r} does not exist; fields: {have}")
            values, on_points = known[field], field not in mesh.cell_fields
        else:
            values = np.asarray(field)
            on_points = len(np.atleast_1d(values)) != mesh.n_cells
        if not values.ndim or values.dtype.kind not in "fiub" or np.ma.is_masked(field):
            what = "masked" if np.ma.is_masked(field) else f"{values.shape} of {values.dtype}"
            raise RenderError(f"{self.name}: values are {what}; expected a number for each cell")
        values = values.astype(np.float64)
        if len(values) not in (mesh.n_cells, mesh.n_points):
            expected = f"{mesh.n_cells:,} cells or {mesh.n_points:,} points"
            raise RenderError(f"{self.name}: {len(values):,} values cannot be drawn on {expected}")
        if not mesh.n_cells or not on_points:
            return values
        corners, count = values[mesh.connectivity], np.diff(mesh.offsets)
        total = np.add.reduceat(corners, mesh.offsets[:-1])
        return np.asarray(total / count.reshape(-1, *[1] * (values.ndim - 1)))

    def check_shard(self, shard: int) -> int:
        """Return the number of a shard.

        Raises:
            RenderError: it is not the number of a shard.
        """
        if not 0 <= shard < self.k:
            raise RenderError(f"shard {shard} does not exist; shards are 0 to {self.k - 1}")
        return shard


def _segments(lines: Mesh) -> Mesh:
    """Lines of two points each; cell fields are repeated."""
    last = np.zeros(len(lines.connectivity), bool)
    last[lines.offsets[1:] - 1] = True
    first = np.flatnonzero(~last)
    cell = np.repeat(np.arange(lines.n_cells), np.diff(lines.offsets) - 1)
    return Mesh(
        points=lines.points,
        connectivity=np.stack(
            [lines.connectivity[first], lines.connectivity[first + 1]], 1
        ).ravel(),
        offsets=np.arange(0, 2 * len(first) + 1, 2),
        types=np.full(len(first), LINE, np.uint8),
        point_fields=lines.point_fields,
        cell_fields={name: values[cell] for name, values in lines.cell_fields.items()},
        name=lines.name,
    )


class HasSubject(Protocol):
    """Anything that can be drawn, such as a `Partition`."""

    def subject(self) -> Subject:
        """What pictures need of it."""


Drawable: TypeAlias = Subject | HasSubject | Folder | str | Path


def subject_of(what: Drawable | Mesh) -> Subject:
    """The subject of a picture.

    Args:
        what: a subject, an object with a method `subject()` such as a `Partition`, an open folder,
            or the path of a folder.

    Raises:
        RenderError: it is a mesh, which is not partitioned.
        StoreError: the folder is damaged.
    """
    if isinstance(what, Subject):
        return what
    if isinstance(what, (Folder, str, Path)):
        return _of_folder(what if isinstance(what, Folder) else load(what))
    if isinstance(what, Mesh):
        raise RenderError(f"{what.name}: is not partitioned; draw partition(mesh, parts)")
    return what.subject()


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
        mesh=mesh,
    )


def _results(folder: Folder) -> dict[str, Array]:
    """Results that models have stored beside the shards, if complete."""
    found: dict[str, Array] = {}
    for name in folder.puts():
        with suppress(StoreError):
            found |= folder.gather_put(name)
    return found
