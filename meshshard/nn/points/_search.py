"""Search: ids of the near rows of a sharded cloud, exact, for own places."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshshard.comm import Domain
from meshshard.errors import DomainError, MeshshardError, n_of
from meshshard.graph.neighbors import NeighborIndex, finite, squared_length, widened
from meshshard.mesh import Array
from meshshard.nn.points._scan import Scan, dimension
from meshshard.nn.points._voxels import Rows, fetch
from meshshard.processes import available_memory
from meshshard.tensor import Sharding, ShardTensor
from meshshard.tensor.shard_tensor import refuse

__all__ = ["Side", "around", "nearest", "side"]

TREE_DIMS = 8  # that points spread in, up to which a tree beats looking at all of them
EDGE_BYTES = 48  # of one edge while a graph is made
NOTHING = np.iinfo(np.int64).max


class Side(NamedTuple):
    """Points of one cloud: own rows in their order, and how all are divided."""

    points: Tensor
    sharding: Sharding

    @property
    def domain(self) -> Domain:
        """The ranks."""
        return self.sharding.domain

    @property
    def dims(self) -> int:
        """Number of coordinates."""
        return int(self.points.shape[1])


def side(pos: Any, what: str) -> Side:
    """Positions (n, d), sharded along their rows, or plain: all on one rank.

    Raises:
        NoShardRule: sharded along another dim.
        MeshshardError: not a table of numbers.
    """
    if isinstance(pos, ShardTensor):
        if pos.ndim != 2 or pos.sharded_dim != 0:
            raise refuse(what, (pos,), None, "positions are (n, d), sharded along their rows")
        return Side(pos.to_local().detach().to(torch.float64), pos.sharding)
    if not isinstance(pos, Tensor):
        kind = f"{type(pos).__module__}.{type(pos).__name__}"
        raise MeshshardError(f"{what}: positions are not {kind}, but what torch.as_tensor makes")
    if pos.ndim != 2:
        raise MeshshardError(f"{what}: positions are (n, d), not {tuple(pos.shape)}")
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
    """The k nearest of x for every row of y, by distance, then row in the source.

    Args:
        x: the points.
        y: the places; those of x if None, none its own neighbor.
        k: how many.
        what: who asks, for errors.
        within: the largest distance that counts.
        max_edges: more are refused.

    Returns:
        (own edges,) ids of the neighbors; (own rows of y + 1,) where those of each row begin.

    Raises:
        DomainError: points that are not finite; more edges than may be, or than memory can hold.
    """
    places, mine = _prepared(x, y, what)
    k = max(0, min(k, x.sharding.total - (y is None)))
    _afford(x, len(places) * k, what)
    ids = _nearest(x, mine, None if y is None else places, k, within)
    if max_edges is None and k and (ids[:, -1] >= 0).all():
        return _tensors(x, ids.reshape(-1), np.arange(0, ids.size + 1, k))
    found = ids >= 0
    starts = np.append(0, np.cumsum(found.sum(1)))
    if max_edges is not None:
        _afford(x, int(starts[-1]), what, max_edges)
    return _tensors(x, ids[found], starts)


def around(
    x: Side, y: Side | None, reach: float, max_edges: int | None, what: str
) -> tuple[Tensor, Tensor]:
    """All of x within a distance of every row of y, ordered and returned as by `nearest`.

    Raises:
        DomainError: more edges than may be, or than memory can hold; before they are made.
    """
    places, mine = _prepared(x, y, what)
    own = None if y is None else places
    clouds = [(_cloud(x, mine, None), mine, np.arange(len(places)))]
    if x.domain.size > 1 and x.sharding.total:
        ghosts = fetch(x.domain, mine, places, np.full(len(places), float(reach)), None)
        clouds.append((_cloud(x, ghosts.rows, None), ghosts.rows, ghosts.places))
    count = int(clouds[0][0].count(reach, own).sum()) - (len(places) if y is None else 0)
    count += sum(int(c.count(reach, places[rows]).sum()) for c, _, rows in clouds[1:])
    _afford(x, count, what, max_edges)
    parts = [(*pairs, mine) for pairs in clouds[0][0].ball(reach, own)]
    for cloud, rows, asked in clouds[1:]:
        parts += [(asked[p.at], p.to, p.squares, rows) for p in cloud.ball(reach, places[asked])]
    where = np.concatenate([np.zeros(0, np.int64), *(a for a, _, _, _ in parts)])
    to = np.concatenate([np.zeros(0, np.int64), *(r.ids[t] for _, t, _, r in parts)])
    name = np.concatenate([np.zeros(0, np.int64), *(r.names[t] for _, t, _, r in parts)])
    squares = np.concatenate([np.zeros(0), *(s for _, _, s, _ in parts)])
    by = np.lexsort((name, squares, where))
    starts = np.append(0, np.cumsum(np.bincount(where, minlength=len(places))))
    return _tensors(x, to[by], starts)


def _prepared(x: Side, y: Side | None, what: str) -> tuple[Array, Rows]:
    """Places and own points, or an error on all ranks."""
    _match(x, y, what)

    def _check() -> tuple[Array, Array]:
        points = _finite(x, "x" if y else "points")
        return points, points if y is None or y is x else _finite(y, "y")

    points, places = x.domain.run_collectively(_check, what)
    ids = np.arange(len(points)) + x.sharding.first
    origin = x.sharding.origin
    return places, Rows(points, ids if origin is None else origin.cpu().numpy(), ids)


def _match(x: Side, y: Side | None, what: str) -> None:
    """Conditions that all ranks see alike."""
    if y is None:
        return
    if x.domain.group != y.domain.group:
        raise MeshshardError(f"{what}: two domains meet; shard both clouds over one")
    if x.dims != y.dims:
        raise MeshshardError(f"{what}: {x.dims} coordinates meet {y.dims}")


def _finite(one: Side, name: str) -> Array:
    points = np.ascontiguousarray(one.points.cpu().numpy())
    try:
        return finite(points)
    except MeshshardError as error:
        raise MeshshardError(f"{name}, own rows: {error}") from None


def _afford(x: Side, edges: int, what: str, most: int | None = None) -> None:
    """Refuse edges that may not be, or that there is no memory for: all ranks alike.

    Communication: one gather of objects.
    """
    counts = x.domain.share((edges, edges * EDGE_BYTES, _free(x.domain.device)))
    total = sum(count for count, _, _ in counts)
    if most is not None and total > most:
        raise DomainError(f"{what}: {n_of(total, 'edges')}, at most {most:,} are allowed")
    for rank, (count, size, free) in enumerate(counts):
        if size > free:
            raise DomainError(
                f"{what}: {total:,} edges, {count:,} of them on rank {rank}, need {size:,} bytes "
                f"there and {free:,} are free; take a smaller radius or k, or more ranks"
            )


def _free(device: torch.device) -> int:
    """Bytes of memory that a device has left."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = available_memory()
    return NOTHING if free is None else free


def _cloud(x: Side, rows: Rows, most: int | None) -> NeighborIndex | Scan:
    """Points in the form that is fastest to ask; the answers are the same."""
    points, names = (torch.from_numpy(a).to(x.domain.device) for a in rows[:2])
    device = x.domain.device.type
    if device == "cpu" and (x.dims <= TREE_DIMS or dimension(points) <= TREE_DIMS):
        return NeighborIndex(rows.points, most, rows.names, torch.get_num_threads())
    return Scan(points, names)


def _nearest(x: Side, mine: Rows, places: Array | None, k: int, within: float) -> Array:
    """(own places, k) ids, -1 where there are fewer."""
    at = mine.points if places is None else places
    found, reach = _cloud(x, mine, k).nearest(k, places, within)
    ids = found.astype(np.int64)
    ids += x.sharding.first
    if (found[:, -1:] < 0).any():  # what is missing comes last
        ids[found < 0] = -1
    if x.domain.size == 1 or not x.sharding.total:
        return ids
    reach = np.minimum(reach, within)
    ghosts = fetch(x.domain, mine, at, reach, k)
    if not len(ghosts.rows.ids) or not len(ghosts.places):
        return ids
    theirs = _cloud(x, ghosts.rows, k)
    _, away = theirs.nearest(1, at[ghosts.places])
    near = ghosts.places[away <= widened(reach[ghosts.places])]
    more, _ = theirs.nearest(k, at[near], within)
    tables = [_table(at[near], rows, to) for rows, to in ((mine, found[near]), (ghosts.rows, more))]
    squares, names, both = (np.concatenate(pair, axis=1) for pair in zip(*tables, strict=True))
    by = np.lexsort((names, squares))[:, :k]
    ids[near] = np.take_along_axis(both, by, 1)
    return ids


def _table(places: Array, rows: Rows, to: Array) -> tuple[Array, Array, Array]:
    """Squared distances, names and ids of neighbors; what is not there comes last."""
    missing = to < 0
    if not len(rows.ids):
        shape = to.shape
        return np.full(shape, np.inf), np.full(shape, NOTHING), np.full(shape, -1)
    squares = squared_length(places[:, None] - rows.points[to])
    squares[missing] = np.inf
    return squares, np.where(missing, NOTHING, rows.names[to]), np.where(missing, -1, rows.ids[to])


def _tensors(x: Side, ids: Array, starts: Array) -> tuple[Tensor, Tensor]:
    place = x.domain.device
    return (
        torch.from_numpy(ids.astype(np.int64, copy=False)).to(place),
        torch.from_numpy(starts.astype(np.int64, copy=False)).to(place),
    )
