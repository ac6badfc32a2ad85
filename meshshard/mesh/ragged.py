"""Ragged arrays: rows of varying length in one flat array, with offsets (as in CSR)."""

from __future__ import annotations

import numpy as np

from meshshard.mesh.arrays import Array

__all__ = ["gather_rows", "no_rows", "offsets_of", "ranges"]


def offsets_of(counts: Array) -> Array:
    """(n + 1,) int64 offsets of consecutive rows of the given lengths (n,)."""
    out = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=out[1:])
    return out


def no_rows() -> tuple[Array, Array]:
    """Values and offsets of a ragged array without rows."""
    return np.zeros(0, np.int64), np.zeros(1, np.int64)


def ranges(starts: Array, stops: Array) -> Array:
    """The integers starts[0]:stops[0], then starts[1]:stops[1], and so on, concatenated."""
    count = stops - starts
    out = np.repeat(starts - np.cumsum(count) + count, count)
    out += np.arange(len(out), dtype=out.dtype)
    return np.asarray(out)


def gather_rows(values: Array, offsets: Array, rows: Array) -> tuple[Array, Array]:
    """The chosen rows of a ragged array: their values, concatenated, and their offsets."""
    starts, stops = offsets[rows], offsets[rows + 1]
    return values[ranges(starts, stops)], offsets_of(stops - starts)
