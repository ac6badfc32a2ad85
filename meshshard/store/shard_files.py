"""Shard files: safetensors files written atomically, memory-mapped, verified by checksums."""

from __future__ import annotations

import contextlib
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from meshshard.atomic_write import atomic_file
from meshshard.errors import StoreError
from meshshard.mesh import Array

__all__ = ["crc32", "header_crc32", "map_file", "report_damage", "sha256", "write_arrays"]

_DTYPES = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4",
    "U64": "<u8", "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8",
}  # fmt: skip


@contextlib.contextmanager
def report_damage(path: Path) -> Iterator[None]:
    """Context manager: report parsing errors as StoreError('… is damaged')."""
    try:
        yield
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError,
            MemoryError) as error:  # fmt: skip
        raise StoreError(
            f"{path}: is damaged ({type(error).__name__}: {error}); write the folder again"
        ) from None


def write_arrays(path: Path, arrays: dict[str, Array], metadata: dict[str, str]) -> None:
    """Write one safetensors file atomically.

    Raises:
        StoreError: the format has no such dtype, or reserves the name of an array.
        OSError: the file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    native = {name: _storable(name, a) for name, a in arrays.items()}
    try:
        with atomic_file(path) as part:
            part.touch()
            mode = part.stat().st_mode
            save_file(native, part, metadata)
            part.chmod(mode)  # safetensors makes it readable for its owner only
    except SafetensorError as error:  # wraps the OSError
        raise OSError(str(error)) from None


def _storable(name: str, array: Array) -> Array:
    """The array, contiguous and little-endian, if safetensors has its dtype."""
    little = array.dtype.newbyteorder("<")
    if little not in [np.dtype(code) for code in _DTYPES.values()]:
        raise StoreError(f"array {name!r} of dtype {array.dtype} cannot be stored; convert it")
    if name == "__metadata__":
        raise StoreError(f"{name!r} is a reserved name in safetensors files; rename the array")
    return np.ascontiguousarray(array, little)


def map_file(
    path: Path, size: int, header: int | None = None
) -> tuple[dict[str, Array], dict[str, str]]:
    """Arrays of a safetensors file as views of one memory map, and its metadata.

    safetensors' own NumPy loader copies every array; here only the pages that are accessed are
    read.

    Args:
        path: the file.
        size: expected bytes.
        header: expected checksum of its header, if known.

    Raises:
        StoreError: the file is missing, has another size, or its header cannot be parsed.
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
    with report_damage(path):
        entries = json.loads(head)
        metadata = dict(entries.pop("__metadata__", {}))
        return dict(_views(np.asarray(whole[start:]), entries.items())), metadata


def _views(data: Array, entries: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Array]]:
    for name, entry in entries:
        first, last = entry["data_offsets"]
        yield name, data[first:last].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])


def crc32(path: Path) -> int:
    """CRC-32 of a file.

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


def header_crc32(path: Path) -> int:
    """CRC-32 of the header of a safetensors file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return zlib.crc32(file.read(length))


def sha256(path: str | Path) -> str:
    """Hex digest of a file, read in blocks."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
