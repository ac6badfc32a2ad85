"""Store: a folder of shards that outlives the process: manifest.json and one file a shard.

`NAME.shards/manifest.json` says what was cut, how and how well; `shard_00000.safetensors` holds the
geometry, fields and plan of one shard. A folder is written under a hidden name and renamed when it
is complete, so a writer that is killed leaves nothing that looks finished.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from meshshard.atomic_write import (
    MANIFEST,
    crc32,
    damage_is_loud,
    header_crc32,
    hidden,
    is_foreign,
    map_file,
    read_manifest,
    there_already,
    write_arrays,
    write_through,
    writing,
)
from meshshard.errors import MeshError, StoreError, n_of
from meshshard.graph.plan import Plan, received
from meshshard.mesh import Array, Faces, Mesh
from meshshard.mesh.submesh import Piece, assemble, pieces_of
from meshshard.partitioning.partition import Partition

__all__ = ["SCHEMA", "Folder", "load", "plain", "save", "sha256"]

SCHEMA = 1
CHECKED = ("meshshard", "numpy", "scipy", "pymetis", "vtk", "safetensors")


def save(
    partition: Partition,
    path: str | Path,
    *,
    source: str | Path | None = None,
    request: Mapping[str, Any] | None = None,
    command: str = "",
    force: bool = False,
) -> Path:
    """Write a partition as a folder that each rank can open alone.

    Args:
        partition: of a mesh or cloud.
        path: the folder; `.shards` is its usual ending.
        source: the file that was read; its name and sha256 are recorded.
        request: what was asked for, so that the same request can be recognized later.
        command: what was typed, for the record.
        force: replace a folder that is there.

    Returns:
        The folder.

    Raises:
        StoreError: the folder is there already, or the partition is of a bare graph.
    """
    mesh = partition.mesh
    if mesh is None:
        raise StoreError("a bare graph has no geometry to store; partition a mesh or a cloud")
    target = Path(path)
    if target.exists() and not force:
        raise there_already(target)
    if is_foreign(target):
        raise StoreError(f"{target} is there and no folder of shards; choose another name")
    identity = uuid.uuid4().hex
    manifest = _manifest(partition, source)
    with hidden(target, force=force) as folder:
        records = [
            _write_shard(partition.plan(p), piece, mesh, folder, identity)
            for p, piece in enumerate(pieces_of(partition))
        ]
        manifest |= {"request": dict(request or {}), "command": command}
        manifest |= {"id": identity, "shards": records}
        text = json.dumps(manifest, indent=1, ensure_ascii=False, allow_nan=False)
        # a file name that is no UTF-8 becomes an escape that JSON knows
        write_through(folder / MANIFEST, text.encode("utf-8", "backslashreplace"))
    return target


def load(path: str | Path) -> Folder:
    """Open a folder of shards; only the manifest is read.

    Raises:
        StoreError: no such folder, not finished, damaged, or written by a newer meshshard.
    """
    folder = Path(path)
    return Folder(folder, read_manifest(folder, SCHEMA))


@dataclass(frozen=True, eq=False)
class Folder:
    """A finished folder of shards.

    Attributes:
        path: where it is.
        manifest: what manifest.json says.
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
        """What a row is: "cells" or "points"."""
        return str(self.manifest["entity"])

    @cached_property
    def sizes(self) -> Array:
        """(k,) owned rows of every shard: the sharding shapes."""
        return np.asarray(self.manifest["sizes"], np.int64)

    def arrays(self, shard: int) -> Mapping[str, Array]:
        """Every array of one shard, mapped from its file; nothing is read until it is touched.

        Raises:
            StoreError: the file is missing, cut short, damaged or from another folder.
        """
        if not 0 <= shard < self.k:
            raise StoreError(f"{self.path}: has no shard {shard}; they are 0 to {self.k - 1}")
        record = self.manifest["shards"][shard]
        path = self.path / record["file"]
        arrays, metadata = map_file(path, record["bytes"], record["header"])
        if metadata.get("id") != self.manifest["id"] or metadata.get("shard") != str(shard):
            raise StoreError(f"{path}: belongs to another folder or shard; write the folder again")
        return arrays

    def plan(self, shard: int) -> Plan:
        """The exchange plan and local edges of one shard."""
        arrays = self.arrays(shard)
        names = [n for n in Plan.__dataclass_fields__ if n not in ("shard", "n_owned")]
        plan = {name: arrays[_plan_key(name)] for name in names}
        plan["halo"] = plan["halo"].astype(np.int64)  # ids of any shard have one type
        return Plan(shard=shard, n_owned=int(self.sizes[shard]), **plan)

    def piece(self, shard: int) -> Piece:
        """The geometry and fields of one shard, and the rows of the mesh they come from."""
        arrays = self.arrays(shard)
        with damage_is_loud(self.path):
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
        """Fields of a shard, in the order of the file."""
        names = [field["name"] for field in self.manifest["fields"] if field["on"] == on]
        return {name: arrays[f"{on.removesuffix('s')}:{name}"] for name in names}

    def origin(self, shard: int) -> Array:
        """(n_owned,) row in the mesh of every owned row."""
        arrays = self.arrays(shard)
        name = "cells.origin" if self.entity == "cells" else "points.origin"
        return arrays[name][: int(self.sizes[shard])]

    def gather(self) -> Mesh:
        """The whole mesh in the order of the file, with all fields, bit for bit.

        Raises:
            StoreError: a shard is damaged, or shards do not make up the mesh.
        """
        n_cells, n_points = self.manifest["n_cells"], self.manifest["n_points"]
        for record in self.manifest["shards"]:
            path = self.path / record["file"]
            if crc32(path) != record["crc32"]:
                raise StoreError(f"{path}: its bytes have changed; write the folder again")
        with damage_is_loud(self.path):
            pieces = [self.piece(p) for p in range(self.k)]
            try:
                return assemble(pieces, n_cells, n_points, self.manifest["name"])
            except MeshError as error:
                raise StoreError(f"{self.path}: shards do not fit together: {error}") from None

    def labels(self) -> Array:
        """(n,) int64 shard of every entity, in the order of the file."""
        out = np.empty(int(self.sizes.sum()), np.int64)
        with damage_is_loud(self.path):
            for p in range(self.k):
                out[self.origin(p)] = p
        return out

    def put(self, shard: int, fields: Mapping[str, Array], name: str = "prediction") -> Path:
        """Save fields of one shard's owned rows beside it: results to be gathered later.

        Args:
            shard: its number.
            fields: arrays with a row for every owned row.
            name: of the set; each set is complete once every shard has put its part.

        Raises:
            StoreError: an array has another number of rows.
        """
        n = int(self.sizes[shard])
        for field, values in fields.items():
            if len(values) != n:
                rows = f"{field!r} has {n_of(len(values), 'rows')}"
                raise StoreError(f"{name}: {rows}, shard {shard} owns {n}")
        if name == "shard":
            raise StoreError("a set of results cannot be called 'shard': the shards are")
        path = self.path / _part_name(name, shard)
        with writing(path):
            write_arrays(path, dict(fields), {"id": self.manifest["id"], "shard": str(shard)})
        return path

    def gather_put(self, name: str = "prediction") -> dict[str, Array]:
        """Fields that all shards have put, each in the order of the file.

        Raises:
            StoreError: naming the shard whose part is missing or does not fit.
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
        """Fields that one shard has put."""
        path = self.path / _part_name(name, shard)
        if not path.exists():
            raise StoreError(f"{self.path}: shard {shard} has no {name!r} yet ({path.name})")
        arrays, metadata = map_file(path, path.stat().st_size)
        if metadata.get("id") != self.manifest["id"] or metadata.get("shard") != str(shard):
            raise StoreError(f"{path}: was made for another folder or shard; predict again")
        if any(a.shape[:1] != (self.sizes[shard],) for a in arrays.values()):
            raise StoreError(f"{path}: has not {n_of(self.sizes[shard], 'rows')}; predict again")
        return arrays

    def puts(self) -> list[str]:
        """Names of the sets of results that lie in the folder."""
        names = {f.name.rpartition("_")[0] for f in self.path.glob("*_?????.safetensors")}
        return sorted(names - {"shard"})

    def check(self) -> Folder:
        """The folder itself, once every byte and the whole plan are proved.

        Raises:
            StoreError: naming the file or shard that is wrong.
        """
        self.gather()
        plans = [self.plan(p) for p in range(self.k)]
        for plan, ids in zip(plans, received(plans, self.sizes), strict=True):
            if not np.array_equal(ids, plan.halo):
                raise StoreError(f"{self.path}: shard {plan.shard} is not sent the rows it needs")
        return self


def plain(value: Any) -> Any:
    """What a value is after a trip through JSON: tuples are lists."""
    return json.loads(json.dumps(value))


def sha256(path: str | Path) -> str:
    """Hex digest of a file, read in blocks."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_shard(
    plan: Plan, piece: Piece, whole: Mesh, folder: Path, identity: str
) -> dict[str, Any]:
    """Write one shard; what the manifest says about it."""
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
    """Name of a plan's array in a stored file; `hops` was called `ring` when the format was set."""
    return "plan.ring" if name == "hops" else f"plan.{name}"


def _narrow(array: Array) -> Array:
    """Ids as int32 where they fit: half the bytes."""
    if array.dtype == np.int64 and (not len(array) or array.max() < 2**31):
        return array.astype(np.int32)
    return array


def _manifest(partition: Partition, source: str | Path | None) -> dict[str, Any]:
    """What manifest.json says, apart from the shards."""
    mesh = partition.mesh
    assert mesh is not None
    return {
        "schema": SCHEMA,
        "name": Path(mesh.name).name,
        "kind": mesh.kind,
        "entity": partition.entity,
        "sizes": partition.sizes.tolist(),
        "targets": None if partition.targets is None else partition.targets.tolist(),
        "halo_depth": partition.halo.depth,
        "n_points": mesh.n_points,
        "n_cells": mesh.n_cells,
        "points_dtype": str(mesh.points.dtype),
        "offset": mesh.offset.tolist(),
        "welded_points": mesh.n_welded,
        "blocks": list(mesh.blocks),
        "fields": [*_describe(mesh.cell_fields, "cells"), *_describe(mesh.point_fields, "points")],
        "source": _describe_source(source),
        "method": partition.method,
        "quality": partition.quality.as_dict(),
        "versions": _versions(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _describe(fields: Mapping[str, Array], on: str) -> Iterator[dict[str, Any]]:
    for name, values in fields.items():
        width = int(np.prod(values.shape[1:], dtype=int))
        yield {"name": name, "on": on, "dtype": str(values.dtype), "width": width, "unit": None}


def _describe_source(source: str | Path | None) -> dict[str, Any] | None:
    if source is None:
        return None
    path = Path(source)
    return {"path": str(path), "bytes": path.stat().st_size, "sha256": sha256(path)}


def _versions() -> dict[str, str]:
    found = {}
    for package in CHECKED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _part_name(name: str, shard: int) -> str:
    if not name.replace("-", "").replace("_", "").isalnum():
        raise StoreError(f"{name!r} cannot name a file; letters, digits, - and _ can")
    return f"{name}_{shard:05d}.safetensors"
