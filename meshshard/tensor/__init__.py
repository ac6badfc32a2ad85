"""tensor: one tensor over the ranks of a domain, and the rules by which torch works on it.

Rules are plain functions in tables, one file a family. A function without a rule is refused by
name; `shard_rule` adds one.
"""

from meshshard.tensor import (
    along,
    attention,
    attributes,
    core,
    grids,
    groups,
    indexing,
    losses,
    norms,
    optimizers,
    pointwise,
    products,
    random,
    recurrent,
    reductions,
    views,
)
from meshshard.tensor.build import shard
from meshshard.tensor.core import NoShardRule, Sharding, ShardTensor, shard_rule
from meshshard.tensor.graph import ShardGraph
from meshshard.tensor.modules import by_own_rows

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

FAMILIES = {
    "pointwise": pointwise.RULES,
    "reductions": reductions.RULES,
    "along": along.RULES,
    "products": products.RULES,
    "views": views.RULES,
    "indexing": indexing.RULES,
    "attention": attention.RULES,
    "groups": groups.RULES,
    "norms": norms.RULES,
    "losses": losses.RULES,
    "random": random.RULES,
    "grids": grids.RULES,
    "recurrent": recurrent.RULES,
    "optimizers": optimizers.RULES,
    "attributes": attributes.RULES,
}
for _family in FAMILIES.values():
    core.RULES.update(_family)
