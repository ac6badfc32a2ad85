"""conv: graph convolutions of PyG, or your own, on shards without a change to their code."""

from meshshard.nn.conv.checks import Consistency, ConvCheck, check_consistency, check_conv
from meshshard.nn.conv.convert import convert
from meshshard.nn.conv.deep_halo import DeepHalo

__all__ = ["Consistency", "ConvCheck", "DeepHalo", "check_consistency", "check_conv", "convert"]
