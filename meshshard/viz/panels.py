"""Panels: a mesh with several sets of values side by side, such as truth, prediction, error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from meshshard.errors import RenderError
from meshshard.mesh import Array, Mesh
from meshshard.viz.annotations import add_bar, add_text, add_title
from meshshard.viz.camera import fit, view_axes
from meshshard.viz.rendering import enlargement, plotter
from meshshard.viz.scales import Scale, magnitude, scale_of
from meshshard.viz.scene import Scene, Style, scene_of
from meshshard.viz.shards import add_lines, add_values
from meshshard.viz.subject import Drawable, Subject, subject_of

__all__ = ["Panel", "plot_panels", "plot_prediction"]

TITLE, BAR = 44.0, 74.0  # pixels for the title of the picture, and for a row of color bars
ERRORS, SMALL_ERRORS = "PuOr_r", "cividis"


@dataclass(frozen=True, eq=False)
class Panel:
    """A set of values on the mesh.

    Attributes:
        title: written above it.
        values: (n_cells,) or (n_points,).
        scale: its colors; panels of a row with the same scale share a bar if they are neighbors.
        lines: draw the lines between shards.
    """

    title: str
    values: Array
    scale: Scale
    lines: bool = True


def plot_panels(
    what: Drawable | Mesh,
    rows: Sequence[Sequence[Panel]],
    *,
    title: str = "",
    style: Style | None = None,
) -> Any:
    """Draw a mesh several times, with one camera and without light; color bars are below a row.

    Args:
        what: a mesh, or anything that `plot_shards` draws, with the lines between its shards.
        rows: the panels, row by row.
        title: written above all.
        style: options; numbers and legend do not apply. None chooses a size.

    Returns:
        A pyvista Plotter.

    Raises:
        RenderError: OpenGL is missing, or values have another length than the mesh.
    """
    columns = max(len(row) for row in rows)
    style = style or Style(size=(520 * columns, 400 * len(rows) + 50))
    scene = scene_of(_subject(what), 0.0, None, style)
    unit = enlargement(style.size)
    body = (style.size[1] - TITLE * unit) / len(rows) - BAR * unit
    runs = [(i, run) for i, row in enumerate(rows) for run in _runs(row)]
    made = plotter(
        style.size,
        hidden=style.off_screen,
        shape=(1 + 2 * len(rows), columns),
        row_weights=[TITLE * unit, *[body, BAR * unit] * len(rows)],
        groups=[(0, slice(None)), *((2 + 2 * i, run) for i, run in runs if len(run) > 1)],
    )
    made.subplot(0, 0)
    add_title(made, title, [])
    for i, row in enumerate(rows):
        for column, panel in enumerate(row):
            made.subplot(1 + 2 * i, column)
            _add_panel(made, scene, panel)
    for i, run in runs:
        made.subplot(2 + 2 * i, run[0])
        width = min(0.7, 0.7 * 1.5 / len(run))
        add_bar(made, rows[i][run[0]].scale, ((1 - width) / 2, 0.45, width, 0.2))
    index = made.renderers.loc_to_index
    made.link_views([index((1 + 2 * i, c)) for i, row in enumerate(rows) for c in range(len(row))])
    made.subplot(1, 0)
    return made


def plot_prediction(
    what: Drawable | Mesh,
    truth: str | Array,
    prediction: str | Array,
    *,
    name: str = "",
    names: tuple[str, str] = ("truth", "prediction"),
    log: bool = False,
    style: Style | None = None,
) -> Any:
    """Draw a true field, its prediction with the same colors, and the error with its own.

    Args:
        what: a mesh, or anything that `plot_shards` draws.
        truth: name of a field, or (n_cells, …) or (n_points, …) values. Of vectors, magnitudes
            are drawn, and the magnitude of the difference.
        prediction: the same of the prediction.
        name: what the values are, for the color bar; "" for the name of the field.
        names: titles of the two, such as ("serial", "sharded").
        log: draw the absolute error on a logarithmic scale, for errors as small as rounding.
        style: options as in `plot_panels`; `cmap`, `clim` and `unit` are those of the field.

    Returns:
        A pyvista Plotter.

    Raises:
        RenderError: OpenGL is missing, a field does not exist, or the two differ in shape.
    """
    subject = _subject(what)
    true, found = (subject.values(v) for v in (truth, prediction))
    if true.shape != found.shape:
        raise RenderError(
            f"{names[0]} has shape {true.shape}, {names[1]} {found.shape}; expected the same"
        )
    if not name:
        name = next((v for v in (truth, prediction) if isinstance(v, str)), "values")
    both = np.concatenate([magnitude(true), magnitude(found)])
    options = style or Style()
    scale = scale_of(both, name, unit=options.unit, cmap=options.cmap, clim=options.clim)
    error = found - true
    known = np.isfinite(error)
    length = max(float(np.linalg.norm(true[known])), np.finfo(float).tiny)
    relative = float(np.linalg.norm(error[known])) / length
    said = f"difference {100 * relative:.3g} % (relative L2)"
    panels = [
        Panel(names[0], magnitude(true), scale),
        Panel(names[1], magnitude(found), scale),
        _error(error, said, f"{names[1]} - {names[0]}", options.unit, log=log),
    ]
    return plot_panels(subject, [panels], title=subject.title, style=style)


def _error(error: Array, said: str, name: str, unit: str, *, log: bool) -> Panel:
    """The panel of an error: with its sign if it has one and is not `log`."""
    size = np.abs(magnitude(error))
    most = float(np.nanmax(size, initial=0.0))
    if log:
        low = 10.0 ** np.floor(np.log10(max(most, 1e-300)) - 4)
        scale = scale_of(size, f"abs({name})", unit=unit, cmap=SMALL_ERRORS,
                         clim=(low, max(most, 2 * low)), log=True)  # fmt: skip
        return Panel(f"{said}, at most {most:.2g}", np.maximum(size, low), scale)
    if error.ndim > 1:
        return Panel(said, size, scale_of(size, f"abs({name})", unit=unit, cmap=SMALL_ERRORS))
    limits = (-most, most) if most else None
    return Panel(said, error, scale_of(error, name, unit=unit, cmap=ERRORS, clim=limits))


def _subject(what: Drawable | Mesh) -> Subject:
    """The subject of a picture; a mesh that is not partitioned is one shard."""
    if not isinstance(what, Mesh):
        return subject_of(what)
    entity = "cells" if what.n_cells else "points"
    labels = np.zeros(what.n_cells or what.n_points, np.int64)
    return Subject(what.name, entity, labels, [labels[:0]], np.zeros((1, 1), np.int64), what)


def _runs(row: Sequence[Panel]) -> Iterator[list[int]]:
    """Columns of neighboring panels with the same scale."""
    for _, run in groupby(range(len(row)), key=lambda column: row[column].scale):
        yield list(run)


def _add_panel(made: Any, scene: Scene, panel: Panel) -> None:
    values = scene.subject.values(panel.values)
    add_values(made, scene, scene.body, values[scene.body.rows], panel.scale)
    if panel.lines and scene.style.lines and scene.subject.k > 1:
        add_lines(made, scene)
    axes = view_axes(scene.direction, scene.style.up)
    fit(made, scene.focus, axes, (0.0, 0.17), scene.style.zoom)
    for i, text in enumerate([panel.title, *panel.scale.notes(values)]):
        add_text(made, text, (0.5, 0.92 - 0.07 * i), 12 if i else 16, align="center")
