"""conv: graph convolutions of PyG, or user-defined ones, on shards with their code unchanged."""

from meshshard.nn.conv.checks import Consistency, ConvCheck, check_consistency, check_conv
from meshshard.nn.conv.convert import convert
from meshshard.nn.conv.deep_halo import DeepHalo

__all__ = ["Consistency", "ConvCheck", "DeepHalo", "check_consistency", "check_conv", "convert"]
