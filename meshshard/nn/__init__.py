"""nn: layers for sharded meshes and point clouds; the same classes on any number of ranks.

They take ShardTensors or plain tensors and return the same kind. The `Communication:` lines of the
docstrings list the collectives of each layer.
"""

from meshshard.nn.attention import Bottleneck
from meshshard.nn.conv import (
    Consistency,
    ConvCheck,
    DeepHalo,
    check_consistency,
    check_conv,
    convert,
)
from meshshard.nn.graph import Level, MeshBlock, aggregate, cluster, cluster_around, coarsen
from meshshard.nn.points import (
    Box,
    ball_query,
    edge_vectors,
    farthest_points,
    grid_from_points,
    grouped,
    knn,
    knn_graph,
    knn_interpolate,
    mask_of,
    points_from_grid,
    radius_graph,
    random_points,
)
from meshshard.nn.pool import (
    AttentionPool,
    attention_pool,
    global_add_pool,
    global_max_pool,
    global_mean_pool,
)
from meshshard.nn.slices import CrossSliceAttention, SliceAttention

__all__ = [
    "AttentionPool", "Bottleneck", "Box", "Consistency", "ConvCheck", "CrossSliceAttention",
    "DeepHalo", "Level", "MeshBlock", "SliceAttention", "aggregate", "attention_pool",
    "ball_query", "check_consistency", "check_conv", "cluster", "cluster_around", "coarsen",
    "convert", "edge_vectors", "farthest_points", "global_add_pool", "global_max_pool",
    "global_mean_pool", "grid_from_points", "grouped", "knn", "knn_graph", "knn_interpolate",
    "mask_of", "points_from_grid", "radius_graph", "random_points",
]  # fmt: skip
