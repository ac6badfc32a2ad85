"""Files of a store: written whole or not at all, mapped without a copy, checked byte for byte."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from meshshard.errors import StoreError
from meshshard.mesh import Array

__all__ = ["crc32", "hidden", "map_file", "replacing", "write_arrays", "write_through"]


@contextlib.contextmanager
def hidden(target: Path) -> Iterator[Path]:
    """A folder under a hidden name that becomes `target` at the end, or disappears."""
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target)
    folder = target.with_name(f".{target.name}.{os.getpid()}.writing")
    folder.mkdir()
    try:
        yield folder
        old = target.with_name(f".{target.name}.{os.getpid()}.old")
        if target.exists():
            target.rename(old)
        folder.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_leftovers(target: Path) -> None:
    """Hidden folders of writers that are gone."""
    for left in target.parent.glob(f".{target.name}.*"):
        words = left.name.split(".")
        if words[-1] in ("writing", "old") and words[-2].isdigit() and not _alive(int(words[-2])):
            shutil.rmtree(left, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
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
    """One safetensors file, under its name only once it is whole."""
    from safetensors.numpy import save_file

    with replacing(path) as part:
        save_file({n: np.ascontiguousarray(a) for n, a in arrays.items()}, part, metadata)


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


def map_file(path: Path, size: int) -> tuple[dict[str, Array], dict[str, str]]:
    """Arrays of a safetensors file as views of one map, and its metadata.

    The library's numpy loader copies every tensor; a rank should hold what it touches only.

    Raises:
        StoreError: the file is missing, has another size, or its header makes no sense.
    """
    damaged = f"{path}: is damaged or cut short; write the folder again"
    try:
        whole = np.memmap(path, np.uint8, "r")
    except FileNotFoundError:
        raise StoreError(f"{path}: is missing; write the folder again") from None
    except (OSError, ValueError) as error:
        raise StoreError(f"{damaged} ({error})") from None
    if len(whole) != size or size < 8:
        raise StoreError(
            f"{path}: has {len(whole)} bytes instead of {size}; write the folder again"
        )
    start = 8 + int.from_bytes(whole[:8].tobytes(), "little")
    try:
        header = json.loads(whole[8:start].tobytes())
        metadata = header.pop("__metadata__", {})
        arrays = dict(_views(np.asarray(whole[start:]), header.items()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"{damaged} ({error})") from None
    return arrays, metadata


def _views(data: Array, entries: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Array]]:
    for name, entry in entries:
        first, last = entry["data_offsets"]
        yield name, data[first:last].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
