"""models: complete surrogates built from `nn`; the same code serial and sharded."""

from meshshard.models.dgcnn import DGCNN, DynamicEdgeConv
from meshshard.models.transolver import Transolver, TransolverOptions

__all__ = ["DGCNN", "DynamicEdgeConv", "Transolver", "TransolverOptions"]
