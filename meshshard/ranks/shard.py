"""Shard: what one rank holds of a folder, as sharded tensors with an exchange."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshshard import store
from meshshard.comm import Domain, Exchange
from meshshard.comm.domain import launched_domain
from meshshard.errors import MeshshardError, StoreError, n_of
from meshshard.graph.plan import Plan, runs
from meshshard.mesh import Array, Mesh
from meshshard.mesh.ragged import offsets_of, ranges
from meshshard.ranks._once import once
from meshshard.ranks.points import Points
from meshshard.tensor import ShardGraph, Sharding, ShardTensor

__all__ = ["Shard", "load"]


def load(path: str | Path, domain: Domain | None = None) -> Shard:
    """Load what this rank holds of a folder of k shards, on R <= k ranks.

    Every rank takes consecutive shards, and opens only their files. Halo rows that one of these
    shards needs from another become interior rows of the rank.

    Args:
        path: the folder.
        domain: the ranks; by default those that were launched, one in a process started by
            `python`.

    Communication: three gathers of objects, so that a wrong folder is an error on every rank.

    Raises:
        DomainError: on every rank, if one cannot open the folder or has another version of it, or
            if there are more ranks than shards.

    Examples:
        >>> shard = load("boundary_8.shards")  # written by Partition.save; one rank
        >>> shard["center"].shape
        torch.Size([4778, 3])
        >>> shard.names[:2]
        ['CpMeanTrim', 'pMeanTrim']
    """
    domain = domain or launched_domain()
    folder = domain.run_collectively(lambda: _opened(path, domain), "load")
    domain.agree(folder.manifest["id"], f"the version of {path}")
    cuts = runs(folder.sizes, domain.size)
    shards = range(int(cuts[domain.rank]), int(cuts[domain.rank + 1]))
    plan = domain.run_collectively(lambda: _merged(folder, cuts, domain.rank), "load")
    return Shard(folder, shards, domain, plan, np.add.reduceat(folder.sizes, cuts[:-1]))


@dataclass(frozen=True, eq=False)
class Shard:
    """The rows of one rank: fields by name, the graph of its rows, the exchange of its halo.

    Fields are those of the sharded entity (cells or points), in the dtypes of the file. `center`,
    and for cells of surfaces `area`, `area_vector` and `normal`, are computed from the geometry, in
    the units of the file.

    Attributes:
        folder: the folder that it was loaded from.
        shards: numbers of the shards that this rank holds.
        domain: the ranks.
        plan: the plan of all shards of this rank together.
        sizes: owned rows of every rank.
    """

    folder: store.Folder
    shards: range
    domain: Domain
    plan: Plan
    sizes: Array
    _fields: dict[str, ShardTensor] = field(default_factory=dict)

    def __repr__(self) -> str:
        own, halo = self.plan.n_owned, len(self.plan.halo)
        return (
            f"Shard({self.folder.path.name}, {self.domain}: shards {self.shards.start} to "
            f"{self.shards.stop - 1}, {n_of(own, 'owned rows')} and {n_of(halo, 'halo rows')})"
        )

    def __getitem__(self, name: str) -> ShardTensor:
        """A field as a sharded tensor (N,) or (N, width).

        Raises:
            KeyError: listing the fields of the shard.
        """
        if name not in self._fields:
            if name not in self.names:
                raise KeyError(f"no field {name!r}; there are: {', '.join(self.names)}")
            self._fields[name] = ShardTensor.from_local(self._rows(name), self.sharding)
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

    def __deepcopy__(self, memo: dict[int, Any]) -> Shard:
        """The same rows with fields of its own; the graph and the exchange are shared."""
        copied = copy.copy(self)
        copied.__dict__["_fields"] = copy.deepcopy(self._fields, memo)
        return copied

    @cached_property
    def names(self) -> list[str]:
        """Names of the fields: first those of the file, then those that are computed."""
        entity = self.folder.entity
        stored = [f["name"] for f in self.folder.manifest["fields"] if f["on"] == entity]
        computed = ["center"]
        if self.folder.manifest["kind"] == "surface" and entity == "cells":
            computed += ["area", "area_vector", "normal"]
        return [*stored, *(c for c in computed if c not in stored)]

    @cached_property
    def sharding(self) -> Sharding:
        """The sharding of every field; random draws are keyed by the row in the source file."""
        origin = np.concatenate([self.folder.origin(p) for p in self.shards])
        rows = torch.from_numpy(origin.astype(np.int64)).to(self.domain.device)
        ends = runs(self.folder.sizes, self.domain.size)
        every = self.folder.sizes.tolist()
        shards = [every[a:b] for a, b in pairwise(ends.tolist())]
        return Sharding(self.domain, self.sizes.tolist(), rows, shards)

    @cached_property
    def exchange(self) -> Exchange:
        """The exchange of halo rows between the ranks."""
        rows = torch.from_numpy(self.plan.send_rows.astype(np.int64)).to(self.domain.device)
        return Exchange(
            self.domain,
            self.plan.n_owned,
            rows,
            self.plan.send_counts.tolist(),
            self.plan.recv_counts.tolist(),
            f"exchange of {self.folder.path.name}",
        )

    @cached_property
    def edge_index(self) -> Tensor:
        """(2, n_edges) int64 local rows of source and destination of every in-edge."""
        to = np.repeat(np.arange(self.plan.n_local), np.diff(self.plan.indptr))
        pairs = np.stack([self.plan.indices.astype(np.int64), to])
        return torch.from_numpy(pairs).to(self.domain.device)

    @once
    def graph(self) -> ShardGraph:
        """The graph of the owned rows, which layers take in place of PyG's `edge_index`.

        Communication: one gather of objects and one exchange, at the first access, which all ranks
        must make.
        """
        return ShardGraph.from_plan(self.plan, self.sharding, self.exchange)

    @once
    def points(self) -> Points:
        """The points of a mesh whose cells are sharded, with their fields and their own sharding.

        Raises:
            MeshshardError: the points themselves are sharded.
        """
        if self.folder.entity == "points":
            raise MeshshardError("shard.points: the points are the rows of the shard; use shard[…]")
        return Points(self)

    def coordinates(self, shard: int) -> Array:
        """(n, 3) positions of the points of one of the rank's shards, as "center" of points."""
        mesh = self.folder.piece(shard).mesh
        offset = np.asarray(self.folder.manifest["offset"])
        places: Array = np.asarray(mesh.positions("points") + mesh.offset) - offset
        return places.astype(mesh.points.dtype)

    def local(self, x: ShardTensor) -> Tensor:
        """Owned rows, then halo rows, of a field or a hidden state: (n_local, …).

        Communication: one exchange, forward and backward.
        """
        return self.domain.exchange(x.to_local(), self.exchange)

    def to_pyg(self) -> Any:
        """The local rows as a PyG `Data`: `pos`, `edge_index`, `n_owned`, and each field.

        Halo rows follow the `n_owned` owned rows; on one rank the Data is the whole mesh.

        Communication: one exchange for each field, forward and backward.

        Examples:
            >>> load("boundary_8.shards").to_pyg().num_nodes
            4778
        """
        from torch_geometric.data import Data

        fields = {name: self.local(self[name]) for name in self.names}
        pos, edges, n = fields.pop("center"), self.edge_index, self.plan.n_owned
        data = Data(pos=pos, edge_index=edges, n_owned=n, num_nodes=self.plan.n_local)
        for name, values in fields.items():
            data[name] = values
        return data

    def put(self, fields: Mapping[str, Any], name: str = "prediction") -> None:
        """Save sharded results of this rank in the folder; `meshshard gather` collects them.

        Args:
            fields: sharded tensors (N,) or (N, width) by name.
            name: name of the set of results.
        """
        parts = {n: x.cpu().numpy() for n, x in self._owned(fields, "put").items()}
        start = 0
        for p in self.shards:
            stop = start + int(self.folder.sizes[p])
            self.folder.put(p, {n: a[start:stop] for n, a in parts.items()}, name)
            start = stop

    def gather(self, fields: Mapping[str, Any]) -> Mesh | None:
        """The whole mesh with these fields, in the order of the file, on rank 0; None elsewhere.

        Args:
            fields: sharded tensors (N,) or (N, width) by name.

        Communication: one all-to-all for each field, and one for the rows of the file.

        Examples:
            >>> shard = load("boundary_8.shards")
            >>> mesh = shard.gather({"twice": 2 * shard["CpMeanTrim"]})
            >>> mesh.cell_fields["twice"].shape
            (4778,)
        """
        domain, sizes = self.domain, self.sizes.tolist()
        owned = self._owned(fields, "gather")
        whole = {n: domain.gather(x, sizes) for n, x in owned.items()}
        assert self.sharding.origin is not None
        origin = domain.gather(self.sharding.origin, sizes)
        if domain.rank:
            return None
        rows = torch.argsort(origin)
        found = {n: x[rows].cpu().numpy() for n, x in whole.items()}
        on = "cell" if self.folder.entity == "cells" else "point"
        return self.folder.gather().with_fields(**{on: found})

    def _owned(self, fields: Mapping[str, Any], what: str) -> dict[str, Tensor]:
        """The owned rows of sharded results.

        Raises:
            MeshshardError: a result is not sharded like the fields; raised on every rank.
        """
        for name, x in fields.items():
            if not isinstance(x, ShardTensor):
                raise MeshshardError(
                    f"{what}: {name!r} is a plain {type(x).__name__}; pass a sharded tensor, such "
                    "as the result of a model, or tensor.shard(rows, shard.domain, shard.sizes) of "
                    "rows in the order of the shards"
                )
            if x.sharding != self.sharding or x.sharded_dim != 0:
                raise MeshshardError(
                    f"{what}: {name!r} is sharded along dim {x.sharded_dim} with {x.sharding}, the "
                    f"fields along dim 0 with {self.sharding}; use x.redistribute(shard.sizes)"
                )
        return {name: x.detach().to_local() for name, x in fields.items()}

    def _rows(self, name: str) -> Tensor:
        """Owned rows of a field, on the device."""
        on = "cell" if self.folder.entity == "cells" else "point"
        parts = []
        for p in self.shards:
            arrays, own = self.folder.arrays(p), int(self.folder.sizes[p])
            stored = arrays.get(f"{on}:{name}")
            parts.append(self._computed(name, p)[:own] if stored is None else stored[:own])
        return torch.from_numpy(np.concatenate(parts)).to(self.domain.device)

    def _computed(self, name: str, shard: int) -> Array:
        """Geometry of the rows of one shard, in the dtype of its points."""
        mesh = self.folder.piece(shard).mesh
        offset = np.asarray(self.folder.manifest["offset"])
        compute: dict[str, Callable[[], Array]] = {
            "center": lambda: self._centers(mesh) - offset,
            "area": mesh.areas,
            "area_vector": mesh.area_vectors,
            "normal": mesh.normals,
        }
        return compute[name]().astype(mesh.points.dtype)

    def _centers(self, mesh: Mesh) -> Array:
        """Centers in the coordinates of the file."""
        return np.asarray(mesh.positions(self.folder.entity) + mesh.offset)


def _opened(path: str | Path, domain: Domain) -> store.Folder:
    folder = store.load(path)
    if domain.size > folder.k:
        raise StoreError(
            f"{path} has {n_of(folder.k, 'shards')} for {domain.size} ranks; "
            f"partition again with --parts {domain.size} or more"
        )
    return folder


def _merged(folder: store.Folder, cuts: Array, rank: int) -> Plan:
    """The plans of this rank's shards as one, with halo rows between them as interior rows."""
    offsets = offsets_of(folder.sizes)
    shards = range(int(cuts[rank]), int(cuts[rank + 1]))
    first, last = int(offsets[shards.start]), int(offsets[shards.stop])
    plans = [folder.plan(p) for p in shards]
    halo, hops = _outside(plans, first, last)
    degree, sources = _edges(plans, offsets, first, last, halo)
    local = sources - first
    away = np.flatnonzero((sources < first) | (sources >= last))
    local[away] = last - first + np.searchsorted(halo, sources[away])
    send_rows, send_counts = _sends(plans, offsets, cuts, rank)
    owners = np.searchsorted(offsets[cuts], halo, side="right") - 1
    return Plan(
        shard=rank,
        n_owned=last - first,
        halo=halo,
        hops=hops,
        indptr=offsets_of(degree),
        indices=local,
        send_rows=send_rows - first,
        send_counts=send_counts,
        recv_counts=np.bincount(owners, minlength=len(cuts) - 1),
    )


def _outside(plans: list[Plan], first: int, last: int) -> tuple[Array, Array]:
    """Ids of the halo of the rank, ascending, and their distance in hops."""
    ids = np.concatenate([p.halo for p in plans]).astype(np.int64)
    hops = np.concatenate([p.hops for p in plans])
    away = (ids < first) | (ids >= last)
    order = np.lexsort((hops[away], ids[away]))
    found, at = np.unique(ids[away][order], return_index=True)
    return found, hops[away][order][at]


def _edges(
    plans: list[Plan], offsets: Array, first: int, last: int, halo: Array
) -> tuple[Array, Array]:
    """In-degree of every local row, and ids of the sources, in the order of each row's in-edges."""
    to, counts, sources = [], [], []
    for plan in plans:
        own = np.arange(offsets[plan.shard], offsets[plan.shard + 1])
        ids = np.concatenate([own, plan.halo.astype(np.int64)])
        to.append(ids)
        counts.append(np.diff(plan.indptr))
        sources.append(ids[plan.indices])
    ids, count = np.concatenate(to), np.concatenate(counts).astype(np.int64)
    starts = offsets_of(count)[:-1]
    # Of several copies of a row, take the one with the most in-edges: its owner's has all of them.
    wanted = np.concatenate([np.arange(first, last), halo])
    order = np.lexsort((-count, ids))
    place = order[np.searchsorted(ids[order], wanted)]
    picked = ranges(starts[place], starts[place] + count[place])
    return count[place], np.concatenate(sources)[picked]


def _sends(plans: list[Plan], offsets: Array, cuts: Array, rank: int) -> tuple[Array, Array]:
    """Ids to send, unique and ascending for each rank that they go to; and their numbers."""
    ids = [plan.send_rows.astype(np.int64) + offsets[plan.shard] for plan in plans]
    to = [np.repeat(np.arange(len(plan.send_counts)), plan.send_counts) for plan in plans]
    ranks = np.searchsorted(cuts, np.concatenate(to), side="right") - 1
    pairs = np.unique(np.stack([ranks, np.concatenate(ids)]), axis=1)
    pairs = pairs[:, pairs[0] != rank]
    return pairs[1], np.bincount(pairs[0], minlength=len(cuts) - 1)
