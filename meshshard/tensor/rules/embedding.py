"""Rules of embeddings: indices in a table, either of which may be sharded."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from meshshard.tensor._torch_private import native
from meshshard.tensor.rules.batched import batched
from meshshard.tensor.rules.table import named
from meshshard.tensor.shard_tensor import Rule, ShardTensor, normalize_dim, refuse

_embedding = batched(F.embedding, "input, weight vD -> D")


def embedding(x: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
    """F.embedding of indices in a table, either of which may be sharded.

    Raises:
        IndexError: a plain index is not a row of a table whose rows are sharded.

    Communication: none; one all-reduce of the result if the rows of the table are sharded.
    """
    names = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")
    given = dict(zip(names, args, strict=False)) | kwargs
    if given.get("max_norm") is not None or given.get("scale_grad_by_freq"):
        why = "max_norm and scale_grad_by_freq depend on the indices of all rows"
        raise refuse(F.embedding, (x, weight), None, why)
    if type(weight) is not ShardTensor or weight._dim != 0:
        return _embedding(x, weight, *args, **kwargs)
    if type(x) is ShardTensor:
        why = "the rows of the table and the indices are sharded: take_rows finds them"
        raise refuse(F.embedding, (x, weight), None, why)
    return _from_rows(x, weight, given.get("padding_idx"))


def _from_rows(x: Tensor, weight: ShardTensor, padding_idx: int | None) -> Tensor:
    """Rows of a table by plain indices: each rank adds those that it owns."""
    sharding = weight._sharding
    if x.numel() and not 0 <= int(x.min()) <= int(x.max()) < sharding.total:
        raise IndexError("index out of range in self")
    if padding_idx is not None:
        padding_idx = normalize_dim(padding_idx, sharding.total) - sharding.first
    with native():
        local = x - sharding.first
        mine = (local >= 0) & (local < sharding.own)
        learned = mine if padding_idx is None else mine & (local != padding_idx)
        table = torch.cat([weight, weight.new_zeros(1, weight.shape[1])])
        rows = table[torch.where(learned, local, sharding.own)]
        if padding_idx is not None:  # its row gets no gradient
            rows = rows + table.detach()[torch.where(mine & ~learned, local, sharding.own)]
        return sharding.domain.all_reduce(rows)


RULES: dict[Any, Rule] = named({"embedding": embedding})
