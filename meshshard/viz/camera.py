"""Camera: the direction from which a picture shows a mesh, and the zoom at which it fits."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshshard.mesh import Array
from meshshard.viz.rendering import panel_size

__all__ = ["default_direction", "fit", "view_axes"]


def default_direction(points: Array) -> Array:
    """(3,) direction from the mesh to the eye: from the front, the side and above.

    A flat mesh is seen along its normal.
    """
    extent = np.ptp(points, axis=0)
    flat = extent <= 1e-3 * extent.max()
    if flat.any():
        return np.asarray(flat, float)
    spread, axes = np.linalg.eigh(np.cov(points - points.mean(axis=0), rowvar=False))
    if spread[0] > 1e-6 * spread[2]:
        return np.array([-0.8, -1.0, 0.6])
    normal = axes[:, 0]
    return np.asarray(normal * np.sign(normal[np.abs(normal).argmax()]))


def view_axes(direction: Array, up: tuple[float, float, float] = (0.0, 0.0, 1.0)) -> Array:
    """(3, 3) unit vectors to the right, up, and towards the eye.

    Args:
        direction: (3,) from the mesh to the eye.
        up: what points up in the picture; y, then x, if `direction` is parallel to it.
    """
    towards = np.asarray(direction, float) / np.abs(direction).max()  # its square may overflow
    towards /= np.linalg.norm(towards)
    wanted = [
        np.asarray(up, float) / np.linalg.norm(up),
        np.array([0.0, 1.0, 0.0]),
        np.array([1.0, 0.0, 0.0]),
    ]
    right = next(r for r in (np.cross(u, towards) for u in wanted) if np.linalg.norm(r) > 0.2)
    right /= np.linalg.norm(right)
    return np.stack([right, np.cross(towards, right), towards])


def fit(
    made: Any, points: Array, axes: Array, margins: tuple[float, float], zoom: float = 1.0
) -> None:
    """Set a plotter's camera to a parallel projection in which the points fill the panel.

    PyVista's `camera.tight` does so for views along an axis only, and its `reset_camera` fits
    the sphere around the bounding box, which leaves up to half of the window empty.

    Args:
        made: the plotter.
        points: (n, 3) points that must be visible.
        axes: (3, 3) from `view_axes`.
        margins: free fractions of the width at the right and of the height at the top.
        zoom: magnification about the middle of the points.
    """
    seen = points @ axes.T
    low, high = seen.min(axis=0), seen.max(axis=0)
    width, height = panel_size(made)
    aspect = np.array([width / height, 1.0])
    free = aspect * (1 - np.array(margins))
    half = 0.53 * max(float(((high - low)[:2] / free).max()) / zoom, 1e-30)  # of the panel's height
    middle = (low + high) / 2
    middle[:2] += half * aspect * margins
    eye = middle + np.array([0.0, 0.0, made.length + half])  # outside of everything drawn
    made.camera_position = [eye @ axes, middle @ axes, axes[1]]
    made.enable_parallel_projection()
    made.camera.parallel_scale = half
    made.reset_camera_clipping_range()
