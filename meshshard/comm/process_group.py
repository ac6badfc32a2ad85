"""The calls of torch.distributed: counted, and with errors that name rank, operation and rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from meshshard.comm.threads import ThreadGroup
from meshshard.errors import DomainError, n_of

if TYPE_CHECKING:
    from meshshard.comm.domain import Domain

__all__ = ["Pending", "all_reduce", "all_to_all", "share", "start_all_to_all"]

T = TypeVar("T")


class Pending:
    """Rows under way; `wait` gives them."""

    def __init__(self, rows: Tensor, work: Any, domain: Domain, what: str) -> None:
        self._rows, self._work, self._domain, self._what = rows, work, domain, what

    def wait(self) -> Tensor:
        """The rows, once they are there."""
        if self._work is not None:
            with named(self._domain, self._what, self._rows):
                self._work.wait()
        return self._rows


def all_reduce(domain: Domain, x: Tensor, kind: str, op: str = "sum") -> Tensor:
    """Reduce a tensor in place, or as a new one under torch.compile."""
    if torch.compiler.is_compiling():
        out: Tensor = functional.all_reduce(x, op, _group(domain))
        return out
    domain.traffic.add(kind, x)
    how = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
    with named(domain, kind, x):
        if isinstance(domain.group, ThreadGroup):
            return domain.group.all_reduce(domain.rank, x, op)
        dist.all_reduce(x, how, group=domain.group)
    return x


def all_to_all(
    domain: Domain, x: Tensor, send: Sequence[int], receive: Sequence[int], kind: str
) -> Tensor:
    """Send runs of rows to every rank, get theirs, by rank."""
    return start_all_to_all(domain, x, send, receive, kind).wait()


def start_all_to_all(
    domain: Domain, x: Tensor, send: Sequence[int], receive: Sequence[int], kind: str
) -> Pending:
    """The first half of `all_to_all`: the rows are under way when it returns."""
    if torch.compiler.is_compiling():
        rows = functional.all_to_all_single(x, list(receive), list(send), _group(domain))
        there = functional.wait_tensor(rows)  # type: ignore[no-untyped-call]
        return Pending(there, None, domain, kind)
    domain.traffic.add(kind, x)
    what = f"{kind} of {n_of(sum(send), 'rows')} to and {n_of(sum(receive), 'rows')} from ranks"
    with named(domain, what, x):
        if isinstance(domain.group, ThreadGroup):
            there = domain.group.all_to_all(domain.rank, x, send)
            return Pending(there, None, domain, what)
        rows = x.new_empty((sum(receive), *x.shape[1:]))
        work = dist.all_to_all_single(
            rows, x.contiguous(), list(receive), list(send), group=domain.group, async_op=True
        )
    return Pending(rows, work, domain, what)


def share(domain: Domain, value: T) -> list[T]:
    """Everybody's picklable value."""
    out: list[Any] = [None] * domain.size
    with named(domain, "share", torch.empty(0)):
        if isinstance(domain.group, ThreadGroup):
            return domain.group.swap(domain.rank, value)
        dist.all_gather_object(out, value, group=domain.group)
    return out


class named:  # noqa: N801 - reads as a function; a class costs a tenth of contextlib's generator
    """Errors of torch.distributed as one line that says who was doing what."""

    __slots__ = ("domain", "what", "x")

    def __init__(self, domain: Domain, what: str, x: Tensor) -> None:
        self.domain, self.what, self.x = domain, what, x

    def __enter__(self) -> None:
        """Nothing."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Say who, if it failed."""
        if isinstance(error, (RuntimeError, ValueError)):
            raise self._said(error) from error

    def _said(self, error: BaseException) -> DomainError:
        domain, reason = self.domain, " ".join(str(error).split())
        return DomainError(
            f"rank {domain.rank} of {domain.size}: {self.what}, {tuple(self.x.shape)} "
            f"{self.x.dtype}: another rank has raised, died, is late or makes another call "
            f"({reason[:200]})"
        )


def _group(domain: Domain) -> Any:
    return domain.group
