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

    Every point belongs to the first shard that has a cell at it; the points of a shard are in the
    order of the file. `nn.aggregate(field, graph, "mean")` takes means over the graphs.

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
            self._fields[name] = ShardTensor.from_local(rows[self._numbers.own], self.sharding)
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

        Communication: three all-to-alls of counts, five of numbers, and one gather of objects,
        at the first access to a field, a graph or this, which all ranks must make.
        """
        numbers = self._numbers
        sizes = [sum(shards) for shards in numbers.shards]
        origin = self._held.ids[numbers.own]
        return Sharding(self._shard.domain, sizes, origin, numbers.shards)

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
        order, send = domain.group_by_rank(points.owners(rows))
        found, _ = domain.route(found[order], send)
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
        shards = self._shard.shards
        every = [self._arrays(p)["points.origin"].astype(np.int64) for p in shards]
        ids, at = np.unique(np.concatenate(every), return_index=True)
        shard = np.repeat(np.asarray(shards), [len(rows) for rows in every])[at]
        first = torch.from_numpy(shard).to(self._device)
        return _Held(torch.from_numpy(ids).to(self._device), first, at)

    @once
    def _numbers(self) -> _Numbers:
        total = self._shard.folder.manifest["n_points"]
        return _number(self._shard.domain, self._held, total, self._shard.shards)

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
        shard: (n_held,) int64 the first shard of the rank that has a cell at the point.
        at: for each, where it is first in the arrays of the rank's shards, one after another.
    """

    ids: Tensor
    shard: Tensor
    at: Array


class _Numbers(NamedTuple):
    """Owners and global rows of the points that a rank holds.

    Attributes:
        own: (n_owned,) int64 which of the held points the rank owns, in the order of their rows.
        shards: for every rank the owned points of each of its shards.
        rows: (n_held,) int64 global rows.
    """

    own: Tensor
    shards: list[list[int]]
    rows: Tensor


def _number(domain: Domain, held: _Held, total: int, shards: range) -> _Numbers:
    """Find the owner of every point, the first shard that has a cell at it, and its row.

    A point is looked up at the rank that its number belongs to if the numbers are divided evenly.

    Communication: three all-to-alls of counts, five of numbers, and one gather of objects.
    """
    ids = held.ids
    asked = torch.bincount(ids * domain.size // max(total, 1), minlength=domain.size).tolist()
    found, counts = domain.route(ids, asked)
    known, at = torch.unique(found, return_inverse=True)

    def _answer(values: Tensor, reduce: str) -> Tensor:
        """The reduction over the ranks that hold a point, for every point held here."""
        values, _ = domain.route(values, asked)
        table = torch.zeros_like(known).scatter_reduce(0, at, values, reduce, include_self=False)
        return domain.all_to_all(table[at], counts, asked, "points")

    own = torch.nonzero(_answer(held.shard, "amin") == held.shard).view(-1)
    own = own[torch.argsort(held.shard[own], stable=True)]
    sizes = torch.bincount(held.shard[own] - shards.start, minlength=len(shards)).tolist()
    every = domain.share(sizes)
    rows = torch.full_like(ids, -1)
    first = domain.offset([sum(n) for n in every])
    rows[own] = torch.arange(first, first + len(own)).to(ids)
    return _Numbers(own, every, _answer(rows, "amax"))
