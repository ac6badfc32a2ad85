"""Meshes of any size for benchmarks, tests and notebooks, shaped like the field's data sets.

    poly_surface   a car's skin of polygons, as snappyHexMesh leaves it: quads, refined 1:4 near the
                   wheels, nose and mirrors; hanging nodes make 5- to 8-gons, some quads are halved
    tri_surface    the same skin of triangles
    hex_volume     a box of hexahedra, graded towards its corner
    tet_volume     the same box of tetrahedra

Each takes the number of cells wanted and returns a `meshshard.Mesh` with points in float32, ids in
int64, the cell fields of DrivAerML and about that number of cells: exactly so for polygons, within
1 % above 10,000 cells elsewhere. Surfaces are closed and wound as OpenFOAM winds its boundaries:
normals point into the body.
"""

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from meshshard.mesh import Mesh

Array = npt.NDArray[Any]
Triple = tuple[int, int, int]

SPEED = 38.889  # m/s, the inflow of DrivAerML
LENGTHS = (4.6, 1.8, 1.4)  # of the car, m
BOX = (3.0, 1.0, 1.0)  # of the volumes, m
BASE = 2.2  # polygons that one quad of the unrefined skin becomes on average
HALVED = 0.02  # share of unrefined quads that are cut into two triangles

# Where flow is interesting: center and radius of the refined regions, m.
REFINED = (
    ((-2.3, 0.0, 0.6), 0.95), ((-1.4, 0.9, 0.35), 0.55), ((-1.4, -0.9, 0.35), 0.55),
    ((1.35, 0.9, 0.35), 0.55), ((1.35, -0.9, 0.35), 0.55), ((2.3, 0.0, 0.7), 0.8),
    ((-0.7, 0.8, 1.1), 0.4), ((-0.7, -0.8, 1.1), 0.4),
)  # fmt: skip

# A cube in six tetrahedra round its diagonal 0-6 (Kuhn, 1960).
SIX = np.array([[0, 1, 2, 6], [0, 2, 3, 6], [0, 3, 7, 6], [0, 7, 4, 6], [0, 4, 5, 6], [0, 5, 1, 6]])
POLYGON, TRIANGLE, HEXAHEDRON, TETRAHEDRON = 7, 5, 12, 10  # VTK's numbers


def tri_surface(n: int, seed: int = 0) -> Mesh:
    """About n triangles on a car: quads cut along one diagonal or the other, drawn at random."""
    places, quads = _skin(_shape(n / 2, LENGTHS, _area))
    turned = np.random.default_rng(seed).random(len(quads)) < 0.5
    quads[turned] = np.roll(quads[turned], 1, axis=1)
    return _uniform(_car(places), quads[:, [0, 1, 2, 0, 2, 3]].reshape(-1, 3), TRIANGLE)


def poly_surface(n: int, seed: int = 0) -> Mesh:
    """Exactly n polygons on a car (n >= 64): mostly quads, triangles to 8-gons."""
    places, quads = _skin(_shape(n / BASE, LENGTHS, _area))
    more = n - len(quads)
    n_refined = int(more - HALVED * len(quads)) // 3
    refined = _nearest_to_interest(_car(places[quads].mean(axis=1)), n_refined)
    middle, ends = _middles(quads, refined, len(places))
    halved = _some_plain(refined, middle, more - 3 * n_refined, seed)
    center = np.cumsum(refined) - 1 + len(places) + len(ends)
    rows = _Rows(quads, middle, center, refined, halved)
    offsets, connectivity = _polygons(rows)
    new = [places[ends].mean(axis=1), places[quads[refined]].mean(axis=1)]
    return _mesh(_car(np.concatenate([places, *new])), offsets, connectivity, POLYGON)


def hex_volume(n: int) -> Mesh:
    """About n hexahedra in a box."""
    return _uniform(*_hexahedra(_shape(n, (1, 1, 1), _volume)), HEXAHEDRON)


def tet_volume(n: int) -> Mesh:
    """About n tetrahedra in a box, six to a cube."""
    points, cubes = _hexahedra(_shape(n / 6, (1, 1, 1), _volume))
    return _uniform(points, cubes[:, SIX].reshape(-1, 4), TETRAHEDRON)


GENERATORS: dict[str, Callable[[int], Mesh]] = {
    "polygons": poly_surface,
    "triangles": tri_surface,
    "hexahedra": hex_volume,
    "tetrahedra": tet_volume,
}


# ---------------------------------------------------------------------------------------- lattices
def _shape(n: float, lengths: tuple[float, ...], count: Callable[[Triple], int]) -> Triple:
    """Steps along three axes, about in proportion to `lengths`, whose `count` is nearest to n."""
    low, high = 0.0, n
    for _ in range(60):
        scale = (low + high) / 2
        steps = tuple(max(1.0, scale * length) for length in lengths)
        low, high = (low, scale) if count(steps) > n else (scale, high)
    near = [range(max(1, round(s) - 2), round(s) + 3) for s in steps]
    return min(product(*near), key=lambda t: abs(count(t) - n))


def _area(steps: Triple) -> int:
    """Quads on the surface of a box."""
    a, b, c = steps
    return 2 * (a * b + b * c + c * a)


def _volume(steps: Triple) -> int:
    return steps[0] * steps[1] * steps[2]


def _skin(steps: Triple) -> tuple[Array, Array]:
    """The surface of a box: places (n, 3) on the cube [-1, 1]^3, and quads (m, 4) wound inward."""
    shape = tuple(s + 1 for s in steps)
    sheets = [
        np.ravel_multi_index(_sheet(shape, axis, side), shape)
        for axis in range(3)
        for side in (0, steps[axis])
    ]
    keys, ids = np.unique(np.concatenate([s.ravel() for s in sheets]), return_inverse=True)
    bounds = np.cumsum([s.size for s in sheets])[:-1]
    quads = []
    for number, (sheet, own) in enumerate(zip(sheets, np.split(ids, bounds), strict=True)):
        grid = own.reshape(sheet.shape)
        hops = [grid[:-1, :-1], grid[1:, :-1], grid[1:, 1:], grid[:-1, 1:]]
        far = number % 2 == 1  # there, the ring in this direction would point outward
        quads.append(np.stack(hops[::-1] if far else hops, axis=-1).reshape(-1, 4))
    places = np.stack(np.unravel_index(keys, shape), axis=1) * (2 / np.array(steps)) - 1
    return places, np.concatenate(quads)


def _sheet(shape: Triple, axis: int, side: int) -> tuple[Array, ...]:
    """Lattice coordinates of one side of a box, as a grid over the two other axes."""
    first, second = (axis + 1) % 3, (axis + 2) % 3
    at: list[Array] = [np.zeros(0, int)] * 3
    at[first], at[second] = np.meshgrid(
        np.arange(shape[first]), np.arange(shape[second]), indexing="ij"
    )
    at[axis] = np.full_like(at[first], side)
    return tuple(at)


def _hexahedra(steps: Triple) -> tuple[Array, Array]:
    """Points (n, 3) and hexahedra (m, 8) of a box, graded."""
    shape = tuple(s + 1 for s in steps)
    axes = [np.linspace(0, 1, s) for s in shape]
    grading = (1.4, 1.0, 1.2)
    graded = [length * x**g for length, x, g in zip(BOX, axes, grading, strict=True)]
    points = np.stack(np.meshgrid(*graded, indexing="ij"), axis=-1).reshape(-1, 3)
    first = np.arange(len(points)).reshape(shape)[:-1, :-1, :-1].reshape(-1, 1)
    right, back, up = shape[1] * shape[2], shape[2], 1
    floor = np.array([0, right, right + back, back])
    return points, first + np.concatenate([floor, floor + up])


# ------------------------------------------------------------------------------------------ the car
def _car(places: Array) -> Array:
    """The cube's surface [-1, 1]^3 as a car: a rounded box with a cabin, wheel arches and waves."""
    round_box = places / (np.abs(places) ** 5).sum(axis=1, keepdims=True) ** 0.2
    x, y, z = (round_box * (np.array(LENGTHS) / 2) * (1, 1, 0.64)).T
    cabin = np.exp(-(((x - 0.2) / 1.0) ** 4)) * np.sqrt(np.clip(z / 0.45, 0, 1))
    z = z + 0.7 + 0.55 * cabin + 0.03 * np.sin(7 * x) * np.cos(9 * y)
    for wheel in (-1.4, 1.35):
        arch = ((x - wheel) ** 2 + (z - 0.35) ** 2) / 0.32**2
        y = y * (1 - 0.25 * np.exp(-(arch**2)))
    return np.stack([x, y, z], axis=1)


def _nearest_to_interest(points: Array, count: int) -> Array:
    """(n,) bool, the `count` points nearest to regions where flow is interesting."""
    distance = np.full(len(points), np.inf)
    for center, radius in REFINED:
        square = sum((points[:, axis] - center[axis]) ** 2 for axis in range(3))
        np.minimum(distance, square / radius**2, out=distance)
    chosen = np.zeros(len(points), bool)
    if count > 0:
        chosen[np.argpartition(distance, count - 1)[:count]] = True
    return chosen


def _middles(quads: Array, refined: Array, n_points: int) -> tuple[Array, Array]:
    """Points halfway along the edges of refined quads.

    Returns:
        (m, 4) id of the point on each edge of each quad, -1 where there is none, and the two ends
        (n_new, 2) of the edge that each lies on. New ids follow those of the corners.
    """
    following = np.roll(quads, -1, axis=1)
    key = np.minimum(quads, following) * n_points + np.maximum(quads, following)
    edges = np.unique(key[refined])
    if not len(edges):
        return np.full_like(quads, -1), np.zeros((0, 2), np.int64)
    place = np.minimum(np.searchsorted(edges, key), len(edges) - 1)
    middle = np.where(edges[place] == key, n_points + place, -1)
    return middle, np.stack(np.divmod(edges, n_points), axis=1)


def _some_plain(refined: Array, middle: Array, count: int, seed: int) -> Array:
    """(m,) bool, `count` quads drawn from those that are not refined and have no hanging node."""
    plain = np.flatnonzero(~refined & (middle < 0).all(axis=1))
    chosen = np.zeros(len(refined), bool)
    chosen[np.random.default_rng(seed).permutation(plain)[:count]] = True
    return chosen


class _Rows(NamedTuple):
    """The skin's quads (m, 4) and what becomes of each.

    Attributes:
        quads: corners.
        middle: points halfway along the edges, -1 where there is none.
        center: (m,) point in the middle of each refined quad.
        refined: (m,) becomes four quads.
        halved: (m,) becomes two triangles.
    """

    quads: Array
    middle: Array
    center: Array
    refined: Array
    halved: Array


def _polygons(rows: _Rows) -> tuple[Array, Array]:
    """Offsets and connectivity of all polygons, those of one quad one after the other."""
    quads, middle, center, refined, halved = rows
    hanging = (middle >= 0).sum(axis=1)
    cells = 1 + 3 * refined + halved
    corners = np.where(refined, 16, np.where(halved, 6, 4 + hanging))
    start = _bounds(corners)
    size = np.repeat(np.where(refined, 4, np.where(halved, 3, corners)), cells)
    connectivity = np.empty(start[-1], np.int64)
    rest = ~refined & ~halved
    ring = np.stack([quads[rest], middle[rest]], axis=2).reshape(-1, 8)
    connectivity[np.repeat(rest, corners)] = ring[ring >= 0]
    at = start[:-1][halved]
    connectivity[at[:, None] + np.arange(6)] = quads[halved][:, [0, 1, 2, 0, 2, 3]]
    at, own, half = start[:-1][refined], quads[refined], middle[refined]
    for i in range(4):
        child = (own[:, i], half[:, i], center[refined], half[:, i - 1])
        for j, ids in enumerate(child):
            connectivity[at + 4 * i + j] = ids
    return _bounds(size), connectivity


# -------------------------------------------------------------------------------------------- Mesh
def _uniform(points: Array, cells: Array, kind: int) -> Mesh:
    """A mesh of cells (m, corners) of one type."""
    m, corners = cells.shape
    offsets = np.arange(0, m * corners + 1, corners, dtype=np.int64)
    return _mesh(points, offsets, cells.ravel(), kind)


def _mesh(points: Array, offsets: Array, connectivity: Array, kind: int) -> Mesh:
    types = np.full(len(offsets) - 1, kind, np.uint8)
    mesh = Mesh(points.astype(np.float32), connectivity, offsets, types, name="generated")
    return mesh.with_fields(cell=flow(mesh.centers()))


def flow(places: Array) -> dict[str, Array]:
    """Fields of DrivAerML at some places (n, 3): smooth, of the right size, from position alone.

    Kinematic, as in OpenFOAM: pressure and wall shear stress over density, in m2/s2.
    """
    x, y, z = places.astype(np.float32).T
    cp = np.cos(1.3 * x) * np.exp(-(z**2)) - 0.4 * np.sin(2 * z) * np.cos(3 * y)
    half = np.float32(SPEED**2 / 2)
    shear = np.stack([-2 - np.cos(2 * x), np.sin(3 * y), -np.sin(2 * z)], axis=1)
    return {
        "CpMeanTrim": cp,
        "pMeanTrim": half * cp,
        "pPrime2MeanTrim": np.square(half * (0.02 + 0.05 * np.square(np.sin(x + y)))),
        "wallShearStressMeanTrim": shear,
    }


def _bounds(count: Array) -> Array:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(count, dtype=np.int64)])
