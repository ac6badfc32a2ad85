"""points: neighbors, sampling and interpolation of sharded points; to regular grids and back."""

from meshshard.nn.points.grid import Box, grid_from_points, points_from_grid
from meshshard.nn.points.interpolate import knn_interpolate
from meshshard.nn.points.knn import ball_query, edge_vectors, grouped, knn, knn_graph, radius_graph
from meshshard.nn.points.sampling import farthest_points, mask_of, random_points

__all__ = [
    "Box", "ball_query", "edge_vectors", "farthest_points", "grid_from_points", "grouped",
    "knn", "knn_graph", "knn_interpolate", "mask_of", "points_from_grid", "radius_graph",
    "random_points",
]  # fmt: skip
