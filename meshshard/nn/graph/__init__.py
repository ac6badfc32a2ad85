"""graph: layers on a ShardGraph: aggregation over in-edges, MeshGraphNet's block, coarse levels."""

from meshshard.nn.graph.aggregate import aggregate
from meshshard.nn.graph.coarsen import Level, cluster, cluster_around, coarsen
from meshshard.nn.graph.mesh_block import MeshBlock

__all__ = ["Level", "MeshBlock", "aggregate", "cluster", "cluster_around", "coarsen"]
