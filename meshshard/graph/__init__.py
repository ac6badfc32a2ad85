"""Graph: who is next to whom, and the halo and exchange plan that follow from it."""

from meshshard.graph.graph import Graph, cell_graph, knn_graph, point_graph, radius_graph

__all__ = ["Graph", "cell_graph", "knn_graph", "point_graph", "radius_graph"]
