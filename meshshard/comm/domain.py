"""Domain: the ranks of one sample, and what they can do together."""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from meshshard.comm import linear, process_group
from meshshard.comm.traffic import Traffic
from meshshard.errors import DomainError, MeshshardError, n_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from meshshard.comm.exchange import Exchange

__all__ = ["Domain", "init_domain"]

TIMEOUT = 60.0  # seconds that a rank waits for the others
Size = Sequence[int]
T = TypeVar("T")


class Domain:
    """The ranks that together hold one sample. One rank needs no process group.

    Every tensor collective is differentiable, with its exact adjoint (see `meshshard.comm`), and
    raises DomainError where a tensor has not the rows that its sizes say. None of the attributes
    communicates.

    Attributes:
        rank: number of this rank in the domain.
        size: number of ranks.
        device: where its tensors are.
        group: torch's process group, None for one rank.
        traffic: counts of what was sent.
        whole: whether its ranks hold all rows, so that functions of all rows are right.
    """

    whole = True

    def __init__(
        self, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self.group: Any = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self.device = torch.device(device)
        self.traffic = Traffic()
        self._sum = linear.Sum(self)

    def __repr__(self) -> str:
        return f"Domain(rank {self.rank} of {self.size}, {self.device})"

    # ------------------------------------------------------------------------- differentiable

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """The sum or maximum over ranks of tensors of one shape, on every rank.

        A sum's adjoint is the same sum. A maximum shares its gradient among all global ties.

        Communication: one all-reduce forward and backward (max: two backward).
        """
        if op not in ("sum", "max"):
            raise DomainError(f"all_reduce: {op!r} is unknown: sum or max")
        if self.size == 1:
            return x
        return linear.apply(self._sum, x) if op == "sum" else linear.largest(self, x)

    def all_gather(self, x: Tensor, sizes: Size) -> Tensor:
        """The rows of all ranks, in their order, on every rank; `sizes` may be uneven.

        Communication: one all-to-all forward and backward.
        """
        return linear.apply(linear.Gather(self, tuple(sizes)), self._rows(x, sizes, "all_gather"))

    def gather(self, x: Tensor, sizes: Size, root: int = 0) -> Tensor:
        """The rows of all ranks on one rank; no rows on the others. Its adjoint is `scatter`.

        Communication: one all-to-all forward and backward.
        """
        op = linear.Redistribute(self, tuple(sizes), self._all_on(root, sizes))
        return linear.apply(op, self._rows(x, sizes, "gather"))

    def scatter(self, x: Tensor, sizes: Size, root: int = 0) -> Tensor:
        """Rows of one rank to their owners. Its adjoint is `gather`.

        Args:
            x: all rows on the root; no rows (0, …) of the same type on the others.
            sizes: rows that each rank gets.
            root: the rank that has them.

        Communication: one all-to-all forward and backward.
        """
        there = self._all_on(root, sizes)
        op = linear.Redistribute(self, there, tuple(sizes))
        return linear.apply(op, self._rows(x, there, "scatter"))

    def redistribute(self, x: Tensor, sizes: Size, wanted: Size) -> Tensor:
        """The same rows in the same order, divided otherwise; its adjoint goes back.

        Communication: one all-to-all forward and backward, of the rows that change their rank.
        """
        if sum(sizes) != sum(wanted) or len(wanted) != self.size:
            raise DomainError(f"redistribute: {tuple(sizes)} cannot become {tuple(wanted)}")
        op = linear.Redistribute(self, tuple(sizes), tuple(wanted))
        return linear.apply(op, self._rows(x, sizes, "redistribute"))

    def shift(self, x: Tensor, sizes: Size, steps: int = 1) -> Tensor:
        """The rows of the rank `steps` before this one, round a ring; its adjoint shifts back.

        Communication: one all-to-all (to one peer) forward and backward.
        """
        op = linear.Shift(self, tuple(sizes), steps % self.size)
        return linear.apply(op, self._rows(x, sizes, "shift"))

    def exchange(self, x: Tensor, plan: Exchange) -> Tensor:
        """Owned rows with the halo rows that their owners send behind them: (n_local, …).

        Its adjoint sends the gradients of halo rows home and adds them there.

        Communication: one all-to-all of the plan's rows forward and backward.
        """
        return plan.start(x).finish()

    def replicate(self, x: Tensor) -> Tensor:
        """A replicated leaf that wants a gradient: the same tensor; its adjoint is the mean.

        Communication: none forward, one all-reduce backward.
        """
        return x if self.size == 1 else linear.apply(linear.Replicate(self), x)

    # --------------------------------------------------------------------- not differentiable

    def average_gradients(self, module: torch.nn.Module) -> None:
        """Mean of all parameter gradients over the domain, for models outside DDP and FSDP.

        Parameters without a gradient here count as zero where another rank has one.

        Communication: one all-reduce for each type of gradient, and one of flags.
        """
        if self.size == 1:
            return
        parameters = [p for p in module.parameters() if p.requires_grad]
        have = torch.tensor([float(p.grad is not None) for p in parameters], device=self.device)
        process_group.all_reduce(self, have, "average_gradients")
        used = [p for p, n in zip(parameters, have.tolist(), strict=True) if n]
        for p in used:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for p in used:
            grad = getattr(p.grad, "_local_tensor", p.grad)  # own part of a DTensor on another axis
            assert grad is not None
            by_type.setdefault(grad.dtype, []).append(grad)
        for grads in by_type.values():
            flat = torch.cat([g.reshape(-1) for g in grads])
            process_group.all_reduce(self, flat, "average_gradients")
            parts = torch.split(flat / self.size, [g.numel() for g in grads])
            for grad, part in zip(grads, parts, strict=True):
                grad.copy_(part.view_as(grad))

    def agree(self, value: Any, what: str) -> None:
        """Raise on every rank unless all have the same picklable value.

        Communication: one gather of objects.

        Raises:
            DomainError: naming the ranks that differ.
        """
        others = self.share(value)
        differ = [r for r, other in enumerate(others) if other != others[0]]
        if differ:
            raise DomainError(
                f"ranks disagree on {what}: rank 0 has {others[0]!r}, "
                f"rank {differ[0]} has {others[differ[0]]!r}"
            )

    def shared_seed(self) -> int:
        """A seed from the default generator, which advances equally on every rank."""
        return int(torch.randint(2**62, ()))

    def share(self, value: T) -> list[T]:
        """Everybody's value, by rank.

        Communication: one gather of objects.
        """
        return [value] if self.size == 1 else process_group.share(self, value)

    def run_collectively(self, action: Callable[[], T], what: str) -> T:
        """Do something that may fail on one rank; where it fails on any, all raise.

        Communication: one gather of objects.

        Raises:
            DomainError: the first reason, and the ranks that give it.
        """
        result, error = None, None
        try:
            result = action()
        except MeshshardError as raised:
            error = str(raised)
        errors = self.share(error)
        why = next((e for e in errors if e is not None), None)
        if why is not None:
            raise DomainError(f"{what}: {self._where(errors, why)}{why}")
        return result  # type: ignore[return-value]

    def route(self, x: Tensor, send: Size) -> tuple[Tensor, list[int]]:
        """Runs of rows to every rank, and theirs here, by rank; how many come is found out first.

        Args:
            x: (sum(send), …) rows, grouped by the rank that they go to.
            send: how many go to each.

        Returns:
            The rows that came, and how many from each rank.

        Communication: one all-to-all of counts, one of the rows.
        """
        if self.size == 1:
            return x, list(send)
        ones = [1] * self.size
        counts = torch.tensor(send, dtype=torch.int64, device=self.device)
        receive = process_group.all_to_all(self, counts, ones, ones, "counts").tolist()
        return process_group.all_to_all(self, x.detach(), send, receive, "route"), receive

    def close(self) -> None:
        """End the process group while Python still runs; done by itself at the end of a script.

        Gloo's threads must be joined before the process unloads them, else it may abort
        ("terminate called without an active exception"): the last reference goes here.
        """
        if self.group is not None and self.group is dist.group.WORLD:
            self.group = None
            dist.destroy_process_group()

    def offset(self, sizes: Size) -> int:
        """First id of this rank's rows."""
        return sum(sizes[: self.rank])

    def _where(self, errors: list[str | None], why: str) -> str:
        """The ranks that give one reason, in front of it; nothing where there is one rank only."""
        alike = [rank for rank, error in enumerate(errors) if error == why]
        if self.size == 1:
            return ""
        if len(alike) == self.size:
            return "all ranks: "
        return f"rank{'s' * (len(alike) > 1)} {', '.join(map(str, alike))}: "

    def _all_on(self, root: int, sizes: Size) -> tuple[int, ...]:
        if not 0 <= root < self.size:
            raise DomainError(f"root {root}: ranks are 0 to {self.size - 1}")
        return tuple(sum(sizes) if r == root else 0 for r in range(self.size))

    def _rows(self, x: Tensor, sizes: Size, what: str) -> Tensor:
        """The tensor, once it has the rows that `sizes` says."""
        if len(sizes) != self.size:
            raise DomainError(f"{what}: {n_of(len(sizes), 'sizes')} for {n_of(self.size, 'ranks')}")
        if x.ndim == 0 or x.shape[0] != sizes[self.rank]:
            raise DomainError(
                f"{what}: rank {self.rank} has a tensor {tuple(x.shape)}, "
                f"sizes say {n_of(sizes[self.rank], 'rows')}"
            )
        return x


def init_domain(
    device_mesh: DeviceMesh | None = None,
    axis: str | None = None,
    *,
    device: torch.device | str | None = None,
    timeout: float = TIMEOUT,
) -> Domain:
    """The domain of this process.

    Args:
        device_mesh: an existing mesh of devices, of which one axis is the domain.
        axis: its name; unnamed where the mesh has one axis only.
        device: by default this rank's GPU where there is one, else the CPU.
        timeout: seconds to wait for other ranks, where a process group is made here.

    Returns:
        All ranks that torchrun (or `meshshard launch`) started, the ranks along the axis, or one
        rank without any process group: the same code, serial.
    """
    place = _device(device)
    if device_mesh is not None:
        return Domain(device_mesh.get_group(axis), place)
    if dist.is_initialized():
        return Domain(dist.group.WORLD, place)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Domain(None, place)
    backend = "nccl" if place.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    if backend == "gloo":  # else a rank that ends at once breaks the connecting of the others
        dist.barrier()
    domain = Domain(dist.group.WORLD, place)
    atexit.register(domain.close)
    return domain


def _device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    if torch.cuda.is_available():
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(place)
        return place
    return torch.device("cpu")


@contextlib.contextmanager
def count_traffic(domain: Domain) -> Iterator[Traffic]:
    """Within it, the traffic is counted from zero; what was counted before is kept."""
    before, domain.traffic = domain.traffic, Traffic()
    try:
        yield domain.traffic
    finally:
        domain.traffic = before
