"""Pictures of shards: on the mesh, pulled apart, with their halos, as PNG, HTML or on screen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from meshshard.errors import RenderError, n_of
from meshshard.mesh import Array, Mesh
from meshshard.viz._canvas import (
    View,
    add_labels,
    add_legend,
    add_solid_labels,
    add_title,
    axes_towards,
    check_window,
    legend_columns,
    look_from,
    look_into,
    plotter,
    point_size,
)
from meshshard.viz._geometry import Drawing, cut_lines, drawing_of
from meshshard.viz._numbers import numbers
from meshshard.viz._page import write_page
from meshshard.viz._scene import Scene, Style, scene_of
from meshshard.viz._subject import Drawable, Subject, subject_of

__all__ = ["Style", "plot_shards", "view"]

MOST = 132  # shards above which a picture has no legend
COLORS = "viridis"  # of fields
MANY = 24  # shards above which the legend gives numbers only


def plot_shards(
    what: Drawable,
    *,
    field: str | None = None,
    explode: float = 0.0,
    halo: int | None = None,
    style: Style | None = None,
) -> Any:
    """Draw a cut mesh: a color and a number for every shard, lines where they meet.

    Surfaces are drawn as they are, solids as their outer surface, clouds as points. Shards that
    exchange rows have colors that differ strongly. A mesh of more than `style.most` cells is
    drawn coarser, and the picture says so.

    Args:
        what: a partition, an open folder, or the path of a folder.
        field: color by this field instead of by shard; of a vector its length.
        explode: move shards away from the middle: 0.5 by half of their distance to it. Each
            then has its halo beside it, translucent, in the colors of its owners.
        halo: show one shard and its halo rows, translucent, the others as a shadow.
        style: everything else.

    Returns:
        A pyvista Plotter: `.show()`, or `.show(screenshot="cut.png")`.

    Raises:
        RenderError: this machine cannot draw, or there is no such field or shard.
    """
    return _picture(scene_of(subject_of(what), explode, halo, style or Style()), field)


def _picture(scene: Scene, field: str | None) -> Any:
    """A plotter with the scene, and title, legend and numbers in the plane of the window."""
    subject, style = scene.subject, scene.style
    wanted = style.legend and field is None and subject.k <= MOST
    entries = _entries(subject) if wanted else []
    right = legend_columns(entries, style.size)[1] if entries else (0.12 if field else 0.0)
    made, seen = _drawn(scene, field)
    look = _look(scene, seen, (right, 0.09))
    look.place(made)
    if entries:
        add_legend(made, _heading(subject), entries, subject.colors)
    if style.numbers:
        add_labels(made, *numbers(_numbered(scene, seen), look, scene.style.size))
    add_title(made, _title(subject), _notes(scene, field))
    return made


def _page(scene: Scene, field: str | None, path: Path) -> None:
    """A scene to be turned in a browser, with what else a picture says written over it."""
    subject = scene.subject
    made, seen = _drawn(scene, field)
    for title in list(made.scalar_bars.keys()):
        made.remove_scalar_bar(title)  # the page has its own
    look = look_into(
        seen.mesh.points, axes_towards(scene.direction, scene.style.up), scene.style.size
    )
    look.place(made)
    add_solid_labels(made, *numbers(_numbered(scene, seen), look, scene.style.size), look)
    lines = [_title(subject), *_notes(scene, field)]
    if field is None:
        legend, colors = [_heading(subject), *_entries(subject)], subject.colors
    else:
        legend, colors = _scale(_values(subject, field)[seen.rows], field)
    write_page(made, path, lines, legend, colors)


def _scale(values: Array, field: str) -> tuple[list[str], Array]:
    """Steps of a field's colors, largest first, for a page."""
    import pyvista

    low, high = _range(values)
    steps = np.linspace(1, 0, 9)
    colors = pyvista.LookupTable(COLORS, n_values=256).values[np.round(steps * 255).astype(int)]
    return [field, *(f"{low + s * (high - low):.4g}" for s in steps)], colors[:, :3]


def _range(values: Array) -> tuple[float, float]:
    """What the colors span: all but the last hundredth at either end."""
    known = values[np.isfinite(values)]
    low, high = np.percentile(known, [1, 99]) if len(known) else (0.0, 1.0)
    return float(low), float(high)


def _look(scene: Scene, seen: Drawing, margins: tuple[float, float]) -> View:
    """From where: on everything, or from its own side on the one shard that is shown."""
    style, places, direction = scene.style, seen.mesh.points, scene.direction
    if scene.halo is not None:
        subject = scene.subject
        middle = (places.min(axis=0) + places.max(axis=0)) / 2
        if style.direction is None:
            direction = np.where(
                subject.centers[scene.halo] < middle, -np.abs(direction), np.abs(direction)
            )
        rows = np.append(np.flatnonzero(subject.labels == scene.halo), subject.halos[scene.halo])
        places = subject.positions[rows] + scene.shift[scene.halo]
        margins = (margins[0] + 0.1, margins[1] + 0.15)
    return look_from(places, axes_towards(direction, style.up), style.size, margins)


def _numbered(scene: Scene, seen: Drawing) -> Drawing:
    """The shards that get a number."""
    if scene.halo is None:
        return seen
    return seen.some(np.flatnonzero(seen.shard == scene.halo))


def _drawn(scene: Scene, field: str | None) -> tuple[Any, Drawing]:
    """A plotter with bodies, halos and lines on it, and the body as it lies there."""
    style = scene.style
    made = plotter(style.size, flat=style.flat, hidden=style.off_screen)
    seen = scene.body.moved(scene.shift)
    if scene.halo is None:
        _add_body(made, scene, seen, field)
    else:
        mine = seen.shard == scene.halo
        _add_body(made, scene, seen.some(np.flatnonzero(mine)), field)
        _add_shadow(made, scene, seen.some(np.flatnonzero(~mine)))
    for shard in scene.shards_with_halo:
        _add_halo(made, scene, shard)
    if style.lines:
        _add_lines(made, scene)
    return made, seen


def _notes(scene: Scene, field: str | None) -> list[str]:
    """What a picture says below its title."""
    notes = list(scene.notes)
    if field is not None:
        notes.append(f"color: {field}")
    if scene.halo is not None:
        n = len(scene.subject.halos[scene.halo])
        notes.append(
            f"shard {scene.halo}; translucent: its halo, {n_of(n, 'rows')} that others own"
        )
    elif scene.shards_with_halo:
        notes.append("translucent: the halo of each shard, rows that others own")
    return notes


def _heading(subject: Subject) -> str:
    return f"shard   {subject.entity}" if subject.k <= MANY else "shard"


def _entries(subject: Subject) -> list[str]:
    """Texts of the legend; with sizes where there is room."""
    if subject.k > MANY:
        return [str(p) for p in range(subject.k)]
    return [f"{p:>2}    {n:,}" for p, n in enumerate(subject.sizes)]


def _title(subject: Subject) -> str:
    name, n = Path(subject.name).name, len(subject.labels)
    return f"{name}: {n_of(n, subject.entity)} in {n_of(subject.k, 'shards')}"


def _add_body(made: Any, scene: Scene, seen: Drawing, field: str | None) -> None:
    """The shards themselves."""
    from meshshard.io import to_pyvista

    subject, style = scene.subject, scene.style
    shown = to_pyvista(seen.mesh)
    options: dict[str, Any] = {"reset_camera": False, **_light(style)}
    if not seen.mesh.n_cells:
        options |= {"render_points_as_spheres": True, "point_size": point_size(len(seen))}
    if field is not None:
        shown["value"] = _values(subject, field)[seen.rows]
        clim = _range(shown["value"])
        bar = {"title": " ", "vertical": True, "n_labels": 5, "fmt": "%.4g", "color": "black"}
        bar |= {"position_x": 0.9, "position_y": 0.2, "height": 0.6, "width": 0.05}
        made.add_mesh(
            shown, scalars="value", cmap=COLORS, clim=clim, scalar_bar_args=bar, **options
        )
        return
    shown["color"] = subject.colors[seen.shard]
    made.add_mesh(shown, scalars="color", rgb=True, **options)


def _values(subject: Subject, field: str) -> Array:
    """One number for every cell of the mesh (every point of a cloud)."""
    mesh = subject.solid
    known = {**mesh.point_fields, **mesh.cell_fields}
    if field not in known:
        have = ", ".join(known) or "none"
        raise RenderError(f"{subject.name}: no field {field!r}; there are: {have}")
    values = known[field].astype(np.float64)
    if values.ndim > 1:
        values = np.linalg.norm(values.reshape(len(values), -1), axis=1)
    if mesh.n_cells and field not in mesh.cell_fields:
        corners = values[mesh.connectivity]
        values = np.add.reduceat(corners, mesh.offsets[:-1]) / np.diff(mesh.offsets)
    return values


def _add_shadow(made: Any, scene: Scene, seen: Drawing) -> None:
    """Shards that are not meant, just visible."""
    from meshshard.io import to_pyvista

    size = 0.6 * point_size(len(scene.body))
    made.add_mesh(
        to_pyvista(seen.mesh),
        color="gray",
        opacity=(0.4, 0.4, 0.12, 0.03)[scene.subject.solid.dim],
        point_size=size,
        reset_camera=False,
    )


def _add_halo(made: Any, scene: Scene, shard: int) -> None:
    from meshshard.io import to_pyvista

    subject = scene.subject
    mesh, rows = subject.solid, scene.halo_rows(shard)
    if not len(rows):
        return
    cloud = mesh if subject.entity == "cells" else Mesh(points=mesh.points)
    shape = drawing_of(cloud, rows, np.zeros(len(rows), np.int64))
    shape = replace(shape, shard=np.full(len(shape), shard)).moved(scene.shift)
    shown = to_pyvista(shape.mesh)
    shown["color"] = subject.colors[subject.labels[shape.rows]]
    made.add_mesh(
        shown,
        scalars="color",
        rgb=True,
        opacity=0.4,
        render_points_as_spheres=not cloud.n_cells,
        point_size=1.4 * point_size(len(subject.labels)),
        reset_camera=False,
        **_light(scene.style),
    )


def _light(style: Style) -> dict[str, Any]:
    """Enough shade to see the shape, little enough to tell the colors."""
    if style.flat:
        return {"lighting": False}
    return {"lighting": True, "ambient": 0.45, "diffuse": 0.62, "specular": 0.0}


def _add_lines(made: Any, scene: Scene) -> None:
    """The edges between shards, on both sides where they are pulled apart."""
    import pyvista

    body = scene.body
    ends, sides = cut_lines(body.mesh, body.shard)
    if scene.halo is not None:
        mine = (sides == scene.halo).any(axis=1)
        ends, sides = ends[mine], sides[mine]
    if not len(ends):
        return
    both = [0, 1] if scene.shift.any() else [0]
    places = np.concatenate(
        [body.mesh.points[ends] + scene.shift[sides[:, s]][:, None] for s in both]
    ).reshape(-1, 3)
    pairs = np.arange(len(places)).reshape(-1, 2)
    shown = pyvista.PolyData(places, lines=np.insert(pairs, 0, 2, axis=1).ravel())
    made.add_mesh(shown, color="#1a1a1a", line_width=2, lighting=False, reset_camera=False)


def view(
    folder: Drawable,
    *,
    png: str | Path | None = None,
    html: str | Path | None = None,
    show: bool = False,
    explode: float = 0.0,
    field: str | None = None,
) -> list[Path]:
    """Draw a folder of shards into files or a window: what `meshshard view` does.

    Args:
        folder: its path, or anything else that `plot_shards` draws.
        png: write a picture.
        html: write a scene to be turned in a browser: one file that needs no other and no network.
        show: open a window.
        explode: move shards away from the middle, see `plot_shards`.
        field: color by this field.

    Returns:
        The files that were written.

    Raises:
        RenderError: this machine cannot draw, cannot open a window, or lacks what writes HTML.
    """
    scene = scene_of(subject_of(folder), explode, None, Style(off_screen=True))
    written = []
    if html is not None:
        _page(scene, field, Path(html))
        written.append(Path(html))
    if png is not None:
        made = _picture(scene, field)
        made.screenshot(str(png))
        made.close()
        written.append(Path(png))
    if show:
        check_window()
        scene.style = Style()
        _picture(scene, field).show()
    return written
