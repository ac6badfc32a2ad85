"""Runs of uneven length put in a row: offsets from counts, and the places of chosen runs."""

from __future__ import annotations

import numpy as np

from meshshard.mesh.arrays import Array

__all__ = ["gather_rows", "offsets_of", "ranges"]


def offsets_of(counts: Array) -> Array:
    """(n + 1,) int64 offsets of consecutive runs of the given lengths (n,)."""
    out = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=out[1:])
    return out


def ranges(starts: Array, stops: Array) -> Array:
    """The integers of starts[0]:stops[0], then of starts[1]:stops[1], and so on."""
    count = stops - starts
    out = np.repeat(starts - np.cumsum(count) + count, count)
    out += np.arange(len(out), dtype=out.dtype)
    return np.asarray(out)


def gather_rows(values: Array, offsets: Array, rows: Array) -> tuple[Array, Array]:
    """The runs `rows` of a ragged array: their values one after the other, and their offsets."""
    starts, stops = offsets[rows], offsets[rows + 1]
    return values[ranges(starts, stops)], offsets_of(stops - starts)
