"""models: complete surrogates built from `nn`; the same code serial and sharded."""

from meshshard.models.dgcnn import DGCNN, DynamicEdgeConv
from meshshard.models.geo_transolver import GeoOptions, GeoTransolver
from meshshard.models.mesh_graph_net import MeshGraphNet
from meshshard.models.transolver import Transolver, TransolverOptions

__all__ = [
    "DGCNN",
    "DynamicEdgeConv",
    "GeoOptions",
    "GeoTransolver",
    "MeshGraphNet",
    "Transolver",
    "TransolverOptions",
]
