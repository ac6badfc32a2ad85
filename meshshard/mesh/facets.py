"""Facets of cells (edges, faces or end points), and an exact match between cells by one sort.

The facets of a surface are its edges, of a volume its faces, of curves their end points. Every
facet of every cell is listed, cell by cell; facets with the same corners are the same facet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np

from meshshard.errors import MeshError
from meshshard.mesh.arrays import Array
from meshshard.mesh.cells import CELL_TYPES, POLYHEDRON, CellType, types_present
from meshshard.mesh.mesh import Mesh
from meshshard.mesh.ragged import gather_rows, offsets_of

__all__ = ["Facets", "Matches", "edges", "facets", "match"]

Sides = list[tuple[int, ...]]  # corners of each facet of a cell, as positions within the cell
BLOCK = 1 << 14  # cells or facets per block, so that intermediate results stay in cache
MAX_CELLS_PER_FACET = 1000  # more indicate a broken mesh; pairs grow with the square


@dataclass(frozen=True, eq=False)
class Facets:
    """The facets of all cells, cell by cell.

    Attributes:
        offsets: (n_cells + 1,) int64; facets of cell i are offsets[i]:offsets[i + 1].
        low: (n_facets,) int32 or int64, the smallest point id of each facet.
        tag: (n_facets,) int64 or uint64, equal for facets with the same corners: the other end
            of an edge; for a face a 64-bit hash of its corners that does not depend on their order.
        forward: (n_facets,) bool, whether the cell traverses the edge from its smaller to its
            larger id; None if the facets are not edges.
    """

    offsets: Array
    low: Array
    tag: Array
    forward: Array | None = None

    @cached_property
    def owner(self) -> Array:
        """(n_facets,) int32 cell of each facet."""
        n = len(self.offsets) - 1
        return np.repeat(np.arange(n, dtype=_id_type(n)), np.diff(self.offsets))


@dataclass(frozen=True, eq=False)
class Matches:
    """Pairs of equal facets.

    Attributes:
        facets: the facets that were matched.
        first, second: (n_matches,) the two facets of each pair; c > 2 cells that share a facet
            give all c (c - 1) / 2 pairs.
        shared: number of distinct facets that belong to more than two cells.
    """

    facets: Facets
    first: Array
    second: Array
    shared: int

    @cached_property
    def open(self) -> Array:
        """(n_facets,) bool, facets of one cell only: the boundary."""
        return np.asarray(self.twin < 0)

    @cached_property
    def twin(self) -> Array:
        """(n_facets,) neighbor cell across each facet, -1 if open; one of several."""
        owner = self.facets.owner
        out = np.full(len(owner), -1, owner.dtype)
        out[self.first], out[self.second] = owner[self.second], owner[self.first]
        return out


def facets(mesh: Mesh) -> Facets:
    """The facets of every cell; point ids are mapped by `mesh.weld`, if any."""
    ids = _welded(mesh)
    if mesh.dim == 2 and _all_corners(mesh.types):
        return _edges_of_polygons(mesh.offsets, ids)
    return _facets_by_type(mesh, ids)


def match(listed: Facets, n_points: int) -> Matches:
    """Find all pairs of equal facets.

    The low id, a short hash of the tag and the index of each facet are packed into a 64-bit word;
    the words are sorted in place. Consecutive words that differ only in the index are candidates,
    verified by the whole tag. Runs of three or more (non-manifold facets, or a collision of the
    short hash) are sorted again by low id and tag. Degenerate edges (both ends are the same point)
    match nothing.

    Args:
        listed: the facets of all cells.
        n_points: number of points of the mesh.

    Raises:
        MeshError: more than 1000 cells share one facet.
    """
    keys, index_bits = _pack(listed, n_points)
    keys.sort()
    a, b, in_run = _equal_consecutive(keys, index_bits)
    del keys
    good = listed.tag[a] == listed.tag[b]
    if listed.forward is not None and (listed.tag == listed.low).any():
        good &= listed.tag[a] != listed.low[a]
    simple = good & ~in_run
    more_a, more_b, shared = _match_runs(listed, np.union1d(a[in_run], b[in_run]))
    a, b = np.concatenate([a[simple], more_a]), np.concatenate([b[simple], more_b])
    return Matches(listed, a, b, shared)


def edges(mesh: Mesh) -> tuple[Array, Array]:
    """Both ends of every edge of every cell, with repetitions (stored point ids, not welded).

    Edges join consecutive corners of polygons, of the faces of solids and of poly-lines. The other
    nodes of a curved cell are joined to all corners of that cell.
    """
    ends: list[tuple[Array, Array]] = []
    if mesh.faces is not None:
        ends.append(_following(mesh.faces.offsets, mesh.faces.connectivity))
    ids = mesh.connectivity
    for number in types_present(mesh.types):
        cell = CELL_TYPES[number]
        rows = np.flatnonzero(mesh.types == number)
        if cell.n_points == 0 and cell.dim < 3:
            points, bounds = gather_rows(ids, mesh.offsets, rows)
            a, b = _following(bounds, points)
            keep = np.ones(len(a), bool)
            keep[bounds[1:] - 1] = cell.dim == 2  # a poly-line is not closed
            ends.append((a[keep], b[keep]))
        elif number != POLYHEDRON:
            starts = mesh.offsets[rows]
            ends.extend((ids[starts + i], ids[starts + j]) for i, j in _edge_table(cell))
    none = ids[:0]
    return (
        np.concatenate([none, *(a for a, _ in ends)]),
        np.concatenate([none, *(b for _, b in ends)]),
    )


def _edge_table(cell: CellType) -> list[tuple[int, int]]:
    """Pairs of points of one cell that an edge joins."""
    corners = cell.n_corners or cell.n_points
    faces = cell.faces or (tuple(range(corners)),)
    sides = {tuple(sorted(e)) for f in faces for e in zip(f, f[1:] + f[:1], strict=True)}
    inner = {(c, node) for c in range(corners) for node in range(corners, cell.n_points)}
    return sorted((i, j) for i, j in sides | inner if i != j)


def _following(offsets: Array, ids: Array) -> tuple[Array, Array]:
    """Every corner and the next one of its polygon; the first follows the last."""
    following = np.empty_like(ids)
    following[:-1] = ids[1:]
    following[offsets[1:] - 1] = ids[offsets[:-1]]
    return ids, following


def _match_runs(listed: Facets, rows: Array) -> tuple[Array, Array, int]:
    """All pairs of equal facets among `rows`, and the number of facets of three or more cells."""
    rows = rows[np.lexsort((listed.tag[rows], listed.low[rows]))]
    if listed.forward is not None:
        rows = rows[listed.tag[rows] != listed.low[rows]]
    low, tag = listed.low[rows], listed.tag[rows]
    new = np.ones(len(rows), bool)
    new[1:] = (low[1:] != low[:-1]) | (tag[1:] != tag[:-1])
    group = np.cumsum(new) - 1
    size = np.bincount(group, minlength=1)
    most = int(size.max())
    if most > MAX_CELLS_PER_FACET:
        point = int(low[np.flatnonzero(group == size.argmax())[0]])
        raise MeshError(
            f"{most} cells share one facet at point {point}, at most {MAX_CELLS_PER_FACET} can be "
            "matched: remove the collapsed cells, or partition the points"
        )
    pairs = [np.flatnonzero(group[s:] == group[:-s]) for s in range(1, most)]
    first = [rows[p] for p in pairs]
    second = [rows[p + s] for s, p in enumerate(pairs, 1)]
    none = rows[:0]
    return np.concatenate([none, *first]), np.concatenate([none, *second]), int((size > 2).sum())


def _pack(listed: Facets, n_points: int) -> tuple[Array, int]:
    """Sortable words (low id | short hash of the tag | facet index); number of index bits."""
    n = len(listed.low)
    index_bits = max(1, (n - 1).bit_length())
    hash_bits = 64 - index_bits - max(1, (n_points - 1).bit_length())
    if hash_bits < 4:
        raise MeshError(f"{n} facets of {n_points} points do not fit 64-bit keys; split the mesh")
    keys = np.empty(n, np.uint64)
    for first in range(0, n, BLOCK):
        block = slice(first, first + BLOCK)
        key, short = keys[block], listed.tag[block].astype(np.uint64)
        short *= np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: Fibonacci hashing
        short >>= np.uint64(64 - hash_bits)
        key[:] = listed.low[block]
        key <<= np.uint64(hash_bits)
        key |= short
        key <<= np.uint64(index_bits)
        key |= np.arange(first, first + len(key), dtype=np.uint64)
    return keys, index_bits


def _equal_consecutive(keys: Array, index_bits: int) -> tuple[Array, Array, Array]:
    """Pairs of consecutive sorted words that differ only in the facet index.

    Returns:
        Both facets of every pair, and whether the pair is part of a run of three or more.
    """
    kind, mask = _id_type(len(keys)), np.uint64((1 << index_bits) - 1)
    count, n = 0, len(keys)
    # the first `count` entries are filled
    a, b, in_run = np.empty(n, kind), np.empty(n, kind), np.empty(n, bool)
    for first in range(0, n - 1, BLOCK):
        start = max(first - 1, 0)  # one more pair at both ends, for `in_run`
        block = keys[start : first + BLOCK + 2]
        same = np.zeros(len(block) + 1, bool)  # same[i + 1]: pair i
        np.less_equal(block[1:] ^ block[:-1], mask, out=same[1:-1])
        at = np.flatnonzero(same[1 + first - start : 1 + first - start + BLOCK]) + first - start
        at = at[at < len(block) - 1]
        index = (block & mask).astype(kind)
        more = slice(count, count + len(at))
        a[more], b[more], in_run[more] = index[at], index[at + 1], same[at] | same[at + 2]
        count += len(at)
    return a[:count], b[:count], in_run[:count]


def _edges_of_polygons(offsets: Array, ids: Array) -> Facets:
    """Edges of linear polygons: from each corner to the next one."""
    ids, following = _following(offsets, ids)
    high = np.maximum(ids, following)
    return Facets(offsets, np.minimum(ids, following), high, ids < following)


def _facets_by_type(mesh: Mesh, ids: Array) -> Facets:
    """Facets of cells of several types, stored cell by cell."""
    groups = list(_groups(mesh))
    counts = np.zeros(mesh.n_cells, np.int64)
    for rows, sides in groups:
        counts[rows] = len(sides)
    if mesh.faces is not None:
        counts += np.diff(mesh.faces.cell_offsets)
    offsets = offsets_of(counts)
    low = np.empty(offsets[-1], ids.dtype)
    tag = np.empty(offsets[-1], np.uint64 if mesh.dim == 3 else ids.dtype)
    forward = np.empty(offsets[-1], bool) if mesh.dim == 2 else None
    for rows, sides in _in_blocks(groups):
        corners = [ids.take(mesh.offsets[rows] + i) for i in range(1 + max(map(max, sides)))]
        marks = [_hash(c) for c in corners] if mesh.dim == 3 else corners
        combine = np.add if mesh.dim == 3 else np.maximum
        for j, side in enumerate(sides):
            at = offsets[rows] + j
            low[at] = reduce(np.minimum, (corners[i] for i in side))
            tag[at] = reduce(combine, (marks[i] for i in side))
            if forward is not None:
                forward[at] = corners[side[0]] < corners[side[1]]
    if mesh.faces is not None:
        _place_polyhedra(mesh, offsets, low, tag)
    return Facets(offsets, low, tag, forward)


def _groups(mesh: Mesh) -> Iterator[tuple[Array, Sides]]:
    """Groups of cells of one type and size: rows, and the corners of each facet."""
    for number in types_present(mesh.types):
        if number == POLYHEDRON:
            continue
        cell = CELL_TYPES[number]
        rows = np.flatnonzero(mesh.types == number)
        size = mesh.offsets[rows + 1] - mesh.offsets[rows]
        for n in np.flatnonzero(np.bincount(size)):
            yield rows[size == n], _sides(cell, cell.n_corners or int(n))


def _in_blocks(groups: list[tuple[Array, Sides]]) -> Iterator[tuple[Array, Sides]]:
    """The same groups, split into blocks of rows."""
    for rows, sides in groups:
        for first in range(0, len(rows), BLOCK):
            yield rows[first : first + BLOCK], sides


def _sides(cell: CellType, corners: int) -> Sides:
    """Corners of each facet of one cell, as positions within the cell."""
    if cell.dim == 3:
        return list(cell.faces)
    if cell.dim == 2:
        return [(i, (i + 1) % corners) for i in range(corners)]
    return [(0,), (corners - 1,)]


def _place_polyhedra(mesh: Mesh, offsets: Array, low: Array, tag: Array) -> None:
    """Fill in low ids and tags of the faces of polyhedra."""
    assert mesh.faces is not None
    cell_offsets, face_offsets, connectivity = mesh.faces
    if len(connectivity) == 0:
        return
    ids = connectivity if mesh.weld is None else mesh.weld[connectivity]
    count = np.diff(cell_offsets)
    place = np.repeat(offsets[:-1] - cell_offsets[:-1], count) + np.arange(count.sum())
    low[place] = np.minimum.reduceat(ids, face_offsets[:-1])
    tag[place] = np.add.reduceat(_hash(ids), face_offsets[:-1])


def _hash(ids: Array) -> Array:
    """64-bit hash of each id (the finalizer of SplitMix64: Steele, Lea and Flood, 2014)."""
    x = ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def _all_corners(types: Array) -> bool:
    """Whether all points of every cell are corners."""
    return all(not CELL_TYPES[t].n_corners for t in types_present(types))


def _welded(mesh: Mesh) -> Array:
    """Point ids of all cells in the smallest integer type, mapped by `weld`."""
    ids = mesh.connectivity.astype(_id_type(mesh.n_points), copy=False)
    return ids if mesh.weld is None else mesh.weld.astype(ids.dtype, copy=False)[ids]


def _id_type(n: int) -> type[np.int32] | type[np.int64]:
    """The smallest signed type for ids below n."""
    return np.int32 if n < 2**31 else np.int64
