"""Scene: what one picture contains, as geometry, before anything is drawn."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

import numpy as np

from meshshard.errors import MeshWarning, RenderError
from meshshard.mesh import Array, Mesh
from meshshard.viz.camera import default_direction
from meshshard.viz.drawing import Drawing, coarsened, drawing_of, slice_of
from meshshard.viz.subject import Subject

__all__ = ["Scene", "Style", "scene_of"]

PLANE = re.compile(r"(-?)([xyz])(?:=([-+.\de]+))?")
NUMBERS = {"size": 2, "direction": 3, "up": 3, "focus": 6, "clim": 2}  # how many in a `Style`
LARGEST = {"explode": 1e3, "zoom": 1e6, "size": 20_000}
DENSE = 0.8  # share of the cells that fill the picture of a solid


@dataclass(frozen=True)
class Style:
    """How shards are drawn.

    Attributes:
        size: width and height of the picture in pixels.
        direction: from the mesh to the eye; None for a view from the front, the side and above.
        up: what points up in the picture.
        clip: "x", "y", "z" keeps the lower half along an axis, "-x", "-y", "-z" the upper half,
            "x=0.5" what is below 0.5; cells are not cut. "auto" removes the near half of solids,
            "" removes nothing.
        slice: "x", "y", "z" draws the plane through the middle of a solid, "y=0.1" that at 0.1.
        focus: what fills the picture: (x min, x max, y min, y max, z min, z max), "" for all, or
            "auto": of a solid that is clipped or sliced, where its cells are densest.
        zoom: magnification about the middle of that.
        cmap: color map of matplotlib for fields; "" for viridis, or coolwarm for values of both
            signs.
        clim: the values of the first and the last color; None for the range of the field, made
            symmetric for values of both signs.
        unit: unit of the field, written at the color bar.
        lines: draw the edges between shards.
        numbers: label each visible shard with its number.
        legend: list the colors of the shards.
        halos: in an exploded view, draw each shard's halo next to it, translucent.
        off_screen: never open a window, so that `.screenshot()` works without `.show()`.
        flat: draw without light, in exactly the colors of the legend.
        max_cells: number of cells (or points) above which a coarser mesh is drawn.
    """

    size: tuple[int, int] = (1200, 760)
    direction: tuple[float, float, float] | None = None
    up: tuple[float, float, float] = (0.0, 0.0, 1.0)
    clip: str = "auto"
    slice: str = ""
    focus: tuple[float, float, float, float, float, float] | str = "auto"
    zoom: float = 1.0
    cmap: str = ""
    clim: tuple[float, float] | None = None
    unit: str = ""
    lines: bool = True
    numbers: bool = True
    legend: bool = True
    halos: bool = True
    off_screen: bool = False
    flat: bool = False
    max_cells: int = 500_000


@dataclass(eq=False)
class Scene:
    """What one picture contains.

    Attributes:
        subject: the partitioned mesh.
        style: how it is drawn.
        body: its geometry, before shards are moved.
        shift: (k, 3) by how much each shard is moved.
        halo: the one shard that is drawn with its halo; None for all shards.
        clip: the half of a solid that is kept, as in `Style`; "" for both.
        coarse: the body is coarser than the mesh.
        notes: lines below the title.
    """

    subject: Subject
    style: Style
    body: Drawing
    shift: Array
    halo: int | None
    clip: str = ""
    coarse: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def direction(self) -> Array:
        """(3,) direction from the mesh to the eye."""
        return _direction(self.style, self.subject.solid)

    @property
    def focus(self) -> Array:
        """(n, 3) points that fill the picture."""
        style, points = self.style, self.body.mesh.points
        if isinstance(style.focus, tuple):
            box = np.array(style.focus, float).reshape(3, 2)
            ends = points.min(axis=0), points.max(axis=0)
            if not self.shift.any() and ((box[:, 0] > ends[1]) | (box[:, 1] < ends[0])).any():
                spans = ", ".join(
                    f"{low:.4g} to {high:.4g}" for low, high in zip(*ends, strict=True)
                )
                raise RenderError(f"focus is {style.focus}: nothing is there; x, y, z are {spans}")
            return np.asarray(np.stack(np.meshgrid(*box), axis=-1).reshape(-1, 3))
        if style.focus not in ("auto", ""):
            raise RenderError(f"focus is {style.focus!r}; expected six numbers, 'auto' or ''")
        solid = self.subject.solid
        if style.focus == "" or solid.dim < 3 or not (self.clip or style.slice) or self.shift.any():
            return points
        return _dense(points, _kept(solid, self.body.rows))

    @property
    def shards_with_halo(self) -> list[int]:
        """Shards whose halo is drawn."""
        if self.halo is not None:
            return [self.halo]
        wanted = self.style.halos and self.shift.any() and not self.coarse
        return list(range(self.subject.k)) if wanted else []

    def halo_rows(self, shard: int) -> Array:
        """Rows of a shard's halo that the clip keeps."""
        mesh, rows = self.subject.solid, self.subject.halos[shard]
        if mesh.dim < 3 or self.subject.entity != "cells":
            return rows
        return np.asarray(rows[np.isin(rows, _kept_rows(mesh, self.clip))])


def scene_of(subject: Subject, explode: float, halo: int | None, style: Style) -> Scene:
    """The scene that `plot_shards` draws; its arguments are explained there.

    Raises:
        RenderError: the shard does not exist, or `explode` or an option is not valid.
    """
    _check(style, explode)
    if halo is not None:
        subject.check_shard(halo)
    if style.slice and halo is not None:
        raise RenderError("halo= cannot be drawn on a slice; use clip= instead of slice=")
    mesh = subject.solid
    label = subject.cell_labels if mesh.n_cells else subject.labels
    clip = _clip(mesh, style, halo)
    if style.slice:
        whole = _sliced(mesh, style.slice, label)
    else:
        whole = _body(mesh, label, clip, separate=bool(explode) or halo is not None)
    body = coarsened(whole, style.max_cells)
    coarse = len(body) < len(whole)
    scene = Scene(subject, style, body, _shifts(subject, explode), halo, clip, coarse)
    if clip or style.slice:
        axis, value = _plane(style.slice or clip, mesh)[1:]
        size = max(float(np.ptp(mesh.points, axis=0).max()), 1e-30)
        value = float(np.round(value / size, 4) * size)
        how = "sliced" if style.slice else "clipped without cutting cells"
        scene.notes.append(f"{how} at {'xyz'[axis]} = {value:.4g}")
    if coarse:
        what = "cells" if mesh.n_cells else "points"
        note = f"drawn coarser: {len(body):,} of {len(whole):,} {what}"
        scene.notes.append(note)
        warnings.warn(f"{subject.name}: {note}", MeshWarning, stacklevel=4)
    return scene


def _check(style: Any, explode: Any) -> None:
    """Verify the numbers of a style.

    Raises:
        RenderError: one is not a number, too many, too few, or out of range.
    """
    for name, n in NUMBERS.items():
        value = getattr(style, name)
        if value is None or isinstance(value, str):
            continue
        if np.shape(value) != (n,) or not all(
            isinstance(v, (int, float, np.number)) and isfinite(v) for v in value
        ):
            raise RenderError(f"{name} is {value!r}; expected {n} numbers")
    if not (isinstance(explode, (int, float)) and 0 <= explode <= LARGEST["explode"]):
        raise RenderError(f"explode is {explode!r}; expected 0 to {LARGEST['explode']:g}")
    if not 0 < style.zoom <= LARGEST["zoom"]:
        raise RenderError(f"zoom is {style.zoom!r}; expected above 0, at most {LARGEST['zoom']:g}")
    if not all(isinstance(v, (int, np.integer)) and 0 < v <= LARGEST["size"] for v in style.size):
        raise RenderError(f"size is {style.size!r}; expected pixels up to {LARGEST['size']:,}")
    if not np.any(style.up) or (style.direction is not None and not np.any(style.direction)):
        raise RenderError("direction and up must not be (0, 0, 0)")
    if isinstance(style.focus, tuple) and any(np.diff(style.focus)[::2] < 0):
        raise RenderError(f"focus is {style.focus}; expected x min, x max, y min, y max, …")
    if style.max_cells < 1:
        raise RenderError(f"max_cells is {style.max_cells}; expected at least 1")


def _body(mesh: Mesh, label: Array, clip: str, *, separate: bool) -> Drawing:
    """Drawing of a mesh.

    Args:
        mesh: the whole mesh.
        label: (n,) shard of every cell (point of a cloud).
        clip: the half that is kept.
        separate: close the surface of every shard of a solid, also between shards.
    """
    rows = _kept_rows(mesh, clip)
    if not len(rows):
        raise RenderError(f"{mesh.name}: nothing is left at clip={clip!r}; choose another plane")
    body = drawing_of(mesh, rows, label[rows] if separate else np.zeros(len(rows), np.int64))
    return replace(body, shard=label[body.rows])


def _kept_rows(mesh: Mesh, clip: str) -> Array:
    """Rows of the cells (points of a cloud) that a clip keeps."""
    if not clip:
        return np.arange(mesh.n_cells or mesh.n_points)
    upper, axis, value = _plane(clip, mesh)
    along = mesh.positions("cells" if mesh.n_cells else "points")[:, axis] + mesh.offset[axis]
    return np.flatnonzero(along >= value if upper else along <= value)


def _sliced(mesh: Mesh, text: str, label: Array) -> Drawing:
    """The plane of a slice."""
    _, axis, value = _plane(text, mesh)
    if mesh.dim < 3:
        raise RenderError(f"{mesh.name}: slice= needs a volume, this is a {mesh.kind}; use clip=")
    drawn = slice_of(mesh, axis, value)
    if not len(drawn):
        raise RenderError(f"{mesh.name}: no cell is at {'xyz'[axis]} = {value:g}")
    return replace(drawn, shard=label[drawn.rows])


def _plane(text: str, mesh: Mesh) -> tuple[bool, int, float]:
    """Whether the upper part is kept, the axis, and the position of the plane."""
    found = PLANE.fullmatch(text)
    try:
        upper, name, given = found.groups() if found else ("", "", "no")
        value = None if given is None else float(given)
    except ValueError:
        name = ""
    if not name:
        raise RenderError(f"a plane is {text!r}; expected an axis such as 'x', '-x' or 'x=0.5'")
    axis = "xyz".index(name)
    if value is None:
        at = mesh.positions("cells" if mesh.n_cells else "points")[:, axis]
        value = float((at.min() + at.max()) / 2 + mesh.offset[axis])
    return upper == "-", axis, value


def _clip(mesh: Mesh, style: Style, halo: int | None) -> str:
    """The part to keep; "" for all."""
    if style.clip != "auto":
        return style.clip
    if mesh.dim < 3 or halo is not None or style.slice:
        return ""
    towards = _direction(style, mesh)
    axis = int(np.abs(towards[:2]).argmax())
    return ("-" if towards[axis] < 0 else "") + "xyz"[axis]


def _direction(style: Style, mesh: Mesh) -> Array:
    if style.direction is not None:
        return np.array(style.direction, float)
    if style.slice:
        axis = _plane(style.slice, mesh)[1]
        return np.asarray(
            np.eye(3)[axis] * (-1 if axis == 1 else 1)
        )  # x to the right where it can be
    return default_direction(mesh.points)


def _dense(points: Array, centers: Array) -> Array:
    """(8, 3) corners of a box around most cells, or the points if the box is not much smaller."""
    tail = 50 * (1 - DENSE)
    low, high = np.percentile(centers, [tail, 100 - tail], axis=0)
    middle, half = (low + high) / 2, 0.6 * (high - low)
    ends = points.min(axis=0), points.max(axis=0)
    box = np.clip([middle - half, middle + half], *ends)
    extent = np.maximum(np.ptp(ends, axis=0), 1e-30)
    if np.prod(np.where(extent > 1e-30, np.ptp(box, axis=0) / extent, 1.0)) > 0.5:
        return points
    return np.asarray(np.stack(np.meshgrid(*box.T), axis=-1).reshape(-1, 3))


def _kept(mesh: Mesh, rows: Array) -> Array:
    """(n, 3) centers of the cells that are drawn, once each."""
    return np.asarray(mesh.centers()[np.unique(rows)] + mesh.offset)


def _shifts(subject: Subject, explode: float) -> Array:
    """(k, 3) by how much each shard is moved; zero for empty shards."""
    points = subject.solid.points
    middle = (points.min(axis=0) + points.max(axis=0)) / 2
    return np.asarray(np.nan_to_num(explode * (subject.centers - middle)))
