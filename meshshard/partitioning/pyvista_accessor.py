"""The accessor of PyVista meshes: `mesh.meshshard.partition(8).plot()`.

PyVista loads this module through an entry point of the installed package (`pyvista.accessors`) when
`.meshshard` of a mesh is first accessed; without an installation, import
`meshshard.partitioning.pyvista_accessor`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
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
    """Methods of meshshard on a PyVista mesh, point set or MultiBlock."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def mesh(self, name: str = "mesh") -> Mesh:
        """Convert it to a validated `Mesh` that shares its arrays.

        Raises:
            ReadError: it is empty or of an unsupported type.
            MeshError: it is inconsistent.
        """
        return io.from_pyvista(self._dataset, name)

    def partition(
        self,
        parts: int | Sequence[float],
        *,
        on: str = "auto",
        method: str | Path | Partitioner | Callable[..., Array] | Array | None = None,
        weights: Array | str | None = None,
        halo: int = 1,
        graph: Graph | None = None,
    ) -> Partition:
        """Cut it into shards; the arguments are those of `meshshard.partition`."""
        return partition(
            self.mesh(), parts, on=on, method=method, weights=weights, halo=halo, graph=graph
        )
