"""Manifest: what manifest.json of a folder of shards says; written, read and validated."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from meshshard.errors import StoreError, n_of
from meshshard.mesh import Array, Mesh
from meshshard.store.shard_files import sha256

__all__ = ["MANIFEST", "SCHEMA", "is_foreign", "manifest_of", "read_manifest"]

SCHEMA = 1
MANIFEST = "manifest.json"
PACKAGES = ("meshshard", "numpy", "scipy", "pymetis", "vtk", "safetensors")  # versions recorded

_KEYS = {
    "id": str, "name": str, "kind": str, "entity": str, "sizes": list, "shards": list,
    "n_points": int, "n_cells": int, "halo_depth": int, "blocks": list, "fields": list,
    "method": dict, "quality": dict,
}  # fmt: skip
_SHARD_KEYS = {"file": str, "bytes": int, "crc32": int, "header": int, "points": int, "cells": int}


def manifest_of(
    mesh: Mesh, cut: Mapping[str, Any], source: str | Path | None = None
) -> dict[str, Any]:
    """The manifest of a partitioned mesh, without its shards.

    Args:
        mesh: the whole mesh or cloud.
        cut: how it was cut: `entity`, `sizes`, `targets`, `halo_depth`, `method`, `quality`.
        source: the file that was read; its path, size and sha256 are recorded.
    """
    return {
        "schema": SCHEMA,
        "name": Path(mesh.name).name,
        "kind": mesh.kind,
        "n_points": mesh.n_points,
        "n_cells": mesh.n_cells,
        "points_dtype": str(mesh.points.dtype),
        "offset": mesh.offset.tolist(),
        "welded_points": mesh.n_welded,
        "blocks": list(mesh.blocks),
        "fields": [*_describe(mesh.cell_fields, "cells"), *_describe(mesh.point_fields, "points")],
        "source": None if source is None else _describe_source(Path(source)),
        **cut,
        "versions": _versions(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _describe(fields: Mapping[str, Array], on: str) -> Iterator[dict[str, Any]]:
    for name, values in fields.items():
        width = int(np.prod(values.shape[1:], dtype=int))
        yield {"name": name, "on": on, "dtype": str(values.dtype), "width": width, "unit": None}


def _describe_source(path: Path) -> dict[str, Any]:
    return {"path": str(path), "bytes": path.stat().st_size, "sha256": sha256(path)}


def _versions() -> dict[str, str]:
    import importlib.metadata

    found = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a complete folder of shards, validated.

    Raises:
        StoreError: the folder does not exist, is incomplete or damaged, or has another schema.
    """
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
        manifest = json.loads(text)
    except (FileNotFoundError, NotADirectoryError):
        raise StoreError(f"{folder}: {_what_is_there(folder)}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"{folder}: manifest.json is damaged ({error}); write it again") from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("schema"), int):
        raise StoreError(f"{folder}: manifest.json is not the manifest of a folder of shards")
    if manifest["schema"] != SCHEMA:
        raise StoreError(
            f"{folder}: has schema {manifest['schema']}, this meshshard reads {SCHEMA}; "
            "write it again, or use the version that wrote it"
        )
    wrong = _first_error(manifest)
    if wrong:
        raise StoreError(f"{folder}: manifest.json is damaged ({wrong}); write the folder again")
    return manifest


def _what_is_there(path: Path) -> str:
    """What exists at a path where a folder of shards was expected, and what to do."""
    if path.is_file():
        return "is a file, not a folder of shards; make one with: meshshard partition"
    inside = next(iter(sorted(path.glob("*.shards"))), None) if path.is_dir() else None
    if inside is not None:
        return f"has no manifest.json; did you mean {inside}?"
    what = "has no manifest.json" if path.is_dir() else "does not exist"
    return f"{what}; write it with: meshshard partition"


def _first_error(manifest: dict[str, Any]) -> str:
    """The first thing that is wrong in a manifest; empty if there is none."""
    for key, kind in _KEYS.items():
        if not isinstance(manifest.get(key), kind):
            return f"no {key!r} of type {kind.__name__}"
    shards, sizes, entity = manifest["shards"], manifest["sizes"], manifest["entity"]
    for i, shard in enumerate(shards):
        for key, kind in _SHARD_KEYS.items():
            if not isinstance(shard, dict) or not isinstance(shard.get(key), kind):
                return f"shard {i} has no {key!r} of type {kind.__name__}"
    if not shards or len(sizes) != len(shards):
        return f"{n_of(len(sizes), 'sizes')} for {n_of(len(shards), 'shards')}"
    if entity not in ("cells", "points"):
        return f"entity {entity!r}"
    if not all(isinstance(n, int) and n >= 0 for n in sizes):
        return "sizes are not all integers of 0 or more"
    if sum(sizes) != manifest[f"n_{entity}"]:
        return f"sizes add up to {sum(sizes)} of {manifest[f'n_{entity}']} {entity}"
    held = {key: sum(shard[key] for shard in shards) for key in ("points", "cells")}
    if held["cells"] != manifest["n_cells"] or not 0 <= manifest["n_points"] <= held["points"]:
        return f"shards hold {held['points']} points and {held['cells']} cells"
    return "" if isinstance(manifest.get("source"), dict | None) else "source is not an object"


def is_foreign(target: Path) -> bool:
    """Whether something exists at `target` that is not a folder of shards.

    Another writer may replace the folder at any moment, so a manifest counts as missing only if
    the same folder was there before and after the check.
    """
    while (before := _identity(target)) and not (target / MANIFEST).exists():
        if before == _identity(target):
            return True
    return False


def _identity(path: Path) -> tuple[int, int, int] | None:
    """Identifies a folder even if its name and inode are reused; None if it does not exist."""
    try:
        found = path.stat()
    except OSError:  # removed meanwhile, or not accessible: writing reports that
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns
