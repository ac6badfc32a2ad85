"""Matching: ranks compare their calls before they enter a collective, and raise if they differ.

A collective that not all ranks enter waits forever, and two different ones either end the process
or return a wrong number. So every rank first posts which call it makes, and from which line of user
code; then it waits until all ranks have posted the same one. Ranks of one machine post in shared
memory; ranks of several machines gather the calls, and do so for the first 1,000 only.

After 1,000 calls a rank of one machine no longer waits before an all-reduce of CPU tensors: it
compares its call with those that are posted, and the rest while it waits for the result. Then all
ranks raise just the same, but the process group is of no use afterwards: some ranks have entered a
collective that others have not.

The environment variable MESHSHARD_CHECKED_CALLS is the number of calls that are compared, for each
process group: 0 for none.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist

from meshshard.comm.board import ENDED, Board, Gather
from meshshard.errors import DomainError, n_of

__all__ = ["Call", "Matching", "call_of", "end_calls", "matching_of", "raise_if_different"]

VARIABLE = "MESHSHARD_CHECKED_CALLS"
ALL, FEW = sys.maxsize, 1_000  # calls that are compared: on one machine, on several
PATIENCE = timedelta(seconds=0.1)  # for a result, before a rank compares the posts again
LIBRARIES = frozenset({"meshshard", "torch", "torch_geometric"}) | sys.stdlib_module_names
Table = tuple[int, ...]


class Call(NamedTuple):
    """A collective that a rank makes.

    Attributes:
        what: its name, then what must be equal on all ranks: shape, type.
        file: file of the line of user code that makes it, without its folder; empty if unknown.
        line: that line.
        send: number of rows for every rank, of an all-to-all.
        receive: number of rows from every rank, of an all-to-all.
    """

    what: tuple[Any, ...]
    file: str = ""
    line: int = 0
    send: Table = ()
    receive: Table = ()

    def __str__(self) -> str:
        place = f" at {self.file}:{self.line}" if self.file else ""
        return f"{self.what[0]}({', '.join(map(str, self.what[1:]))}){place}"


def call_of(*what: Any, send: Sequence[int] = (), receive: Sequence[int] = ()) -> Call:
    """The call that user code makes now.

    Args:
        what: name of the collective, then what must be equal on all ranks.
        send: number of rows for every rank, of an all-to-all.
        receive: number of rows from every rank, of an all-to-all.
    """
    frame: Any = sys._getframe(1)
    while frame is not None and _is_library(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    tables = tuple(send), tuple(receive)
    if frame is None:
        return Call(what, "", 0, *tables)
    return Call(what, _base(frame.f_code.co_filename), frame.f_lineno, *tables)


def raise_if_different(calls: Mapping[int, Call]) -> None:
    """Raise if the calls of some ranks differ, or the rows that they send to one another.

    Args:
        calls: of each of these ranks.

    Raises:
        DomainError: naming both calls.
    """
    first = min(calls)
    for rank, call in calls.items():
        if call[:3] != calls[first][:3]:
            same_line = call[1:3] == calls[first][1:3]
            remedy = "" if same_line else "; all ranks must make the same calls from the same lines"
            raise DomainError(
                f"ranks are in different collectives: rank {first} in {calls[first]}, rank {rank} "
                f"in {call}{remedy}"
            )
    for a, b in product(calls, repeat=2):
        if calls[a].send and calls[a].send[b] != calls[b].receive[a]:
            raise DomainError(
                f"{calls[a]}: rank {a} sends {n_of(calls[a].send[b], 'rows')} to rank {b}, "
                f"which expects {calls[b].receive[a]}"
            )


class Matching:
    """The calls of one process group.

    Attributes:
        board: where the ranks of one machine post their calls; None on several machines.
        limit: number of calls that are compared.
        waited: number of calls for which the ranks of one machine wait before they enter.
        count: number of calls so far.
        broken: whether ranks have entered different collectives.
    """

    def __init__(self, board: Board | None, limit: int) -> None:
        self.board, self.limit, self.waited = board, limit, FEW
        self.count, self.broken = 0, False

    def enter(self, call: Call, gather: Gather, early: bool = False) -> bool:
        """Return when this rank may make this call: all ranks make it, as far as is known.

        Args:
            call: the call of this rank.
            gather: returns the values of all ranks, by rank.
            early: return without the ranks that have not come yet, after the first 1,000 calls.

        Returns:
            Whether all ranks make this call for certain; else `finish` must be called.

        Raises:
            DomainError: on every rank, if another one makes another call or has ended.
            RuntimeError: a rank has not made its call before the time-out of the group.
        """
        self.count += 1
        if self.count > self.limit:
            return True
        board = self.board
        if board is None:
            raise_if_different(dict(enumerate(gather(_plain(call)))))
            return True
        if self.broken:
            raise DomainError(
                f"{call}: ranks were in different collectives before; this process group cannot be "
                "used any more"
            )
        if board.post(_checksum(*call[:3]), _balance(call.send, call.receive, board.rank)):
            return True
        if early and self.count > self.waited and not board.differ():
            return False
        self._wait(call, board)
        return True

    def finish(self, call: Call, work: dist.Work) -> None:
        """Wait for a collective that this rank has entered before it knew the calls of all ranks.

        Args:
            call: the call of this rank.
            work: the collective.

        Raises:
            DomainError, RuntimeError: as for `enter`.
        """
        assert self.board is not None
        try:
            work.wait(PATIENCE)
        except RuntimeError:  # the time is over, or a rank has ended
            self._wait(call, self.board)
            work.wait()
        if self.board.differ():
            self._wait(call, self.board)

    def _wait(self, call: Call, board: Board) -> None:
        """Wait for the calls of the other ranks; raise if they differ, or if one will not come."""
        self.broken = self.count > self.waited  # others may have entered the collective
        _wait(call, board)
        self.broken = False


_groups: WeakKeyDictionary[dist.ProcessGroup, Matching] = WeakKeyDictionary()


def matching_of(group: dist.ProcessGroup, gather: Gather) -> Matching:
    """The calls of a process group, which all of its transports share.

    Args:
        group: the process group.
        gather: returns the values of all ranks, by rank.

    Communication: three gathers of objects at the first call for a group.
    """
    found = _groups.get(group)
    if found is None:
        given = gather(os.environ.get(VARIABLE, ""))[0]
        if given and not given.isdecimal():
            raise DomainError(f"{VARIABLE}={given}: pass a number of calls, 0 for none")
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        board = Board.shared(rank, size, _timeout(group), gather) if given != "0" else None
        limit = int(given) if given else ALL if board else FEW
        found = _groups[group] = Matching(board, limit)
    return found


def end_calls(group: dist.ProcessGroup) -> None:
    """Record that this rank makes no more calls in a group; ranks that wait for it raise."""
    found = _groups.pop(group, None)
    if found is not None and found.board is not None:
        found.board.end()


def _wait(call: Call, board: Board) -> None:
    """Wait for the other ranks; raise if one makes another call, or will not make any."""
    absent = board.wait()
    if absent is not None:
        state, count = board.state(absent), n_of(board.count(absent), "collectives")
        if not state:
            raise RuntimeError(f"rank {absent} has not entered it within {board.timeout:.0f} s")
        why = "has ended" if state == ENDED else "has raised an error"
        raise DomainError(f"rank {board.rank} is in {call}, but rank {absent} {why} after {count}")
    if board.agree():
        return
    texts = board.texts(json.dumps(_plain(call)))
    calls = {rank: _parsed(text) for rank, text in texts.items()}
    raise_if_different({rank: other for rank, other in calls.items() if other is not None})
    raise DomainError(f"ranks are in different collectives: rank {board.rank} in {call}")


def _plain(call: Call) -> Call:
    """A call of strings and numbers, as it is sent to other ranks."""
    send, receive = tuple(map(int, call.send)), tuple(map(int, call.receive))
    return Call(tuple(map(str, call.what)), call.file, call.line, send, receive)


def _parsed(text: str) -> Call | None:
    """A call as another rank wrote it; None if it was too long."""
    try:
        what, file, line, send, receive = json.loads(text)
    except ValueError:
        return None
    return Call(tuple(what), file, line, tuple(send), tuple(receive))


@lru_cache(maxsize=4096)
def _checksum(what: tuple[Any, ...], file: str, line: int) -> int:
    """32 bits of a call, the same in every process."""
    return zlib.crc32(repr((what, file, line)).encode())


@lru_cache(maxsize=4096)
def _balance(send: Table, receive: Table, rank: int) -> int:
    """A number whose sum over the ranks is zero if every rank receives what it is sent."""
    sent = sum(hash((rank, other, rows)) for other, rows in enumerate(send))
    return (sent - sum(hash((other, rank, rows)) for other, rows in enumerate(receive))) % 2**62


def _timeout(group: dist.ProcessGroup) -> float:
    """Seconds that the backend of a group waits for other ranks, as far as it says."""
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    timeout = getattr(options, "_timeout", dist.default_pg_timeout)
    seconds: float = timeout.total_seconds()
    return seconds


@lru_cache(maxsize=1024)
def _is_library(module: str) -> bool:
    """Whether a module is not the user's; code that torch.compile generates has no module."""
    return not module or module.partition(".")[0] in LIBRARIES


@lru_cache(maxsize=1024)
def _base(file: str) -> str:
    return Path(file).name
