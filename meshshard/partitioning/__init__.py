"""Partitioning: cut a mesh, cloud or graph into balanced shards with an exchange plan."""

from meshshard.partitioning.methods import RCB, Given, Metis, Morton, Random
from meshshard.partitioning.partition import Partition, partition

__all__ = ["RCB", "Given", "Metis", "Morton", "Partition", "Random", "partition"]
