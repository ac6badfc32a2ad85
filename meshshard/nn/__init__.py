"""nn: layers that run on one sharded mesh as on a whole one, the same class for any world size.

They take ShardTensors, or plain tensors, and give back the same kind. Each says what it sends.
"""

from meshshard.nn.aggregate import aggregate
from meshshard.nn.attention import Bottleneck
from meshshard.nn.checks import Consistency, ConvCheck, check_consistency, check_conv
from meshshard.nn.coarsen import Level, cluster, cluster_around, coarsen
from meshshard.nn.convert import convert
from meshshard.nn.deep import Deepened
from meshshard.nn.grid import Box, grid_from_points, points_from_grid
from meshshard.nn.interpolate import knn_interpolate
from meshshard.nn.knn import ball_query, edge_vectors, grouped, knn, knn_graph, radius_graph
from meshshard.nn.mesh_block import MeshBlock
from meshshard.nn.pool import (
    AttentionPool,
    attention_pool,
    farthest_points,
    global_add_pool,
    global_max_pool,
    global_mean_pool,
    mask_of,
    random_points,
)
from meshshard.nn.slice_attention import CrossSliceAttention, SliceAttention

__all__ = [
    "AttentionPool",
    "Bottleneck",
    "Box",
    "Consistency",
    "ConvCheck",
    "CrossSliceAttention",
    "Deepened",
    "Level",
    "MeshBlock",
    "SliceAttention",
    "aggregate",
    "attention_pool",
    "ball_query",
    "check_consistency",
    "check_conv",
    "cluster",
    "cluster_around",
    "coarsen",
    "convert",
    "edge_vectors",
    "farthest_points",
    "global_add_pool",
    "global_max_pool",
    "global_mean_pool",
    "grid_from_points",
    "grouped",
    "knn",
    "knn_graph",
    "knn_interpolate",
    "mask_of",
    "points_from_grid",
    "radius_graph",
    "random_points",
]
