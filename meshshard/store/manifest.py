"""Manifest: what manifest.json of a folder of shards says; written, read and validated."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from meshshard.errors import StoreError, n_of
from meshshard.mesh import Array, Mesh
from meshshard.store.shard_files import part_name, read_regular, sha256

__all__ = ["MANIFEST", "SCHEMA", "content_of", "manifest_of", "read_manifest", "why_foreign"]

SCHEMA = 2
MANIFEST = "manifest.json"
PACKAGES = ("meshshard", "numpy", "scipy", "pymetis", "vtk")  # versions recorded

_KEYS = {
    "id": str, "name": str, "kind": str, "entity": str, "sizes": list, "shards": list,
    "n_points": int, "n_cells": int, "halo_depth": int, "blocks": list, "fields": list,
    "method": dict, "quality": dict, "points_dtype": str, "content": str,
}  # fmt: skip
_SHARD_KEYS = {
    "file": str, "bytes": int, "crc32": int, "header": int, "owned": int, "halo": int,
    "points": int, "cells": int,
}  # fmt: skip
_FIELD_KEYS = {"name": str, "on": str, "dtype": str, "width": int}
_CONTENT = (
    "kind", "entity", "sizes", "halo_depth", "n_points", "n_cells", "points_dtype", "blocks",
    "fields",
)  # fmt: skip
OWN_FILES = re.compile(r"manifest\.json|[\w-]+_\d{5}\.safetensors|\.writing\..*")
SMALL, PER_FILE = 1 << 22, 1 << 10  # bytes: a manifest has at most one, and the other per file


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
        "points_dtype": str(mesh.points.dtype.newbyteorder("=")),
        "offset": mesh.offset.tolist(),
        "welded_points": mesh.n_welded,
        "blocks": list(mesh.blocks),
        "fields": [*_describe(mesh.cell_fields, "cells"), *_describe(mesh.point_fields, "points")],
        "source": None if source is None else _describe_source(Path(source)),
        **cut,
        "versions": _versions(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def content_of(manifest: Mapping[str, Any], shards: Iterable[str]) -> str:
    """SHA-256 of what a folder holds: equal for equal content, whatever its `id` and its date.

    Args:
        manifest: the manifest of the folder.
        shards: `Written.content` of each shard.
    """
    said = [{key: manifest[key] for key in _CONTENT}, *shards]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _describe(fields: Mapping[str, Array], on: str) -> Iterator[dict[str, Any]]:
    for name, values in fields.items():
        width = int(np.prod(values.shape[1:], dtype=int))
        dtype = str(values.dtype.newbyteorder("="))  # in files all are little-endian
        yield {"name": name, "on": on, "dtype": dtype, "width": width, "unit": None}


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
    if not (folder / MANIFEST).exists():
        raise StoreError(f"{folder}: {_what_is_there(folder)}")
    manifest = _parsed(folder)
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


def _parsed(folder: Path) -> Any:
    """The content of manifest.json; its size is bounded by the number of files beside it."""
    try:
        text = read_regular(folder / MANIFEST, SMALL + PER_FILE * len(os.listdir(folder)))  # noqa: PTH208
        return json.loads(text)
    except (OSError, ValueError, RecursionError, StoreError) as error:
        why = str(error).removesuffix("; write the folder again")
        raise StoreError(f"{folder}: manifest.json is damaged ({why}); write it again") from None


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
    wrong = _wrong_entry("shard", shards, _SHARD_KEYS) or _wrong_entry(
        "field", manifest["fields"], _FIELD_KEYS
    )
    if wrong or not all(isinstance(name, str) for name in manifest["blocks"]):
        return wrong or "blocks are not all names"
    for i, shard in enumerate(shards):
        if shard["file"] != part_name("shard", i):
            return f"the file of shard {i} is {shard['file']!r}, not {part_name('shard', i)}"
    if not shards or len(sizes) != len(shards):
        return f"{n_of(len(sizes), 'sizes')} for {n_of(len(shards), 'shards')}"
    if entity not in ("cells", "points"):
        return f"entity {entity!r}"
    if not all(isinstance(n, int) and n >= 0 for n in sizes):
        return "sizes are not all integers of 0 or more"
    if [shard["owned"] for shard in shards] != sizes:
        return "sizes are not the owned rows of the shards"
    if sum(sizes) != manifest[f"n_{entity}"]:
        return f"sizes add up to {sum(sizes)} of {manifest[f'n_{entity}']} {entity}"
    held = {key: sum(shard[key] for shard in shards) for key in ("points", "cells")}
    if held["cells"] != manifest["n_cells"] or not 0 <= manifest["n_points"] <= held["points"]:
        return f"shards hold {held['points']} points and {held['cells']} cells"
    return "" if isinstance(manifest.get("source"), dict | None) else "source is not an object"


def _wrong_entry(what: str, entries: list[Any], keys: Mapping[str, type]) -> str:
    """The first of a list of objects that lacks a key; empty if none does."""
    for i, entry in enumerate(entries):
        for key, kind in keys.items():
            if not isinstance(entry, dict) or not isinstance(entry.get(key), kind):
                return f"{what} {i} has no {key!r} of type {kind.__name__}"
    return ""


def why_foreign(target: Path) -> str:
    """Why what exists at `target` must not be replaced; empty if it may be, or nothing exists.

    Another writer may replace the folder at any moment, so only a finding counts with the same
    folder before and after it.
    """
    while before := _identity(target):
        why = _not_ours(target)
        if not why or before == _identity(target):
            return why
    return ""


def _not_ours(target: Path) -> str:
    """What shows that meshshard has not written a folder; empty if nothing does."""
    try:
        manifest = _parsed(target)
        files = os.listdir(target)  # noqa: PTH208 - names only
    except (OSError, StoreError):
        return "is not a folder of shards"
    if not isinstance(manifest, dict) or not {"schema", "id", "sizes", "shards"} <= manifest.keys():
        return "is not a folder of shards"
    others = sorted(name for name in files if not OWN_FILES.fullmatch(name))
    return f"holds {others[0]!r}, which is not part of a folder of shards" if others else ""


def _identity(path: Path) -> tuple[int, int, int] | None:
    """Identifies a folder even if its name and inode are reused; None if it does not exist."""
    try:
        found = path.stat()
    except OSError:  # removed meanwhile, or not accessible: writing reports that
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns
