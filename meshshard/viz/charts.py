"""Charts of a partition, as SVG: rows of each shard, and rows exchanged between shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np

from meshshard.atomic_write import atomic_file, report_write_errors
from meshshard.errors import RenderError
from meshshard.mesh import Array
from meshshard.viz.camera import default_direction, view_axes
from meshshard.viz.colors import INK
from meshshard.viz.scales import Scale
from meshshard.viz.subject import Drawable, Subject, subject_of

__all__ = ["Svg", "plot_agreement", "plot_bars", "plot_rank_graph"]

FONT = "font-family='Helvetica, Arial, sans-serif'"
SOFT = "#777777"
SIDE, LEFT, TOP = 400.0, 84.0, 66.0  # of a square chart


@dataclass(frozen=True, repr=False)
class Svg:
    """A chart that notebooks display and `save` writes.

    Attributes:
        text: the whole SVG document.
    """

    text: str

    def __repr__(self) -> str:
        return f"Svg({len(self.text):,} characters)"

    def _repr_svg_(self) -> str:
        return self.text

    def save(self, path: str | Path) -> Path:
        """Write the chart to a file, and return its path."""
        with report_write_errors(Path(path)), atomic_file(Path(path)) as part:
            part.write_text(self.text, encoding="utf-8")
        return Path(path)


def plot_bars(what: Drawable) -> Svg:
    """Draw the owned and halo rows of every shard as bars.

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
    parts += [_text(14, 44, "solid: owned   pale: halo, copies of rows of other shards", 12, SOFT)]
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
        _text(mean, bottom + 20, f"mean of owned rows {owned.mean():,.1f}", 12, SOFT, "center"),
    ]
    return _document(width, height, parts)


def plot_rank_graph(what: Drawable) -> Svg:
    """Draw shards as discs, linked by the number of rows that they exchange.

    The area of a disc shows the owned rows. Discs are placed roughly as the shards on the mesh,
    seen as in `plot_shards`. With up to 40 links, each link shows its rows, the sum of both
    directions.

    Args:
        what: a partition, an open folder, or the path of a folder.
    """
    subject = subject_of(what)
    width, height, edge = 860, 560, 60
    both = np.triu(subject.traffic + subject.traffic.T, 1)
    links = np.argwhere(both)
    position = _layout(subject, both) * (width - 2 * edge, height - 2 * edge - 40)
    position += (edge, edge + 40)
    largest = float(np.clip(155 / np.sqrt(subject.k), 11, 34))
    radius = largest * np.sqrt(subject.sizes / max(int(subject.sizes.max(initial=1)), 1))
    rows = both[tuple(links.T)]
    heading = f"Exchange between shards: {rows.sum():,} rows in one exchange"
    note = f"disc: owned {subject.entity}   line: rows exchanged, sum of both directions"
    parts = [_text(14, 24, heading, 16, INK, "bold"), _text(14, 44, note, 12, SOFT)]
    for (a, b), n in zip(links, rows.tolist(), strict=True):
        stroke = 1.0 + 9.0 * n / max(int(rows.max()), 1)
        parts.append(
            _line(
                position[a].tolist(),
                position[b].tolist(),
                "#8c96a3",
                stroke,
                "stroke-opacity='0.55'",
            )
        )
    if len(links) <= 40:
        texts = [f"{n:,}" for n in rows.tolist()]
        discs = np.column_stack([position, np.maximum(radius, 3)])
        places = _label_places(position[links], texts, discs)
        parts += [_link_rows(at, t) for at, t in zip(places, texts, strict=True) if at is not None]
    for p in range(subject.k):
        parts.append(_disc(position[p], max(radius[p], 3), _hex(subject.colors[p])))
        size = float(np.clip(radius[p] * 0.75, 8, 17))
        x, y = position[p].tolist()
        ink = INK if subject.colors[p] @ [0.3, 0.6, 0.1] > 110 else "white"
        parts.append(_text(x, y, str(p), size, ink, "bold center middle"))
    return _document(width, height, parts)


def plot_agreement(
    true: Array, predicted: Array, *, name: str = "drag coefficient", band: float = 0.0
) -> Svg:
    """Draw predicted against true coefficients: one disc for each body, and the line of equality.

    Args:
        true: (n,) coefficients.
        predicted: (n,) their predictions.
        name: what they are.
        band: half width of a band about the line, such as 1e-3 for 10 counts of drag.

    Raises:
        RenderError: there are none, or they differ in number or are not finite.
    """
    both = [np.asarray(values, np.float64).ravel() for values in (true, predicted)]
    if len(both[0]) != len(both[1]) or not len(both[0]) or not np.isfinite(both).all():
        raise RenderError(
            f"{name}: {len(both[0])} true and {len(both[1])} predicted values; "
            "expected the same number, at least one, and finite values"
        )
    low, high = float(np.min(both)) - band, float(np.max(both)) + band
    edge = 0.06 * (high - low) or max(abs(high), 1.0) / 10
    scale = Scale(name, low - edge, high + edge, "")
    ends = np.array([scale.low, scale.high])
    start, end = _in_frame(scale, ends, ends)
    sides = [*_in_frame(scale, ends, ends + band), *_in_frame(scale, ends, ends - band)[::-1]]
    outline = " ".join(f"{x:.1f},{y:.1f}" for x, y in sides)
    error = np.abs(both[1] - both[0])
    said = f"mean absolute error {error.mean():.3g}, largest {error.max():.3g}"
    within = f", {int((error <= band).sum())} of {len(error)} within ±{band:g}"
    parts = [
        _text(14, 24, f"{name}: predicted against true", 16, INK, "bold"),
        _text(14, 44, said + (within if band else ""), 12, SOFT),
        f"<clipPath id='frame'>{_box(LEFT, TOP, SIDE, SIDE, 'white')}</clipPath>",
        f"<g clip-path='url(#frame)'><polygon points='{outline}' fill='#dfe6ee'/>",
        _line(start, end, SOFT, 1.2) + "</g>",
        *_frame(scale),
        *(_disc(at, 5, "#2b72cc") for at in _in_frame(scale, *both)),
    ]
    return _document(LEFT + SIDE + 24, TOP + SIDE + 64, parts)


def _in_frame(scale: Scale, x: Array, y: Array) -> Array:
    """(n, 2) places of points in a square chart with the same scale on both axes."""
    at = (np.stack([x, y], axis=-1) - scale.low) / (scale.high - scale.low)
    return np.asarray((at * [1, -1] + [0, 1]) * SIDE + [LEFT, TOP])


def _frame(scale: Scale) -> list[str]:
    """The frame of a square chart, with values and titles at its axes."""
    bottom, middle = TOP + SIDE, TOP + SIDE / 2
    parts = [
        f"<rect x='{LEFT}' y='{TOP}' width='{SIDE}' height='{SIDE}' fill='none' stroke='{SOFT}'/>",
        _text(LEFT + SIDE / 2, bottom + 46, f"true {scale.title}", 13, INK, "center"),
        f"<g transform='translate(20 {middle}) rotate(-90)'>"
        f"{_text(0, 0, f'predicted {scale.title}', 13, INK, 'center')}</g>",
    ]
    for at, text in scale.ticks().items():
        parts += [
            _text(LEFT + at * SIDE, bottom + 20, text, 12, INK, "center"),
            _text(LEFT - 8, TOP + (1 - at) * SIDE, text, 12, INK, "end middle"),
        ]
    return parts


def _label_places(ends: Array, texts: list[str], discs: Array) -> list[Array | None]:
    """Where each link's text is written: on its line or beside it, on no other text or disc.

    Places near the middle of the line and far from other lines are preferred.

    Args:
        ends: (n, 2, 2) both ends of every link.
        texts: what is written.
        discs: (k, 3) x, y and radius.

    Returns:
        The center of every text, None if it does not fit.
    """
    half = np.array([[_label_width(text) / 2 + 1, 9.0] for text in texts])
    along = np.linspace(0.12, 0.88, 39)
    found: list[Array | None] = []
    for i, (a, b) in enumerate(ends):
        normal = np.array([a[1] - b[1], b[0] - a[0]]) / max(float(np.linalg.norm(b - a)), 1e-9)
        shift, at = (v.ravel() for v in np.meshgrid([0.0, 14, -14, 28, -28], along, indexing="ij"))
        places = a + at[:, None] * (b - a) + shift[:, None] * normal
        gap = np.maximum(np.abs(places[:, None] - discs[:, :2]) - half[i], 0)
        free = (np.linalg.norm(gap, axis=2) >= discs[:, 2] + 1).all(axis=1)
        for j, other in enumerate(found):
            if other is not None:
                free &= (np.abs(places - other) >= half[i] + half[j]).any(axis=1)
        others = np.delete(ends, i, axis=0)
        crossed = (_distance_to_lines(places, others) < half[i].min() + 3).sum(axis=1)
        cost = np.abs(at - 0.5) + np.abs(shift) / 20 + 0.4 * crossed
        best = int(np.where(free, cost, np.inf).argmin())
        found.append(places[best] if free[best] else None)
    return found


def _distance_to_lines(places: Array, ends: Array) -> Array:
    """(m, n) distance of m points from n segments (n, 2, 2)."""
    start, step = ends[:, 0], ends[:, 1] - ends[:, 0]
    length = np.maximum((step**2).sum(axis=1), 1e-9)
    at = ((places[:, None] - start) * step).sum(axis=2) / length
    nearest = start + np.clip(at, 0, 1)[..., None] * step
    return np.asarray(np.linalg.norm(places[:, None] - nearest, axis=2))


def _layout(subject: Subject, both: Array) -> Array:
    """(k, 2) positions of the discs in the unit square, y down.

    Starts at the centers of the shards; then discs repel each other, and links pull them together.
    """
    k = subject.k
    angle = 2 * np.pi * np.arange(k) / max(k, 1)
    position = np.stack([np.cos(angle), np.sin(angle)], 1)
    if subject.mesh is not None:
        centers = _projected_centers(subject)
        position = np.where(
            np.isnan(centers), position * np.nanmax(np.abs(centers), initial=1.0), centers
        )
    position = _to_unit_square(position)
    linked = (both + both.T > 0).astype(float)
    for step in np.linspace(0.06, 0.005, 120):
        offset = position[:, None] - position[None]
        distance = np.linalg.norm(offset, axis=2) + np.eye(k) + 1e-9
        push = (offset / distance[..., None] ** 3).sum(axis=1) / k**1.5
        pull = (linked[..., None] * offset * distance[..., None]).sum(axis=1)
        force = push * 0.8 - pull
        size = np.linalg.norm(force, axis=1, keepdims=True) + 1e-12
        position = position + force / size * np.minimum(size, step * 0.5)
    return _to_unit_square(position)


def _projected_centers(subject: Subject) -> Array:
    """(k, 2) centers of the shards in the plane of a picture, y down."""
    right, up, _ = view_axes(default_direction(subject.solid.points))
    return np.stack([subject.centers @ right, -(subject.centers @ up)], axis=1)


def _to_unit_square(position: Array) -> Array:
    low, high = position.min(axis=0), position.max(axis=0)
    wide = high > low
    return np.asarray((position - low) / np.where(wide, high - low, 1.0) + np.where(wide, 0.0, 0.5))


def _document(width: float, height: float, parts: Sequence[str]) -> Svg:
    body = "\n".join(parts)
    return Svg(
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' "
        f"viewBox='0 0 {width} {height}' {FONT}>\n"
        f"<rect width='{width}' height='{height}' fill='white'/>\n{body}\n</svg>\n"
    )


def _text(x: float, y: float, text: str, size: float, color: str = INK, how: str = "") -> str:
    """SVG text; `how` may contain bold, end, center (in x) and middle (in y)."""
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


def _disc(position: Array, radius: float, color: str) -> str:
    return (
        f"<circle cx='{position[0]:.1f}' cy='{position[1]:.1f}' r='{radius:.1f}' fill='{color}' "
        f"stroke='{INK}' stroke-width='1'/>"
    )


def _link_rows(position: Array, text: str) -> str:
    """A number on a white box."""
    width = _label_width(text)
    paper = _box(position[0] - width / 2, position[1] - 8, width, 16, "white", 0.85)
    return paper + _text(position[0], position[1], text, 11, INK, "center middle")


def _label_width(text: str) -> float:
    return 6.4 * len(text) + 6


def _hex(color: Array) -> str:
    return "#{:02x}{:02x}{:02x}".format(*color.tolist())
