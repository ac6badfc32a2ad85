"""The accessor of PyVista meshes: `mesh.meshshard.partition(8).plot()`.

PyVista finds this module by the entry point of the installed package (group `pyvista.accessors`)
when a mesh is first asked for `.meshshard`; without an installation,
`import meshshard.partitioning.pyvista_accessor` does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyvista

from meshshard import io
from meshshard.graph import Graph
from meshshard.mesh import Array, Mesh
from meshshard.partitioning.methods import Partitioner
from meshshard.partitioning.partition import Partition, partition

__all__ = ["MeshshardAccessor"]


@pyvista.register_dataset_accessor("meshshard", pyvista.DataObject)
class MeshshardAccessor:
    """What meshshard does with a PyVista mesh, point set or MultiBlock."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def mesh(self, name: str = "mesh") -> Mesh:
        """As a checked `Mesh` that shares its arrays.

        Raises:
            ReadError: it is empty or of another kind.
            MeshError: it contradicts itself.
        """
        return io.from_pyvista(self._dataset, name)

    def partition(
        self,
        parts: int | Sequence[float],
        *,
        on: str = "auto",
        method: Partitioner | Callable[..., Array] | Array | None = None,
        weights: Array | str | None = None,
        halo: int = 1,
        graph: Graph | None = None,
    ) -> Partition:
        """Cut it into shards; see `meshshard.partition` for the arguments."""
        return partition(
            self.mesh(), parts, on=on, method=method, weights=weights, halo=halo, graph=graph
        )
