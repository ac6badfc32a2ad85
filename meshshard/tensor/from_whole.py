"""Build: sharded tensors out of whole ones."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from meshshard.comm import Domain
from meshshard.errors import MeshshardError, n_of
from meshshard.tensor.shard_tensor import Sharding, ShardTensor, dim_of, wrap

__all__ = ["shard"]


def shard(
    x: Tensor | None,
    domain: Domain,
    sizes: Sequence[int] | Sharding,
    *,
    dim: int = 0,
    root: int | None = None,
) -> ShardTensor:
    """A whole tensor, divided over the ranks.

    Args:
        x: the whole tensor, on every rank; or on `root` only, None elsewhere.
        domain: the ranks.
        sizes: rows of each rank.
        dim: the dim to divide.
        root: the rank that has the tensor; None where all have it.

    Communication: none where all have it; else one gather of its shape and one all-to-all.

    Raises:
        MeshshardError: the tensor has another number of rows than the sizes.
        IndexError: there is no such dim.
    """
    sharding = sizes if isinstance(sizes, Sharding) else Sharding(domain, sizes)
    if root is not None:
        return _from_root(x, sharding, dim, root)
    if x is None:
        raise MeshshardError(f"rank {domain.rank} has no tensor; say which rank has: root=…")
    dim = dim_of(dim, x.ndim)
    if x.ndim == 0 or x.shape[dim] != sharding.total:
        raise MeshshardError(
            f"a tensor {tuple(x.shape)} for {n_of(sharding.total, 'rows')} on dim {dim}"
        )
    own = x.narrow(dim, sharding.first, sharding.own)
    leaf = x.requires_grad and x.is_leaf
    if leaf and domain.size > 1:
        own = domain.replicate(x).narrow(dim, sharding.first, sharding.own)
    return wrap(own.view_as(own), sharding, dim)


def _from_root(x: Tensor | None, sharding: Sharding, dim: int, root: int) -> ShardTensor:
    domain = sharding.domain
    about = domain.share(None if x is None else (tuple(x.shape), x.dtype))[root]
    if about is None:
        raise MeshshardError(f"rank {root} has no tensor to divide")
    shape, dtype = about
    dim = dim_of(dim, len(shape))
    if not shape or shape[dim] != sharding.total:
        raise MeshshardError(f"a tensor {shape} for {n_of(sharding.total, 'rows')} on dim {dim}")
    if domain.rank == root:
        assert x is not None
        rows = x.movedim(dim, 0)
    else:
        import torch

        rest = [n for d, n in enumerate(shape) if d != dim]
        rows = torch.empty((0, *rest), dtype=dtype, device=domain.device)
    own = domain.scatter(rows, sharding.sizes, root)
    return wrap(own.movedim(0, dim), sharding, dim)
