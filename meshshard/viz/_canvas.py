"""Canvas: a plotter that is proved to draw, its camera, its legend and its labels."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from meshshard.errors import MeshWarning, RenderError
from meshshard.mesh import Array

__all__ = [
    "View",
    "add_labels",
    "add_legend",
    "add_solid_labels",
    "add_title",
    "axes_towards",
    "check_rendering",
    "check_window",
    "direction_on",
    "legend_columns",
    "look_from",
    "look_into",
    "plotter",
    "point_size",
    "show",
]

WINDOW = "VTK_DEFAULT_OPENGL_WINDOW"  # VTK's own name for its choice of window
OFF_SCREEN = ("vtkEGLRenderWindow", "vtkOSOpenGLRenderWindow")
PACKAGES = "libgl1 libegl1 libegl-mesa0 libgl1-mesa-dri libxrender1"
PROBE = """
from vtkmodules.vtkRenderingCore import vtkRenderer, vtkRenderWindow, vtkWindowToImageFilter
import vtkmodules.vtkRenderingOpenGL2
window = vtkRenderWindow()
window.SetOffScreenRendering(1)
window.SetSize(8, 8)
renderer = vtkRenderer()
renderer.SetBackground(1.0, 0.0, 0.0)
window.AddRenderer(renderer)
window.Render()
picture = vtkWindowToImageFilter()
picture.SetInput(window)
picture.Update()
red = picture.GetOutput().GetScalarComponentAsFloat(4, 4, 0, 0)
print(window.GetClassName() if red == 255.0 else "")
"""
INK = "#1a1a1a"
DISTANCE = 3.73  # at which a perspective of 30 degrees, as browsers use it, shows the same


def check_rendering() -> str:
    """The window to draw in, by the name of its VTK class.

    VTK ends the process where OpenGL is missing, so a child process tries first, once for each
    kind of window: the one that is set, else on the display if there is one, else off screen.

    Raises:
        RenderError: none draws; naming the packages that are missing.
    """
    chosen = os.environ.get(WINDOW)
    has_display = sys.platform != "linux" or bool(os.environ.get("DISPLAY"))
    windows = [chosen] if chosen else [*([""] if has_display else []), *OFF_SCREEN]
    for window in windows:
        if found := _tried(window, os.environ.get("DISPLAY")):
            return found
    also = f" ({WINDOW}={chosen} is set: unset it, or set it right)" if chosen else ""
    raise RenderError(
        "this machine cannot draw: OpenGL is missing; "
        f"on Debian or Ubuntu: apt-get install {PACKAGES}{also}"
    )


def check_window() -> None:
    """Do nothing if a window can be opened.

    Raises:
        RenderError: there is no display.
    """
    if check_rendering() in OFF_SCREEN:
        raise RenderError("there is no display to open a window on; write a file: --png or --html")


@cache
def _tried(window: str, display: str | None) -> str:
    """What a child process draws in, asked for a kind of window; "" if it cannot."""
    environment = {**os.environ, WINDOW: window} if window else dict(os.environ)
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def plotter(size: tuple[int, int], *, flat: bool = False, hidden: bool = False) -> Any:
    """An empty pyvista plotter on white; off screen where there is no display.

    Args:
        size: width and height in pixels.
        flat: colors exactly as given, without light and without smoothing of edges.
        hidden: off screen in any case.
    """
    window = check_rendering()
    if window in OFF_SCREEN:
        os.environ[WINDOW] = window  # VTK asks here, and prints a line about X where it is empty
    import pyvista

    hidden = hidden or window in OFF_SCREEN or pyvista.OFF_SCREEN
    made: Any = pyvista.Plotter(
        off_screen=True if hidden else None,
        window_size=list(size),
        lighting="none" if flat else "light kit",
    )
    made.set_background("white")
    if flat:
        made.render_window.SetMultiSamples(0)
    else:
        made.enable_anti_aliasing("ssaa")
    return made


def show(made: Any) -> Any:
    """Show a picture, in a notebook or a window; where there is neither, say how to get it.

    Args:
        made: a plotter, of `plot_shards`.
    """
    import pyvista

    wanted = pyvista.OFF_SCREEN or pyvista.ON_SCREENSHOT
    if made.off_screen and not made.notebook and not wanted:
        warnings.warn(
            "there is no display to open a window on; plot_shards(…).show(screenshot='cut.png') "
            "writes a picture, as meshshard view --png does",
            MeshWarning,
            stacklevel=3,
        )
    return made.show()


def point_size(n: int) -> float:
    """Pixels for each of n points of a cloud."""
    return float(np.clip(1300 / np.sqrt(max(n, 1)), 2, 14))


@dataclass(frozen=True, eq=False)
class View:
    """A parallel projection.

    Attributes:
        focus: (3,) what is in the middle of the window.
        axes: (3, 3) unit vectors to the right, up, and towards the eye.
        scale: half the height of the window in units of the mesh.
    """

    focus: Array
    axes: Array
    scale: float

    def place(self, made: Any) -> None:
        """Set a plotter's camera."""
        camera = made.camera
        camera.focal_point = tuple(self.focus)
        camera.position = tuple(self.focus + DISTANCE * self.scale * self.axes[2])
        camera.up = tuple(self.axes[1])
        camera.enable_parallel_projection()
        camera.parallel_scale = self.scale
        made.reset_camera_clipping_range()

    def pixels(self, places: Array, size: tuple[int, int]) -> Array:
        """(n, 3) column and row from the top left, and nearness to the eye in the mesh's units."""
        seen = (places - self.focus) @ self.axes.T
        unit = 2 * self.scale / size[1]
        return np.stack(
            [size[0] / 2 + seen[:, 0] / unit, size[1] / 2 - seen[:, 1] / unit, seen[:, 2]], axis=1
        )

    def places(self, pixels: Array, size: tuple[int, int]) -> Array:
        """The inverse of `pixels`."""
        unit = 2 * self.scale / size[1]
        seen = np.stack(
            [
                (pixels[:, 0] - size[0] / 2) * unit,
                (size[1] / 2 - pixels[:, 1]) * unit,
                pixels[:, 2],
            ],
            axis=1,
        )
        return np.asarray(seen @ self.axes + self.focus)


def look_from(
    places: Array, axes: Array, size: tuple[int, int], margins: tuple[float, float]
) -> View:
    """The view in which all places fill the window.

    Args:
        places: (n, 3) points to be seen.
        axes: (3, 3) unit vectors to the right, up, and towards the eye.
        size: of the window.
        margins: shares of the width at the right and of the height at the top to keep free.
    """
    seen = places @ axes.T
    low, high = seen.min(axis=0), seen.max(axis=0)
    aspect = size[0] / size[1]
    free = 1 - np.asarray(margins)
    scale = 0.5 * max((high - low)[1] / free[1], (high - low)[0] / free[0] / aspect, 1e-30) * 1.06
    middle = (low + high) / 2
    middle[0] += scale * aspect * margins[0]
    middle[1] += scale * margins[1]
    return View(middle @ axes, axes, float(scale))


def look_into(places: Array, axes: Array, size: tuple[int, int]) -> View:
    """The view in which perspective keeps all places inside the window."""
    middle = (places.min(axis=0) + places.max(axis=0)) / 2
    across, up, near = ((places - middle) @ axes.T).T
    width, height = 0.85 * size[0] / size[1] / DISTANCE, 0.8 / DISTANCE
    distance = np.max(near + np.maximum(np.abs(up) / height, np.abs(across) / width))
    return View(middle, axes, max(float(distance), 1e-30) / DISTANCE)


def direction_on(places: Array) -> Array:
    """To the eye: from the front, above and aside, and straight on what is flat."""
    extent = np.ptp(places, axis=0)
    flat = extent <= 1e-3 * extent.max()
    return np.asarray(flat, float) if flat.any() else np.array([-0.8, -1.0, 0.6])


def axes_towards(direction: Array, up: tuple[float, float, float] = (0.0, 0.0, 1.0)) -> Array:
    """(3, 3) unit vectors to the right, up, and towards the eye in a direction from the mesh.

    What points up is turned into the plane of the picture; looking along it y, then x is up.
    """
    towards = np.asarray(direction, float) / np.linalg.norm(direction)
    wanted = [np.asarray(up, float), np.array([0.0, 1.0, 0.0]), np.array([1.0, 0.0, 0.0])]
    right = next(r for r in (np.cross(u, towards) for u in wanted) if np.linalg.norm(r) > 0.2)
    right /= np.linalg.norm(right)
    return np.stack([right, np.cross(towards, right), towards])


def add_title(made: Any, title: str, notes: list[str]) -> None:
    """A line at the top left, and smaller ones below it."""
    height = made.window_size[1]
    lines = [(title, 18), *((note, 14) for note in notes)]
    top = height - 14
    for text, size in lines:
        top -= size + 6
        _text(made, text, (18 / made.window_size[0], top / height), size)


def _text(made: Any, text: str, at: tuple[float, float], size: int, middle: bool = False) -> None:
    """Text in the plane of the window; `at` in shares of its width and height."""
    from vtkmodules.vtkRenderingCore import vtkTextActor

    actor = vtkTextActor()
    actor.SetInput(text)
    style = actor.GetTextProperty()
    style.SetFontFamilyToArial()
    style.SetFontSize(size)
    style.SetColor(0.1, 0.1, 0.1)
    if middle:
        style.SetVerticalJustificationToCentered()
    actor.GetPositionCoordinate().SetCoordinateSystemToNormalizedDisplay()
    actor.GetPositionCoordinate().SetValue(*at)
    made.add_actor(actor, reset_camera=False, name=None)


def legend_columns(entries: list[str], size: tuple[int, int]) -> tuple[int, float]:
    """Columns of a legend, and the share of the window's width that it takes."""
    rows = max(1, (size[1] - 100) // 24)
    columns = -(-len(entries) // rows)
    widest = max((len(e) for e in entries), default=0)
    return columns, min(0.6, columns * (40 + 8.2 * widest) / size[0] + 0.015)


def add_legend(made: Any, heading: str, entries: list[str], colors: Array) -> None:
    """A heading, and boxes of color with their texts in columns at the right."""
    width, height = made.window_size
    columns, share = legend_columns(entries, (width, height))
    rows = -(-len(entries) // max(columns, 1))
    step = min(24.0, (height - 90) / max(rows, 1))
    first = height / 2 + step * rows / 2
    left = width * (1 - share)
    place = np.arange(len(entries))
    x = left + (place // rows) * (width - left) / max(columns, 1)
    y = first - (place % rows + 0.5) * step
    half = min(8.0, 0.38 * step)
    boxes = np.stack(
        [np.stack([x + a, y + b], 1) for a, b in ((0, -half), (20, -half), (20, half), (0, half))],
        1,
    )
    paper = [[(left - 12, 0), (width, 0), (width, height), (left - 12, height)]]
    white = np.full((1, 3), 255, np.uint8)
    size = np.array([width, height])
    _boxes(made, np.concatenate([paper, boxes]) / size, np.concatenate([white, colors]))
    _text(made, heading, (left / width, (first + 0.5 * step) / height), 14, middle=True)
    for entry, at in zip(entries, np.stack([x + 27, y], 1) / size, strict=True):
        _text(made, entry, (at[0], at[1]), 14, middle=True)


def _boxes(made: Any, corners: Array, colors: Array) -> None:
    """Filled quads in the plane of the window; corners (n, 4, 2) in shares of it."""
    import pyvista
    from vtkmodules.vtkRenderingCore import vtkActor2D, vtkCoordinate, vtkPolyDataMapper2D

    n = len(corners)
    points = np.concatenate([corners.reshape(-1, 2), np.zeros((4 * n, 1))], axis=1)
    quads = np.insert(np.arange(4 * n).reshape(n, 4), 0, 4, axis=1)
    boxes = pyvista.PolyData(points, quads.ravel())
    boxes.cell_data["rgb"] = colors
    boxes.cell_data.active_scalars_name = "rgb"
    mapper = vtkPolyDataMapper2D()
    mapper.SetInputData(boxes)
    place = vtkCoordinate()
    place.SetCoordinateSystemToNormalizedDisplay()
    mapper.SetTransformCoordinate(place)
    actor = vtkActor2D()
    actor.SetMapper(mapper)
    made.add_actor(actor, reset_camera=False, name=None)


def add_labels(made: Any, texts: list[str], places: Array) -> None:
    """Numbers at places, on top of everything."""
    made.add_point_labels(
        places,
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


def add_solid_labels(made: Any, texts: list[str], places: Array, view: View) -> None:
    """Numbers as geometry, upright in a view, for scenes that know no other text."""
    import pyvista

    height = 0.045 * view.scale
    for text, place in zip(texts, places, strict=True):
        letters = pyvista.Text3D(text, depth=0.0, height=height, center=(0.0, 0.0, 0.0))
        width = float(np.ptp(letters.points[:, 0])) + 0.6 * height
        plate = pyvista.Plane(i_size=width, j_size=1.5 * height, i_resolution=1, j_resolution=1)
        for shape, color, lift in ((plate, "white", 0.9), (letters, INK, 1.0)):
            shape.points = shape.points @ view.axes + place + lift * height * view.axes[2]
            made.add_mesh(shape, color=color, lighting=False, reset_camera=False)
