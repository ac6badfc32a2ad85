"""Search: exact neighbors in a sharded cloud, as ids, for the queries of this rank."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshshard.comm import Domain
from meshshard.errors import DomainError, MeshshardError, n_of
from meshshard.graph.neighbors import NeighborIndex, finite, squared_length, widened
from meshshard.mesh import Array
from meshshard.nn.points._scan import Scan, intrinsic_dimension
from meshshard.nn.points._voxels import Rows, fetch_candidates
from meshshard.processes import available_memory
from meshshard.tensor import Sharding, ShardTensor
from meshshard.tensor.shard_tensor import refuse

__all__ = ["Side", "nearest", "side", "within_radius"]

TREE_DIMS = 8  # intrinsic dimension up to which a k-d tree is faster than brute force
EDGE_BYTES = 48  # memory of one edge while a graph is made
NO_KEY = np.iinfo(np.int64).max  # key of a missing neighbor: last in any order


class Side(NamedTuple):
    """A cloud on one rank: its points (n_owned, d), and the sharding of all points."""

    points: Tensor
    sharding: Sharding

    @property
    def domain(self) -> Domain:
        """The ranks that hold the cloud."""
        return self.sharding.domain

    @property
    def dims(self) -> int:
        """Number of coordinates."""
        return int(self.points.shape[1])


def side(pos: Any, what: str) -> Side:
    """Positions (n, d), sharded along their rows, or plain: all on one rank.

    Args:
        pos: the positions.
        what: the calling function, for error messages.

    Raises:
        NoShardRule: the positions are sharded along another dim.
        MeshshardError: they are not a tensor (n, d).
    """
    if isinstance(pos, ShardTensor):
        if pos.ndim != 2 or pos.sharded_dim != 0:
            raise refuse(what, (pos,), None, "positions must be (n, d), sharded along their rows")
        return Side(pos.to_local().detach().to(torch.float64), pos.sharding)
    if not isinstance(pos, Tensor):
        kind = f"{type(pos).__module__}.{type(pos).__name__}"
        raise MeshshardError(
            f"{what}: positions must be a tensor, not {kind}; convert them with torch.as_tensor"
        )
    if pos.ndim != 2:
        raise MeshshardError(f"{what}: positions must be (n, d), not {tuple(pos.shape)}")
    points = pos.detach().to(torch.float64)
    return Side(points, Sharding(Domain(None, pos.device), [len(pos)]))


def nearest(
    x: Side,
    y: Side | None,
    k: int,
    what: str,
    within: float = np.inf,
    max_edges: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The k nearest points of x for every row of y, ordered by distance, then row in the source.

    Args:
        x: the points.
        y: the queries; None for the points themselves, of which none is its own neighbor.
        k: number of neighbors.
        what: the calling function, for error messages.
        within: largest distance of a neighbor.
        max_edges: number of edges on all ranks above which an error is raised.

    Returns:
        (n_edges,) int64 ids of the neighbors of this rank's queries; (n_queries + 1,) int64 offsets
        of each query's neighbors.

    Raises:
        DomainError: on every rank, for points that are not finite, more than `max_edges` edges, or
            more than memory can hold.
    """
    queries, own = _prepared(x, y, what)
    k = max(0, min(k, x.sharding.total - (y is None)))
    _check_edges(x, len(queries) * k, what)
    ids = _nearest(x, own, None if y is None else queries, k, within)
    if max_edges is None and k and (ids[:, -1] >= 0).all():
        return _tensors(x, ids.reshape(-1), np.arange(0, ids.size + 1, k))
    found = ids >= 0
    starts = np.append(0, np.cumsum(found.sum(1)))
    if max_edges is not None:
        _check_edges(x, int(starts[-1]), what, max_edges)
    return _tensors(x, ids[found], starts)


def within_radius(
    x: Side, y: Side | None, radius: float, max_edges: int | None, what: str
) -> tuple[Tensor, Tensor]:
    """All points of x within a radius of every row of y; arguments and results as in `nearest`.

    Raises:
        DomainError: as `nearest`; edges are counted before they are made.
    """
    queries, own = _prepared(x, y, what)
    asking = None if y is None else queries
    clouds = [(_index(x, own, None), own, np.arange(len(queries)))]
    if x.domain.size > 1 and x.sharding.total:
        every = np.full(len(queries), float(radius))
        others = fetch_candidates(x.domain, own, queries, every, None)
        clouds.append((_index(x, others.rows, None), others.rows, others.queries))
    count = int(clouds[0][0].count(radius, asking).sum()) - (len(queries) if y is None else 0)
    count += sum(int(c.count(radius, queries[rows]).sum()) for c, _, rows in clouds[1:])
    _check_edges(x, count, what, max_edges)
    parts = [(*pairs, own) for pairs in clouds[0][0].ball(radius, asking)]
    for cloud, points, rows in clouds[1:]:
        parts += [(rows[p.at], p.to, p.squares, points) for p in cloud.ball(radius, queries[rows])]
    at = np.concatenate([np.zeros(0, np.int64), *(a for a, _, _, _ in parts)])
    to = np.concatenate([np.zeros(0, np.int64), *(r.ids[t] for _, t, _, r in parts)])
    keys = np.concatenate([np.zeros(0, np.int64), *(r.keys[t] for _, t, _, r in parts)])
    squares = np.concatenate([np.zeros(0), *(s for _, _, s, _ in parts)])
    by = np.lexsort((keys, squares, at))
    starts = np.append(0, np.cumsum(np.bincount(at, minlength=len(queries))))
    return _tensors(x, to[by], starts)


def _prepared(x: Side, y: Side | None, what: str) -> tuple[Array, Rows]:
    """Queries and points of this rank; an error on every rank if those of any are not finite."""
    _check_match(x, y, what)

    def _check() -> tuple[Array, Array]:
        points = _finite(x, "x" if y else "points")
        return points, points if y is None or y is x else _finite(y, "y")

    points, queries = x.domain.run_collectively(_check, what)
    ids = np.arange(len(points)) + x.sharding.first
    origin = x.sharding.origin
    return queries, Rows(points, ids if origin is None else origin.cpu().numpy(), ids)


def _check_match(x: Side, y: Side | None, what: str) -> None:
    """Conditions that hold or fail identically on every rank."""
    if y is None:
        return
    if x.domain.group != y.domain.group:
        raise MeshshardError(
            f"{what}: x and y are sharded over different domains; shard both over one domain"
        )
    if x.dims != y.dims:
        raise MeshshardError(f"{what}: x has {n_of(x.dims, 'coordinates')}, y has {y.dims}")


def _finite(one: Side, name: str) -> Array:
    points = np.ascontiguousarray(one.points.cpu().numpy())
    try:
        return finite(points)
    except MeshshardError as error:
        raise MeshshardError(f"{name}, local rows: {error}") from None


def _check_edges(x: Side, edges: int, what: str, most: int | None = None) -> None:
    """Raise an error on every rank if there are too many edges, in number or for any rank's memory.

    Communication: one gather of objects.
    """
    counts = x.domain.share((edges, edges * EDGE_BYTES, _free_memory(x.domain.device)))
    total = sum(count for count, _, _ in counts)
    if most is not None and total > most:
        raise DomainError(f"{what}: {n_of(total, 'edges')}, at most {most:,} are allowed")
    for rank, (count, size, free) in enumerate(counts):
        if size > free:
            raise DomainError(
                f"{what}: {total:,} edges, {count:,} of them on rank {rank}, need {size:,} bytes "
                f"there, but {free:,} are free; take a smaller radius or k, or more ranks"
            )


def _free_memory(device: torch.device) -> int:
    """Bytes of free memory on a device; a large number where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = available_memory()
    return sys.maxsize if free is None else free


def _index(x: Side, rows: Rows, max_k: int | None) -> NeighborIndex | Scan:
    """The faster of two search structures over points, with identical results."""
    points, keys = (torch.from_numpy(a).to(x.domain.device) for a in rows[:2])
    device = x.domain.device.type
    if device == "cpu" and (x.dims <= TREE_DIMS or intrinsic_dimension(points) <= TREE_DIMS):
        return NeighborIndex(rows.points, max_k, rows.keys, torch.get_num_threads())
    return Scan(points, keys)


def _nearest(x: Side, own: Rows, queries: Array | None, k: int, within: float) -> Array:
    """(n_queries, k) ids, -1 where there are fewer neighbors."""
    at = own.points if queries is None else queries
    found, kth = _index(x, own, k).nearest(k, queries, within)
    ids = found.astype(np.int64)
    ids += x.sharding.first
    if (found[:, -1:] < 0).any():  # missing neighbors come last
        ids[found < 0] = -1
    if x.domain.size == 1 or not x.sharding.total:
        return ids
    radius = np.minimum(kth, within)
    others = fetch_candidates(x.domain, own, at, radius, k)
    if not len(others.rows.ids) or not len(others.queries):
        return ids
    index = _index(x, others.rows, k)
    _, distance = index.nearest(1, at[others.queries])
    near = others.queries[distance <= widened(radius[others.queries])]
    more, _ = index.nearest(k, at[near], within)
    pairs = (own, found[near]), (others.rows, more)
    tables = [_table(at[near], rows, to) for rows, to in pairs]
    squares, keys, both = (np.concatenate(pair, axis=1) for pair in zip(*tables, strict=True))
    by = np.lexsort((keys, squares))[:, :k]
    ids[near] = np.take_along_axis(both, by, 1)
    return ids


def _table(queries: Array, rows: Rows, to: Array) -> tuple[Array, Array, Array]:
    """Squared distances, keys and ids of neighbors (n, k); missing ones sort last."""
    missing = to < 0
    if not len(rows.ids):
        shape = to.shape
        return np.full(shape, np.inf), np.full(shape, NO_KEY), np.full(shape, -1)
    squares = squared_length(queries[:, None] - rows.points[to])
    squares[missing] = np.inf
    return squares, np.where(missing, NO_KEY, rows.keys[to]), np.where(missing, -1, rows.ids[to])


def _tensors(x: Side, ids: Array, starts: Array) -> tuple[Tensor, Tensor]:
    device = x.domain.device
    return (
        torch.from_numpy(ids.astype(np.int64, copy=False)).to(device),
        torch.from_numpy(starts.astype(np.int64, copy=False)).to(device),
    )
