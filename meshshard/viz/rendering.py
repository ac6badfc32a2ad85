"""Rendering: a check that this machine can draw, an empty plotter, and how it is shown."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from meshshard.atomic_write import atomic_file, report_write_errors
from meshshard.errors import MeshWarning, RenderError

__all__ = [
    "LINE",
    "check_picture",
    "check_rendering",
    "check_window",
    "enlargement",
    "panel_size",
    "plotter",
    "point_size",
    "save_picture",
    "show",
]

WINDOW = "VTK_DEFAULT_OPENGL_WINDOW"  # VTK's own name for its choice of window
LINE = 5.0  # width in pixels of the cells of a mesh of lines, in a picture of 1200 x 760 pixels
OFF_SCREEN = ("vtkEGLRenderWindow", "vtkOSOpenGLRenderWindow")
PACKAGES = "libgl1 libegl1 libegl-mesa0 libgl1-mesa-dri libxrender1"
PICTURES = (".png", ".jpeg", ".jpg", ".bmp", ".tif", ".tiff")  # as PyVista writes them
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


def check_rendering() -> str:
    """Name of the VTK window class that draws on this machine.

    VTK crashes the process if OpenGL is missing, so a child process draws first. It tries the
    window that VTK_DEFAULT_OPENGL_WINDOW names; else one on the display if there is one; else
    those off screen.

    Raises:
        RenderError: none of them draws; the message names the packages to install.
    """
    chosen = os.environ.get(WINDOW)
    has_display = sys.platform != "linux" or bool(os.environ.get("DISPLAY"))
    windows = [chosen] if chosen else [*([""] if has_display else []), *OFF_SCREEN]
    for window in windows:
        if found := _drawn_by_child(window, os.environ.get("DISPLAY")):
            return found
    also = f"; or unset {WINDOW}, which is {chosen}" if chosen else ""
    raise RenderError(
        "cannot draw on this machine: OpenGL is missing; "
        f"on Debian or Ubuntu: apt-get install {PACKAGES}{also}"
    )


def check_window() -> None:
    """Raise an error if no window can be opened.

    Raises:
        RenderError: a display is missing.
    """
    if check_rendering() in OFF_SCREEN:
        raise RenderError(
            "cannot open a window without a display; write a file instead: --png or --html"
        )


@cache
def _drawn_by_child(window: str, display: str | None) -> str:
    """Window class in which a child process draws a red pixel; "" if it fails.

    Args:
        window: the class to ask VTK for; "" for VTK's default.
        display: part of the cache's key; the child inherits it.
    """
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


def plotter(
    size: tuple[int, int], *, flat: bool = False, hidden: bool = False, **panels: Any
) -> Any:
    """An empty pyvista Plotter on white; off screen without a display.

    Args:
        size: width and height in pixels.
        flat: without light and anti-aliasing, so that pixels have exactly the colors given.
        hidden: off screen even if there is a display.
        panels: `shape`, `groups` and `row_weights` of pyvista's Plotter, for several panels.
    """
    window = check_rendering()
    if window in OFF_SCREEN:
        os.environ[WINDOW] = window  # else VTK tries X first, and prints a warning
    import pyvista

    hidden = hidden or window in OFF_SCREEN or pyvista.OFF_SCREEN
    made: Any = pyvista.Plotter(
        off_screen=True if hidden else None,
        window_size=list(size),
        lighting="none" if flat else "light kit",
        border=False,
        **panels,
    )
    made.set_background("white")
    if flat:
        made.render_window.SetMultiSamples(0)
    else:
        made.enable_anti_aliasing("ssaa")
    return made


def check_picture(path: str | Path) -> None:
    """Verify the suffix of a picture.

    Raises:
        RenderError: pictures are not written in this format.
    """
    if Path(path).suffix not in PICTURES:
        raise RenderError(f"{path}: pictures are written as {', '.join(PICTURES)}")


def save_picture(made: Any, path: str | Path) -> Path:
    """Write the picture of a plotter, atomically, and close it.

    Raises:
        RenderError: pictures are not written in this format.
        StoreError: the file cannot be written.
    """
    check_picture(path)
    with report_write_errors(Path(path)), atomic_file(Path(path)) as part:
        made.screenshot(str(part))
    made.close()
    return Path(path)


def show(made: Any) -> Any:
    """Show a plotter in a notebook or a window; warn if there is neither.

    Args:
        made: the plotter, from `plot_shards`.
    """
    import pyvista

    wanted = pyvista.OFF_SCREEN or pyvista.ON_SCREENSHOT
    if made.off_screen and not made.notebook and not wanted:
        warnings.warn(
            "cannot open a window without a display; to write a picture, use "
            "plot_shards(…).show(screenshot='cut.png') or meshshard view --png",
            MeshWarning,
            stacklevel=3,
        )
    return made.show()


def panel_size(made: Any) -> tuple[float, float]:
    """Width and height in pixels of the active panel of a plotter."""
    left, bottom, right, top = made.renderer.GetViewport()
    return (right - left) * made.window_size[0], (top - bottom) * made.window_size[1]


def enlargement(size: tuple[int, int]) -> float:
    """By how much text and lines are larger than in a picture of 1200 x 760 pixels."""
    return max(0.6, float(np.sqrt(size[0] * size[1] / (1200 * 760))))


def point_size(n: int, size: tuple[int, int]) -> float:
    """Diameter in pixels of each of n points of a cloud in a picture of this size."""
    return enlargement(size) * float(np.clip(1300 / np.sqrt(max(n, 1)), 2, 14))
