"""Graphs of meshes and point clouds, and the halo and exchange plan of a partitioned graph."""

from meshshard.graph.graph import Graph, cell_graph, knn_graph, point_graph, radius_graph

__all__ = ["Graph", "cell_graph", "knn_graph", "point_graph", "radius_graph"]
