"""Distribute: sharded tensors made of whole ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshshard.comm import Domain
from meshshard.errors import MeshshardError, n_of
from meshshard.tensor.shard_tensor import ShardTensor, alias_of, normalize_dim, wrap
from meshshard.tensor.sharding import Sharding

__all__ = ["shard"]


def shard(
    x: Tensor | None,
    domain: Domain,
    sizes: Sequence[int] | Sharding,
    *,
    dim: int = 0,
    root: int | None = None,
) -> ShardTensor:
    """Divide a whole tensor over the ranks.

    Args:
        x: the whole tensor, on every rank; with `root`, on that rank only and None elsewhere.
        domain: the ranks.
        sizes: number of rows of each rank.
        dim: the dim to divide.
        root: the rank that has the tensor; None if all have it.

    Communication: none without `root`; else one gather of the shape and one all-to-all.

    Raises:
        MeshshardError: the number of rows is not the sum of the sizes.
        IndexError: the tensor does not have the dim.
    """
    sharding = sizes if isinstance(sizes, Sharding) else Sharding(domain, sizes)
    if root is not None:
        return _from_root(x, sharding, dim, root)
    if x is None:
        raise MeshshardError(
            f"shard: rank {domain.rank} got no tensor; give it on every rank, or say which rank "
            "has it: root=…"
        )
    dim = _checked_dim(tuple(x.shape), dim, sharding)
    owned = x.narrow(dim, sharding.first, sharding.own)
    if x.requires_grad and x.is_leaf and domain.size > 1:
        owned = domain.replicate(x).narrow(dim, sharding.first, sharding.own)
    return wrap(alias_of(owned), sharding, dim)


def _from_root(x: Tensor | None, sharding: Sharding, dim: int, root: int) -> ShardTensor:
    domain = sharding.domain
    about = domain.share(None if x is None else (tuple(x.shape), x.dtype))[root]
    if about is None:
        raise MeshshardError(f"shard: root={root}, but rank {root} got no tensor")
    shape, dtype = about
    dim = _checked_dim(shape, dim, sharding)
    if domain.rank == root:
        assert x is not None
        rows = x.movedim(dim, 0)
    else:
        rest = [n for d, n in enumerate(shape) if d != dim]
        rows = torch.empty((0, *rest), dtype=dtype, device=domain.device)
    owned = domain.scatter(rows, sharding.sizes, root)
    return wrap(owned.movedim(0, dim), sharding, dim)


def _checked_dim(shape: tuple[int, ...], dim: int, sharding: Sharding) -> int:
    dim = normalize_dim(dim, len(shape))
    if not shape or shape[dim] != sharding.total:
        raise MeshshardError(
            f"shard: expected {n_of(sharding.total, 'rows')} on dim {dim}, got a tensor of shape "
            f"{shape}"
        )
    return dim
