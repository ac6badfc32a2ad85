"""Small meshes with unusual fields, bitwise comparison, and the command in a separate process."""

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from meshshard.errors import MeshWarning
from meshshard.mesh import Array, Faces, Mesh
from meshshard.mesh.cells import CELL_TYPES, POLYHEDRON
from meshshard.partitioning.partition import Partition, partition

ROOT = Path(__file__).resolve().parent.parent
AHMED = ROOT / "meshshard" / "data" / "boundary_1.vtp"
NAMES = ("../../etc/x", 'q"uote', "<tag>&amp;", "名前", "a b:c", "new\nline")


def fields(n: int, seed: int = 0) -> dict[str, Array]:
    """Fields of unusual dtypes, widths, names and values."""
    rng = np.random.default_rng(seed)
    awkward = rng.normal(size=n)
    awkward[: n // 3] = np.nan
    awkward[n // 3 : n // 2] = -0.0
    return {
        "f8": awkward,
        "f4": rng.normal(size=(n, 3)).astype(np.float32),
        "ids": 2**53 + 1 + np.arange(n, dtype=np.int64),
        "negative": -(2**40) * np.arange(n, dtype=np.int64),
        "flag": rng.random(n) < 0.5,
        "u1": rng.integers(0, 255, n).astype(np.uint8),
        "tensor": rng.normal(size=(n, 9)),
        "matrix": rng.normal(size=(n, 3, 3)).astype(np.float32),
        "plan.halo": np.arange(n, dtype=np.int32),
        **{name: np.full(n, i, np.int16) for i, name in enumerate(NAMES)},
    }


def surface(n: int = 7, m: int = 5, orphans: int = 3) -> Mesh:
    """Quads, every third of them cut into triangles, far from the origin, with unused points."""
    at = np.arange((n + 1) * (m + 1)).reshape(n + 1, m + 1) + orphans
    quads = np.stack([at[:-1, :-1], at[1:, :-1], at[1:, 1:], at[:-1, 1:]], -1).reshape(-1, 4)
    cells = []
    for i, (a, b, c, d) in enumerate(quads.tolist()):
        cells += [[a, b, c], [a, c, d]] if i % 3 == 0 else [[a, b, c, d]]
    x, y = np.meshgrid(np.arange(n + 1.0), np.arange(m + 1.0), indexing="ij")
    points = np.zeros((orphans + x.size, 3))
    points[orphans:, 0], points[orphans:, 1] = x.ravel() / 10, y.ravel() / 10
    counts = np.array([len(c) for c in cells])
    return Mesh(
        points=points + 1e7,
        connectivity=np.concatenate(cells),
        offsets=np.concatenate([[0], np.cumsum(counts)]),
        types=np.where(counts == 3, 5, 9).astype(np.uint8),
        point_fields=fields(len(points), 1),
        cell_fields=fields(len(cells), 2),
        name="surface.vtp",
    )


def cloud(n: int = 60) -> Mesh:
    points = np.random.default_rng(3).normal(size=(n, 3)).astype(np.float32)
    return Mesh(points=points, point_fields=fields(n), name="cloud.npz")


def volume(n: int = 3, polyhedra: bool = True) -> Mesh:
    """n x n x n hexahedra; with `polyhedra` every second one is stored as a polyhedron."""
    side = n + 1
    at = np.arange(side**3).reshape(side, side, side)
    corners = [(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0)]
    corners += [(i, j, 1) for i, j, _ in corners]
    cells = np.stack([at[i : i + n, j : j + n, k : k + n].ravel() for i, j, k in corners], -1)
    is_poly = (np.arange(len(cells)) % 2 == 1) & polyhedra
    sides = np.array(CELL_TYPES[12].faces)
    turned = cells[is_poly][:, sides].reshape(-1, 4)
    bounds = np.concatenate([[0], np.cumsum(np.where(is_poly, 6, 0))])
    faces = Faces(bounds, np.arange(0, 4 * len(turned) + 1, 4), turned.ravel())
    return Mesh(
        points=np.argwhere(at >= 0) * 0.5,
        connectivity=cells.ravel(),
        offsets=np.arange(0, 8 * len(cells) + 1, 8),
        types=np.where(is_poly, POLYHEDRON, 12).astype(np.uint8),
        faces=faces if polyhedra else None,
        point_fields=fields(side**3, 4),
        cell_fields=fields(len(cells), 5),
        name="volume.vtu",
    )


def cut(mesh: Any, parts: Any, **options: Any) -> Partition:
    """A partition; warnings are ignored."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MeshWarning)
        return partition(mesh, parts, **options)


def assert_bits(a: Array, b: Array, what: str = "") -> None:
    assert (a.dtype, a.shape) == (b.dtype, b.shape), what
    assert np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes(), what


def assert_same(a: Mesh, b: Mesh) -> None:
    """Points and fields bit for bit, cells id for id."""
    assert_bits(a.points, b.points, "points")
    assert_bits(a.types, b.types, "types")
    np.testing.assert_array_equal(a.offsets, b.offsets)
    np.testing.assert_array_equal(a.connectivity, b.connectivity)
    for kind in ("point_fields", "cell_fields"):
        mine, other = getattr(a, kind), getattr(b, kind)
        assert list(mine) == list(other)
        for name in mine:
            assert_bits(mine[name], other[name], name)
    assert (a.faces is None) == (b.faces is None)
    if a.faces is not None and b.faces is not None:
        for one, two in zip(a.faces, b.faces, strict=True):
            np.testing.assert_array_equal(one, two)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}


def start(*words: str | Path, **options: Any) -> subprocess.Popen[str]:
    """Start the command `meshshard` in a separate process."""
    return subprocess.Popen(
        [sys.executable, "-m", "meshshard", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        **options,
    )


def meshshard(*words: str | Path, code: int = 0, **options: Any) -> tuple[str, str]:
    """Standard output and error of the command, once it ended with the expected exit code."""
    process = start(*words, **options)
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, (process.returncode, out, err)
    assert "Traceback" not in err
    return out, err
