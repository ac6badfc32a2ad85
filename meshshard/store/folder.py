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
    atomic_file,
    atomic_folder,
    report_write_errors,
    write_and_sync,
)
from meshshard.errors import StoreError, n_of
from meshshard.graph.plan import Plan, check_plan, received
from meshshard.mesh import Array, Faces, Mesh
from meshshard.mesh.checks import warn
from meshshard.mesh.submesh import Piece, assemble
from meshshard.store.manifest import (
    MANIFEST,
    content_of,
    manifest_of,
    read_manifest,
    why_foreign,
)
from meshshard.store.shard_arrays import check_piece, wrong_array
from meshshard.store.shard_files import (
    Mapped,
    arrays_crc32,
    map_file,
    part_name,
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
    if why := why_foreign(target):
        raise StoreError(f"{target} {why}; remove it yourself, or choose another name")
    if target.exists() and (names := results_in(target)):
        warn(f"{target}: the results {', '.join(names)} are removed with the folder they are in")
    identity = uuid.uuid4().hex
    manifest = manifest_of(mesh, cut, source)
    with atomic_folder(target, force=force) as folder:
        records = [_write_shard(plan, piece, mesh, folder, identity) for plan, piece in shards]
        content = content_of(manifest, [record.pop("content") for record in records])
        manifest |= {"id": identity, "content": content, "shards": records}
        text = json.dumps(manifest, indent=1, ensure_ascii=False, allow_nan=False)
        # a file name that is not valid UTF-8 becomes an escape sequence of JSON
        write_and_sync(folder / MANIFEST, text.encode("utf-8", "backslashreplace"))
        _check_sizes(folder, records)
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
        return self._mapped(shard).arrays

    def _mapped(self, shard: int) -> Mapped:
        record = self.manifest["shards"][shard]
        path = self.path / record["file"]
        mapped = map_file(path, record["bytes"], record["header"])
        said = mapped.metadata
        if said.get("id") != self.manifest["id"] or said.get("shard") != str(shard):
            raise StoreError(f"{path}: belongs to another folder or shard; write the folder again")
        with report_damage(path):
            wrong = wrong_array(mapped.arrays, self.manifest, shard)
        if wrong:
            raise StoreError(f"{path}: is damaged ({wrong}); write the folder again")
        return mapped

    def plan(self, shard: int) -> Plan:
        """The exchange plan and local graph of one shard."""
        arrays = self.arrays(shard)
        names = [n for n in Plan.__dataclass_fields__ if n not in ("shard", "n_owned")]
        plan = {name: arrays[f"plan.{name}"] for name in names}
        plan["halo"] = plan["halo"].astype(np.int64)  # the same dtype for every shard
        with report_damage(self.path):
            return check_plan(Plan(shard=shard, n_owned=int(self.sizes[shard]), **plan), self.sizes)

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
            piece = Piece(mesh, arrays["cells.origin"], arrays["points.origin"])
            return check_piece(
                piece,
                self.manifest["n_cells"],
                self.manifest["n_points"],
                arrays.get("points.weld"),
            )

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
            if arrays_crc32(path) != record["crc32"]:
                raise StoreError(f"{path}: its bytes have changed; write the folder again")
        with report_damage(self.path):
            pieces = [self.piece(p) for p in range(self.k)]
            return assemble(pieces, n_cells, n_points, self.manifest["name"])

    def labels(self) -> Array:
        """(n,) int64 shard of every entity, in source order."""
        rows = [self.origin(p) for p in range(self.k)]  # as many as the manifest says
        out = np.full(int(self.sizes.sum()), -1)
        with report_damage(self.path):
            for p, of_shard in enumerate(rows):
                out[of_shard] = p
            if (out < 0).any():
                raise ValueError(f"no shard has row {np.argmin(out)}")
        return out

    def put(self, shard: int, fields: Mapping[str, Array], name: str = "prediction") -> Path:
        """Save results for the owned rows of one shard, as a file beside it; see `gather_put`.

        Args:
            shard: number of the shard.
            fields: arrays of shape (n_owned, …).
            name: name of the set of results; it is complete once every shard has put its part.

        Raises:
            StoreError: the shard does not exist, an array has another number of rows, or the name
                or a dtype is not allowed.
        """
        if not 0 <= shard < self.k:
            raise StoreError(f"{self.path}: has no shard {shard}; shards are 0 to {self.k - 1}")
        n = int(self.sizes[shard])
        if masked := [field for field, values in fields.items() if np.ma.is_masked(values)]:
            raise StoreError(f"{name}: {masked[0]!r} has masked values; replace with .filled(…)")
        fields = {field: np.atleast_1d(values) for field, values in fields.items()}
        for field, values in fields.items():
            if len(values) != n:
                rows = f"{field!r} has {n_of(len(values), 'rows')}"
                raise StoreError(f"{name}: {rows}, but shard {shard} owns {n:,}; pass owned rows")
        if name == "shard":
            raise StoreError(
                "results cannot be named 'shard', the files of shards are; choose another name"
            )
        path = self.path / part_name(name, shard)
        with report_write_errors(path), atomic_file(path) as part:
            write_arrays(part, fields, {"id": self.manifest["id"], "shard": str(shard)})
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
        path = self.path / part_name(name, shard)
        if not path.exists():
            raise StoreError(
                f"{self.path}: shard {shard} has no results {name!r} yet ({path.name})"
            )
        arrays, metadata, _ = map_file(path)
        if metadata.get("id") != self.manifest["id"] or metadata.get("shard") != str(shard):
            raise StoreError(f"{path}: was made for another folder or shard; predict again")
        if any(a.shape[:1] != (self.sizes[shard],) for a in arrays.values()):
            rows = n_of(self.sizes[shard], "rows")
            raise StoreError(f"{path}: does not hold the {rows} of shard {shard}; predict again")
        return arrays

    def puts(self) -> list[str]:
        """Names of the sets of results in the folder."""
        return results_in(self.path)

    def check(self) -> Folder:
        """Verify all checksums, arrays and the exchange plan, and return the folder itself.

        Raises:
            StoreError: naming the file or shard that is wrong.
        """
        self.gather()
        self.labels()
        plans = [self.plan(p) for p in range(self.k)]
        for plan, ids in zip(plans, received(plans, self.sizes), strict=True):
            if not np.array_equal(ids, plan.halo):
                raise StoreError(f"{self.path}: shard {plan.shard} does not receive its halo rows")
        crcs = [record["crc32"] for record in self.manifest["shards"]]
        content = content_of(
            self.manifest, [self._mapped(p).content(c) for p, c in enumerate(crcs)]
        )
        if content != self.manifest["content"]:
            raise StoreError(f"{self.path}: manifest.json has changed; write the folder again")
        return self


def results_in(folder: Path) -> list[str]:
    """Names of the sets of results in a folder."""
    names = {f.name.rpartition("_")[0] for f in folder.glob("[!.]*_?????.safetensors")}
    return sorted(names - {"shard"})


def _check_sizes(folder: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Verify that all shards are there before the folder gets its name.

    Raises:
        OSError: another program has removed or changed one.
    """
    for record in records:
        found = (folder / record["file"]).stat().st_size
        if found != record["bytes"]:
            raise OSError(f"{record['file']} has {found} bytes instead of {record['bytes']}")


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
            arrays[f"plan.{name}"] = getattr(plan, name)
    if mesh.faces is not None:
        arrays |= {f"faces.{name}": a for name, a in mesh.faces._asdict().items()}
    if whole.weld is not None:
        arrays["points.weld"] = whole.weld[piece.points]
    written = {name: _narrow(a) for name, a in arrays.items() if a is not None}
    written |= {f"point:{name}": a for name, a in mesh.point_fields.items()}
    written |= {f"cell:{name}": a for name, a in mesh.cell_fields.items()}
    path = folder / part_name("shard", plan.shard)
    made = write_arrays(path, written, {"id": identity, "shard": str(plan.shard)})
    counts = {"owned": plan.n_owned, "halo": len(plan.halo)}
    counts |= {"points": mesh.n_points, "cells": mesh.n_cells}
    return {"file": path.name, **made._asdict(), **counts}


def _narrow(array: Array) -> Array:
    """int64 ids as int32 if they fit."""
    if array.dtype == np.int64 and (not len(array) or array.max() < 2**31):
        return array.astype(np.int32)
    return array
