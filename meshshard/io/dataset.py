"""`Dataset` is a data set as a file stores it; `to_mesh` merges those of a file into a Mesh.

A file may mix dimensions and hold strips, pixels, ghost cells and several blocks. A `Mesh` has
cells of one dimension: strips are split, pixels and voxels are converted, and other cells are left
out with a warning that counts them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from meshshard.errors import ReadError, n_of
from meshshard.mesh import Array, Faces, Mesh
from meshshard.mesh.cells import (
    EMPTY,
    HEXAHEDRON,
    PIXEL,
    QUAD,
    STRIP,
    TRIANGLE,
    VOXEL,
    dimensions,
    type_name,
    types_present,
)
from meshshard.mesh.checks import check_cells, check_names, check_points, warn, warn_fields
from meshshard.mesh.ragged import gather_rows, no_rows, offsets_of

__all__ = ["Dataset", "field_name", "free_name", "to_mesh"]

Fields = dict[str, Array]
GHOST = "vtkGhostType"
HIDING = 1 | 8 | 32  # its bits for which VTK removes a cell: duplicate, refined, hidden
RESERVED = ("part_id", "shard", "shard_id", "global_id", "halo")  # arrays that meshshard writes
REORDERED = {  # cell type in the file: cell type in a Mesh, and the permutation of its points
    PIXEL: (QUAD, [0, 1, 3, 2]),
    VOXEL: (HEXAHEDRON, [0, 1, 3, 2, 4, 5, 7, 6]),
}
CURVED = (68, 75)  # first Lagrange and Bezier cell types; those of order 1 are the linear cells:
LINEAR = ((3, 2), (5, 3), (9, 4), (10, 4), (12, 8), (13, 6), (14, 5))  # type, number of points


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set: points (n, 3), cells of any dimension (CSR, VTK types), fields, block name.

    `rows` is the row that each cell had when the data set was read; None if no cell has been left
    out or split since.
    """

    points: Array
    connectivity: Array = field(default_factory=lambda: no_rows()[0])
    offsets: Array = field(default_factory=lambda: no_rows()[1])
    types: Array = field(default_factory=lambda: np.zeros(0, np.uint8))
    faces: Faces | None = None
    point_fields: Fields = field(default_factory=dict)
    cell_fields: Fields = field(default_factory=dict)
    block: str = ""
    rows: Array | None = None

    @property
    def dim(self) -> int:
        """Highest dimension of the cells; -1 without cells."""
        return max((int(dimensions(t)) for t in types_present(self.types)), default=-1)


def to_mesh(datasets: Iterable[Dataset], name: str) -> Mesh:
    """Validate the data sets of a file and merge them; keep the cells of the highest dimension.

    Args:
        datasets: as stored, in file order.
        name: name of the mesh in messages.

    Returns:
        A mesh whose cells and points are in file order.

    Raises:
        ReadError: the file has no points, or all cells are ghost cells.
        MeshError: ids, offsets, numbers of points per cell or coordinates are invalid.
    """
    stored = [_with_linear_cells(dataset) for dataset in datasets if len(dataset.points)]
    if not stored:
        raise ReadError(f"{name}: empty: no points, so there is nothing to partition")
    for dataset in stored:
        where = f"{name} (block '{dataset.block}')" if dataset.block else name
        check_cells(dataset, len(dataset.points), where)
    kept = [_without_ghosts(dataset, name) for dataset in stored]
    dim = max(dataset.dim for dataset in kept)
    _warn_left_out(kept, dim, name)
    starts = offsets_of(np.array([len(dataset.types) for dataset in stored]))
    pairs = [
        (_of_dimension(dataset, dim), start)
        for dataset, start in zip(kept, starts, strict=False)
        if dataset.dim == dim or dim < 1
    ]
    if dim < 1:
        pairs = [(_cloud(dataset, name), start) for dataset, start in pairs]
    mesh = _concatenated(pairs, name)
    check_points(mesh.points, name)
    check_names(mesh)
    warn_fields(mesh)
    for array in RESERVED:
        if array in mesh.cell_fields or array in mesh.point_fields:
            warn(f"{name}: array '{array}' is kept, but meshshard writes arrays of the same name")
    return mesh


def _with_linear_cells(dataset: Dataset) -> Dataset:
    """Lagrange and Bezier cells of order 1 under the type of the linear cell."""
    present, types = types_present(dataset.types), dataset.types
    for first in CURVED:
        for number, (linear, n_points) in enumerate(LINEAR, first):
            if number in present:
                order_one = (types == number) & (np.diff(dataset.offsets) == n_points)
                types = np.where(order_one, linear, types).astype(np.uint8)
    return dataset if types is dataset.types else replace(dataset, types=types)


def _without_ghosts(dataset: Dataset, name: str) -> Dataset:
    """Remove the cells that VTK hides: copies of cells of another piece, refined and blank ones."""
    points, cells = dict(dataset.point_fields), dict(dataset.cell_fields)
    if points.pop(GHOST, np.zeros(0)).any():
        warn(f"{name}: point array {GHOST} (ghost points) is ignored")
    ghost = cells.pop(GHOST, None)
    dataset = replace(dataset, point_fields=points, cell_fields=cells)
    if ghost is None:
        return dataset
    hidden = ghost.astype(np.uint8) & HIDING > 0
    if not hidden.any():
        return dataset
    keep = np.flatnonzero(~hidden)
    warn(f"{name}: {n_of(len(ghost) - len(keep), 'ghost cells')} left out ({GHOST})")
    if not len(keep):
        raise ReadError(
            f"{name}: all {len(ghost)} cells are ghost cells ({GHOST}); "
            "read the piece that owns them"
        )
    return _take(dataset, keep)


def _warn_left_out(datasets: Sequence[Dataset], dim: int, name: str) -> None:
    """Warn about cells of a lower dimension than the mesh, with the number of each type."""
    seen: Counter[int] = Counter()
    for dataset in datasets:
        low = [cell_type for cell_type in types_present(dataset.types) if _is_lower(cell_type, dim)]
        seen.update(
            {cell_type: int(np.count_nonzero(dataset.types == cell_type)) for cell_type in low}
        )
    if seen:
        counts = ", ".join(f"{n} {type_name(cell_type)}" for cell_type, n in sorted(seen.items()))
        kept = ("vertices", "curves", "surface cells", "volume cells")[max(dim, 0)]
        warn(f"{name}: mixed dimensions: {counts} left out; only the {kept} are kept")


def _is_lower(cell_type: int, dim: int) -> bool:
    return cell_type == EMPTY or int(dimensions(cell_type)) < dim


def _take(dataset: Dataset, rows: Array) -> Dataset:
    """The data set with the cells `rows` only; all points are kept."""
    connectivity, offsets = gather_rows(dataset.connectivity, dataset.offsets, rows)
    return replace(
        dataset,
        connectivity=connectivity,
        offsets=offsets,
        types=dataset.types[rows],
        faces=None if dataset.faces is None else dataset.faces.take(rows),
        cell_fields={name: values[rows] for name, values in dataset.cell_fields.items()},
        rows=rows if dataset.rows is None else dataset.rows[rows],
    )


def _of_dimension(dataset: Dataset, dim: int) -> Dataset:
    """The cells of one dimension; strips, pixels and voxels are converted."""
    if any(_is_lower(cell_type, dim) for cell_type in types_present(dataset.types)):
        keep = (dimensions(dataset.types) == dim) & (dataset.types != EMPTY)
        dataset = _take(dataset, np.flatnonzero(keep))
    present = types_present(dataset.types)
    if STRIP in present:
        dataset = _split_strips(dataset)
    for cell_type in REORDERED:
        if cell_type in present:
            dataset = _reorder(dataset, cell_type)
    return dataset


def _split_strips(dataset: Dataset) -> Dataset:
    """Split triangle strips: m points make m - 2 triangles, every second one reversed.

    Every triangle gets the fields of its strip.
    """
    counts = np.diff(dataset.offsets)
    strip = dataset.types == STRIP
    n_cells = np.where(strip, counts - 2, 1)
    first = offsets_of(n_cells)
    rows = np.repeat(np.arange(len(n_cells)), n_cells)
    step = np.arange(first[-1]) - first[rows]  # number of the triangle in its strip
    size = np.where(strip[rows], 3, counts[rows])
    offsets = offsets_of(size)
    corner = np.arange(offsets[-1]) - np.repeat(offsets[:-1], size)
    is_strip, odd = np.repeat(strip[rows], size), np.repeat(step % 2 == 1, size)
    corner = np.where(is_strip & odd & (corner < 2), 1 - corner, corner)
    at = np.repeat(dataset.offsets[rows] + np.where(strip[rows], step, 0), size) + corner
    types = np.where(strip[rows], TRIANGLE, dataset.types[rows]).astype(np.uint8)
    taken = _take(dataset, rows)
    return replace(taken, connectivity=dataset.connectivity[at], offsets=offsets, types=types)


def _reorder(dataset: Dataset, cell_type: int) -> Dataset:
    """Convert pixels to quads, or voxels to hexahedra, which order their points differently."""
    mesh_type, order = REORDERED[cell_type]
    cells = np.flatnonzero(dataset.types == cell_type)
    connectivity, types = dataset.connectivity.copy(), dataset.types.copy()
    start = dataset.offsets[cells][:, None]
    connectivity[start + np.arange(len(order))] = dataset.connectivity[start + order]
    types[cells] = mesh_type
    return replace(dataset, connectivity=connectivity, types=types)


def _cloud(dataset: Dataset, name: str) -> Dataset:
    """The points, without cells.

    If the data set has one vertex cell per point, in order, cell fields become point fields.
    """
    points = dict(dataset.point_fields)
    if dataset.cell_fields:
        n = len(dataset.points)
        if len(dataset.types) == n and np.array_equal(dataset.connectivity, np.arange(n)):
            for key, values in dataset.cell_fields.items():
                points[key if key not in points else f"{key} (cells)"] = values
        else:
            warn(
                f"{name}: there is not one vertex cell per point, in order; "
                f"cell fields are left out: {', '.join(dataset.cell_fields)}"
            )
    return Dataset(dataset.points, point_fields=points, block=dataset.block)


def _concatenated(pairs: Sequence[tuple[Dataset, int]], name: str) -> Mesh:
    """One mesh of several data sets; each comes with the row of its first cell in the file."""
    datasets = [dataset for dataset, _ in pairs]
    points = _joined([d.points for d in datasets])
    if points.dtype.kind != "f":
        points = points.astype(np.float64)
    connectivity, offsets = _joined_rows(
        [(d.connectivity, d.offsets, len(d.points)) for d in datasets]
    )
    return Mesh(
        points=points,
        connectivity=connectivity,
        offsets=offsets,
        types=_joined([d.types for d in datasets]),
        faces=_joined_faces(datasets),
        point_fields=_joined_fields([(d.point_fields, len(d.points)) for d in datasets], name),
        cell_fields=_joined_cell_fields(datasets, name),
        cell_origin=_origin(pairs),
        blocks=_block_names(datasets),
        name=name,
    )


def _joined(arrays: Sequence[Array]) -> Array:
    """Concatenated arrays; a single one is returned without a copy."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _joined_rows(parts: Sequence[tuple[Array, Array, int]]) -> tuple[Array, Array]:
    """Concatenated CSR arrays (ids, offsets, n): ids are 0 to n - 1 and are renumbered."""
    if len(parts) == 1:
        return parts[0][0], parts[0][1].astype(np.int64, copy=False)
    shifts = offsets_of(np.array([n for _, _, n in parts]))
    counts = np.concatenate([np.diff(offsets) for _, offsets, _ in parts])
    values = [v.astype(np.int64) + s for (v, _, _), s in zip(parts, shifts, strict=False)]
    return np.concatenate(values), offsets_of(counts)


def _joined_faces(datasets: Sequence[Dataset]) -> Faces | None:
    if all(dataset.faces is None for dataset in datasets):
        return None
    ids, offsets = no_rows()
    faces = [d.faces or Faces(np.zeros(len(d.types) + 1, np.int64), offsets, ids) for d in datasets]
    rows = [
        (f.connectivity, f.offsets, len(d.points)) for f, d in zip(faces, datasets, strict=True)
    ]
    connectivity, offsets = _joined_rows(rows)
    per_cell = np.concatenate([np.diff(f.cell_offsets) for f in faces])
    return Faces(offsets_of(per_cell), offsets, connectivity)


def _joined_cell_fields(datasets: Sequence[Dataset], name: str) -> Fields:
    fields = _joined_fields([(d.cell_fields, len(d.types)) for d in datasets], name)
    names = _block_names(datasets)
    if names and len(datasets[0].types):
        block = [np.full(len(d.types), names.index(d.block), np.int32) for d in datasets]
        fields[free_name("block", fields)] = np.concatenate(block)
    return fields


def _joined_fields(parts: Sequence[tuple[Fields, int]], name: str) -> Fields:
    """Concatenated fields.

    If some data sets lack a field, it is NaN there if it is floating-point, else it is left out.

    Args:
        parts: fields and number of rows of each data set.
        name: name of the mesh in messages.
    """
    if len(parts) == 1:
        return dict(parts[0][0])
    parts = [(fields, n) for fields, n in parts if n]
    out: Fields = {}
    for key in dict.fromkeys(k for fields, _ in parts for k in fields):
        have = [fields[key] for fields, _ in parts if key in fields]
        missing = len(parts) - len(have)
        if len({(v.shape[1:], v.dtype.kind) for v in have}) > 1:
            warn(f"{name}: field '{key}' left out: its type or width differs between pieces")
            continue
        if missing and have[0].dtype.kind != "f":
            warn(f"{name}: field '{key}' left out: {missing} of {len(parts)} pieces lack it")
            continue
        if missing:
            warn(f"{name}: field '{key}': NaN in {missing} of {len(parts)} pieces, which lack it")
        like = have[0]
        out[key] = np.concatenate(
            [fields[key] if key in fields else _nan(n, like) for fields, n in parts]
        )
    return out


def _nan(n: int, like: Array) -> Array:
    return np.full((n, *like.shape[1:]), np.nan, like.dtype)


def _origin(pairs: Sequence[tuple[Dataset, int]]) -> Array | None:
    """Row of each cell in the file; None if it equals the row in the mesh for all cells."""
    at = offsets_of(np.array([len(d.types) for d, _ in pairs]))
    if not at[-1] or all(d.rows is None and at[i] == start for i, (d, start) in enumerate(pairs)):
        return None
    return np.concatenate(
        [(np.arange(len(d.types)) if d.rows is None else d.rows) + start for d, start in pairs]
    )


def _block_names(datasets: Sequence[Dataset]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(dataset.block for dataset in datasets))
    return names if len(names) > 1 else ()


def field_name(name: str | None, i: int, taken: Container[str], kind: str, where: str) -> str:
    """Name of array number `i` of a file; a missing or repeated one is replaced with a warning."""
    if not name:
        warn(f"{where}: {kind} array {i} has no name; it is called 'array {i}'")
        name = f"array {i}"
    if name in taken:
        warn(f"{where}: two {kind} arrays are called '{name}'; the later is renamed")
    return free_name(name, taken)


def free_name(name: str, taken: Container[str]) -> str:
    """`name`, or `name (2)`, `name (3)`, … if it is taken."""
    out, n = name, 2
    while out in taken:
        out, n = f"{name} ({n})", n + 1
    return out
