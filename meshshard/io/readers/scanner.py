"""Scanner of files that mix lines of text with ascii or binary numbers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from meshshard.errors import ReadError
from meshshard.mesh import Array

__all__ = ["Scanner", "parse_numbers"]


def parse_numbers(text: str | bytes, dtype: Any) -> Array:
    """Parse numbers separated by white space.

    Raises:
        ValueError: a word is not a number.
    """
    if isinstance(text, bytes):
        text = text.decode("latin-1")
    if not text or text.isspace():  # np.fromstring would return one number
        return np.empty(0, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        try:
            return np.fromstring(text, dtype, sep=" ")
        except (DeprecationWarning, OverflowError) as error:
            raise ValueError(str(error)) from None


def _leading_numbers(text: bytes) -> Iterator[float]:
    with suppress(ValueError):
        for line in BytesIO(text):  # not all words at once, which would take ten times the memory
            yield from map(float, line.split())


class Scanner:
    """A position in a file; methods that return lines or numbers advance it.

    Attributes:
        path: the file, for messages.
        data: the bytes of the file.
        at: the position, in bytes.
    """

    def __init__(self, path: Path, data: bytes | None = None) -> None:
        """Read the file, unless `data` is given."""
        self.path = path
        self.data = path.read_bytes() if data is None else data
        self.at = 0

    @cached_property
    def _starts(self) -> Array:
        """Position of the first byte of every word."""
        visible = np.frombuffer(self.data, np.uint8) > 32
        return np.flatnonzero(visible & ~np.concatenate([[False], visible[:-1]]))

    def raw_line(self) -> str:
        """The rest of this line."""
        end = self.data.find(b"\n", self.at)
        end = len(self.data) if end < 0 else end
        text, self.at = self.data[self.at : end], end + 1
        return text.decode("utf-8", "replace").strip()

    def line(self) -> list[str]:
        """The words of the next line that is not blank; empty at the end of the file."""
        while self.at < len(self.data):
            if words := self.raw_line().split():
                return words
        return []

    def peek(self) -> list[str]:
        """The same as `line`, without advancing."""
        at = self.at
        words = self.line()
        self.at = at
        return words

    def ascii(self, n: int, dtype: Any, what: str) -> Array:
        """The next `n` words as numbers.

        Raises:
            ReadError: the file has fewer words, or they are not numbers.
        """
        if not n:
            return np.empty(0, dtype)
        first = int(np.searchsorted(self._starts, self.at))
        if first + n > len(self._starts):
            raise ReadError(
                f"{self.path}: {what} needs {n} numbers, the file has {len(self._starts) - first} "
                "more words: truncated, or its header is wrong"
            )
        last = first + n
        end = int(self._starts[last]) if last < len(self._starts) else len(self.data)
        text = self.data[self._starts[first] : end]
        self.at = end
        try:
            out = parse_numbers(text, dtype)
        except ValueError:
            out = np.empty(0, dtype)
        if len(out) != n:
            raise ReadError(f"{self.path}: {what} is corrupt: some of {n} words are not numbers")
        return out

    def floats(self) -> Array:
        """All numbers up to the first word that is not a number, without advancing."""
        text = self.data[self.at :]
        try:
            out = parse_numbers(text, np.float64)
        except ValueError:
            out = np.empty(0)
        if len(out) == len(self._starts) - np.searchsorted(self._starts, self.at):
            return out
        return np.fromiter(_leading_numbers(text), np.float64)

    def binary(self, n: int, dtype: Any, what: str) -> Array:
        """The next `n` binary numbers, in the byte order of this machine.

        Raises:
            ReadError: the file has fewer.
        """
        kind = np.dtype(dtype)
        size = n * kind.itemsize
        if size > len(self.data) - self.at:
            raise ReadError(
                f"{self.path}: {what} needs {size} bytes, the file has {len(self.data) - self.at} "
                "more: truncated, or its header is wrong"
            )
        out = np.frombuffer(self.data, kind, n, self.at)
        self.at += size
        return out.astype(kind.newbyteorder("="))
