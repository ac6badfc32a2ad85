"""Scene: what one picture shows, as geometry, before any pixel."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace

import numpy as np

from meshshard.errors import MeshWarning
from meshshard.mesh import Array, Mesh
from meshshard.viz._canvas import direction_on
from meshshard.viz._geometry import Drawing, coarsened, drawing_of, kept_by_clip
from meshshard.viz._subject import Subject

__all__ = ["Scene", "Style", "scene_of"]


@dataclass(frozen=True)
class Style:
    """How shards are drawn.

    Attributes:
        size: width and height of the picture in pixels.
        direction: from the mesh to the eye; None for a view from the front, above and aside.
        up: what points up in the picture.
        clip: "x", "y", "z" keeps the lower half along an axis, "-x", "-y", "-z" the upper one;
            whole cells are kept. "auto" takes the near half off solids, "" nothing.
        lines: the edges along which shards meet.
        numbers: each shard's number on the part of it that is seen.
        legend: colors with their shards.
        halos: in an exploded view, each shard's halo beside it, translucent.
        off_screen: never a window, so that `.screenshot()` needs no `.show()` before it.
        flat: colors exactly as in the legend, without light.
        most: cells (or points) above which a coarser mesh is drawn.
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
    most: int = 500_000


@dataclass(eq=False)
class Scene:
    """What one picture shows: the subject, its own geometry, where shards go, and the notes."""

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
        """(3,) to the eye: as the style says, or as suits the mesh."""
        return _direction(self.style, self.subject.solid)

    @property
    def shards_with_halo(self) -> list[int]:
        """Which shards have their halo drawn."""
        if self.halo is not None:
            return [self.halo]
        wanted = self.style.halos and self.shift.any() and not self.coarse
        return list(range(self.subject.k)) if wanted else []

    def halo_rows(self, shard: int) -> Array:
        """Rows of a shard's halo, those that a solid's cut leaves."""
        mesh, rows = self.subject.solid, self.subject.halos[shard]
        if mesh.dim < 3 or self.subject.entity != "cells":
            return rows
        kept = _kept(mesh, self.clip)
        return np.asarray(rows[np.isin(rows, kept)])


def scene_of(subject: Subject, explode: float, halo: int | None, style: Style) -> Scene:
    """Geometry of a picture, before any pixel."""
    if halo is not None:
        subject.check_shard(halo)
    mesh = subject.solid
    label = subject.cell_labels if mesh.n_cells else subject.labels
    clip = _clip(mesh, style, halo)
    whole = _body(mesh, label, clip, apart=bool(explode) or halo is not None)
    body = coarsened(whole, style.most)
    coarse = len(body) < len(whole)
    scene = Scene(subject, style, body, _shifts(subject, explode), halo, clip, coarse)
    if clip:
        scene.notes.append(f"cut open in the middle of {clip[-1]}, whole cells kept")
    if coarse:
        what = "cells" if mesh.n_cells else "points"
        note = f"drawn coarser: {len(body):,} of {len(whole):,} {what}"
        scene.notes.append(note)
        warnings.warn(f"{subject.name}: {note}", MeshWarning, stacklevel=4)
    return scene


def _body(mesh: Mesh, label: Array, clip: str, apart: bool) -> Drawing:
    """What is drawn of a mesh; `apart`: solids are closed between shards too."""
    rows = _kept(mesh, clip)
    body = drawing_of(mesh, rows, label[rows] if apart else np.zeros(len(rows), np.int64))
    return replace(body, shard=label[body.rows])


def _kept(mesh: Mesh, clip: str) -> Array:
    """Rows of the cells (points of a cloud) on the side that is kept."""
    if not clip:
        return np.arange(mesh.n_cells or mesh.n_points)
    return kept_by_clip(mesh.positions("cells" if mesh.n_cells else "points"), clip)


def _clip(mesh: Mesh, style: Style, halo: int | None) -> str:
    """Which half to keep, "" for both."""
    if style.clip != "auto":
        return style.clip
    if mesh.dim < 3 or halo is not None:
        return ""
    towards = _direction(style, mesh)
    axis = int(np.abs(towards[:2]).argmax())
    return ("-" if towards[axis] < 0 else "") + "xyz"[axis]


def _direction(style: Style, mesh: Mesh) -> Array:
    given = style.direction
    return direction_on(mesh.points) if given is None else np.array(given, float)


def _shifts(subject: Subject, explode: float) -> Array:
    """(k, 3) how far each shard is moved."""
    places = subject.solid.points
    middle = (places.min(axis=0) + places.max(axis=0)) / 2
    return np.asarray(np.nan_to_num(explode * (subject.centers - middle)))
