"""Libraries: ways to hold one tensor over ranks, behind the few calls that the probe matrix needs.

Every library gets its best chance: rows by `from_local` with the true shapes, parameters and plain
tensors replicated as it documents.
"""

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

Sizes = Sequence[int]


class Held(NamedTuple):
    """What a rank has of a result: its own part along a dim, or the whole (None)."""

    local: Tensor
    dim: int | None


class Meshshard:
    """ShardTensor of this package; parameters stay plain."""

    def __init__(self) -> None:
        from meshshard.comm import init_domain

        self.domain = init_domain()

    def around(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def rows(self, local: Tensor, sizes: Sizes, dim: int = 0) -> Any:
        from meshshard.tensor import Sharding, ShardTensor

        return ShardTensor.from_local(local, Sharding(self.domain, sizes), dim)

    def plain(self, x: Tensor) -> Any:
        return x

    def held(self, x: Any) -> Held:
        from meshshard.tensor import ShardTensor

        return Held(x.to_local(), x.sharded_dim) if type(x) is ShardTensor else Held(x, None)

    def gradients(self, x: Tensor) -> list[Tensor]:
        """The gradient of a plain parameter, as DDP over the domain would make it."""
        own = torch.zeros_like(x) if x.grad is None else x.grad
        return [self.domain.all_reduce(own) / self.domain.size]


class OfTorch:
    """torch's DTensor: knows only the sizes of torch.chunk, other sizes as users would try them."""

    def __init__(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def around(self) -> AbstractContextManager[Any]:
        from torch.distributed.tensor.experimental import implicit_replication

        return implicit_replication()

    def rows(self, local: Tensor, sizes: Sizes, dim: int = 0) -> Any:
        from torch.distributed.tensor import DTensor, Shard

        whole = _whole(local, sizes, dim)
        stride = torch.empty(whole, device="meta").stride()
        return DTensor.from_local(
            local, self.mesh, [Shard(dim)], run_check=False, shape=whole, stride=stride
        )

    def plain(self, x: Tensor) -> Any:
        from torch.distributed.tensor import DTensor, Replicate

        return DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)

    def held(self, x: Any) -> Held:
        from torch.distributed.tensor import Replicate

        if not hasattr(x, "placements"):
            return Held(x, None)
        if x.placements[0].is_partial():
            x = x.redistribute(self.mesh, [Replicate()])
        placement = x.placements[0]
        return Held(x.to_local(), placement.dim if placement.is_shard() else None)

    def gradients(self, x: Any) -> list[Tensor]:
        """The gradient of a replicated parameter."""
        return [torch.zeros(x.shape).double() if x.grad is None else self.held(x.grad).local]


class PhysicsNeMo(OfTorch):
    """PhysicsNeMo's ShardTensor, given the shapes of all shards; parameters stay plain."""

    def around(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def rows(self, local: Tensor, sizes: Sizes, dim: int = 0) -> Any:
        from physicsnemo.domain_parallel import ShardTensor
        from torch.distributed.tensor import Shard

        shapes = [
            torch.Size(n if d == dim else m for d, m in enumerate(local.shape)) for n in sizes
        ]
        return ShardTensor.from_local(local, self.mesh, [Shard(dim)], {0: shapes})

    def plain(self, x: Tensor) -> Any:
        return x

    def gradients(self, x: Any) -> list[Tensor]:
        """The gradient of a plain parameter: whole on every rank, or to be added, or averaged."""
        own = torch.zeros_like(x) if x.grad is None else self.held(x.grad).local
        total = own.clone()
        dist.all_reduce(total)
        return [own, total, total / dist.get_world_size()]


LIBRARIES = {"meshshard": Meshshard, "DTensor": OfTorch, "PhysicsNeMo": PhysicsNeMo}


def _whole(local: Tensor, sizes: Sizes, dim: int) -> torch.Size:
    return torch.Size(sum(sizes) if d == dim else n for d, n in enumerate(local.shape))
