"""Dataset: one leaf of a file as it is stored; `assemble` makes a Mesh of the leaves.

A file may mix dimensions, hold strips, pixels, ghosts and several blocks. A `Mesh` has cells of one
dimension and plain types. Everything that is left out on the way is counted and named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from meshshard.errors import ReadError
from meshshard.mesh import Array, Faces, Mesh
from meshshard.mesh.cells import QUAD, TRIANGLE
from meshshard.mesh.checks import (
    EMPTY,
    PIXEL,
    STRIP,
    VOXEL,
    check_cells,
    check_points,
    dimensions,
    kinds,
    type_name,
    warn,
    warn_fields,
)
from meshshard.mesh.ragged import gather_rows, offsets_of

__all__ = ["Dataset", "assemble", "free_name"]

Fields = dict[str, Array]
GHOST = "vtkGhostType"
OURS = ("part_id", "shard", "shard_id", "global_id", "halo")  # arrays that meshshard writes
SWAPPED = {PIXEL: (QUAD, [0, 1, 3, 2]), VOXEL: (12, [0, 1, 3, 2, 4, 5, 7, 6])}


def _no_ids() -> Array:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class Dataset:
    """One leaf: points (n, 3), cells of any dimension (CSR, VTK types), fields, block name.

    `rows` is the row of each cell in the leaf, None while no cell was left out or split.
    """

    points: Array
    connectivity: Array = field(default_factory=_no_ids)
    offsets: Array = field(default_factory=lambda: np.zeros(1, np.int64))
    types: Array = field(default_factory=lambda: np.zeros(0, np.uint8))
    faces: Faces | None = None
    point_fields: Fields = field(default_factory=dict)
    cell_fields: Fields = field(default_factory=dict)
    block: str = ""
    rows: Array | None = None

    @property
    def dim(self) -> int:
        """Highest dimension of the cells; -1 without cells."""
        return max((int(dimensions(np.array(kind))) for kind in kinds(self.types)), default=-1)


def assemble(leaves: Iterable[Dataset], name: str) -> Mesh:
    """One checked mesh of all leaves of a file: the cells of the highest dimension.

    Args:
        leaves: as stored, in file order.
        name: what to call the mesh in messages.

    Returns:
        A mesh whose cells and points follow the order of the leaves.

    Raises:
        ReadError: there is nothing to read.
        MeshError: ids, offsets, arities or coordinates are wrong.
    """
    full = [leaf for leaf in leaves if len(leaf.points)]
    if not full:
        raise ReadError(f"{name}: empty: no points, so there is nothing to partition")
    for leaf in full:
        check_cells(leaf, len(leaf.points), _called(leaf, name))
    owned = [_without_ghosts(leaf, name) for leaf in full]
    dim = max(leaf.dim for leaf in owned)
    _warn_left_out(owned, dim, name)
    starts = offsets_of(np.array([len(leaf.types) for leaf in full]))
    pairs = [
        (_plain(leaf, dim), start)
        for leaf, start in zip(owned, starts, strict=False)
        if leaf.dim == dim or dim < 1
    ]
    if dim < 1:
        return _finish(_join([(_cloud(leaf, name), at) for leaf, at in pairs], name))
    return _finish(_join(pairs, name))


def _called(leaf: Dataset, name: str) -> str:
    return f"{name} (block '{leaf.block}')" if leaf.block else name


def _finish(mesh: Mesh) -> Mesh:
    check_points(mesh.points, mesh.name)
    warn_fields(mesh)
    for array in OURS:
        if array in mesh.cell_fields or array in mesh.point_fields:
            warn(f"{mesh.name}: already has an array '{array}'; it is kept under its own name")
    return mesh


def _without_ghosts(leaf: Dataset, name: str) -> Dataset:
    """Cells flagged by vtkGhostType belong to another piece: leave them out."""
    points, cells = dict(leaf.point_fields), dict(leaf.cell_fields)
    if points.pop(GHOST, np.zeros(0)).any():
        warn(f"{name}: point array {GHOST} (ghost points) is ignored")
    ghost = cells.pop(GHOST, None)
    leaf = replace(leaf, point_fields=points, cell_fields=cells)
    if ghost is None or not (ghost > 0).any():
        return leaf
    keep = np.flatnonzero(ghost == 0)
    warn(f"{name}: {len(ghost) - len(keep)} ghost cells left out ({GHOST} > 0)")
    if not len(keep):
        raise ReadError(
            f"{name}: all {len(ghost)} cells are ghosts ({GHOST} > 0); nothing is owned"
        )
    return _take(leaf, keep)


def _warn_left_out(leaves: Sequence[Dataset], dim: int, name: str) -> None:
    """Name the cells whose dimension is lower than that of the mesh."""
    seen: Counter[int] = Counter()
    for leaf in leaves:
        low = [kind for kind in kinds(leaf.types) if _lower(kind, dim)]
        seen.update({kind: int(np.count_nonzero(leaf.types == kind)) for kind in low})
    if seen:
        words = ", ".join(f"{n} {type_name(kind)}" for kind, n in sorted(seen.items()))
        kept = ("vertices", "curves", "surface cells", "volume cells")[max(dim, 0)]
        warn(f"{name}: mixed dimensions: {words} left out; only the {kept} are kept")


def _lower(kind: int, dim: int) -> bool:
    return kind == EMPTY or int(dimensions(np.array(kind))) < dim


def _take(leaf: Dataset, rows: Array) -> Dataset:
    """The cells `rows` of a leaf; all its points."""
    connectivity, offsets = gather_rows(leaf.connectivity, leaf.offsets, rows)
    return replace(
        leaf,
        connectivity=connectivity,
        offsets=offsets,
        types=leaf.types[rows],
        faces=_take_faces(leaf.faces, rows),
        cell_fields={k: v[rows] for k, v in leaf.cell_fields.items()},
        rows=rows if leaf.rows is None else leaf.rows[rows],
    )


def _take_faces(faces: Faces | None, rows: Array) -> Faces | None:
    if faces is None:
        return None
    of, cell_offsets = gather_rows(np.arange(len(faces.offsets) - 1), faces.cell_offsets, rows)
    connectivity, offsets = gather_rows(faces.connectivity, faces.offsets, of)
    return Faces(cell_offsets, offsets, connectivity)


def _plain(leaf: Dataset, dim: int) -> Dataset:
    """Only the cells of one dimension; strips cut, pixels and voxels turned."""
    present = kinds(leaf.types)
    if any(_lower(kind, dim) for kind in present):
        keep = (dimensions(leaf.types) == dim) & (leaf.types != EMPTY)
        leaf = _take(leaf, np.flatnonzero(keep))
    if STRIP in present and dim == 2:
        leaf = _cut_strips(leaf)
    for kind, (plain, order) in SWAPPED.items():
        if kind in present and (leaf.types == kind).any():
            leaf = _turn(leaf, kind, plain, order)
    return leaf


def _cut_strips(leaf: Dataset) -> Dataset:
    """A strip of m points becomes m - 2 triangles, every second one turned; values spread."""
    counts = np.diff(leaf.offsets)
    strip = leaf.types == STRIP
    pieces = np.where(strip, counts - 2, 1)
    first = offsets_of(pieces)
    rows = np.repeat(np.arange(len(pieces)), pieces)
    within = np.arange(first[-1]) - first[rows]
    taken = _take(leaf, rows)
    size = np.where(strip[rows], 3, counts[rows])
    offsets = offsets_of(size)
    place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], size)
    cut, odd = np.repeat(strip[rows], size), np.repeat(within % 2 == 1, size)
    place = np.where(cut & odd & (place < 2), 1 - place, place)
    at = np.repeat(leaf.offsets[rows] + np.where(strip[rows], within, 0), size) + place
    types = np.where(strip[rows], TRIANGLE, leaf.types[rows]).astype(np.uint8)
    return replace(taken, connectivity=leaf.connectivity[at], offsets=offsets, types=types)


def _turn(leaf: Dataset, kind: int, plain: int, order: list[int]) -> Dataset:
    """Give the cells of one type the point order of another."""
    cells = np.flatnonzero(leaf.types == kind)
    connectivity, types = leaf.connectivity.copy(), leaf.types.copy()
    start = leaf.offsets[cells][:, None]
    connectivity[start + np.arange(len(order))] = leaf.connectivity[start + order]
    types[cells] = plain
    return replace(leaf, connectivity=connectivity, types=types)


def _cloud(leaf: Dataset, name: str) -> Dataset:
    """Points without cells; the fields of one vertex cell a point become point fields."""
    points = dict(leaf.point_fields)
    if leaf.cell_fields:
        n = len(leaf.points)
        if len(leaf.types) == n and np.array_equal(leaf.connectivity, np.arange(n)):
            for key, values in leaf.cell_fields.items():
                points[key if key not in points else f"{key} (cells)"] = values
        else:
            warn(
                f"{name}: vertex cells are not one a point in order; their fields are left out: "
                + ", ".join(leaf.cell_fields)
            )
    return Dataset(leaf.points, point_fields=points, block=leaf.block)


def _join(pairs: Sequence[tuple[Dataset, int]], name: str) -> Mesh:
    """Leaves one after the other; `pairs` holds each with the file row of its first cell."""
    leaves = [leaf for leaf, _ in pairs]
    points = np.concatenate([d.points for d in leaves]) if len(leaves) > 1 else leaves[0].points
    if points.dtype.kind != "f":
        points = points.astype(np.float64)
    connectivity, offsets = _joined_runs(
        [(d.connectivity, d.offsets, len(d.points)) for d in leaves]
    )
    types = leaves[0].types if len(leaves) == 1 else np.concatenate([d.types for d in leaves])
    return Mesh(
        points=points,
        connectivity=connectivity,
        offsets=offsets,
        types=types,
        faces=_joined_faces(leaves),
        point_fields=_joined_fields([(d.point_fields, len(d.points)) for d in leaves], name),
        cell_fields=_joined_cell_fields(leaves, name),
        cell_origin=_origin(pairs),
        blocks=_block_names(leaves),
        name=name,
    )


def _joined_runs(parts: Sequence[tuple[Array, Array, int]]) -> tuple[Array, Array]:
    """Ragged arrays of ids (values, offsets, number of things they name) put in a row."""
    if len(parts) == 1:
        return parts[0][0], parts[0][1].astype(np.int64, copy=False)
    shifts = offsets_of(np.array([n for _, _, n in parts]))
    counts = np.concatenate([np.diff(offsets) for _, offsets, _ in parts])
    values = [v.astype(np.int64) + s for (v, _, _), s in zip(parts, shifts, strict=False)]
    return np.concatenate(values), offsets_of(counts)


def _joined_faces(leaves: Sequence[Dataset]) -> Faces | None:
    if all(leaf.faces is None for leaf in leaves):
        return None
    faces = [
        d.faces or Faces(np.zeros(len(d.types) + 1, np.int64), np.zeros(1, np.int64), _no_ids())
        for d in leaves
    ]
    runs = [(f.connectivity, f.offsets, len(d.points)) for f, d in zip(faces, leaves, strict=True)]
    connectivity, offsets = _joined_runs(runs)
    per_cell = np.concatenate([np.diff(f.cell_offsets) for f in faces])
    return Faces(offsets_of(per_cell), offsets, connectivity)


def _joined_cell_fields(leaves: Sequence[Dataset], name: str) -> Fields:
    fields = _joined_fields([(d.cell_fields, len(d.types)) for d in leaves], name)
    names = _block_names(leaves)
    if names and len(leaves[0].types):
        number = {block: i for i, block in enumerate(names)}
        block = [np.full(len(d.types), number[d.block], np.int32) for d in leaves]
        fields[free_name("block", fields)] = np.concatenate(block)
    return fields


def _joined_fields(parts: Sequence[tuple[Fields, int]], name: str) -> Fields:
    """Fields of all leaves; a leaf without a float field gets NaN, others are left out."""
    if len(parts) == 1:
        return dict(parts[0][0])
    parts = [(fields, n) for fields, n in parts if n]
    out: Fields = {}
    for key in dict.fromkeys(k for fields, _ in parts for k in fields):
        have = [fields[key] for fields, _ in parts if key in fields]
        if len({(v.shape[1:], v.dtype.kind) for v in have}) > 1:
            warn(f"{name}: field '{key}' left out: its type or width differs between pieces")
            continue
        if len(have) < len(parts) and have[0].dtype.kind != "f":
            warn(f"{name}: field '{key}' left out: {len(parts) - len(have)} pieces lack it")
            continue
        if len(have) < len(parts):
            warn(f"{name}: field '{key}': NaN where {len(parts) - len(have)} pieces lack it")
        blank = have[0][:0]
        rows = [fields.get(key, _nan(n, blank)) for fields, n in parts]
        out[key] = np.concatenate(rows)
    return out


def _nan(n: int, like: Array) -> Array:
    """`n` rows of NaN as wide as `like`; zero rows where NaN does not exist."""
    if like.dtype.kind != "f":
        return like
    return np.full((n, *like.shape[1:]), np.nan, like.dtype)


def _origin(pairs: Sequence[tuple[Dataset, int]]) -> Array | None:
    """File row of each cell; None where it is the row itself."""
    if all(leaf.rows is None for leaf, _ in pairs):
        at = 0
        for leaf, start in pairs:
            if start != at:
                break
            at += len(leaf.types)
        else:
            return None
    rows = [(np.arange(len(d.types)) if d.rows is None else d.rows) + start for d, start in pairs]
    out = np.concatenate(rows)
    return out if len(out) else None


def _block_names(leaves: Sequence[Dataset]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(leaf.block for leaf in leaves))
    return names if len(names) > 1 else ()


def free_name(name: str, taken: Container[str]) -> str:
    """`name`, numbered if it is taken."""
    out, n = name, 2
    while out in taken:
        out, n = f"{name} ({n})", n + 1
    return out
