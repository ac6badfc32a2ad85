"""Exchange: halo rows from their owners, gradients of halo rows home; one adjoint pair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, product
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from meshshard.comm import linear, process_group
from meshshard.errors import DomainError, n_of

if TYPE_CHECKING:
    from meshshard.comm.domain import Domain

    Plans = WeakValueDictionary[int, "Exchange"]

__all__ = ["Exchange", "PendingExchange"]


_plans: Plans = WeakValueDictionary()  # by handle: what compiled code knows a plan by
_handles = count(2)  # torch.compile takes 0 and 1 for constants


@dataclass(eq=False)
class Exchange:
    """The rows that this rank sends and receives, as tensors on its device.

    Proved on all ranks before its first use: sent and received counts agree pair by pair.

    Attributes:
        domain: the ranks.
        n_owned: owned rows of this rank.
        send_rows: (n_sent,) int64 owned rows, grouped by the rank that needs them.
        send: rows that go to each rank.
        receive: rows that come from each rank.
        name: what to call it in errors.
        n_halo: rows that come from other ranks.
        handle: its number in compiled code, where a new plan needs no new compilation.
    """

    domain: Domain
    n_owned: int
    send_rows: Tensor
    send: Sequence[int]
    receive: Sequence[int]
    name: str = "exchange"
    n_halo: int = field(init=False)
    handle: int = field(init=False, default_factory=_handles.__next__)
    _proved: set[tuple[Any, ...]] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self.n_halo = sum(self.receive)
        _plans[self.handle] = self

    @classmethod
    def of_halo(cls, domain: Domain, sizes: Sequence[int], halo: Tensor, name: str) -> Exchange:
        """The exchange of a halo that is only known at run time.

        Args:
            domain: the ranks.
            sizes: owned rows of every rank.
            halo: (n_halo,) int64 ids that this rank needs, ascending, none of them its own.
            name: what to call it in errors.

        Communication: one all-to-all of counts, one of the ids.
        """
        ends = torch.tensor(sizes, device=halo.device).cumsum(0)
        receive = torch.bincount(torch.searchsorted(ends, halo, right=True), minlength=len(sizes))
        wanted, send = domain.route(halo, receive.tolist())
        rows = wanted - domain.offset(sizes)
        return cls(domain, sizes[domain.rank], rows, send, receive.tolist(), name)

    def check(self, x: Tensor) -> None:
        """Compare the tables of all ranks, and what a row is: its type and width.

        Communication: one gather of objects, at the first call with such rows only.

        Raises:
            DomainError: on every rank, naming the pair that disagrees.
        """
        row = (x.dtype, *x.shape[1:])
        if row in self._proved or self.domain.size == 1:
            return
        self.domain.agree(row, f"the rows of {self.name}")
        tables = self.domain.share((tuple(self.send), tuple(self.receive)))
        for a, b in product(range(len(tables)), repeat=2):
            sent, expected = tables[a][0][b], tables[b][1][a]
            if sent != expected:
                raise DomainError(
                    f"{self.name}: rank {a} sends {n_of(sent, 'rows')} to rank {b}, "
                    f"which expects {expected}; load one folder on all ranks"
                )
        self._proved.add(row)

    def start(self, x: Tensor) -> PendingExchange:
        """Send boundary rows; interior rows can be computed until `finish`.

        Args:
            x: (n_owned, …) owned rows.

        Raises:
            DomainError: another number of rows.
        """
        if x.shape[0] != self.n_owned:
            raise DomainError(
                f"{self.name}: rank {self.domain.rank} owns {n_of(self.n_owned, 'rows')}, "
                f"got a tensor {tuple(x.shape)}"
            )
        if not torch.compiler.is_compiling():
            self.check(x)
        return PendingExchange(self, x)

    def start_back(self, halo: Tensor) -> process_group.Pending | None:
        """Send (n_halo, …) gradients home; `wait` gives those of `send_rows`, None serially."""
        if self.domain.size == 1:
            return None
        return process_group.start_all_to_all(
            self.domain, halo, self.receive, self.send, "accumulate"
        )


class PendingExchange:
    """An exchange under way."""

    def __init__(self, plan: Exchange, x: Tensor) -> None:
        self._plan, self._x = plan, x
        self._pending = None
        if plan.domain.size > 1 and not torch.compiler.is_compiling():
            with torch.no_grad():
                self._pending = _send(plan, x.detach())

    def wait_halo(self) -> Tensor:
        """(n_halo, …) halo rows alone, outside of autograd: for operators with an adjoint."""
        if self._pending is None:
            return self._x[:0] if self._plan.domain.size == 1 else _send(self._plan, self._x).wait()
        return self._pending.wait()

    def finish(self) -> Tensor:
        """(n_local, …) owned rows, then halo rows."""
        if self._plan.domain.size == 1:
            return self._x
        if self._pending is None:
            return linear.apply(Halo(self._plan), self._x)
        out: Tensor = _Finish.apply(self._x, self._plan, self._pending)  # type: ignore[no-untyped-call]
        return out


class _Finish(torch.autograd.Function):
    """Joins owned rows and those that have come; the gradient goes home."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Exchange, pending: process_group.Pending) -> Tensor:
        """The value."""
        ctx.plan = plan
        return torch.cat([x, pending.wait()])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """The value of the adjoint."""
        return linear.apply(Accumulate(ctx.plan), grad), None, None


@dataclass(frozen=True)
class Halo:
    """Owned rows to local rows, as one operator."""

    plan: Exchange

    def __call__(self, x: Tensor) -> Tensor:
        """Owned rows, then halo rows."""
        plan = self.plan
        if torch.compiler.is_compiling():
            local: Tensor = _compiled_halo(x, plan.handle, plan.n_owned + plan.n_halo)
            return local
        return torch.cat([x, _send(plan, x).wait()])

    def adjoint(self) -> Accumulate:
        """Local rows to owned rows."""
        return Accumulate(self.plan)


@dataclass(frozen=True)
class Accumulate:
    """Local rows to owned rows: halo rows go to their owners and are added there."""

    plan: Exchange

    def __call__(self, x: Tensor) -> Tensor:
        """Owned rows, with what peers have for them."""
        plan = self.plan
        if torch.compiler.is_compiling():
            owned: Tensor = _compiled_accumulate(x, plan.handle, plan.n_owned)
            return owned
        mine, away = x[: plan.n_owned], x[plan.n_owned :]
        back = process_group.all_to_all(plan.domain, away, plan.receive, plan.send, "accumulate")
        return mine.index_add(0, plan.send_rows, back)

    def adjoint(self) -> Halo:
        """Owned rows to local rows."""
        return Halo(self.plan)


def _send(plan: Exchange, x: Tensor) -> process_group.Pending:
    rows = x.index_select(0, plan.send_rows)
    return process_group.start_all_to_all(plan.domain, rows, plan.send, plan.receive, "exchange")


# What compiled code calls. Tables stay out of it: Dynamo would compile again for every zero there.
SCHEMA = "(Tensor x, SymInt plan, SymInt rows) -> Tensor"


@torch.library.custom_op("meshshard::halo", mutates_args=(), schema=SCHEMA)
def _compiled_halo(x: Tensor, plan: int, rows: int) -> Tensor:
    del rows
    found = _plan(plan)
    found.check(x)
    return Halo(found)(x)


@torch.library.custom_op("meshshard::accumulate", mutates_args=(), schema=SCHEMA)
def _compiled_accumulate(x: Tensor, plan: int, rows: int) -> Tensor:
    del rows
    return Accumulate(_plan(plan))(x)


def _plan(handle: int) -> Exchange:
    found = _plans.get(handle)
    if found is None:
        raise DomainError("a plan of compiled code is gone; keep it until backward is done")
    return found


@_compiled_halo.register_fake
@_compiled_accumulate.register_fake
def _rows_like(x: Tensor, plan: int, rows: int) -> Tensor:
    return x.new_empty((rows, *x.shape[1:]))
