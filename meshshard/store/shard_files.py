"""Shard files: safetensors files with checksums, memory-mapped."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from meshshard.atomic_write import sync
from meshshard.errors import MeshError, PartitionError, StoreError
from meshshard.mesh import Array
from meshshard.mesh.checks import is_unicode

__all__ = [
    "Mapped",
    "Written",
    "arrays_crc32",
    "map_file",
    "part_name",
    "read_regular",
    "report_damage",
    "sha256",
    "write_arrays",
]

_DTYPES = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4",
    "U64": "<u8", "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8",
}  # fmt: skip
_NAMES = {np.dtype(code): name for name, code in _DTYPES.items()}
BLOCK = 1 << 20
MAX_HEADER = 1 << 22  # bytes; JSON takes up to 25 times its size in memory


@contextlib.contextmanager
def report_damage(path: Path) -> Iterator[None]:
    """Context manager: report parsing errors as StoreError('… is damaged')."""
    try:
        yield
    except (MeshError, PartitionError) as error:
        raise StoreError(f"{path}: is damaged ({error}); write the folder again") from None
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError,
            MemoryError) as error:  # fmt: skip
        raise StoreError(
            f"{path}: is damaged ({type(error).__name__}: {error}); write the folder again"
        ) from None


class Written(NamedTuple):
    """What `write_arrays` has written, for the manifest.

    Attributes:
        bytes: size of the file.
        header: CRC-32 of its header.
        crc32: CRC-32 of the arrays, which follow the header.
        content: SHA-256 of names, dtypes, shapes and `crc32`, without the metadata.
    """

    bytes: int
    header: int
    crc32: int
    content: str


def write_arrays(path: Path, arrays: Mapping[str, Array], metadata: dict[str, str]) -> Written:
    """Write one safetensors file and sync it; checksums are computed while it is written.

    Raises:
        StoreError: the format has no such dtype or name.
        OSError: the file cannot be written.
    """
    native = {name: _storable(name, a) for name, a in arrays.items()}
    order = sorted(native, key=lambda name: (-native[name].itemsize, name))  # keeps them aligned
    ends = accumulate(native[name].nbytes for name in order)
    entries = {
        name: {
            "dtype": _NAMES[native[name].dtype],
            "shape": list(native[name].shape),
            "data_offsets": [end - native[name].nbytes, end],
        }
        for name, end in zip(order, ends, strict=True)
    }
    head = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    crc = 0
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for block in _blocks(native[name] for name in order):
            file.write(block)
            crc = zlib.crc32(block, crc)
    sync(path)
    return Written(path.stat().st_size, zlib.crc32(head), crc, _content(entries, crc))


def _blocks(arrays: Iterable[Array]) -> Iterator[memoryview]:
    """The bytes of arrays, in blocks that stay in cache between checksum and write."""
    for array in arrays:
        flat = array.reshape(-1).view(np.uint8).data
        for first in range(0, len(flat), BLOCK):
            yield flat[first : first + BLOCK]


def _content(entries: Mapping[str, Any], crc: int) -> str:
    return hashlib.sha256(json.dumps([entries, crc], sort_keys=True).encode()).hexdigest()


def _storable(name: str, array: Array) -> Array:
    """The array, contiguous and little-endian, if safetensors has its dtype."""
    little = array.dtype.newbyteorder("<")
    if little not in _NAMES:
        raise StoreError(f"array {name!r} of dtype {array.dtype} cannot be stored; convert it")
    if name == "__metadata__" or not is_unicode(name):
        raise StoreError(f"{name!r} cannot be a name in safetensors files; rename the array")
    return np.ascontiguousarray(array, little)


class Mapped(NamedTuple):
    """A safetensors file that is mapped to memory.

    Attributes:
        arrays: views of the map, by name.
        metadata: that of the header.
        content: as in `Written`, if the arrays have the checksum `crc32`.
    """

    arrays: dict[str, Array]
    metadata: dict[str, str]
    content: Callable[[int], str]


def map_file(path: Path, size: int | None = None, header: int | None = None) -> Mapped:
    """Map a safetensors file to memory.

    safetensors' own NumPy loader copies every array; here only the pages that are accessed are
    read.

    Args:
        path: the file.
        size: expected bytes, if known.
        header: expected checksum of its header, if known.

    Raises:
        StoreError: the file is missing, is a link or no file, has another size, or its header
            cannot be parsed.
    """
    with _opened(path) as file:
        try:
            whole = np.memmap(file, np.uint8, "r")
        except (OSError, ValueError) as error:
            raise _unusable(path, f"cannot be mapped ({error})") from None
    if len(whole) != (len(whole) if size is None else size) or len(whole) < 8:
        raise _unusable(path, f"has {len(whole)} bytes instead of {size}")
    start = 8 + int.from_bytes(whole[:8].tobytes(), "little")
    if start > MAX_HEADER:
        raise _unusable(path, f"is damaged (its header has {start - 8:,} bytes)")
    head = whole[8:start].tobytes()
    if header is not None and zlib.crc32(head) != header:
        raise _unusable(path, "its header has changed")
    with report_damage(path):
        entries = json.loads(head)
        metadata = dict(entries.pop("__metadata__", {}))
        arrays = dict(_views(np.asarray(whole[start:]), entries.items()))
        return Mapped(arrays, metadata, partial(_content, entries))


def _opened(path: Path) -> BinaryIO:
    """Open a regular file; no link out of its folder, no device, no pipe that never ends."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise _unusable(path, "is missing") from None
    except OSError as error:
        why = "a link" if error.errno == errno.ELOOP else error.strerror
        raise _unusable(path, f"cannot be opened ({why})") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _unusable(path, "is not a regular file")
    return os.fdopen(descriptor, "rb")


def _unusable(path: Path, why: str) -> StoreError:
    return StoreError(f"{path}: {why}; write the folder again")


def read_regular(path: Path, most: int) -> bytes:
    """The content of a regular file of at most `most` bytes.

    Raises:
        StoreError: it is missing, larger, a link or no file.
    """
    with _opened(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise _unusable(path, f"is damaged (more than {most:,} bytes)")
    return content


def _views(data: Array, entries: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Array]]:
    for name, entry in entries:
        first, last = entry["data_offsets"]
        yield name, data[first:last].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])


def arrays_crc32(path: Path) -> int:
    """CRC-32 of the arrays of a safetensors file, which follow its header.

    Raises:
        StoreError: it cannot be read.
    """
    crc = 0
    with _opened(path) as file:
        try:
            file.seek(8 + min(int.from_bytes(file.read(8), "little"), MAX_HEADER))
            while block := file.read(BLOCK):
                crc = zlib.crc32(block, crc)
        except OSError as error:
            raise _unusable(path, f"cannot be read ({error})") from None
    return crc


def part_name(name: str, shard: int) -> str:
    """The file of one shard: its data (`shard`), or a set of results."""
    if not name.replace("-", "").replace("_", "").isalnum():
        raise StoreError(f"{name!r} cannot be part of a file name; use letters, digits, - and _")
    return f"{name}_{shard:05d}.safetensors"


def sha256(path: str | Path) -> str:
    """Hex digest of a file, read in blocks.

    Raises:
        StoreError: it cannot be read.
    """
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}; name a file") from None
