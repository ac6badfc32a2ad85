"""Colors: as many as there are shards, far apart, and farthest apart between neighbors.

Distances are Euclidean in OKLab (Ottosson, A perceptual color space for image processing, 2020),
once as most people see and once as with red-green blindness; the smaller one counts.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from meshshard.mesh import Array

__all__ = ["palette", "shard_colors"]

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
RED_GREEN = 0.35  # what is left of the red-green axis to an eye that hardly sees it
MOST = 256  # colors computed; beyond it they repeat, never between neighbors


def shard_colors(k: int, links: Array) -> Array:
    """(k, 3) uint8 color of every shard; shards that exchange rows differ the most.

    Args:
        k: number of shards.
        links: (k, k) rows exchanged between shards, 0 between strangers.
    """
    lab, rgb = palette(min(k, MOST))
    order = np.arange(k) % MOST
    near = (links + links.T > 0) & ~np.eye(k, dtype=bool)
    clash = 1 / np.maximum(_distances(lab), 1e-3) ** 2
    if k <= MOST and near.any():
        order = _arranged(near.astype(float), clash)
    return np.asarray(rgb[order])


@cache
def palette(k: int) -> tuple[Array, Array]:
    """As many colors as wanted, each as far from the earlier ones as can be.

    Neither so light that they fade on white, nor so dark or gray that lines and halos hide in
    them. OKLab (k, 3) float64, and sRGB (k, 3) uint8.
    """
    lab, rgb = _candidates()
    first = int(np.argmin(np.abs(rgb - np.array([0.20, 0.47, 0.80])).sum(axis=1)))
    chosen, nearest = [first], np.full(len(lab), np.inf)
    while len(chosen) < k:
        nearest = np.minimum(nearest, _apart(lab, lab[chosen[-1]]))
        chosen.append(int(nearest.argmax()))
    return lab[chosen], np.round(rgb[chosen] * 255).astype(np.uint8)


def _candidates() -> tuple[Array, Array]:
    """Colors on a grid of lightness, chroma and hue that a screen can show: OKLab and sRGB."""
    light, chroma, hue = np.meshgrid(
        np.linspace(0.52, 0.86, 9),
        np.linspace(0.08, 0.165, 6),
        np.linspace(0, 2 * np.pi, 72, endpoint=False),
        indexing="ij",
    )
    lab = np.stack([light, chroma * np.cos(hue), chroma * np.sin(hue)], axis=-1).reshape(-1, 3)
    linear = (lab @ _TO_LMS.T) ** 3 @ _TO_LINEAR.T
    lab, linear = (a[((linear >= 0) & (linear <= 1)).all(axis=1)] for a in (lab, linear))
    curve = 1.055 * linear ** (1 / 2.4) - 0.055
    return lab, np.where(linear <= 0.0031308, 12.92 * linear, curve)


def _apart(some: Array, other: Array) -> Array:
    """Distances between OKLab colors: the smaller of the two kinds of eyes."""
    difference = some - other
    dull = difference * np.array([1.0, RED_GREEN, 1.0])
    plain, blind = np.linalg.norm(difference, axis=-1), np.linalg.norm(dull, axis=-1)
    return np.asarray(np.minimum(plain, 1.5 * blind))


def _distances(lab: Array) -> Array:
    return _apart(lab[:, None], lab[None])


def _arranged(near: Array, clash: Array) -> Array:
    """Which color each shard takes: swaps of two as long as neighbors clash less."""
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
    """(k,) how much less neighbors clash if shard a swaps colors with each shard."""
    worn = clash[order][:, order].copy()  # clash of the colors that shards i and j wear
    np.fill_diagonal(worn, 0.0)
    now = (near * worn).sum(axis=1)
    then = near[a] @ worn + near @ worn[:, a]  # shard a in their colors, they in that of a
    # Where a and b are neighbors their own pair is counted against itself: put it back.
    own = near[a] * worn[a]
    gain = now[a] + now - own - (then + own)
    gain[a] = 0.0
    return np.asarray(gain)
