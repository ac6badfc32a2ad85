"""Points: the points of a mesh whose cells are sharded, with their fields and their cells."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshshard.comm import Domain
from meshshard.mesh import Array
from meshshard.ranks._once import once
from meshshard.tensor import ShardGraph, Sharding, ShardTensor
from meshshard.tensor.shard_graph import offsets_of

if TYPE_CHECKING:
    from meshshard.ranks.shard import Shard

__all__ = ["Points"]


class Points:
    """The points of a shard of cells: fields by name, and graphs from and to the cells.

    Every point belongs to the lowest rank of those that have a cell at it; a rank's points are in
    the order of the file. `nn.aggregate(field, graph, "mean")` takes means over the graphs.

    Examples:
        >>> from meshshard import load, nn
        >>> shard = load("boundary_8.shards")
        >>> points = shard.points
        >>> points["center"].shape  # coordinates
        torch.Size([4803, 3])
        >>> centers = nn.aggregate(points["center"], points.to_cells, "mean")
        >>> centers.shape
        torch.Size([4778, 3])
    """

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._fields: dict[str, ShardTensor] = {}

    def __repr__(self) -> str:
        return f"Points({self._shard.folder.path.name}: {', '.join(self.names)})"

    def __getitem__(self, name: str) -> ShardTensor:
        """A field as a sharded tensor (n_points,) or (n_points, width).

        Raises:
            KeyError: listing the fields of the points.
        """
        if name not in self._fields:
            if name not in self.names:
                raise KeyError(f"no point field {name!r}; there are: {', '.join(self.names)}")
            held = np.concatenate([self._values(name, p) for p in self._shard.shards])
            rows = torch.from_numpy(held[self._held.at]).to(self._device)
            self._fields[name] = ShardTensor.from_local(rows[self._numbers.mine], self.sharding)
        return self._fields[name]

    def __contains__(self, name: object) -> bool:
        """Whether there is a field of this name."""
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        """The names of the fields."""
        return iter(self.names)

    def keys(self) -> list[str]:
        """The names of the fields."""
        return self.names

    @cached_property
    def names(self) -> list[str]:
        """Names of the fields: those of the file, then "center", the coordinates."""
        fields = self._shard.folder.manifest["fields"]
        stored = [f["name"] for f in fields if f["on"] == "points"]
        return [*stored, *(["center"] if "center" not in stored else [])]

    @once
    def sharding(self) -> Sharding:
        """The sharding of every point field.

        Communication: two all-to-alls of counts, four of point numbers, and one gather of objects,
        at the first access to a field, a graph or this, which all ranks must make.
        """
        numbers = self._numbers
        return Sharding(self._shard.domain, numbers.sizes, self._held.ids[numbers.mine])

    @once
    def to_cells(self) -> ShardGraph:
        """The graph whose nodes are the cells, and whose sources are the points of each cell.

        Communication: as `ShardGraph.from_ids`, at the first access.
        """
        rows, indptr = self._incidence
        return ShardGraph.from_ids(rows, indptr, self._shard.sharding, self.sharding)

    @once
    def from_cells(self) -> ShardGraph:
        """The graph whose nodes are the points, and whose sources are the cells at each point.

        Communication: as `ShardGraph.from_ids`, and one all-to-all of counts and one of the cells,
        at the first access.
        """
        domain, cells, points = self._shard.domain, self._shard.sharding, self.sharding
        rows, indptr = self._incidence
        cell = torch.repeat_interleave(torch.arange(cells.own).to(rows), indptr.diff())
        found = torch.stack([rows, cell + cells.first, cells.sources(rows.device)[cell]], 1)
        ends = torch.tensor(points.sizes).cumsum(0).to(rows)
        owner = torch.searchsorted(ends, rows, right=True)
        send = torch.bincount(owner, minlength=domain.size).tolist()
        found, _ = domain.route(found[torch.argsort(owner, stable=True)], send)
        found = found[torch.argsort(found[:, 2], stable=True)]  # in the order of the file,
        found = found[torch.argsort(found[:, 0], stable=True)]  # by point
        counts = torch.bincount(found[:, 0] - points.first, minlength=points.own)
        return ShardGraph.from_ids(found[:, 1].contiguous(), offsets_of(counts), points, cells)

    @property
    def _device(self) -> torch.device:
        return self._shard.domain.device

    @cached_property
    def _held(self) -> _Held:
        """The points of all cells of this rank."""
        every = np.concatenate([self._arrays(p)["points.origin"] for p in self._shard.shards])
        ids, at = np.unique(every.astype(np.int64), return_index=True)
        return _Held(torch.from_numpy(ids).to(self._device), at)

    @once
    def _numbers(self) -> _Numbers:
        total = self._shard.folder.manifest["n_points"]
        return _number(self._shard.domain, self._held.ids, total)

    @cached_property
    def _incidence(self) -> tuple[Tensor, Tensor]:
        """Global row of the points of every owned cell, and (n_owned + 1,) offsets."""
        points, counts = [], []
        for p in self._shard.shards:
            arrays = self._arrays(p)
            points.append(arrays["points.origin"][arrays["cells.connectivity"]])
            counts.append(np.diff(arrays["cells.offsets"]))
        ids = torch.from_numpy(np.concatenate(points).astype(np.int64)).to(self._device)
        count = torch.from_numpy(np.concatenate(counts).astype(np.int64)).to(self._device)
        return self._numbers.rows[torch.searchsorted(self._held.ids, ids)], offsets_of(count)

    def _arrays(self, shard: int) -> Any:
        return self._shard.folder.arrays(shard)

    def _values(self, name: str, shard: int) -> Array:
        stored = self._arrays(shard).get(f"point:{name}")
        if stored is not None:
            return np.asarray(stored)
        return self._shard.coordinates(shard)


class _Held(NamedTuple):
    """The points of the cells of a rank.

    Attributes:
        ids: (n_held,) int64 their rows in the file, ascending.
        at: for each, where it is in the arrays of the rank's shards, one after another.
    """

    ids: Tensor
    at: Array


class _Numbers(NamedTuple):
    """Owners and global rows of the points that a rank holds.

    Attributes:
        mine: (n_held,) whether this rank owns the point.
        sizes: owned points of every rank.
        rows: (n_held,) int64 global rows.
    """

    mine: Tensor
    sizes: list[int]
    rows: Tensor


def _number(domain: Domain, ids: Tensor, total: int) -> _Numbers:
    """Find the owner of every point, the lowest rank that holds it, and its row.

    A point is looked up at the rank that its number belongs to if the numbers are divided evenly.

    Communication: two all-to-alls of counts, four of point numbers, and one gather of objects.
    """
    asked = torch.bincount(ids * domain.size // max(total, 1), minlength=domain.size).tolist()
    found, counts = domain.route(ids, asked)
    known, at = torch.unique(found, return_inverse=True)

    def _answer(values: Tensor, reduce: str) -> Tensor:
        """The reduction over the ranks that hold a point, for every point held here."""
        table = torch.zeros_like(known).scatter_reduce(0, at, values, reduce, include_self=False)
        return domain.all_to_all(table[at], counts, asked, "points")

    holder = torch.repeat_interleave(torch.arange(domain.size).to(at), torch.tensor(counts).to(at))
    mine = _answer(holder, "amin") == domain.rank
    sizes = domain.share(int(mine.sum()))
    rows = torch.full_like(ids, -1)
    rows[mine] = domain.offset(sizes) + torch.arange(sizes[domain.rank]).to(ids)
    return _Numbers(mine, sizes, _answer(domain.route(rows, asked)[0], "amax"))
