"""Ragged arrays: rows of varying length in one flat array, with offsets (as in CSR)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from meshshard.mesh.arrays import Array

__all__ = ["gather_rows", "no_rows", "offsets_of", "ranges", "scatter_rows"]


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


def scatter_rows(
    parts: Sequence[tuple[Array, Array]], values: Iterable[Array], n: int
) -> tuple[Array, Array]:
    """The inverse of `gather_rows`: values and offsets of a ragged array of ids, from its parts.

    Args:
        parts: for each part, its rows in the result, and its offsets.
        values: the values of each part.
        n: number of rows of the result.
    """
    counts = np.zeros(n, np.int64)
    for rows, part_offsets in parts:
        counts[rows] = np.diff(part_offsets)
    offsets = offsets_of(counts)
    out = np.empty(offsets[-1], np.int64)
    for (rows, _), part_values in zip(parts, values, strict=True):
        out[ranges(offsets[rows], offsets[rows + 1])] = part_values
    return out, offsets
