"""Exchange: halo rows from their owners, and the adjoint, gradients of halo rows to their owners.

There are three ways in. `Exchange.start(x).finish()` is the differentiable exchange.
`Exchange.start(x).wait_halo()` gives the halo rows outside of autograd, to operators that have an
adjoint of their own; `Exchange.start_back(grad)` is for these adjoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, product
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from meshshard.comm import linear
from meshshard.comm.ranks import Pending, Ranks
from meshshard.errors import DomainError, n_of

__all__ = ["Exchange", "PendingExchange"]


_exchanges: WeakValueDictionary[int, Exchange] = WeakValueDictionary()  # by handle
_handles = count(2)  # torch.compile treats 0 and 1 as constants


@dataclass(eq=False)
class Exchange:
    """The rows that this rank sends and receives, as tensors on its device.

    Before the first use, all ranks check that the numbers of rows agree for each pair of ranks.

    Attributes:
        ranks: the ranks.
        n_owned: owned rows of this rank.
        send_rows: (n_sent,) int64 owned rows, grouped by the rank that they go to.
        send: number of rows for every rank.
        receive: number of rows from every rank.
        name: its name in errors.
        n_halo: number of rows from all ranks.
        handle: its number in compiled code, so that a new exchange does not recompile it.
    """

    ranks: Ranks
    n_owned: int
    send_rows: Tensor
    send: Sequence[int]
    receive: Sequence[int]
    name: str = "exchange"
    n_halo: int = field(init=False)
    handle: int = field(init=False, default_factory=_handles.__next__)
    _checked: set[tuple[Any, ...]] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self.n_halo = sum(self.receive)
        _exchanges[self.handle] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> Exchange:
        """The same exchange: it is constant, and compiled code knows it by its handle."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """As it was made: its handle belongs to this process."""
        made = self.ranks, self.n_owned, self.send_rows, self.send, self.receive, self.name
        return Exchange, made

    @classmethod
    def of_halo(cls, ranks: Ranks, sizes: Sequence[int], halo: Tensor, name: str) -> Exchange:
        """The exchange of a halo that is only known at run time.

        Args:
            ranks: the ranks.
            sizes: owned rows of every rank.
            halo: (n_halo,) int64 ids of rows of other ranks that this rank needs, ascending.
            name: its name in errors.

        Communication: one all-to-all of counts, one of the ids.
        """
        ends = torch.tensor(sizes, device=halo.device).cumsum(0)
        receive = torch.bincount(torch.searchsorted(ends, halo, right=True), minlength=len(sizes))
        wanted, send = ranks.route(halo, receive.tolist())
        rows = wanted - ranks.offset(sizes)
        return cls(ranks, sizes[ranks.rank], rows, send, receive.tolist(), name)

    def check(self, x: Tensor) -> None:
        """Compare the numbers of rows, and dtype and shape of a row, on all ranks.

        Communication: two gathers of objects at the first call with such rows, later none.

        Raises:
            DomainError: on every rank, naming the pair of ranks that disagrees.
        """
        row = (x.dtype, *x.shape[1:])
        if row in self._checked or self.ranks.size == 1:
            return
        self.ranks.agree(row, f"the rows of {self.name}")
        tables = self.ranks.share((tuple(self.send), tuple(self.receive)))
        for a, b in product(range(len(tables)), repeat=2):
            sent, expected = tables[a][0][b], tables[b][1][a]
            if sent != expected:
                raise DomainError(
                    f"{self.name}: rank {a} sends {n_of(sent, 'rows')} to rank {b}, "
                    f"which expects {expected}; load the same folder on all ranks"
                )
        self._checked.add(row)

    def start(self, x: Tensor) -> PendingExchange:
        """Start to send boundary rows, so that interior rows can be computed meanwhile.

        Args:
            x: (n_owned, …) owned rows.

        Raises:
            DomainError: the tensor does not have n_owned rows.
        """
        if x.shape[0] != self.n_owned:
            raise DomainError(
                f"{self.name}: rank {self.ranks.rank} owns {n_of(self.n_owned, 'rows')}, "
                f"got a tensor {tuple(x.shape)}"
            )
        if not torch.compiler.is_compiling():
            self.check(x)
        return PendingExchange(self, x)

    def start_back(self, halo: Tensor) -> Pending | None:
        """Start to send (n_halo, …) gradients of halo rows to their owners, outside of autograd.

        Returns:
            What to wait for to get the (n_sent, …) gradients of `send_rows`; None on one rank.
        """
        if self.ranks.size == 1:
            return None
        return self.ranks.start_all_to_all(halo, self.receive, self.send, "accumulate")


class PendingExchange:
    """An exchange that has been started."""

    def __init__(self, exchange: Exchange, x: Tensor) -> None:
        self._exchange, self._x = exchange, x
        self._pending = None
        if exchange.ranks.size > 1 and not torch.compiler.is_compiling():
            with torch.no_grad():
                self._pending = _send(exchange, x.detach())

    def wait_halo(self) -> Tensor:
        """(n_halo, …) halo rows alone, outside of autograd: for operators with an adjoint."""
        if self._pending is not None:
            return self._pending.wait()
        alone = self._exchange.ranks.size == 1
        return self._x[:0] if alone else _send(self._exchange, self._x).wait()

    def finish(self) -> Tensor:
        """(n_local, …) owned rows, then halo rows; differentiable."""
        if self._exchange.ranks.size == 1:
            return self._x
        if self._pending is None:
            return linear.apply(Halo(self._exchange), self._x)
        out: Tensor = _Finish.apply(self._x, self._exchange, self._pending)  # type: ignore[no-untyped-call]
        return out


class _Finish(torch.autograd.Function):
    """`Halo` on rows that are already being sent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, pending: Pending) -> Tensor:
        ctx.exchange = exchange
        return torch.cat([x, pending.wait()])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return linear.apply(Accumulate(ctx.exchange), grad), None, None


@dataclass(frozen=True)
class Halo:
    """Owned rows to local rows (owned rows, then halo rows), as a linear operator."""

    exchange: Exchange

    def __call__(self, x: Tensor) -> Tensor:
        """(n_local, …) owned rows, then halo rows."""
        plan = self.exchange
        if torch.compiler.is_compiling():
            local: Tensor = _compiled_halo(x, plan.handle, plan.n_owned + plan.n_halo)
            return local
        return torch.cat([x, _send(plan, x).wait()])

    def adjoint(self) -> Accumulate:
        """Local rows to owned rows."""
        return Accumulate(self.exchange)


@dataclass(frozen=True)
class Accumulate:
    """Local rows to owned rows: halo rows are sent to their owners and added there."""

    exchange: Exchange

    def __call__(self, x: Tensor) -> Tensor:
        """(n_owned, …) owned rows, with the sum of their halo copies added."""
        plan = self.exchange
        if torch.compiler.is_compiling():
            owned: Tensor = _compiled_accumulate(x, plan.handle, plan.n_owned)
            return owned
        owned, halo = x[: plan.n_owned], x[plan.n_owned :]
        back = plan.ranks.all_to_all(halo, plan.receive, plan.send, "accumulate")
        return owned.index_add(0, plan.send_rows, back)

    def adjoint(self) -> Halo:
        """Owned rows to local rows."""
        return Halo(self.exchange)


def _send(exchange: Exchange, x: Tensor) -> Pending:
    rows = x.index_select(0, exchange.send_rows)
    return exchange.ranks.start_all_to_all(rows, exchange.send, exchange.receive, "exchange")


# Called by compiled code, with a handle: Dynamo would recompile for each zero in the counts.
SCHEMA = "(Tensor x, SymInt handle, SymInt rows) -> Tensor"


@torch.library.custom_op("meshshard::halo", mutates_args=(), schema=SCHEMA)
def _compiled_halo(x: Tensor, handle: int, rows: int) -> Tensor:
    del rows
    exchange = _exchange_of(handle)
    exchange.check(x)
    return Halo(exchange)(x)


@torch.library.custom_op("meshshard::accumulate", mutates_args=(), schema=SCHEMA)
def _compiled_accumulate(x: Tensor, handle: int, rows: int) -> Tensor:
    del rows
    return Accumulate(_exchange_of(handle))(x)


def _exchange_of(handle: int) -> Exchange:
    exchange = _exchanges.get(handle)
    if exchange is None:
        raise DomainError(
            "an exchange used by compiled code has been deleted; keep it until backward is done"
        )
    return exchange


@_compiled_halo.register_fake
@_compiled_accumulate.register_fake
def _rows_like(x: Tensor, handle: int, rows: int) -> Tensor:
    del handle
    return x.new_empty((rows, *x.shape[1:]))
