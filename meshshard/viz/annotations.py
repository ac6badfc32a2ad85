"""Annotations: the title of a picture, its legend, and the label on every shard."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshshard.mesh import Array
from meshshard.viz.colors import INK
from meshshard.viz.drawing import Drawing
from meshshard.viz.rendering import plotter, point_size

__all__ = [
    "add_label_plates",
    "add_labels",
    "add_legend",
    "add_title",
    "label_positions",
    "legend_columns",
]

ROW = 24.0  # pixels for a row of the legend


def add_title(made: Any, title: str, notes: list[str]) -> None:
    """Write the title at the top left of a plotter, and the notes below it in smaller type."""
    width, height = made.window_size
    top = height - 14
    for text, size in [(title, 18), *((note, 14) for note in notes)]:
        top -= size + 6
        _add_text(made, text, (18 / width, top / height), size)


def _add_text(made: Any, text: str, position: tuple[float, float], size: int) -> None:
    """Write text of a size in pixels; its lower left corner is in fractions of the window."""
    made.add_text(
        text, position=position, viewport=True, font_size=size / 2, font="arial", color=INK
    )


def legend_columns(entries: list[str], size: tuple[int, int]) -> tuple[int, float]:
    """Columns of a legend, and the fraction of the window's width that it takes."""
    columns = -(-len(entries) // max(1, int((size[1] - 100) / ROW)))
    widest = max((len(e) for e in entries), default=0)
    return columns, min(0.6, columns * (40 + 8.2 * widest) / size[0] + 0.015)


def add_legend(made: Any, heading: str, entries: list[str], colors: Array) -> None:
    """Write color swatches with their entries in columns at the right of a plotter.

    Each column is a scalar bar. PyVista's own legend has a single column, and writes each entry
    in the color of its swatch, so that pale ones cannot be read.
    """
    import pyvista

    width, height = made.window_size
    columns, share = legend_columns(entries, (width, height))
    groups = np.array_split(np.arange(len(entries)), columns)
    top = 0.5 + len(groups[0]) * ROW / height / 2
    _add_text(made, heading, (1 - share, top), 14)
    for i, rows in enumerate(groups):
        table = pyvista.LookupTable(n_values=len(rows))
        table.values = np.insert(colors[rows], 3, 255, axis=1)
        table.IndexedLookupOn()
        table.annotations = {j: f" {entries[row]}" for j, row in enumerate(rows)}
        bar = made.add_scalar_bar(
            title=" " * (i + 1),  # PyVista requires different titles
            lookup_table=table,
            n_labels=0,
            vertical=True,
            position_x=1 - share + i * share / columns,
            position_y=top - len(rows) * ROW / height,
            width=20 / width,
            height=len(rows) * ROW / height,
            label_font_size=14,
            font_family="arial",
            color=INK,
        )
        bar.SetTextPositionToPrecedeScalarBar()
        bar.SetBarRatio(1.0)
        bar.SetAnnotationLeaderPadding(0)


def label_positions(drawing: Drawing, made: Any) -> tuple[list[str], Array]:
    """Label of each visible shard, and the (n, 3) position where it is read best.

    That is deep inside the visible part of the shard: the scene is drawn once more from the
    camera of the plotter, in one plain color for each shard.
    """
    from vtkmodules.vtkRenderingCore import vtkWorldPointPicker

    flat = _draw_ids(drawing, made)
    picture = flat.screenshot(return_img=True).astype(np.int64)
    pixels = _deepest_pixels(picture @ [1 << 16, 1 << 8, 1], filled=bool(drawing.mesh.n_cells))
    picker, positions = vtkWorldPointPicker(), np.zeros((len(pixels), 3))
    for i, (column, row) in enumerate(pixels.values()):
        picker.Pick(column, len(picture) - 1 - row, 0, flat.renderer)
        positions[i] = picker.GetPickPosition()
    flat.close()
    return [str(shard) for shard in pixels], positions


def _draw_ids(drawing: Drawing, made: Any) -> Any:
    """A plotter that shows every shard plus one as a color, without light, on black."""
    from meshshard.io import to_pyvista

    shown = to_pyvista(drawing.mesh)
    code = drawing.shard + 1
    shown["color"] = np.stack([code >> 16, code >> 8 & 255, code & 255], 1).astype(np.uint8)
    flat = plotter(made.window_size, flat=True, hidden=True)
    flat.set_background("black")
    flat.add_mesh(
        shown, scalars="color", rgb=True, lighting=False, point_size=point_size(len(drawing))
    )
    flat.camera.DeepCopy(made.camera)
    flat.reset_camera_clipping_range()
    return flat


def _deepest_pixels(shard_image: Array, *, filled: bool) -> dict[int, tuple[int, int]]:
    """Column and row of each shard's pixel that is farthest from other shards.

    Args:
        shard_image: (rows, columns) shard plus one at each pixel, 0 for none.
        filled: shards are areas, not separate points.
    """
    from scipy.ndimage import binary_closing, distance_transform_edt, find_objects

    found = {}
    boxes: list[Any] = find_objects(shard_image)
    for shard, box in enumerate(boxes):
        if box is None:
            continue
        visible = np.pad(shard_image[box] == shard + 1, 8)
        area = visible if filled else binary_closing(visible, iterations=6)
        depth = distance_transform_edt(area)
        row, column = np.unravel_index(int(np.where(visible, depth, 0).argmax()), depth.shape)
        if depth[row, column] >= 7:  # pixels: less cannot hold a label
            found[shard] = (box[1].start + int(column) - 8, box[0].start + int(row) - 8)
    return found


def add_labels(made: Any, texts: list[str], positions: Array) -> None:
    """Write labels at (n, 3) positions, in front of everything."""
    made.add_point_labels(
        positions,
        texts,
        font_size=17,
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
    for text, position in zip(texts, positions, strict=True):
        letters = pyvista.Text3D(text, depth=0.0, height=height, center=(0.0, 0.0, 0.0))
        width = float(np.ptp(letters.points[:, 0])) + 0.6 * height
        plate = pyvista.Plane(i_size=width, j_size=1.5 * height, i_resolution=1, j_resolution=1)
        for shape, color, lift in ((plate, "white", 0.04), (letters, INK, 0.042)):
            shape.points = shape.points @ axes + position + lift * (eye - position)
            made.add_mesh(shape, color=color, lighting=False, reset_camera=False)
