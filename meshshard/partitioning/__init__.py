"""Partitioning: a mesh or graph to labels, and labels to balanced shards with a plan."""

from meshshard.partitioning.methods import RCB, Given, Metis, Morton, Random
from meshshard.partitioning.partition import Partition, partition

__all__ = ["RCB", "Given", "Metis", "Morton", "Partition", "Random", "partition"]
