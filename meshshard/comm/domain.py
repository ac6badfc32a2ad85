"""Domain: the ranks of one sample, with differentiable collectives."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, is_initialized

from meshshard.comm import linear
from meshshard.comm.exchange import Exchange
from meshshard.comm.process_group import ProcessGroupTransport
from meshshard.comm.ranks import Ranks
from meshshard.comm.traffic import Traffic
from meshshard.comm.transport import Transport
from meshshard.comm.workers import WorkerTransport, send_to_workers
from meshshard.errors import DomainError, n_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Domain", "count_traffic", "init_domain", "launched_domain"]

TIMEOUT = 60.0  # seconds that a rank waits for the others
Size = Sequence[int]


class Domain(Ranks):
    """The ranks that hold one sample together, with differentiable collectives.

    Each has its exact adjoint (see `meshshard.comm`), and raises DomainError if the number of rows
    of a tensor is not that of `sizes`, the owned rows of every rank.

    Args:
        transport: what carries the collectives; by default that of a single rank.
        device: where tensors that the domain makes lie. `init_domain` chooses both.

    Attributes:
        whole: whether the ranks hold all rows, so that functions of all rows are exact.
    """

    whole = True

    def __init__(
        self, transport: Transport | None = None, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(transport, device)
        self._sum = linear.Sum(self)

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """The sum or maximum over the ranks, on every rank. Its shape is the same on all ranks.

        The adjoint of a sum is the same sum. A maximum shares its gradient among all global ties.

        Args:
            x: a partial tensor.
            op: "sum" or "max".

        Communication: one all-reduce forward and backward (max: two backward).
        """
        if op not in ("sum", "max"):
            raise DomainError(f"all_reduce: op {op!r} is unknown; use 'sum' or 'max'")
        if self.size == 1:
            return x
        return linear.apply(self._sum, x) if op == "sum" else linear.largest(self, x)

    def all_gather(self, x: Tensor, sizes: Size) -> Tensor:
        """The rows of all ranks, ordered by rank, on every rank.

        Args:
            x: (sizes[rank], …) owned rows.
            sizes: owned rows of every rank; may be uneven.

        Communication: one all-to-all forward and backward.
        """
        return linear.apply(linear.Gather(self, tuple(sizes)), self._rows(x, sizes, "all_gather"))

    def gather(self, x: Tensor, sizes: Size, root: int = 0) -> Tensor:
        """The rows of all ranks on the root, (0, …) on the others. Its adjoint is `scatter`.

        Args:
            x: (sizes[rank], …) owned rows.
            sizes: owned rows of every rank; may be uneven.
            root: the rank that receives all rows.

        Communication: one all-to-all forward and backward.
        """
        op = linear.Redistribute(self, tuple(sizes), self._all_on(root, sizes))
        return linear.apply(op, self._rows(x, sizes, "gather"))

    def scatter(self, x: Tensor, sizes: Size, root: int = 0) -> Tensor:
        """Rows of the root to their owners: (sizes[rank], …). Its adjoint is `gather`.

        Args:
            x: all rows on the root; (0, …) of the same dtype on the others.
            sizes: rows that each rank receives.
            root: the rank that sends.

        Communication: one all-to-all forward and backward.
        """
        have = self._all_on(root, sizes)
        op = linear.Redistribute(self, have, tuple(sizes))
        return linear.apply(op, self._rows(x, have, "scatter"))

    def redistribute(self, x: Tensor, sizes: Size, wanted: Size) -> Tensor:
        """The same rows in the same order, with other sizes; the adjoint restores the old sizes.

        Args:
            x: (sizes[rank], …) owned rows.
            sizes: owned rows of every rank now.
            wanted: owned rows of every rank afterwards, with the same sum.

        Communication: one all-to-all forward and backward, of the rows that change their rank.
        """
        if sum(sizes) != sum(wanted) or len(wanted) != self.size:
            raise DomainError(
                f"redistribute: sizes {tuple(sizes)} cannot become {tuple(wanted)}: pass "
                f"{n_of(self.size, 'sizes')} with the sum {sum(sizes)}"
            )
        op = linear.Redistribute(self, tuple(sizes), tuple(wanted))
        return linear.apply(op, self._rows(x, sizes, "redistribute"))

    def shift(self, x: Tensor, sizes: Size, steps: int = 1) -> Tensor:
        """The rows of the rank `steps` before this one in a ring; the adjoint shifts back.

        Args:
            x: (sizes[rank], …) owned rows.
            sizes: owned rows of every rank.
            steps: how many ranks further the rows go.

        Communication: one all-to-all (with one peer) forward and backward.
        """
        op = linear.Shift(self, tuple(sizes), steps % self.size)
        return linear.apply(op, self._rows(x, sizes, "shift"))

    def exchange(self, x: Tensor, plan: Exchange) -> Tensor:
        """Owned rows followed by halo rows: (n_local, …).

        The adjoint sends the gradients of halo rows to their owners, which add them.

        Communication: one all-to-all of the plan's rows forward and backward.
        """
        return plan.start(x).finish()

    def replicate(self, x: Tensor) -> Tensor:
        """The same tensor, for a replicated leaf that requires a gradient; its adjoint is the mean.

        Communication: none forward, one all-reduce backward.
        """
        return x if self.size == 1 else linear.apply(linear.Replicate(self), x)

    def average_gradients(self, module: torch.nn.Module) -> None:
        """Average all parameter gradients over the domain, for modules outside of DDP and FSDP.

        A missing gradient counts as zero if another rank has one.

        Communication: one all-reduce for each dtype of the gradients, and one of flags.
        """
        if self.size == 1:
            return
        parameters = [p for p in module.parameters() if p.requires_grad]
        have = torch.tensor([float(p.grad is not None) for p in parameters], device=self.device)
        self.all_reduce_(have, "average_gradients")
        used = [p for p, n in zip(parameters, have.tolist(), strict=True) if n]
        for grads in _gradients_by_dtype(used).values():
            flat = torch.cat([g.reshape(-1) for g in grads])
            self.all_reduce_(flat, "average_gradients")
            parts = torch.split(flat / self.size, [g.numel() for g in grads])
            for grad, part in zip(grads, parts, strict=True):
                grad.copy_(part.view_as(grad))

    def _all_on(self, root: int, sizes: Size) -> tuple[int, ...]:
        if not 0 <= root < self.size:
            raise DomainError(f"root {root} is not a rank; ranks are 0 to {self.size - 1}")
        return tuple(sum(sizes) if r == root else 0 for r in range(self.size))

    def _rows(self, x: Tensor, sizes: Size, what: str) -> Tensor:
        """The tensor, after a check that it has the rows that `sizes` says."""
        if len(sizes) != self.size:
            raise DomainError(
                f"{what}: got {n_of(len(sizes), 'sizes')} for {n_of(self.size, 'ranks')}; "
                "pass the owned rows of every rank"
            )
        if x.ndim == 0 or x.shape[0] != sizes[self.rank]:
            raise DomainError(
                f"{what}: expected {n_of(sizes[self.rank], 'rows')} on rank {self.rank} "
                f"(sizes[{self.rank}]), got a tensor {tuple(x.shape)}"
            )
        return x


def init_domain(
    device_mesh: DeviceMesh | None = None,
    axis: str | None = None,
    *,
    device: torch.device | str | None = None,
    timeout: float = TIMEOUT,
) -> Domain:
    """The domain of this process: the same code on one rank and on many.

    Args:
        device_mesh: an existing device mesh; one of its axes is the domain.
        axis: the name of that axis; not needed if there is only one.
        device: by default the GPU of this rank if there is one, else the CPU.
        timeout: seconds to wait for other ranks, if this call initializes the process group.

    Returns:
        The ranks along the axis; or all ranks that `meshshard launch` or torchrun started; or, in a
        process started by `python`, a single rank without a process group.

    Examples:
        >>> domain = init_domain()  # under python: a single rank
        >>> domain.rank, domain.size
        (0, 1)
    """
    place = _device(device)
    if device_mesh is None:
        return Domain(ProcessGroupTransport.default(place, timeout), place)
    return Domain(ProcessGroupTransport(device_mesh.get_group(axis)), place)


def launched_domain() -> Domain:
    """The ranks that were launched, by `meshshard launch` or torchrun; else one rank on the CPU."""
    launched = is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) > 1
    return init_domain() if launched else Domain()


@contextlib.contextmanager
def count_traffic(ranks: Ranks) -> Iterator[Traffic]:
    """Context manager: count traffic from zero, separately from what was counted before."""
    before, ranks.traffic = ranks.traffic, Traffic()
    try:
        yield ranks.traffic
    finally:
        ranks.traffic = before


def _device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    if torch.cuda.is_available():
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(place)
        return place
    return torch.device("cpu")


def _gradients_by_dtype(
    parameters: Sequence[torch.nn.Parameter],
) -> dict[torch.dtype, list[Tensor]]:
    """The gradients of some parameters, zeros if missing, grouped by dtype."""
    grads: dict[torch.dtype, list[Tensor]] = {}
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        grad = getattr(p.grad, "_local_tensor", p.grad)  # of a DTensor: the part of this rank
        grads.setdefault(grad.dtype, []).append(grad)
    return grads


def _reduce(domain: Domain) -> tuple[Any, ...]:
    """What a process that is not a rank gets of a domain; see `workers.py`."""
    group = domain.group
    if group is None:
        return type(domain), (None, str(domain.device))
    if not isinstance(group, (ProcessGroup, str)):
        raise DomainError("simulated ranks are threads: their domain cannot be sent to a process")
    name = group if isinstance(group, str) else group.group_name
    return _rebuild, (type(domain), name, domain.rank, domain.size, str(domain.device))


def _rebuild(kind: type[Domain], name: str, rank: int, size: int, device: str) -> Domain:
    transport: Transport | None = ProcessGroupTransport.by_name(name)
    if transport is None:
        transport = WorkerTransport(name, rank, size)
    if (transport.rank, transport.size) != (rank, size):
        raise DomainError(
            f"a domain of rank {rank} of {size} was sent to rank {transport.rank} of "
            f"{transport.size}: use that of the rank"
        )
    return kind(transport, device)


send_to_workers(Domain, _reduce)
