"""meshshard: one mesh, many shards.

Cut one mesh or point cloud into balanced shards of uneven size, and write down what each owns and
needs. Importing this loads numpy and nothing else; the rest is loaded where it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from meshshard.errors import MeshError, MeshshardError, MeshWarning
from meshshard.mesh import Mesh

if TYPE_CHECKING:
    from meshshard.graph import Graph, cell_graph, knn_graph, point_graph, radius_graph
    from meshshard.io import from_arrays, from_pyvista, read, to_pyvista, write
    from meshshard.partitioning.methods import RCB, Given, Metis, Morton, Random
    from meshshard.partitioning.partition import Partition, partition
    from meshshard.ranks.shard import Shard, load
    from meshshard.store import Folder

__all__ = [
    "RCB",
    "Folder",
    "Given",
    "Graph",
    "Mesh",
    "MeshError",
    "MeshWarning",
    "MeshshardError",
    "Metis",
    "Morton",
    "Partition",
    "Random",
    "Shard",
    "cell_graph",
    "from_arrays",
    "from_pyvista",
    "knn_graph",
    "load",
    "partition",
    "point_graph",
    "radius_graph",
    "read",
    "to_pyvista",
    "write",
]

_HOMES = {
    "graph": ("Graph", "cell_graph", "knn_graph", "point_graph", "radius_graph"),
    "io": ("from_arrays", "from_pyvista", "read", "to_pyvista", "write"),
    "partitioning": ("RCB", "Given", "Metis", "Morton", "Partition", "Random", "partition"),
    "ranks.shard": ("Shard", "load"),
    "store": ("Folder",),
}
_MODULES = ("comm", "models", "nn", "store", "tensor", "viz")


def __getattr__(name: str) -> Any:
    """Load the module of a public name when it is first asked for."""
    if name in _MODULES:
        return import_module(f"meshshard.{name}")
    if name == "__version__":
        from importlib.metadata import version

        return version("meshshard")
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"meshshard.{home}"), name)
    raise AttributeError(f"module 'meshshard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
