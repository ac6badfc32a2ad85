"""Rules: how each torch function works on sharded tensors, one module a family.

`FAMILIES` is the table of all rules; a function has a rule in one family only. A function without a
rule is refused by name.
"""

from typing import Any

from meshshard.tensor.rules import (
    assignments,
    attention,
    attributes,
    autograd,
    compositions,
    convolutions,
    counts,
    draws,
    grids,
    indexing,
    joins,
    linalg,
    losses,
    matmul,
    norms,
    numeric,
    optimizers,
    pointwise,
    random,
    recurrent,
    reductions,
    reshape,
    row_reads,
    row_writes,
    rows,
    scans,
    scatter,
    selections,
    sorts,
    transforms,
    uniques,
    views,
)
from meshshard.tensor.shard_tensor import Rule

__all__ = ["FAMILIES"]

FAMILIES: dict[str, dict[Any, Rule]] = {
    "pointwise": pointwise.RULES,
    "reductions": reductions.RULES,
    "matmul": matmul.RULES,
    "linalg": linalg.RULES,
    "transforms": transforms.RULES,
    "views": views.RULES,
    "reshape": reshape.RULES,
    "joins": joins.RULES,
    "rows": rows.RULES,
    "scans": scans.RULES,
    "compositions": compositions.RULES,
    "numeric": numeric.RULES,
    "indexing": indexing.RULES,
    "assignments": assignments.RULES,
    "row_reads": row_reads.RULES,
    "sorts": sorts.RULES,
    "selections": selections.RULES,
    "uniques": uniques.RULES,
    "counts": counts.RULES,
    "row_writes": row_writes.RULES,
    "scatter": scatter.RULES,
    "attention": attention.RULES,
    "norms": norms.RULES,
    "losses": losses.RULES,
    "random": random.RULES,
    "draws": draws.RULES,
    "convolutions": convolutions.RULES,
    "grids": grids.RULES,
    "recurrent": recurrent.RULES,
    "optimizers": optimizers.RULES,
    "autograd": autograd.RULES,
    "attributes": attributes.RULES,
}
