"""Store: a folder of shards on disk, manifest.json and one file per shard.

`NAME.shards/manifest.json` says what was cut, how, and at what quality; `shard_00000.safetensors`
holds the geometry, fields and plan of one shard. A folder is written under a temporary name and
renamed when it is complete, so an interrupted writer never leaves a folder that appears complete.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from meshshard.atomic_write import (
    already_exists,
    atomic_folder,
    report_write_errors,
    write_and_sync,
)
from meshshard.errors import MeshError, StoreError, n_of
from meshshard.graph.plan import Plan, received
from meshshard.mesh import Array, Faces, Mesh
from meshshard.mesh.submesh import Piece, assemble
from meshshard.store.manifest import MANIFEST, is_foreign, manifest_of, read_manifest
from meshshard.store.shard_files import (
    crc32,
    header_crc32,
    map_file,
    report_damage,
    write_arrays,
)

__all__ = ["Folder", "load", "write"]


def write(
    path: str | Path,
    mesh: Mesh,
    cut: Mapping[str, Any],
    shards: Iterable[tuple[Plan, Piece]],
    *,
    source: str | Path | None = None,
    force: bool = False,
) -> Path:
    """Write a folder of shards atomically; `Partition.save` calls this.

    Args:
        path: the folder; its name usually ends with `.shards`.
        mesh: the whole mesh or cloud, to describe it in the manifest.
        cut: what else the manifest says: `entity`, `sizes`, `targets`, `halo_depth`, `method`,
            `quality`, `request`, `command`.
        shards: plan and piece of every shard, in order; each is written before the next is taken.
        source: the file that was read; its path, size and sha256 are recorded.
        force: replace an existing folder of shards.

    Returns:
        The folder.

    Raises:
        StoreError: it exists, cannot be written, or a field has a dtype that cannot be stored.
    """
    target = Path(path)
    if target.exists() and not force:
        raise already_exists(target)
    if is_foreign(target):
        raise StoreError(f"{target} exists and is not a folder of shards; choose another name")
    identity = uuid.uuid4().hex
    manifest = manifest_of(mesh, cut, source)
    with atomic_folder(target, force=force) as folder:
        records = [_write_shard(plan, piece, mesh, folder, identity) for plan, piece in shards]
        manifest |= {"id": identity, "shards": records}
        text = json.dumps(manifest, indent=1, ensure_ascii=False, allow_nan=False)
        # a file name that is not valid UTF-8 becomes an escape sequence of JSON
        write_and_sync(folder / MANIFEST, text.encode("utf-8", "backslashreplace"))
    return target


def load(path: str | Path) -> Folder:
    """Open a folder of shards; only the manifest is read.

    Raises:
        StoreError: the folder does not exist, is incomplete or damaged, or was written by a newer
            meshshard.
    """
    folder = Path(path)
    return Folder(folder, read_manifest(folder))


@dataclass(frozen=True, eq=False)
class Folder:
    """A complete folder of shards.

    Attributes:
        path: the folder.
        manifest: the content of manifest.json.
    """

    path: Path
    manifest: dict[str, Any]

    def __repr__(self) -> str:
        rows = n_of(self.sizes.sum(), self.entity)
        return f"Folder({self.path}: {rows} in {n_of(self.k, 'shards')})"

    @property
    def k(self) -> int:
        """Number of shards."""
        return len(self.manifest["sizes"])

    @property
    def entity(self) -> str:
        """What is sharded: "cells" or "points"."""
        return str(self.manifest["entity"])

    @cached_property
    def sizes(self) -> Array:
        """(k,) int64 owned rows of every shard: the sharding shapes."""
        return np.asarray(self.manifest["sizes"], np.int64)

    def arrays(self, shard: int) -> Mapping[str, Array]:
        """All arrays of one shard, memory-mapped: a page is read when it is first accessed.

        Raises:
            StoreError: the file is missing, truncated, damaged or from another folder.
        """
        if not 0 <= shard < self.k:
            raise StoreError(f"{self.path}: has no shard {shard}; shards are 0 to {self.k - 1}")
        record = self.manifest["shards"][shard]
        path = self.path / record["file"]
        arrays, metadata = map_file(path, record["bytes"], record["header"])
        if metadata.get("id") != self.manifest["id"] or metadata.get("shard") != str(shard):
            raise StoreError(f"{path}: belongs to another folder or shard; write the folder again")
        return arrays

    def plan(self, shard: int) -> Plan:
        """The exchange plan and local graph of one shard."""
        arrays = self.arrays(shard)
        names = [n for n in Plan.__dataclass_fields__ if n not in ("shard", "n_owned")]
        plan = {name: arrays[_plan_key(name)] for name in names}
        plan["halo"] = plan["halo"].astype(np.int64)  # the same dtype for every shard
        return Plan(shard=shard, n_owned=int(self.sizes[shard]), **plan)

    def piece(self, shard: int) -> Piece:
        """The geometry and fields of one shard, and the rows of the mesh that they come from."""
        arrays = self.arrays(shard)
        with report_damage(self.path):
            faces = None
            if "faces.offsets" in arrays:
                faces = Faces(*(arrays[f"faces.{name}"] for name in Faces._fields))
            mesh = Mesh(
                points=arrays["points.xyz"],
                connectivity=arrays["cells.connectivity"],
                offsets=arrays["cells.offsets"],
                types=arrays["cells.types"],
                faces=faces,
                point_fields=self._fields(arrays, "points"),
                cell_fields=self._fields(arrays, "cells"),
                cell_origin=arrays.get("cells.file_row"),
                blocks=tuple(self.manifest["blocks"]),
                name=f"{self.manifest['name']} shard {shard}",
            )
            return Piece(mesh, arrays["cells.origin"], arrays["points.origin"])

    def _fields(self, arrays: Mapping[str, Array], on: str) -> dict[str, Array]:
        """Fields of a shard, in the order of the manifest."""
        names = [field["name"] for field in self.manifest["fields"] if field["on"] == on]
        return {name: arrays[f"{on.removesuffix('s')}:{name}"] for name in names}

    def origin(self, shard: int) -> Array:
        """(n_owned,) source row of every owned row: its row in the mesh as read."""
        arrays = self.arrays(shard)
        name = "cells.origin" if self.entity == "cells" else "points.origin"
        return arrays[name][: int(self.sizes[shard])]

    def gather(self) -> Mesh:
        """The whole mesh in source order with all fields, bit for bit as it was read.

        Raises:
            StoreError: a shard is damaged, or the shards do not make up the mesh.
        """
        n_cells, n_points = self.manifest["n_cells"], self.manifest["n_points"]
        for record in self.manifest["shards"]:
            path = self.path / record["file"]
            if crc32(path) != record["crc32"]:
                raise StoreError(f"{path}: its bytes have changed; write the folder again")
        with report_damage(self.path):
            pieces = [self.piece(p) for p in range(self.k)]
            try:
                return assemble(pieces, n_cells, n_points, self.manifest["name"])
            except MeshError as error:
                raise StoreError(f"{self.path}: shards do not fit together: {error}") from None

    def labels(self) -> Array:
        """(n,) int64 shard of every entity, in source order."""
        out = np.empty(int(self.sizes.sum()), np.int64)
        with report_damage(self.path):
            for p in range(self.k):
                out[self.origin(p)] = p
        return out

    def put(self, shard: int, fields: Mapping[str, Array], name: str = "prediction") -> Path:
        """Save results for the owned rows of one shard, as a file beside it; see `gather_put`.

        Args:
            shard: number of the shard.
            fields: arrays of shape (n_owned, …).
            name: name of the set of results; it is complete once every shard has put its part.

        Raises:
            StoreError: an array has another number of rows, or the name or a dtype is not allowed.
        """
        n = int(self.sizes[shard])
        for field, values in fields.items():
            if len(values) != n:
                rows = f"{field!r} has {n_of(len(values), 'rows')}"
                raise StoreError(f"{name}: {rows}, but shard {shard} owns {n:,}; pass owned rows")
        if name == "shard":
            raise StoreError(
                "results cannot be named 'shard', the files of shards are; choose another name"
            )
        path = self.path / _part_name(name, shard)
        with report_write_errors(path):
            write_arrays(path, dict(fields), {"id": self.manifest["id"], "shard": str(shard)})
        return path

    def gather_put(self, name: str = "prediction") -> dict[str, Array]:
        """Results that every shard has put, in source order: name -> (n, …).

        Raises:
            StoreError: the part of a shard is missing, damaged, or has other fields.
        """
        parts = [self._put(name, p) for p in range(self.k)]
        shapes = [{f: (a.dtype, a.shape[1:]) for f, a in part.items()} for part in parts]
        for p, shape in enumerate(shapes):
            if shape != shapes[0]:
                raise StoreError(f"{self.path}: shards 0 and {p} put different fields as {name!r}")
        n = int(self.sizes.sum())
        out = {f: np.empty((n, *shape), dtype) for f, (dtype, shape) in shapes[0].items()}
        for p, part in enumerate(parts):
            for field, values in part.items():
                out[field][self.origin(p)] = values
        return out

    def _put(self, name: str, shard: int) -> Mapping[str, Array]:
        """Results that one shard has put."""
        path = self.path / _part_name(name, shard)
        if not path.exists():
            raise StoreError(
                f"{self.path}: shard {shard} has no results {name!r} yet ({path.name})"
            )
        arrays, metadata = map_file(path, path.stat().st_size)
        if metadata.get("id") != self.manifest["id"] or metadata.get("shard") != str(shard):
            raise StoreError(f"{path}: was made for another folder or shard; predict again")
        if any(a.shape[:1] != (self.sizes[shard],) for a in arrays.values()):
            rows = n_of(self.sizes[shard], "rows")
            raise StoreError(f"{path}: does not hold the {rows} of shard {shard}; predict again")
        return arrays

    def puts(self) -> list[str]:
        """Names of the sets of results in the folder."""
        names = {f.name.rpartition("_")[0] for f in self.path.glob("*_?????.safetensors")}
        return sorted(names - {"shard"})

    def check(self) -> Folder:
        """Verify all checksums and the exchange plan, and return the folder itself.

        Raises:
            StoreError: naming the file or shard that is wrong.
        """
        self.gather()
        plans = [self.plan(p) for p in range(self.k)]
        for plan, ids in zip(plans, received(plans, self.sizes), strict=True):
            if not np.array_equal(ids, plan.halo):
                raise StoreError(f"{self.path}: shard {plan.shard} does not receive its halo rows")
        return self


def _write_shard(
    plan: Plan, piece: Piece, whole: Mesh, folder: Path, identity: str
) -> dict[str, Any]:
    """Write one shard; returns its record for the manifest."""
    mesh = piece.mesh
    arrays: dict[str, Array | None] = {
        "points.xyz": mesh.points,
        "points.origin": piece.points,
        "cells.origin": piece.cells,
        "cells.connectivity": mesh.connectivity,
        "cells.offsets": mesh.offsets,
        "cells.types": mesh.types,
        "cells.file_row": mesh.cell_origin,
    }
    for name in Plan.__dataclass_fields__:
        if name not in ("shard", "n_owned"):
            arrays[_plan_key(name)] = getattr(plan, name)
    if mesh.faces is not None:
        arrays |= {f"faces.{name}": a for name, a in mesh.faces._asdict().items()}
    if whole.weld is not None:
        arrays["points.weld"] = whole.weld[piece.points]
    written = {name: _narrow(a) for name, a in arrays.items() if a is not None}
    written |= {f"point:{name}": a for name, a in mesh.point_fields.items()}
    written |= {f"cell:{name}": a for name, a in mesh.cell_fields.items()}
    path = folder / _part_name("shard", plan.shard)
    write_arrays(path, written, {"id": identity, "shard": str(plan.shard)})
    return {
        "file": path.name,
        "bytes": path.stat().st_size,
        "crc32": crc32(path),
        "header": header_crc32(path),
        "owned": plan.n_owned,
        "halo": len(plan.halo),
        "points": mesh.n_points,
        "cells": mesh.n_cells,
    }


def _plan_key(name: str) -> str:
    """Name of a field of `Plan` in a stored file; `hops` was named `ring` in schema 1."""
    return "plan.ring" if name == "hops" else f"plan.{name}"


def _narrow(array: Array) -> Array:
    """int64 ids as int32 if they fit."""
    if array.dtype == np.int64 and (not len(array) or array.max() < 2**31):
        return array.astype(np.int32)
    return array


def _part_name(name: str, shard: int) -> str:
    if not name.replace("-", "").replace("_", "").isalnum():
        raise StoreError(f"{name!r} cannot be part of a file name; use letters, digits, - and _")
    return f"{name}_{shard:05d}.safetensors"
