"""VTK XML files: the element tree, and the numbers of its arrays.

VTK's reader aborts the process if a header declares 1e11 points, and silently returns half a mesh
if a file is cut short. Here the declared size of every array is checked against the bytes in the
file before memory is allocated.

Encodings: ascii, inline base64, appended base64 and raw; uncompressed, zlib, lzma and lz4.
"""

from __future__ import annotations

import base64
import binascii
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO
from xml.etree import ElementTree

import numpy as np

from meshshard.errors import ReadError
from meshshard.io.formats import last_bytes
from meshshard.io.readers.scanner import parse_numbers
from meshshard.mesh import Array

__all__ = ["DTYPES", "XmlFile"]

DTYPES = {  # NumPy types by VTK's names
    "Int8": "i1", "UInt8": "u1", "Int16": "i2", "UInt16": "u2", "Int32": "i4", "UInt32": "u4",
    "Int64": "i8", "UInt64": "u8", "Float32": "f4", "Float64": "f8", "Bit": "u1",
}  # fmt: skip
BLOCK = 1 << 20
MAX_RATIO = 10_000  # of decompressed to compressed size; only a damaged header exceeds it
LZMA_MEMORY = 1 << 27  # bytes, twice the dictionary of the highest level; a header may ask for 4 GB


def _lz4(block: bytes, size: int) -> bytes:
    """Decompress with VTK: Python's library has no lz4."""
    from vtkmodules.vtkIOCore import vtkLZ4DataCompressor

    compressor = vtkLZ4DataCompressor()
    compressor.AddObserver("ErrorEvent", lambda *_: None)  # type: ignore[arg-type]  # no print
    out = compressor.Uncompress(block, len(block), size)
    return b"" if out is None else bytes(memoryview(out))


DECOMPRESS: Mapping[str, Callable[[bytes, int], bytes]] = {  # (block, decompressed size) -> bytes
    "vtkZLibDataCompressor": lambda block, size: zlib.decompressobj().decompress(block, size),
    "vtkLZMADataCompressor": lambda block, size: lzma.LZMADecompressor(
        memlimit=LZMA_MEMORY
    ).decompress(block, size),
    "vtkLZ4DataCompressor": _lz4,
}


class XmlFile:
    """One VTK XML file: its element tree, and the numbers of its arrays.

    Attributes:
        path: the file.
        root: the VTKFile element.
    """

    def __init__(self, path: Path) -> None:
        """Parse the element tree.

        Raises:
            ReadError: the file is not a VTK XML file, is damaged or cut short.
        """
        self.path = path
        self.size = path.stat().st_size
        self._start = 0  # of the appended data
        self.root = self._parse()
        order = self.root.get("byte_order", "LittleEndian")
        self._order = ">" if order == "BigEndian" else "<"
        width = DTYPES.get(self.root.get("header_type", "UInt32"), "u4")
        self._header = np.dtype(self._order + width)
        name = self.root.get("compressor", "")
        self._decompress = DECOMPRESS.get(name)
        if name and self._decompress is None:
            raise ReadError(f"{path}: compressor {name} is not supported; save it with zlib")
        appended = self.root.find("AppendedData")
        self._raw = appended is not None and appended.get("encoding") == "raw"
        arrays = self.root.iter("DataArray") if appended is not None else ()
        self._ends = sorted(int(o) for a in arrays if (o := a.get("offset", "")[:18]).isdecimal())

    def _parse(self) -> ElementTree.Element:
        if b"</VTKFile>" not in last_bytes(self.path, 4096):
            raise ReadError(
                f"{self.path}: truncated: the closing </VTKFile> is missing; copy the file again"
            )
        parser = ElementTree.XMLParser()
        try:
            for text in self._blocks():
                parser.feed(text)
            root: ElementTree.Element = parser.close()
        except (ElementTree.ParseError, LookupError, ValueError) as error:
            raise ReadError(f"{self.path}: not well-formed XML: {error}") from None
        if root.tag != "VTKFile":
            raise ReadError(f"{self.path}: XML, but not a VTK file: it starts with <{root.tag}>")
        return root

    def _blocks(self) -> Iterator[bytes]:
        """The XML in blocks, without the appended data, whose offset is set."""
        rest = b""
        with self.path.open("rb") as file:
            while block := file.read(BLOCK):
                text = rest + block
                at = text.find(b"<AppendedData")
                if at < 0:
                    yield text[:-20]
                    rest = text[-20:]  # the tag may go on in the next block
                    continue
                text += file.read(BLOCK)
                close = text.find(b">", at) + 1
                first = text.find(b"_", close) + 1
                if not close or not first:
                    raise ReadError(f"{self.path}: truncated: the appended data are missing")
                self._start = file.tell() - len(text) + first
                yield text[:close] + b"</AppendedData></VTKFile>"
                return
        yield rest

    def values(
        self, element: ElementTree.Element, count: int | None = None, most: int | None = None
    ) -> Array:
        """The numbers of a DataArray element, flat.

        Args:
            element: the DataArray.
            count: the required number of values; None if the file does not declare it.
            most: a limit where the number itself is not known; more are never decompressed.

        Raises:
            ReadError: the number of values is another one, the type is unknown, or the data are
                damaged.
        """
        label = element.get("Name", "?")
        kind = element.get("type", "")
        if kind not in DTYPES:
            raise ReadError(f"{self.path}: array '{label}' has the unknown type '{kind}'")
        try:
            dtype = np.dtype(self._order + DTYPES[kind])
            out: Array = self._decode(element, dtype, most if count is None else count)
        except (ValueError, zlib.error, lzma.LZMAError, binascii.Error, EOFError) as error:
            raise ReadError(f"{self.path}: array '{label}' is damaged: {error}") from None
        if count is not None and len(out) != count:
            raise ReadError(
                f"{self.path}: array '{label}' holds {len(out)} values, the header declares "
                f"{count}; the file is damaged or was written incorrectly"
            )
        return out

    def _decode(self, element: ElementTree.Element, dtype: np.dtype[Any], n: int | None) -> Any:
        form = element.get("format", "ascii")
        bits = element.get("type") == "Bit"
        most = n if n is None or not bits else -(-n // 8)
        if form == "ascii":
            return parse_numbers(element.text or "", dtype.newbyteorder("="))
        if form == "binary":
            data = _from_base64((element.text or "").encode())
            raw = self._payload(io.BytesIO(data), len(data), dtype, most)
        elif form == "appended":
            raw = self._appended(int(element.get("offset", "-1")), dtype, most)
        else:
            raise ValueError(f"unknown format '{form}'")
        if bits:
            raw = np.unpackbits(raw)[:n]
        return raw.astype(dtype.newbyteorder("="), copy=False)

    def _appended(self, offset: int, dtype: np.dtype[Any], most: int | None) -> Any:
        start = self._start + offset
        if offset < 0 or not self._start or start >= self.size:
            raise ValueError(f"its offset {offset} is outside the file (truncated?)")
        with self.path.open("rb") as file:
            file.seek(start)
            if self._raw:
                return self._payload(file, self.size - start, dtype, most)
            end = next((self._start + e for e in self._ends if e > offset), self.size)
            data = _from_base64(file.read(end - start).split(b"<")[0])
            return self._payload(io.BytesIO(data), len(data), dtype, most)

    def _payload(self, file: BinaryIO, room: int, dtype: np.dtype[Any], most: int | None) -> Any:
        """The numbers after a binary header; header and numbers have at most `room` bytes."""
        if not room:
            return np.empty(0, dtype)
        if self._decompress is not None:
            return self._decompressed(file, room, dtype, most)
        n_bytes = int(self._numbers(file, 1, room)[0])
        if n_bytes % dtype.itemsize or n_bytes > room - self._header.itemsize:
            raise ValueError(f"it declares {n_bytes} bytes, the file has {room} (truncated?)")
        return _fill(file, np.empty(n_bytes // dtype.itemsize, dtype))

    def _decompressed(
        self, file: BinaryIO, room: int, dtype: np.dtype[Any], most: int | None
    ) -> Any:
        n, size, last = (int(v) for v in self._numbers(file, 3, room))
        if not n:
            return np.empty(0, dtype)
        packed = self._numbers(file, n, room)
        compressed = int(packed.sum(dtype=float))
        total = size * (n - 1) + (last or size)
        if compressed > room or total > MAX_RATIO * (compressed + 1):
            raise ValueError(f"it declares {compressed} compressed bytes, the file has {room}")
        if most is not None and total > most * dtype.itemsize:
            raise ValueError(
                f"it declares {total // dtype.itemsize} values, the header of the file {most}"
            )
        if total % dtype.itemsize:
            raise ValueError(f"{total} bytes are not a whole number of {dtype.name} values")
        out: Any = np.empty(total // dtype.itemsize, dtype)
        view, at = memoryview(out).cast("B"), 0
        for i, length in enumerate(packed):
            want = last if last and i == n - 1 else size
            block = self._decompress(file.read(int(length)), want) if self._decompress else b""
            if len(block) != want:
                raise ValueError(f"compressed block {i} yields {len(block)} of {want} bytes")
            view[at : at + want] = block
            at += want
        return out

    def _numbers(self, file: BinaryIO, n: int, room: int) -> Any:
        if n * self._header.itemsize > room:
            raise ValueError(
                f"its header needs {n} numbers, the file has {room} bytes (truncated?)"
            )
        return _fill(file, np.empty(n, self._header))


def _fill(file: BinaryIO, out: Any) -> Any:
    """Read from the file into an array, without a copy."""
    view = memoryview(out).cast("B") if out.size else memoryview(b"")
    if out.size and file.readinto(view) != len(view):  # type: ignore[attr-defined]
        raise ValueError("the file ends inside the array (truncated?)")
    return out


def _from_base64(text: bytes) -> bytes:
    """Bytes of concatenated base64 streams: writers end a stream after each header and block."""
    packed = b"".join(text.split()).removeprefix(b"_")
    if not re.fullmatch(rb"[A-Za-z0-9+/=]*", packed):
        raise ValueError("it has characters that are not base64")
    return b"".join(base64.b64decode(part) for part in re.findall(rb"[^=]+=*", packed))
