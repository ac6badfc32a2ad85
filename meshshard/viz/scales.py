"""Scales: which color shows which value of a field."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshshard.errors import RenderError
from meshshard.mesh import Array

__all__ = ["Scale", "magnitude", "scale_of"]

SEQUENTIAL, DIVERGING = "viridis", "coolwarm"
NO_VALUE = "black"


@dataclass(frozen=True)
class Scale:
    """Colors of values.

    Attributes:
        title: name of the values, with their unit.
        low: the value of the first color.
        high: the value of the last color; also larger than `low`.
        cmap: name of a color map of matplotlib.
        log: colors are linear in the logarithm of the values.
    """

    title: str
    low: float
    high: float
    cmap: str
    log: bool = False

    def ticks(self) -> dict[float, str]:
        """Round values in the range and what is written at them, at fractions of the bar."""
        if self.log:
            start, end = math.log10(self.low), math.log10(self.high)
            every = max(1, math.ceil((end - start) / 5))
            powers = range(math.ceil(start - 1e-9), math.floor(end + 1e-9) + 1, every)
            return {(p - start) / (end - start): f"1e{p}" for p in powers}
        step = _round_step((self.high - self.low) / 8)
        first, last = math.ceil(self.low / step - 1e-6), math.floor(self.high / step + 1e-6)
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        wide = step >= 1e5 or digits > 4
        return {
            (i * step - self.low) / (self.high - self.low): (
                f"{i * step:.3g}" if wide else f"{i * step:,.{digits}f}"
            )
            for i in range(first, last + 1)
        }

    def table(self) -> Any:
        """The colors as a table of VTK.

        Raises:
            RenderError: the color map does not exist.
        """
        import pyvista

        try:
            return pyvista.LookupTable(
                self.cmap,
                n_values=256,
                scalar_range=(self.low, self.high),
                nan_color=NO_VALUE,
                log_scale=self.log,
            )
        except (ValueError, KeyError, AttributeError):
            raise RenderError(
                f"color map {self.cmap!r} does not exist; choose one of matplotlib, such as "
                f"{SEQUENTIAL} or {DIVERGING}"
            ) from None

    def notes(self, values: Array) -> list[str]:
        """What a picture of values must say: values out of range, and those without a color."""
        known = values[np.isfinite(values)]
        notes = []
        if len(known) and (known.min() < self.low or known.max() > self.high):
            notes.append(
                f"colors end at {self.low:.4g} and {self.high:.4g}; "
                f"values are {known.min():.4g} to {known.max():.4g}"
            )
        if len(known) < len(values):
            notes.append("black: no value")
        return notes


def scale_of(
    values: Array,
    title: str,
    *,
    unit: str = "",
    cmap: str = "",
    clim: tuple[float, float] | None = None,
    log: bool = False,
) -> Scale:
    """The scale of values: all of their range; symmetric about zero if they have both signs.

    Args:
        values: of any shape; those that are not finite have no color.
        title: their name.
        unit: follows the name in brackets.
        cmap: name of a color map of matplotlib; "" for a sequential one, or a diverging one if
            the values have both signs.
        clim: the values of the first and the last color.
        log: colors are linear in the logarithm.

    Raises:
        RenderError: `clim` is not two rising numbers, or the range is wider than a float64.
    """
    known = values[np.isfinite(values)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
    signed = min(-low, high) > 0.05 * max(-low, high) and not log
    if clim is not None:
        low, high = (float(v) for v in clim)
        if not low < high:
            raise RenderError(f"clim is {clim}; expected two rising numbers")
    elif signed:
        low, high = -max(-low, high), max(-low, high)
    if not low < high:
        low, high = low - max(abs(low), 1.0) / 2, high + max(abs(high), 1.0) / 2
    if not np.isfinite(high - low):
        raise RenderError(f"{title}: {low:g} to {high:g} is too wide for a color bar; give clim=")
    name = f"{title} [{unit}]" if unit else title
    return Scale(name, low, high, cmap or (DIVERGING if signed else SEQUENTIAL), log)


def magnitude(values: Array) -> Array:
    """(n,) norms of the rows; scalars as they are."""
    return values if values.ndim == 1 else np.linalg.norm(values.reshape(len(values), -1), axis=1)


def _round_step(step: float) -> float:
    """The smallest 1, 2 or 5 times a power of ten that is not below `step`."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(f * power for f in (1.0, 2.0, 5.0, 10.0) if f * power >= step * (1 - 1e-9))
