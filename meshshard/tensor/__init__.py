"""tensor: one tensor over the ranks of a domain, and the rules by which torch works on it.

Rules are plain functions in tables, one file a family. A function without a rule is refused by
name; `shard_rule` adds one.
"""

from meshshard.tensor import shard_tensor
from meshshard.tensor.from_whole import shard
from meshshard.tensor.own_rows import by_own_rows
from meshshard.tensor.rules import FAMILIES
from meshshard.tensor.shard_graph import ShardGraph
from meshshard.tensor.shard_tensor import NoShardRule, Sharding, ShardTensor, shard_rule

__all__ = [
    "FAMILIES",
    "NoShardRule",
    "ShardGraph",
    "ShardTensor",
    "Sharding",
    "by_own_rows",
    "shard",
    "shard_rule",
]

for _family in FAMILIES.values():
    shard_tensor.RULES.update(_family)
