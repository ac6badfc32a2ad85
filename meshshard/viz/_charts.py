"""Charts of a partition, as SVG: who exchanges how much with whom, and what each shard holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np

from meshshard.mesh import Array
from meshshard.viz._subject import Drawable, Subject, subject_of

__all__ = ["Svg", "plot_bars", "plot_rank_graph"]

FONT = "font-family='Helvetica, Arial, sans-serif'"
INK, SOFT = "#1a1a1a", "#777777"


@dataclass(frozen=True, repr=False)
class Svg:
    """A chart: shown by notebooks, saved as a file.

    Attributes:
        text: the whole SVG document.
    """

    text: str

    def __repr__(self) -> str:
        return f"Svg({len(self.text):,} characters)"

    def _repr_svg_(self) -> str:
        return self.text

    def save(self, path: str | Path) -> Path:
        """Write it to a file."""
        Path(path).write_text(self.text, encoding="utf-8")
        return Path(path)


def plot_bars(what: Drawable) -> Svg:
    """Owned and halo rows of every shard as bars.

    Args:
        what: a partition, an open folder, or the path of a folder.
    """
    subject = subject_of(what)
    owned, halo = subject.sizes, np.array([len(h) for h in subject.halos])
    step = 26 if subject.k <= 16 else max(12, 26 - subject.k // 4)
    left, right, top = 46, 200, 58
    width, height = 760, top + step * subject.k + 44
    scale = (width - left - right) / max(int((owned + halo).max(initial=1)), 1)
    parts = [_text(14, 24, f"Rows of each shard ({subject.entity})", 16, INK, "bold")]
    parts += [_text(14, 44, "solid: owned   pale: halo, copies of rows that others own", 12, SOFT)]
    for p, (n, h) in enumerate(zip(owned.tolist(), halo.tolist(), strict=True)):
        y, color = top + p * step, _hex(subject.colors[p])
        bar = step - max(3, step // 5)
        parts += [
            _text(left - 8, y + bar / 2, str(p), min(13, bar), INK, "end middle"),
            _box(left, y, n * scale, bar, color),
            _box(left + n * scale, y, h * scale, bar, color, 0.4),
            _text(
                left + (n + h) * scale + 8,
                y + bar / 2,
                f"{n:,} + {h:,}" + (f"  ({100 * h / n:.1f} %)" if n else ""),
                min(12, bar),
                INK,
                "middle",
            ),
        ]
    mean, bottom = left + float(owned.mean()) * scale, top + step * subject.k
    parts += [
        _line(
            np.array([mean, top - 4]),
            np.array([mean, bottom + 4]),
            INK,
            1.0,
            "stroke-dasharray='4 3'",
        ),
        _text(mean, bottom + 20, f"mean of owned {owned.mean():,.1f}", 12, SOFT, "center"),
    ]
    return _document(width, height, parts)


def plot_rank_graph(what: Drawable) -> Svg:
    """Shards as discs by their owned rows, linked by the rows that they exchange.

    They lie roughly as on the mesh, seen as in `plot_shards`; each link says how many rows travel
    both ways together, where there are few enough links to read it.

    Args:
        what: a partition, an open folder, or the path of a folder.
    """
    subject = subject_of(what)
    width, height, edge = 860, 560, 60
    both = np.triu(subject.traffic + subject.traffic.T, 1)
    links = np.argwhere(both)
    place = _layout(subject, both) * (width - 2 * edge, height - 2 * edge - 40)
    place += (edge, edge + 40)
    largest = float(np.clip(155 / np.sqrt(subject.k), 11, 34))
    radius = largest * np.sqrt(subject.sizes / max(int(subject.sizes.max(initial=1)), 1))
    rows = both[tuple(links.T)]
    heading = f"Who exchanges with whom: {rows.sum():,} rows in one exchange"
    note = f"disc: owned {subject.entity}   line: rows that travel, both ways together"
    parts = [_text(14, 24, heading, 16, INK, "bold"), _text(14, 44, note, 12, SOFT)]
    for (a, b), n in zip(links, rows.tolist(), strict=True):
        stroke = 1.0 + 9.0 * n / max(int(rows.max()), 1)
        parts.append(
            _line(place[a].tolist(), place[b].tolist(), "#8c96a3", stroke, "stroke-opacity='0.55'")
        )
    if len(links) <= 40:
        middles = place[links].mean(axis=1)
        parts += [_number(at, f"{n:,}") for at, n in zip(middles, rows, strict=True)]
    for p in range(subject.k):
        parts.append(_disc(place[p], max(radius[p], 3), _hex(subject.colors[p])))
        size = float(np.clip(radius[p] * 0.75, 8, 17))
        x, y = place[p].tolist()
        parts.append(_text(x, y, str(p), size, INK, "bold center middle"))
    return _document(width, height, parts)


def _layout(subject: Subject, both: Array) -> Array:
    """(k, 2) places in the unit square, y down: the shards' centers, pushed apart."""
    k = subject.k
    angle = 2 * np.pi * np.arange(k) / max(k, 1)
    place = np.stack([np.cos(angle), np.sin(angle)], 1)
    if subject.mesh is not None:
        eye = _flattened(subject)
        place = np.where(np.isnan(eye), place * np.nanmax(np.abs(eye), initial=1.0), eye)
    place = _unit(place)
    linked = (both + both.T > 0).astype(float)
    for step in np.linspace(0.06, 0.005, 120):
        away = place[:, None] - place[None]
        far = np.linalg.norm(away, axis=2) + np.eye(k) + 1e-9
        push = (away / far[..., None] ** 3).sum(axis=1) / k**1.5
        pull = (linked[..., None] * away * far[..., None]).sum(axis=1)
        force = push * 0.8 - pull
        size = np.linalg.norm(force, axis=1, keepdims=True) + 1e-12
        place = place + force / size * np.minimum(size, step * 0.5)
    return _unit(place)


def _flattened(subject: Subject) -> Array:
    """(k, 2) centers of the shards seen from the front, above and aside, or straight on."""
    from meshshard.viz._canvas import axes_towards, direction_on

    right, up, _ = axes_towards(direction_on(subject.solid.points))
    return np.stack([subject.centers @ right, -(subject.centers @ up)], axis=1)


def _unit(place: Array) -> Array:
    low, high = place.min(axis=0), place.max(axis=0)
    wide = high > low
    return np.asarray((place - low) / np.where(wide, high - low, 1.0) + np.where(wide, 0.0, 0.5))


def _document(width: float, height: float, parts: Sequence[str]) -> Svg:
    body = "\n".join(parts)
    return Svg(
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' "
        f"viewBox='0 0 {width} {height}' {FONT}>\n"
        f"<rect width='{width}' height='{height}' fill='white'/>\n{body}\n</svg>\n"
    )


def _text(x: float, y: float, text: str, size: float, color: str = INK, how: str = "") -> str:
    """Words at a place; `how` may name bold, end, center (of x) and middle (of y)."""
    anchor = "end" if "end" in how else "middle" if "center" in how else "start"
    weight = " font-weight='bold'" if "bold" in how else ""
    shift = " dy='.35em'" if "middle" in how else ""
    return (
        f"<text x='{x:.1f}' y='{y:.1f}'{shift} font-size='{size:g}' fill='{color}' "
        f"text-anchor='{anchor}'{weight} xml:space='preserve'>{escape(text)}</text>"
    )


def _box(x: float, y: float, width: float, height: float, color: str, opacity: float = 1.0) -> str:
    return (
        f"<rect x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{height:.1f}' "
        f"fill='{color}' fill-opacity='{opacity}'/>"
    )


def _line(
    a: Sequence[float] | Array, b: Sequence[float] | Array, color: str, width: float, how: str = ""
) -> str:
    return (
        f"<line x1='{a[0]:.1f}' y1='{a[1]:.1f}' x2='{b[0]:.1f}' y2='{b[1]:.1f}' "
        f"stroke='{color}' stroke-width='{width:.1f}' {how}/>"
    )


def _disc(place: Array, radius: float, color: str) -> str:
    return (
        f"<circle cx='{place[0]:.1f}' cy='{place[1]:.1f}' r='{radius:.1f}' fill='{color}' "
        f"stroke='{INK}' stroke-width='1'/>"
    )


def _number(place: Array, text: str) -> str:
    """A number on a line, on white."""
    width = 6.4 * len(text) + 6
    paper = _box(place[0] - width / 2, place[1] - 8, width, 16, "white", 0.85)
    return paper + _text(place[0], place[1], text, 11, INK, "center middle")


def _hex(color: Array) -> str:
    return "#{:02x}{:02x}{:02x}".format(*color.tolist())
