"""tensor: one tensor on the ranks of a domain, and the rules by which torch functions work on it.

Rules are plain functions in tables, a file for each family. A function without a rule is refused
by name; `shard_rule` adds a rule.
"""

from meshshard.tensor import shard_tensor
from meshshard.tensor._torch_private import check_unasked
from meshshard.tensor.distribute import shard
from meshshard.tensor.own_rows import by_own_rows
from meshshard.tensor.rules import FAMILIES
from meshshard.tensor.rules.table import one_table
from meshshard.tensor.shard_graph import ShardGraph
from meshshard.tensor.shard_tensor import NoShardRule, ShardTensor, shard_rule
from meshshard.tensor.sharding import Sharding

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

shard_tensor.RULES.update(one_table(FAMILIES.values()))
check_unasked(shard_tensor.refuse_unasked)
