"""Ranks: the communicator. Its collectives are counted, name the rank in errors, have no gradient.

`Domain` (domain.py) builds the differentiable collectives on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self, TypeVar

import torch
from torch import Tensor

from meshshard.comm.traffic import Traffic
from meshshard.comm.transport import Transport, Work
from meshshard.errors import DomainError, MeshshardError, n_of

__all__ = ["Pending", "Ranks"]

T = TypeVar("T")


class Ranks:
    """The ranks that hold one sample together; a single rank needs no process group.

    Attributes:
        transport: what carries the collectives.
        rank: number of this rank.
        size: number of ranks.
        device: where the tensors of this rank are.
        traffic: counts of what this rank sent.
    """

    def __init__(
        self, transport: Transport | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self.transport = transport or Transport()
        self.rank = self.transport.rank
        self.size = self.transport.size
        self.device = torch.device(device)
        self.traffic = Traffic()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self.rank} of {self.size}, {self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """The same ranks: copies of what holds them communicate with each other."""
        return self

    def __copy__(self) -> Self:
        """The same ranks."""
        return self

    def __reduce__(self) -> NoReturn:
        """Refuse pickle and torch.save; workers get it by `workers.py`."""
        raise DomainError(
            "a domain cannot be saved, as another run has other ranks: save x.gather() or "
            "model.state_dict(), and load the folder of shards again"
        )

    @property
    def group(self) -> Any:
        """The process group, None for a single rank; equal groups are the same ranks."""
        return self.transport.group

    # -------------------------------------------------------------------------------- tensors

    def all_reduce_(self, x: Tensor, kind: str, op: str = "sum") -> Tensor:
        """Reduce a contiguous tensor over the ranks, in place. Use what it returns.

        Compiled code leaves the tensor unchanged, and returns a new one.

        Args:
            x: a tensor of the same shape on every rank.
            kind: the name of the call in the traffic and in errors.
            op: "sum" or "max".

        Communication: one all-reduce.
        """
        if torch.compiler.is_compiling():
            return self.transport.all_reduce(x, op)
        self.traffic.add(kind, x)
        with _naming(self, kind, x):
            return self.transport.all_reduce(x, op)

    def all_to_all(
        self, x: Tensor, send: Sequence[int], receive: Sequence[int], kind: str
    ) -> Tensor:
        """Send consecutive rows to every rank, and wait for theirs.

        Args:
            x: (sum(send), …) rows, grouped by the rank that they go to.
            send: number of rows for every rank.
            receive: number of rows from every rank.
            kind: the name of the call in the traffic and in errors.

        Returns:
            (sum(receive), …) rows, ordered by rank.

        Communication: one all-to-all.
        """
        return self.start_all_to_all(x, send, receive, kind).wait()

    def start_all_to_all(
        self, x: Tensor, send: Sequence[int], receive: Sequence[int], kind: str
    ) -> Pending:
        """Start an all-to-all, so that it overlaps with computation until `Pending.wait`.

        Args:
            x: (sum(send), …) rows, grouped by the rank that they go to.
            send: number of rows for every rank.
            receive: number of rows from every rank.
            kind: the name of the call in the traffic and in errors.

        Communication: one all-to-all.
        """
        if torch.compiler.is_compiling():
            return Pending(self, kind, *self.transport.start_all_to_all(x, send, receive))
        self.traffic.add(kind, x)
        what = f"{kind} of {n_of(sum(send), 'rows')} to and {n_of(sum(receive), 'rows')} from ranks"
        with _naming(self, what, x):
            return Pending(self, what, *self.transport.start_all_to_all(x, send, receive))

    def group_by_rank(self, to: Tensor) -> tuple[Tensor, list[int]]:
        """How rows are grouped by the rank that they go to, as all-to-alls expect them.

        Args:
            to: (n,) the rank that each row goes to.

        Returns:
            The rows in this order, which is stable, and the number of rows for every rank.
        """
        counts: list[int] = torch.bincount(to, minlength=self.size).tolist()
        return torch.argsort(to, stable=True), counts

    def route(self, x: Tensor, send: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Send rows to ranks that do not know yet how many they will receive.

        Args:
            x: (sum(send), …) rows, grouped by the rank that they go to.
            send: number of rows for every rank.

        Returns:
            The received rows, ordered by rank, and their number from every rank.

        Communication: one all-to-all of counts, one of the rows.
        """
        if self.size == 1:
            return x, list(send)
        ones = [1] * self.size
        counts = torch.tensor(send, dtype=torch.int64, device=self.device)
        receive = self.all_to_all(counts, ones, ones, "counts").tolist()
        return self.all_to_all(x.detach(), send, receive, "route"), receive

    # -------------------------------------------------------------------------------- objects

    def share(self, value: T) -> list[T]:
        """The picklable values of all ranks, by rank.

        Communication: one gather of objects.
        """
        with _naming(self, "share"):
            return self.transport.gather_objects(value)

    def agree(self, value: Any, what: str) -> None:
        """Check that a picklable value is the same on every rank.

        Communication: one gather of objects.

        Raises:
            DomainError: on every rank, naming rank 0 and the first rank that differs.
        """
        values = self.share(value)
        differ = [r for r, other in enumerate(values) if other != values[0]]
        if differ:
            raise DomainError(
                f"ranks disagree on {what}: rank 0 has {values[0]!r}, "
                f"rank {differ[0]} has {values[differ[0]]!r}"
            )

    def run_collectively(self, action: Callable[[], T], what: str) -> T:
        """Run an action on every rank; if it fails on any rank, raise on all.

        Communication: one gather of objects.

        Raises:
            DomainError: the first MeshshardError, and the ranks that raised it.
        """
        result, error = None, None
        try:
            result = action()
        except MeshshardError as raised:
            error = str(raised)
        errors = self.share(error)
        first = next((e for e in errors if e is not None), None)
        if first is not None:
            raise DomainError(f"{what}: {_ranks_with(first, errors)}{first}")
        return result  # type: ignore[return-value]

    # ------------------------------------------------------------------------------- no calls

    def shared_seed(self) -> int:
        """A seed from the default generator, the same on every rank.

        Communication: none; the generators of all ranks advance identically.
        """
        return self.transport.shared_seed()

    def offset(self, sizes: Sequence[int]) -> int:
        """First id of this rank's rows."""
        return sum(sizes[: self.rank])

    def close(self) -> None:
        """Destroy the default process group; scripts that call `init_domain` do so at their end."""
        self.transport.close()


class Pending:
    """An all-to-all that has been started."""

    def __init__(self, ranks: Ranks, what: str, rows: Tensor, work: Work | None) -> None:
        self._ranks, self._what, self._rows, self._work = ranks, what, rows, work

    def wait(self) -> Tensor:
        """The received rows, ordered by rank."""
        if self._work is not None:
            with _naming(self._ranks, self._what, self._rows):
                self._work.wait()
        return self._rows


class _naming:  # noqa: N801 - reads as a function; a class costs a tenth of contextlib's generator
    """Context manager: report errors of the transport as DomainError, naming rank and call."""

    __slots__ = ("ranks", "what", "x")

    def __init__(self, ranks: Ranks, what: str, x: Tensor | None = None) -> None:
        self.ranks, self.what, self.x = ranks, what, x

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, (RuntimeError, ValueError)):
            raise DomainError(self._message(error)) from error

    def _message(self, error: BaseException) -> str:
        tensor = "" if self.x is None else f" (a tensor {tuple(self.x.shape)} {self.x.dtype})"
        reason = " ".join(str(error).split())[:200]
        return (
            f"rank {self.ranks.rank} of {self.ranks.size}: {self.what}{tensor} failed: another "
            f"rank has raised, has died, is late or made another call: {reason}"
        )


def _ranks_with(error: str, errors: list[str | None]) -> str:
    """The ranks that raised an error, to put before it; empty on a single rank."""
    ranks = [rank for rank, other in enumerate(errors) if other == error]
    if len(errors) == 1:
        return ""
    if len(ranks) == len(errors):
        return "all ranks: "
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: "
