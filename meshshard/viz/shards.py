"""Pictures of shards: on the mesh, exploded, or with their halos; as PNG, HTML or on screen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from meshshard.atomic_write import check_directory
from meshshard.errors import n_of
from meshshard.mesh import Array, Mesh
from meshshard.viz.annotations import (
    add_bar,
    add_label_plates,
    add_labels,
    add_legend,
    add_title,
    label_positions,
    legend_columns,
)
from meshshard.viz.camera import fit, view_axes
from meshshard.viz.colors import INK, LIGHT
from meshshard.viz.drawing import Drawing, cut_lines, drawing_of
from meshshard.viz.html_page import write_page
from meshshard.viz.rendering import (
    LINE,
    check_picture,
    check_window,
    enlargement,
    plotter,
    point_size,
    save_picture,
)
from meshshard.viz.scales import Scale, magnitude, scale_of
from meshshard.viz.scene import Scene, Style, scene_of
from meshshard.viz.subject import Drawable, Subject, subject_of

__all__ = ["Style", "add_lines", "add_values", "plot_shards", "view"]

MAX_LEGEND = 132  # shards above which a picture has no legend
MAX_SIZES = 24  # shards above which the legend omits the sizes


def plot_shards(
    what: Drawable,
    *,
    field: str | None = None,
    explode: float = 0.0,
    halo: int | None = None,
    style: Style | None = None,
) -> Any:
    """Draw a partitioned mesh: a color and a number for every shard, and the lines between them.

    Surfaces are drawn as they are, solids as their outer surface, clouds as points. Shards that
    exchange rows have colors that differ strongly. A mesh of more than `style.max_cells` cells is
    drawn coarser, with a note in the picture.

    Args:
        what: a partition, an open folder, or the path of a folder.
        field: color by this field instead of by shard; by the magnitude of a vector.
        explode: move shards away from the middle, by this factor times their distance to it.
            Each shard is drawn with its halo, translucent, in the colors of its owners.
        halo: draw one shard with its halo rows, translucent, and the other shards in pale gray.
        style: all other options.

    Returns:
        A pyvista Plotter: `.show()`, or `.show(screenshot="shards.png")`.

    Raises:
        RenderError: OpenGL is missing, or the field or shard does not exist.
    """
    return _picture(scene_of(subject_of(what), explode, halo, style or Style()), field)


def _picture(scene: Scene, field: str | None) -> Any:
    """A plotter with the scene, its title, legend and labels."""
    subject, style = scene.subject, scene.style
    listed = style.legend and field is None and subject.k <= MAX_LEGEND
    entries = _entries(subject) if listed else []
    right = legend_columns(entries, style.size)[1] if entries else (0.13 if field else 0.0)
    made, body = _drawn(scene, field)
    _aim(made, scene, body, (right, 0.09))
    if entries:
        add_legend(made, _heading(subject), entries, subject.colors)
    if field is not None:
        add_bar(made, _scale(scene, field), (0.87, 0.25, 20 / 1200, 0.5))
    if style.numbers:
        add_labels(made, *label_positions(_labeled(scene, body), made))
    add_title(made, subject.title, _notes(scene, field))
    return made


def _write_html(scene: Scene, field: str | None, path: Path) -> None:
    """Write a scene as a page in which it can be rotated; title and legend are HTML."""
    subject, style = scene.subject, scene.style
    made, body = _drawn(scene, field)
    axes = view_axes(scene.direction, style.up)
    made.view_vector(axes[2], viewup=axes[1], render=False)
    if style.numbers:
        texts, positions = label_positions(_labeled(scene, body), made)
        add_label_plates(made, texts, positions, axes)
    lines = [subject.title, *_notes(scene, field)]
    legend = (_heading(subject), _entries(subject), subject.colors)
    write_page(made, path, lines, legend if field is None else _scale(scene, field))


def _scale(scene: Scene, field: str) -> Scale:
    """The scale of a field, from all of its values, so that all views have the same colors."""
    values, style = scene.subject.values(field), scene.style
    name = field if values.ndim == 1 else f"{field} magnitude"
    return scale_of(magnitude(values), name, unit=style.unit, cmap=style.cmap, clim=style.clim)


def _aim(made: Any, scene: Scene, body: Drawing, margins: tuple[float, float]) -> None:
    """Point the camera at the whole body, or at the one shard that is drawn with its halo."""
    subject, style, direction = scene.subject, scene.style, scene.direction
    points = scene.focus if scene.halo is None and not scene.shift.any() else body.mesh.points
    if scene.halo is not None:
        middle = (points.min(axis=0) + points.max(axis=0)) / 2
        if style.direction is None:
            far = subject.centers[scene.halo] < middle
            direction = np.where(far, -np.abs(direction), np.abs(direction))
        rows = np.append(np.flatnonzero(subject.labels == scene.halo), subject.halos[scene.halo])
        points = subject.positions[rows] + scene.shift[scene.halo]
        margins = (margins[0] + 0.1, margins[1] + 0.15)
    fit(made, points, view_axes(direction, style.up), margins, style.zoom)


def _labeled(scene: Scene, body: Drawing) -> Drawing:
    """The shards that get a label."""
    if scene.halo is None:
        return body
    return body.subset(np.flatnonzero(body.shard == scene.halo))


def _drawn(scene: Scene, field: str | None) -> tuple[Any, Drawing]:
    """A plotter with shards, halos and lines, and the drawing of the shards where they are."""
    style = scene.style
    made = plotter(style.size, flat=style.flat, hidden=style.off_screen)
    body = scene.body.moved(scene.shift)
    if scene.halo is None:
        _add_body(made, scene, body, field)
    else:
        mine = body.shard == scene.halo
        _add_body(made, scene, body.subset(np.flatnonzero(mine)), field)
        _add_others(made, scene, body.subset(np.flatnonzero(~mine)))
    for shard in scene.shards_with_halo:
        _add_halo(made, scene, shard)
    if style.lines:
        add_lines(made, scene)
    return made, body


def _notes(scene: Scene, field: str | None) -> list[str]:
    """Lines below the title."""
    notes = list(scene.notes)
    if field is not None:
        values = magnitude(scene.subject.values(field))
        notes += _scale(scene, field).notes(values[np.unique(scene.body.rows)])
    if scene.halo is not None:
        n = len(scene.subject.halos[scene.halo])
        notes.append(
            f"shard {scene.halo}; translucent: its halo, {n_of(n, 'rows')} of other shards"
        )
    elif scene.shards_with_halo:
        notes.append("translucent: the halo of each shard, rows of other shards")
    return notes


def _heading(subject: Subject) -> str:
    return f"shard   {subject.entity}" if subject.k <= MAX_SIZES else "shard"


def _entries(subject: Subject) -> list[str]:
    """Entries of the legend."""
    if subject.k > MAX_SIZES:
        return [str(p) for p in range(subject.k)]
    return [f"{p:>2}    {n:,}" for p, n in enumerate(subject.sizes)]


def _add_body(made: Any, scene: Scene, body: Drawing, field: str | None) -> None:
    """Add shards, colored by shard or by a field."""
    from meshshard.io import to_pyvista

    subject = scene.subject
    if field is None:
        options = _options(scene, body) | _light(scene.style)
        # an actor for each shard, which a page can hide; not for thousands of shards
        group = body.shard if subject.k <= MAX_LEGEND else np.zeros_like(body.shard)
        for shard in np.unique(group):
            part = body.subset(np.flatnonzero(group == shard))
            shown = to_pyvista(part.mesh)
            shown["color"] = subject.colors[part.shard]
            name = f"shard {shard} body"
            made.add_mesh(shown, scalars="color", rgb=True, name=name, **options)
        return
    values = magnitude(subject.values(field))[body.rows]
    add_values(made, scene, body, values, _scale(scene, field))


def add_values(made: Any, scene: Scene, body: Drawing, values: Array, scale: Scale) -> None:
    """Add a body in exactly the colors of a scale: without light, so that edges show its shape.

    Args:
        made: the plotter.
        scene: what the picture contains.
        body: what is drawn.
        values: (n,) value of each drawn cell (point of a cloud).
        scale: the colors.
    """
    from meshshard.io import to_pyvista

    shown = to_pyvista(body.mesh)
    shown["value"] = values
    options = _options(scene, body) | {
        "cmap": scale.table(),
        "clim": (scale.low, scale.high),
        "log_scale": scale.log,
        "lighting": False,
        "ambient": 0.0,  # VTK adds the parts of ambient and diffuse light also without light
        "diffuse": 1.0,
        "show_scalar_bar": False,
        "interpolate_before_map": True,
    }
    made.add_mesh(shown, scalars="value", **options)
    if body.mesh.dim == 2:
        edges = shown.extract_feature_edges(30.0, non_manifold_edges=False)
        width = enlargement(scene.style.size)
        made.add_mesh(edges, color="gray", line_width=width, lighting=False, reset_camera=False)


def _options(scene: Scene, body: Drawing) -> dict[str, Any]:
    """Options of `add_mesh` for the body."""
    size = scene.style.size
    options: dict[str, Any] = {"reset_camera": False, "line_width": LINE * enlargement(size)}
    if not body.mesh.n_cells:
        points = {"render_points_as_spheres": True, "point_size": point_size(len(body), size)}
        options |= points
    return options


def _add_others(made: Any, scene: Scene, body: Drawing) -> None:
    """Add the shards around the one that is drawn with its halo, in pale gray."""
    from meshshard.io import to_pyvista

    made.add_mesh(
        to_pyvista(body.mesh),
        color="gray",
        opacity=(0.4, 0.4, 0.12, 0.03)[scene.subject.solid.dim],
        point_size=0.6 * point_size(len(scene.body), scene.style.size),
        reset_camera=False,
    )


def _add_halo(made: Any, scene: Scene, shard: int) -> None:
    """Add the halo of a shard, translucent, in the colors of the owners of its rows."""
    from meshshard.io import to_pyvista

    subject = scene.subject
    mesh, rows = subject.solid, scene.halo_rows(shard)
    if not len(rows):
        return
    cloud = mesh if subject.entity == "cells" else Mesh(points=mesh.points)
    halo = drawing_of(cloud, rows, np.zeros(len(rows), np.int64))
    halo = replace(halo, shard=np.full(len(halo), shard)).moved(scene.shift)
    shown = to_pyvista(halo.mesh)
    shown["color"] = subject.colors[subject.labels[halo.rows]]
    made.add_mesh(
        shown,
        scalars="color",
        rgb=True,
        opacity=0.4,
        name=f"shard {shard} halo",
        render_points_as_spheres=not cloud.n_cells,
        point_size=1.4 * point_size(len(subject.labels), scene.style.size),
        reset_camera=False,
        **_light(scene.style),
    )


def _light(style: Style) -> dict[str, Any]:
    """Options of `add_mesh`."""
    return {"lighting": False} if style.flat else {"lighting": True, **LIGHT}


def add_lines(made: Any, scene: Scene) -> None:
    """Add the edges between shards, on both sides if shards are moved."""
    import pyvista

    body = scene.body
    ends, sides = cut_lines(body.mesh, body.shard)
    if scene.halo is not None:
        mine = (sides == scene.halo).any(axis=1)
        ends, sides = ends[mine], sides[mine]
    if not len(ends):
        return
    both = [0, 1] if scene.shift.any() else [0]
    points = [body.mesh.points[ends] + scene.shift[sides[:, s]][:, None] for s in both]
    lines = pyvista.line_segments_from_points(np.concatenate(points).reshape(-1, 3))
    made.add_mesh(
        lines,
        color=INK,
        line_width=2 * enlargement(scene.style.size),
        lighting=False,
        reset_camera=False,
    )


def view(
    folder: Drawable,
    *,
    png: str | Path | None = None,
    html: str | Path | None = None,
    show: bool = False,
    explode: float = 0.0,
    field: str | None = None,
    style: Style | None = None,
) -> list[Path]:
    """Draw a folder of shards into files or a window, as `meshshard view` does.

    Args:
        folder: its path, or anything else that `plot_shards` draws.
        png: picture to write.
        html: page to write, in which the scene can be rotated: a single file that needs no
            network.
        show: open a window.
        explode: move shards away from the middle, see `plot_shards`.
        field: color by this field.
        style: all other options, see `plot_shards`.

    Returns:
        The files that were written.

    Raises:
        RenderError: OpenGL, the display or the package for HTML is missing.
    """
    for file in (png, html):
        if file is not None:
            check_directory(file)
    if png is not None:
        check_picture(png)
    style = style or Style()
    scene = scene_of(subject_of(folder), explode, None, replace(style, off_screen=True))
    written = []
    if html is not None:
        _write_html(scene, field, Path(html))
        written.append(Path(html))
    if png is not None:
        written.append(save_picture(_picture(scene, field), png))
    if show:
        check_window()
        scene.style = style
        _picture(scene, field).show()
    return written
