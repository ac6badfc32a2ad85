"""models: complete surrogates built from `nn`; the same code serial and sharded."""

from meshshard.models.dgcnn import DGCNN, DynamicEdgeConv

__all__ = ["DGCNN", "DynamicEdgeConv"]
