"""Scanner: words and runs of numbers in a file that mixes text with ascii or binary data."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from meshshard.errors import ReadError
from meshshard.mesh import Array

__all__ = ["Scanner", "parse_numbers"]


def parse_numbers(text: str | bytes, dtype: Any) -> Array:
    """Numbers of a text, separated by white space.

    Raises:
        ValueError: something in the text is not a number.
    """
    if isinstance(text, bytes):
        text = text.decode("latin-1")
    if not text or text.isspace():  # numpy makes one number of it
        return np.empty(0, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        try:
            return np.fromstring(text, dtype, sep=" ")
        except (DeprecationWarning, OverflowError) as error:
            raise ValueError(str(error)) from None


def _leading_numbers(text: bytes) -> Iterator[float]:
    with suppress(ValueError):
        yield from map(float, text.split())


class Scanner:
    """A place in a file that moves on as lines and numbers are taken.

    Attributes:
        path: the file, for messages.
        data: all its bytes.
        at: the next byte to look at.
    """

    def __init__(self, path: Path, data: bytes | None = None) -> None:
        """Read the file, unless its data are given."""
        self.path = path
        self.data = path.read_bytes() if data is None else data
        self.at = 0

    @cached_property
    def _starts(self) -> Array:
        """Where each word of the file begins."""
        black = np.frombuffer(self.data, np.uint8) > 32
        return np.flatnonzero(black & ~np.concatenate([[False], black[:-1]]))

    def raw_line(self) -> str:
        """The rest of this line."""
        end = self.data.find(b"\n", self.at)
        end = len(self.data) if end < 0 else end
        text, self.at = self.data[self.at : end], end + 1
        return text.decode("utf-8", "replace").strip()

    def line(self) -> list[str]:
        """The words of the next line that has any; none at the end of the file."""
        while self.at < len(self.data):
            if words := self.raw_line().split():
                return words
        return []

    def peek(self) -> list[str]:
        """The words of the next line, left where they are."""
        at = self.at
        words = self.line()
        self.at = at
        return words

    def ascii(self, n: int, dtype: Any, what: str) -> Array:
        """The next `n` words as numbers.

        Raises:
            ReadError: there are fewer, or they are not numbers.
        """
        if not n:
            return np.empty(0, dtype)
        first = int(np.searchsorted(self._starts, self.at))
        if first + n > len(self._starts):
            raise ReadError(
                f"{self.path}: {what} needs {n} numbers, {len(self._starts) - first} words are "
                "left: truncated, or its header lies"
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
            raise ReadError(f"{self.path}: {what} is corrupt: not all of its {n} words are numbers")
        return out

    def floats(self) -> Array:
        """The numbers from here on, up to the first word that is none, left where they are."""
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
            ReadError: there are fewer.
        """
        kind = np.dtype(dtype)
        size = n * kind.itemsize
        if size > len(self.data) - self.at:
            raise ReadError(
                f"{self.path}: {what} needs {size} bytes, {len(self.data) - self.at} are left: "
                "truncated, or its header lies"
            )
        out = np.frombuffer(self.data, kind, n, self.at)
        self.at += size
        return out.astype(kind.newbyteorder("="))
