"""Scene: what one picture contains, as geometry, before anything is drawn."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace

import numpy as np

from meshshard.errors import MeshWarning, RenderError
from meshshard.mesh import Array, Mesh
from meshshard.viz.camera import default_direction
from meshshard.viz.drawing import Drawing, clipped_rows, coarsened, drawing_of
from meshshard.viz.subject import Subject

__all__ = ["Scene", "Style", "scene_of"]

CLIPS = ("auto", "", "x", "y", "z", "-x", "-y", "-z")


@dataclass(frozen=True)
class Style:
    """How shards are drawn.

    Attributes:
        size: width and height of the picture in pixels.
        direction: from the mesh to the eye; None for a view from the front, the side and above.
        up: what points up in the picture.
        clip: "x", "y", "z" keeps the lower half along an axis, "-x", "-y", "-z" the upper half;
            cells are not cut. "auto" removes the near half of solids, "" removes nothing.
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
        RenderError: the shard does not exist, or `style.clip` is not valid.
    """
    if halo is not None:
        subject.check_shard(halo)
    mesh = subject.solid
    label = subject.cell_labels if mesh.n_cells else subject.labels
    clip = _clip(mesh, style, halo)
    whole = _body(mesh, label, clip, separate=bool(explode) or halo is not None)
    body = coarsened(whole, style.max_cells)
    coarse = len(body) < len(whole)
    scene = Scene(subject, style, body, _shifts(subject, explode), halo, clip, coarse)
    if clip:
        scene.notes.append(f"clipped at the middle of {clip[-1]}, without cutting cells")
    if coarse:
        what = "cells" if mesh.n_cells else "points"
        note = f"drawn coarser: {len(body):,} of {len(whole):,} {what}"
        scene.notes.append(note)
        warnings.warn(f"{subject.name}: {note}", MeshWarning, stacklevel=4)
    return scene


def _body(mesh: Mesh, label: Array, clip: str, *, separate: bool) -> Drawing:
    """Drawing of a mesh.

    Args:
        mesh: the whole mesh.
        label: (n,) shard of every cell (point of a cloud).
        clip: the half that is kept.
        separate: close the surface of every shard of a solid, also between shards.
    """
    rows = _kept_rows(mesh, clip)
    body = drawing_of(mesh, rows, label[rows] if separate else np.zeros(len(rows), np.int64))
    return replace(body, shard=label[body.rows])


def _kept_rows(mesh: Mesh, clip: str) -> Array:
    """Rows of the cells (points of a cloud) in the half that is kept."""
    if not clip:
        return np.arange(mesh.n_cells or mesh.n_points)
    return clipped_rows(mesh.positions("cells" if mesh.n_cells else "points"), clip)


def _clip(mesh: Mesh, style: Style, halo: int | None) -> str:
    """The half to keep; "" for both."""
    if style.clip not in CLIPS:
        raise RenderError(f"clip is {style.clip!r}; expected one of {', '.join(map(repr, CLIPS))}")
    if style.clip != "auto":
        return style.clip
    if mesh.dim < 3 or halo is not None:
        return ""
    towards = _direction(style, mesh)
    axis = int(np.abs(towards[:2]).argmax())
    return ("-" if towards[axis] < 0 else "") + "xyz"[axis]


def _direction(style: Style, mesh: Mesh) -> Array:
    given = style.direction
    return default_direction(mesh.points) if given is None else np.array(given, float)


def _shifts(subject: Subject, explode: float) -> Array:
    """(k, 3) by how much each shard is moved; zero for empty shards."""
    points = subject.solid.points
    middle = (points.min(axis=0) + points.max(axis=0)) / 2
    return np.asarray(np.nan_to_num(explode * (subject.centers - middle)))
