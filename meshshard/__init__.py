"""meshshard: domain parallelism for unstructured meshes.

Cuts one mesh or point cloud into balanced shards of uneven size, and runs ordinary PyTorch models
on them. This import loads NumPy only; everything else is loaded on first access.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from meshshard.errors import MeshError, MeshshardError, MeshWarning
from meshshard.mesh import Mesh

if TYPE_CHECKING:
    from meshshard.graph import Graph, cell_graph, knn_graph, point_graph, radius_graph
    from meshshard.io import from_arrays, from_pyvista, read, to_pyvista, write
    from meshshard.partitioning.explorer import explore
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
    "explore",
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

# The public modules in the order of the story, and the names of each that are also offered here.
_HOMES: dict[str, tuple[str, ...]] = {
    "mesh": ("Mesh",),
    "io": ("from_arrays", "from_pyvista", "read", "to_pyvista", "write"),
    "graph": ("Graph", "cell_graph", "knn_graph", "point_graph", "radius_graph"),
    "store": ("Folder",),
    "viz": (),
    "partitioning": ("RCB", "Given", "Metis", "Morton", "Partition", "Random", "partition"),
    "partitioning.explorer": ("explore",),
    "comm": (),
    "tensor": (),
    "ranks": (),
    "ranks.shard": ("Shard", "load"),
    "nn": (),
    "models": (),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Load a public name or module on first access."""
    if name in _HOME_OF:
        return getattr(import_module(f"meshshard.{_HOME_OF[name]}"), name)
    if name in _HOMES:
        return import_module(f"meshshard.{name}")
    if name == "__version__":
        from importlib.metadata import version

        return version("meshshard")
    raise AttributeError(f"module 'meshshard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__", *(home for home in _HOMES if "." not in home)})
