"""Annotations: the title of a picture, its legend, and the label on every shard."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshshard.mesh import Array
from meshshard.viz.colors import INK
from meshshard.viz.drawing import Drawing, pieces_of
from meshshard.viz.rendering import LINE, enlargement, panel_size, plotter, point_size
from meshshard.viz.scales import Scale

__all__ = [
    "add_bar",
    "add_label_plates",
    "add_labels",
    "add_legend",
    "add_text",
    "add_title",
    "label_positions",
    "legend_columns",
]

ROW = 24.0  # pixels for a row of the legend, in a picture of 1200 x 760 pixels


def add_title(made: Any, title: str, notes: list[str]) -> None:
    """Write the title at the top left of a plotter, and the notes below it in smaller type."""
    width, height = panel_size(made)
    scale = enlargement(made.window_size)
    top = height - 14 * scale
    for text, size in [(title, 18), *((note, 14) for note in notes)]:
        top -= (size + 6) * scale
        add_text(made, text, (18 * scale / width, top / height), size)


def add_text(
    made: Any, text: str, position: tuple[float, float], size: float, *, align: str = "left"
) -> None:
    """Write text at a position in fractions of the panel.

    Args:
        made: the plotter.
        text: a line.
        position: the lower end that `align` names.
        size: in pixels, in a picture of 1200 x 760 pixels.
        align: "left", "center" or "right".
    """
    made.add_text(
        text.replace("|", "¦").replace("$", "\\$"),  # VTK takes them for columns and formulas
        position=position,
        viewport=True,
        font_size=1,
        font="arial",
        color=INK,
        name=f"text {len(made.renderer.actors)}",
    )
    actor = list(made.renderer.actors.values())[-1]
    actor.prop.SetFontSize(round(size * enlargement(made.window_size)))
    actor.prop.SetBackgroundColor(1.0, 1.0, 1.0)
    actor.prop.SetBackgroundOpacity(0.8)
    actor.prop.SetJustification(("left", "center", "right").index(align))


def legend_columns(entries: list[str], size: tuple[int, int]) -> tuple[int, float]:
    """Columns of a legend, and the fraction of the window's width that it takes."""
    scale = enlargement(size)
    columns = -(-len(entries) // max(1, int((size[1] - 100 * scale) / ROW / scale)))
    widest = max((len(e) for e in entries), default=0)
    return columns, min(0.6, columns * (40 + 8.2 * widest) * scale / size[0] + 0.015)


def add_bar(made: Any, scale: Scale, place: tuple[float, float, float, float]) -> None:
    """Draw the colors of a scale with round values beside them, and its title above.

    Args:
        made: the plotter.
        scale: what is drawn.
        place: left, bottom, width and height in fractions of the panel; a bar that is higher
            than wide in pixels is vertical.
    """
    left, bottom, width, height = place
    panel, size = panel_size(made), enlargement(made.window_size)
    upright = height * panel[1] > width * panel[0]
    if upright:
        edge = 10 * size / panel[0]
        _add_paper(made, (left - edge, bottom - edge, 1 - left + edge, height + 4 * edge))
    _add_swatches(made, scale.table(), place, upright)
    for at, text in scale.ticks().items():
        if upright:
            x, y = left + width + 8 * size / panel[0], bottom + at * height - 5 * size / panel[1]
        else:
            x, y = left + at * width, bottom - 20 * size / panel[1]
        add_text(made, text, (x, y), 14, align="left" if upright else "center")
    x = 1 - 10 * size / panel[0] if upright else left + width / 2
    y = bottom + height + (26 if upright else 8) * size / panel[1]
    add_text(made, scale.title, (x, y), 14, align="right" if upright else "center")


def _add_paper(made: Any, place: tuple[float, float, float, float]) -> None:
    """Draw a white rectangle behind a legend: left, bottom, width and height in fractions."""
    import pyvista
    from vtkmodules.vtkRenderingCore import vtkActor2D, vtkCoordinate, vtkPolyDataMapper2D

    left, bottom, width, height = place
    x, y = [left, left + width], [bottom, bottom + height]
    corners = [[x[0], y[0], 0.0], [x[1], y[0], 0.0], [x[1], y[1], 0.0], [x[0], y[1], 0.0]]
    where, mapper, actor = vtkCoordinate(), vtkPolyDataMapper2D(), vtkActor2D()
    where.SetCoordinateSystemToNormalizedViewport()
    mapper.SetInputData(pyvista.PolyData(corners, faces=[4, 0, 1, 2, 3]))
    mapper.SetTransformCoordinate(where)
    actor.SetMapper(mapper)
    actor.GetProperty().SetColor(1.0, 1.0, 1.0)
    actor.GetProperty().SetOpacity(0.85)
    made.add_actor(actor, reset_camera=False)


def _add_swatches(
    made: Any, table: Any, place: tuple[float, float, float, float], upright: bool = True
) -> Any:
    """Draw the colors of a table; returns the scalar bar of VTK."""
    bar = made.add_scalar_bar(
        title=" " * (len(made.scalar_bars) + 1),  # PyVista requires different titles
        lookup_table=table,
        n_labels=0,
        vertical=upright,
        position_x=place[0],
        position_y=place[1],
        width=place[2],
        height=place[3],
        label_font_size=round(14 * enlargement(made.window_size)),
        font_family="arial",
        color=INK,
    )
    bar.SetBarRatio(1.0)
    return bar


def add_legend(made: Any, heading: str, entries: list[str], colors: Array) -> None:
    """Write color swatches with their entries in columns at the right of a plotter.

    Each column is a scalar bar. PyVista's own legend has a single column, and writes each entry
    in the color of its swatch, so that pale ones cannot be read.
    """
    import pyvista

    width, height = made.window_size
    scale = enlargement(made.window_size)
    row = ROW * scale
    columns, share = legend_columns(entries, (width, height))
    groups = np.array_split(np.arange(len(entries)), columns)
    top = 0.5 + len(groups[0]) * row / height / 2
    edge, tall = 10 * scale / width, (len(groups[0]) * row + 44 * scale) / height
    _add_paper(made, (1 - share - edge, top + 34 * scale / height - tall, share + edge, tall))
    add_text(made, heading, (1 - share, top + 12 * scale / height), 14)
    for i, rows in enumerate(groups):
        table = pyvista.LookupTable(n_values=len(rows))
        table.values = np.insert(colors[rows], 3, 255, axis=1)
        table.IndexedLookupOn()
        table.annotations = {j: f" {entries[r]}" for j, r in enumerate(rows)}
        tall = (len(rows) * row + 26 * scale) / height  # VTK leaves room for a title
        place = (
            1 - share + i * share / columns,
            top - len(rows) * row / height,
            20 * scale / width,
            tall,
        )
        bar = _add_swatches(made, table, place)
        bar.SetTextPositionToPrecedeScalarBar()
        bar.SetAnnotationLeaderPadding(0)


def label_positions(drawing: Drawing, made: Any) -> tuple[list[str], Array]:
    """Label of each visible piece of a shard, and the (n, 3) position where it is read best.

    That is deep inside the piece: the scene is drawn once more from the
    camera of the plotter, in one plain color for each shard.
    """
    from vtkmodules.vtkRenderingCore import vtkWorldPointPicker

    piece, shard = pieces_of(drawing)
    flat = _draw_ids(drawing, piece, made)
    picture = flat.screenshot(return_img=True).astype(np.int64)
    pieces = picture @ [1 << 16, 1 << 8, 1]
    pixels = _deepest_pixels(pieces, drawing.mesh.dim, round(7 * enlargement(made.window_size)))
    picker, positions = vtkWorldPointPicker(), np.zeros((len(pixels), 3))
    for i, (_, column, row) in enumerate(pixels):
        picker.Pick(column, len(picture) - 1 - row, 0, flat.renderer)
        positions[i] = picker.GetPickPosition()
    flat.close()
    return [str(shard[p]) for p, _, _ in pixels], positions


def _draw_ids(drawing: Drawing, ids: Array, made: Any) -> Any:
    """A plotter that shows the number of every cell plus one as a color, unlit, on black."""
    from meshshard.io import to_pyvista

    shown = to_pyvista(drawing.mesh)
    code = ids + 1
    shown["color"] = np.stack([code >> 16, code >> 8 & 255, code & 255], 1).astype(np.uint8)
    flat = plotter(made.window_size, flat=True, hidden=True)
    flat.set_background("black")
    flat.add_mesh(
        shown,
        scalars="color",
        rgb=True,
        lighting=False,
        line_width=LINE * enlargement(made.window_size),
        point_size=point_size(len(drawing), made.window_size),
    )
    flat.camera.DeepCopy(made.camera)
    flat.reset_camera_clipping_range()
    return flat


def _deepest_pixels(image: Array, dim: int, least: int) -> list[tuple[int, int, int]]:
    """Piece, column and row of the pixel of each visible area that is farthest from its edge.

    Args:
        image: (rows, columns) piece plus one at each pixel, 0 for none.
        dim: of the cells; surfaces are areas, points and lines are closed or widened to areas.
        least: distance to the edge in pixels below which an area cannot hold a label.
    """
    from scipy.ndimage import (
        binary_closing,
        binary_dilation,
        distance_transform_edt,
        find_objects,
        label,
    )

    found = []
    boxes: list[Any] = find_objects(image)
    for piece, box in enumerate(boxes):
        if box is None:
            continue
        visible = area = np.pad(image[box] == piece + 1, least + 1)
        if dim == 0:
            area = binary_closing(visible, iterations=least - 1)
        elif dim == 1:
            area = binary_dilation(visible, iterations=least)
        areas, n_areas = label(area, np.ones((3, 3)))
        depth = np.where(visible, distance_transform_edt(area), 0)
        for number in range(1, n_areas + 1 if dim else 2):
            inside = np.where(areas == number, depth, 0) if dim else depth
            row, column = np.unravel_index(int(inside.argmax()), inside.shape)
            if inside[row, column] >= least:
                at = box[1].start + int(column) - least - 1, box[0].start + int(row) - least - 1
                found.append((piece, *at))
    return found


def add_labels(made: Any, texts: list[str], positions: Array) -> None:
    """Write labels at (n, 3) positions, in front of everything."""
    made.add_point_labels(
        positions,
        texts,
        font_size=round(17 * enlargement(made.window_size)),
        bold=True,
        text_color=INK,
        shape="rounded_rect",
        shape_color="white",
        shape_opacity=0.72,
        margin=3,
        show_points=False,
        always_visible=True,
        reset_camera=False,
    )


def add_label_plates(made: Any, texts: list[str], positions: Array, axes: Array) -> None:
    """Write labels as geometry that faces the camera; vtk.js shows no other text.

    Args:
        made: the plotter.
        texts: the labels.
        positions: (n, 3) where they are.
        axes: (3, 3) of the camera, from `view_axes`.
    """
    import pyvista

    height, eye = 0.012 * made.camera.distance, np.asarray(made.camera.position)
    for i, (text, position) in enumerate(zip(texts, positions, strict=True)):
        letters = pyvista.Text3D(text, depth=0.0, height=height, center=(0.0, 0.0, 0.0))
        width = float(np.ptp(letters.points[:, 0])) + 0.6 * height
        plate = pyvista.Plane(i_size=width, j_size=1.5 * height, i_resolution=1, j_resolution=1)
        for shape, color, lift in ((plate, "white", 0.04), (letters, INK, 0.042)):
            shape.points = shape.points @ axes + position + lift * (eye - position)
            name = f"shard {text} plate {i} {color}"
            made.add_mesh(shape, color=color, lighting=False, reset_camera=False, name=name)
