"""Colors of shards: all distinct, and most distinct between shards that exchange rows.

The distance of two colors is Euclidean in OKLab (Ottosson, A perceptual color space for image
processing, 2020): the smaller of the one for normal vision and the one for red-green color
blindness. Light moves a color towards or away from black: colors are chosen so that a lit shard
is still nearest to its own color in the legend.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from meshshard.mesh import Array

__all__ = ["INK", "LIGHT", "palette", "shard_colors"]

INK = "#1a1a1a"  # of text and lines, in pictures, charts and HTML pages

_TO_LMS = np.array(
    [
        [1.0, 0.3963377774, 0.2158037573],
        [1.0, -0.1055613458, -0.0638541728],
        [1.0, -0.0894841775, -1.2914855480],
    ]
)
_TO_LINEAR = np.array(
    [
        [4.0767416621, -3.3077115913, 0.2309699292],
        [-1.2684380046, 2.6097574011, -0.3413193965],
        [-0.0041960863, -0.7034186147, 1.7076147010],
    ]
)
RED_GREEN = 0.35  # scale of the red-green axis with red-green color blindness
LIGHT = {"ambient": 0.79, "diffuse": 0.29, "specular": 0.0}  # weak: shape and colors are visible
SHADES = (0.87, 1.0, 1.04)  # scales of OKLab by the least, no and the most light
MAX_COLORS = 256  # beyond it, colors repeat with this period


def shard_colors(k: int, links: Array) -> Array:
    """(k, 3) uint8 sRGB color of every shard; shards that exchange rows differ the most.

    Args:
        k: number of shards.
        links: (k, k) rows exchanged between shards, 0 for none.
    """
    lab, rgb = palette(min(k, MAX_COLORS))
    order = np.arange(k) % MAX_COLORS
    near = (links + links.T > 0) & ~np.eye(k, dtype=bool)
    clash = 1 / np.maximum(_distance(lab[:, None], lab[None]), 1e-3) ** 2
    if k <= MAX_COLORS and near.any():
        order = _arranged(near.astype(float), clash)
    return np.asarray(rgb[order])


@cache
def palette(k: int) -> tuple[Array, Array]:
    """K colors, each as distant from the previous ones as possible.

    Distant means on average of two measures: the distance of the colors, and how much farther the
    other color is from a lit color than its own. They are dark enough for a white background, and
    light and saturated enough for black lines and translucent halos on them.

    Returns:
        (k, 3) float64 OKLab and (k, 3) uint8 sRGB colors.
    """
    lab, rgb = _candidates()
    first = int(np.argmin(np.abs(rgb - np.array([0.20, 0.47, 0.80])).sum(axis=1)))
    chosen, nearest = [first], np.full(len(lab), np.inf)
    while len(chosen) < k:
        nearest = np.minimum(nearest, _apart(lab, lab[chosen[-1]]))
        chosen.append(int(nearest.argmax()))
    return lab[chosen], np.round(rgb[chosen] * 255).astype(np.uint8)


def _candidates() -> tuple[Array, Array]:
    """OKLab and sRGB colors on a grid of lightness, chroma and hue, those inside sRGB when lit."""
    light, chroma, hue = np.meshgrid(
        np.linspace(0.52, 0.86, 9),
        np.linspace(0.05, 0.15, 6),
        np.linspace(0, 2 * np.pi, 72, endpoint=False),
        indexing="ij",
    )
    lab = np.stack([light, chroma * np.cos(hue), chroma * np.sin(hue)], axis=-1).reshape(-1, 3)
    linear = (lab @ _TO_LMS.T) ** 3 @ _TO_LINEAR.T
    lab, linear = (a[((linear >= 0) & (linear <= 0.9)).all(axis=1)] for a in (lab, linear))
    curve = 1.055 * linear ** (1 / 2.4) - 0.055
    return lab, np.where(linear <= 0.0031308, 12.92 * linear, curve)


def _distance(some: Array, other: Array) -> Array:
    """Distance of OKLab colors: the smaller one of the two kinds of vision."""
    difference = some - other
    reduced = difference * np.array([1.0, RED_GREEN, 1.0])
    normal, blind = np.linalg.norm(difference, axis=-1), np.linalg.norm(reduced, axis=-1)
    return np.asarray(np.minimum(normal, 1.5 * blind))


def _apart(some: Array, other: Array) -> Array:
    """How far colors are apart: their distance, and what light leaves of it, on average."""
    left = [
        np.linalg.norm(shade * a - b, axis=-1) - np.linalg.norm(shade * a - a, axis=-1)
        for a, b in ((some, other), (other, some))
        for shade in SHADES
    ]
    return np.asarray((np.minimum.reduce(left) + _distance(some, other)) / 2)


def _arranged(near: Array, clash: Array) -> Array:
    """(k,) color of each shard: colors are swapped as long as neighbors clash less.

    Args:
        near: (k, k) 1.0 between shards that exchange rows.
        clash: (k, k) cost of two colors on neighbors.
    """
    k = len(near)
    order = np.arange(k)
    for _ in range(6):
        before = order.copy()
        for a in range(k):
            gain = _gains(near, clash, order, a)
            b = int(gain.argmax())
            if gain[b] > 1e-9:
                order[[a, b]] = order[[b, a]]
        if (order == before).all():
            break
    return order


def _gains(near: Array, clash: Array, order: Array, a: int) -> Array:
    """(k,) decrease of the cost if shard a swaps colors with each shard."""
    cost = clash[order][:, order].copy()  # cost of the current colors of shards i and j
    np.fill_diagonal(cost, 0.0)
    now = (near * cost).sum(axis=1)
    then = near[a] @ cost + near @ cost[:, a]  # a with the color of b, b with the color of a
    pair = near[a] * cost[a]  # does not change; counted twice in now, left out in then
    gain = now[a] + now - pair - (then + pair)
    gain[a] = 0.0
    return np.asarray(gain)
