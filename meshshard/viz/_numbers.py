"""Numbers: where on a shard its number is read best: deepest inside the part of it that is seen.

The scene is drawn once more with a plain color for each shard; what is hidden does not count.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from meshshard.mesh import Array
from meshshard.viz._canvas import View, plotter, point_size
from meshshard.viz._geometry import Drawing

__all__ = ["numbers"]


def numbers(seen: Drawing, look: View, size: tuple[int, int]) -> tuple[list[str], Array]:
    """Texts and places of each shard's number."""
    spots = _spots(seen, look, size)
    pixels = np.array([[*spot, 0.0] for spot in spots.values()]).reshape(-1, 3)
    centers = seen.mesh.positions("cells" if seen.mesh.n_cells else "points") + seen.mesh.offset
    at = look.pixels(centers, size)
    for i, shard in enumerate(spots):
        mine = at[seen.shard == shard]
        near = np.argsort(np.hypot(*(mine[:, :2] - pixels[i, :2]).T))[:5]
        pixels[i, 2] = mine[near, 2].max()
    return [str(p) for p in spots], look.places(pixels, size)


def _spots(seen: Drawing, look: View, size: tuple[int, int]) -> dict[int, Array]:
    """Column and row of the point of each shard that is deepest inside what is seen of it."""
    from scipy.ndimage import binary_closing, distance_transform_edt, find_objects

    number = _number_image(seen, look, size)
    spots = {}
    boxes: list[Any] = find_objects(number)
    for shard, box in enumerate(boxes):
        if box is None:
            continue
        mine = np.pad(number[box] == shard + 1, 8)
        if not seen.mesh.n_cells:
            mine = binary_closing(mine, iterations=6)
        depth = distance_transform_edt(mine)
        row, column = np.unravel_index(int(depth.argmax()), depth.shape)
        if depth[row, column] >= 7:
            spots[shard] = np.array([box[1].start + column - 8, box[0].start + row - 8], float)
    return spots


def _number_image(seen: Drawing, look: View, size: tuple[int, int]) -> Array:
    """(rows, columns) shard seen at each pixel plus one, 0 for none."""
    from meshshard.io import to_pyvista

    shown = to_pyvista(seen.mesh)
    code = seen.shard + 1
    shown["color"] = np.stack([code >> 16, code >> 8 & 255, code & 255], 1).astype(np.uint8)
    made = plotter(size, flat=True, hidden=True)
    made.set_background("black")
    made.add_mesh(
        shown, scalars="color", rgb=True, lighting=False, point_size=point_size(len(seen))
    )
    look.place(made)
    picture = made.screenshot(return_img=True).astype(np.int64)
    made.close()
    return np.asarray(picture[..., 0] << 16 | picture[..., 1] << 8 | picture[..., 2])
