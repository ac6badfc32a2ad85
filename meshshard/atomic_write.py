"""Files of a store: written whole or not at all, mapped without a copy, checked byte for byte."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import threading
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from meshshard.errors import StoreError, n_of
from meshshard.mesh import Array

__all__ = [
    "crc32",
    "damage_is_loud",
    "header_crc32",
    "hidden",
    "is_foreign",
    "map_file",
    "read_manifest",
    "replacing",
    "there_already",
    "write_arrays",
    "write_through",
    "writing",
]

MANIFEST = "manifest.json"


@contextlib.contextmanager
def writing(target: Path) -> Iterator[None]:
    """Within it, what the system refuses becomes one line that names the target.

    Raises:
        StoreError: no room, no right, a file in the way.
    """
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{target}: cannot be written ({error.strerror or error}); "
            "make room, or write to another directory"
        ) from None


@contextlib.contextmanager
def damage_is_loud(path: Path) -> Iterator[None]:
    """Within it, what cannot be made sense of is said to be damage.

    Raises:
        StoreError: naming the path.
    """
    try:
        yield
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError,
            MemoryError) as error:  # fmt: skip
        raise StoreError(
            f"{path}: is damaged ({type(error).__name__}: {error}); write the folder again"
        ) from None


@contextlib.contextmanager
def hidden(target: Path, *, force: bool) -> Iterator[Path]:
    """A folder under a hidden name that becomes `target` at the end, or disappears.

    Raises:
        StoreError: it cannot be written, or `target` has come into being and is not to be replaced.
    """
    folder = _beside(target, "writing")
    with writing(target):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(target)
            folder.mkdir()
            yield folder
            _take_place(folder, target, force)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def is_foreign(target: Path) -> bool:
    """Whether something is there that is no folder of shards.

    Another writer may put its folder in the place of this one at any moment, so a manifest is
    missing only if the same thing was there before and after the look.
    """
    while (before := _identity(target)) and not (target / MANIFEST).exists():
        if before == _identity(target):
            return True
    return False


def _identity(path: Path) -> tuple[int, int, int] | None:
    """What tells one folder from another that took its name: an inode is soon used again."""
    try:
        found = path.stat()
    except OSError:  # gone at this moment, or what writing will say
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns


def there_already(target: Path) -> StoreError:
    """The error for a folder that nobody has asked to replace."""
    return StoreError(
        f"{target} is there already; replace it with force=True (--force in the shell)"
    )


def _take_place(folder: Path, target: Path, force: bool) -> None:
    """Rename a folder to its target; again where another writer was faster."""
    olds: list[Path] = []
    placed = False
    try:
        while not _renamed(folder, target):
            if not force:
                raise there_already(target)
            olds.append(_beside(target, "old"))
            with contextlib.suppress(FileNotFoundError):
                target.rename(olds[-1])
        placed = True
    finally:
        if olds and not placed and not target.exists():
            with contextlib.suppress(FileNotFoundError):  # stopped between the two: it comes back
                _renamed(olds.pop(), target)
        for old in olds:
            _discard(old)


def _renamed(folder: Path, target: Path) -> bool:
    """Rename, unless something is in the way."""
    try:
        folder.rename(target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise
        return False
    return True


def _beside(target: Path, what: str) -> Path:
    """A hidden name next to the target, of this process and nobody else."""
    return target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.{what}")


def _remove_leftovers(target: Path) -> None:
    """Hidden folders of writers that are gone."""
    for left in target.parent.iterdir():
        words = left.name.removeprefix(f".{target.name}.").split(".")
        if len(words) != 2 or words[1] not in ("writing", "old") or left.name[:1] != ".":
            continue
        pid = words[0].partition("-")[0]
        if pid.isdecimal() and not _alive(int(pid)):
            _discard(left)


def _discard(folder: Path) -> None:
    """Remove a folder, or the link to one."""
    if folder.is_symlink():
        folder.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A hidden name beside `path` to write to; it becomes `path` at the end, or disappears."""
    token = f"{threading.get_ident()}.{os.getpid()}"
    part = path.with_name(f".{path.name[:40]}.{token}.writing")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_arrays(path: Path, arrays: dict[str, Array], metadata: dict[str, str]) -> None:
    """One safetensors file, under its name only once it is whole.

    Raises:
        StoreError: an array of a type or name that the format lacks.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    native = {name: _storable(name, a) for name, a in arrays.items()}
    try:
        with replacing(path) as part:
            part.touch()
            mode = part.stat().st_mode
            save_file(native, part, metadata)
            part.chmod(mode)  # safetensors leaves it to its owner alone
    except SafetensorError as error:  # it wraps what the system said
        raise OSError(str(error)) from None


def _storable(name: str, array: Array) -> Array:
    """Contiguous and little-endian, of a type that the format has."""
    little = array.dtype.newbyteorder("<")
    if little not in [np.dtype(code) for code in _DTYPES.values()]:
        raise StoreError(f"array {name!r} of type {array.dtype} cannot be stored; convert it")
    if name == "__metadata__":
        raise StoreError(f"no array can be called {name!r}; rename it")
    return np.ascontiguousarray(array, little)


def write_through(path: Path, data: bytes) -> None:
    """Write bytes and wait until they are on the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def crc32(path: Path) -> int:
    """Checksum of a file.

    Raises:
        StoreError: it cannot be read.
    """
    crc = 0
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                crc = zlib.crc32(block, crc)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error}); write the folder again") from None
    return crc


_DTYPES = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4",
    "U64": "<u8", "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8",
}  # fmt: skip


def map_file(
    path: Path, size: int, header: int | None = None
) -> tuple[dict[str, Array], dict[str, str]]:
    """Arrays of a safetensors file as views of one map, and its metadata.

    The library's numpy loader copies every tensor; a rank should hold what it touches only.

    Args:
        path: the file.
        size: bytes that it must have.
        header: checksum that its header must have, where one is known.

    Raises:
        StoreError: the file is missing, has another size, or its header makes no sense.
    """
    try:
        whole = np.memmap(path, np.uint8, "r")
    except FileNotFoundError:
        raise StoreError(f"{path}: is missing; write the folder again") from None
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: cannot be mapped ({error}); write the folder again") from None
    if len(whole) != size or size < 8:
        raise StoreError(
            f"{path}: has {len(whole)} bytes instead of {size}; write the folder again"
        )
    start = 8 + int.from_bytes(whole[:8].tobytes(), "little")
    head = whole[8:start].tobytes()
    if header is not None and zlib.crc32(head) != header:
        raise StoreError(f"{path}: its header has changed; write the folder again")
    with damage_is_loud(path):
        entries = json.loads(head)
        metadata = dict(entries.pop("__metadata__", {}))
        return dict(_views(np.asarray(whole[start:]), entries.items())), metadata


def header_crc32(path: Path) -> int:
    """Checksum of what a safetensors file says about its arrays."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return zlib.crc32(file.read(length))


def _views(data: Array, entries: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Array]]:
    for name, entry in entries:
        first, last = entry["data_offsets"]
        yield name, data[first:last].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])


_KEYS = {
    "id": str, "name": str, "kind": str, "entity": str, "sizes": list, "shards": list,
    "n_points": int, "n_cells": int, "halo_depth": int, "blocks": list, "fields": list,
    "method": dict, "quality": dict,
}  # fmt: skip
_SHARD_KEYS = {"file": str, "bytes": int, "crc32": int, "header": int, "points": int, "cells": int}


def read_manifest(folder: Path, schema: int) -> dict[str, Any]:
    """What manifest.json of a finished folder says, once it makes sense.

    Raises:
        StoreError: no such folder, not finished, damaged, or of another schema.
    """
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
        manifest = json.loads(text)
    except (FileNotFoundError, NotADirectoryError):
        raise StoreError(f"{folder}: {_what_it_is(folder)}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"{folder}: manifest.json is damaged ({error}); write it again") from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("schema"), int):
        raise StoreError(f"{folder}: manifest.json is no manifest of shards")
    if manifest["schema"] != schema:
        raise StoreError(
            f"{folder}: has schema {manifest['schema']}, this meshshard reads {schema}; "
            "write it again, or use the version that wrote it"
        )
    wrong = _nonsense(manifest)
    if wrong:
        raise StoreError(f"{folder}: manifest.json is damaged ({wrong}); write the folder again")
    return manifest


def _what_it_is(path: Path) -> str:
    """What is at a path where a folder of shards was expected, and what to do."""
    if path.is_file():
        return "is a file, not a folder of shards; make one with: meshshard partition"
    inside = next(iter(sorted(path.glob("*.shards"))), None) if path.is_dir() else None
    if inside is not None:
        return f"has no manifest.json, but there is {inside.name} in it"
    what = "has no manifest.json" if path.is_dir() else "is not there"
    return f"{what}; write it with: meshshard partition"


def _nonsense(manifest: dict[str, Any]) -> str:
    """What in a manifest cannot be right; empty where all can."""
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
        return "sizes are no counts"
    if sum(sizes) != manifest[f"n_{entity}"]:
        return f"sizes add up to {sum(sizes)} of {manifest[f'n_{entity}']} {entity}"
    held = {key: sum(shard[key] for shard in shards) for key in ("points", "cells")}
    if held["cells"] != manifest["n_cells"] or not 0 <= manifest["n_points"] <= held["points"]:
        return f"shards hold {held['points']} points and {held['cells']} cells"
    return "" if isinstance(manifest.get("source"), dict | None) else "source is no record"
