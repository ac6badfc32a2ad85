"""Board: shared memory in which the ranks of one machine post what they are about to do.

Every rank has a line of 64-bit cells that only it writes. A post is one cell: the number of the
call in the upper half, a checksum of what it is in the lower half. There are two such cells, used
in turn: a rank posts call n + 1 only after all have posted call n, so no rank still reads n - 1.

A rank holds a lock on one byte of the file; the kernel releases it when the process ends, however
it ends. The file has no name after all ranks have opened it, so nothing remains of it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import finalize

__all__ = ["ENDED", "RAISED", "Board"]

POST, BALANCE, STATE, TEXT, LENGTH, CELLS = 0, 2, 4, 5, 6, 8  # cells of a rank: 2 posts, ...
ENDED, RAISED = 1, 2  # states of a rank
HALF = 32  # bits of the checksum
MASK = (1 << 62) - 1
YIELD = 1e-4  # seconds in which a rank only yields its core; later it sleeps
SLEEP = 1e-4  # seconds between two reads of the posts
SETTLE = 0.01  # seconds within which writes of other cores become visible
TEXTS = 1.0  # seconds to wait for the texts of the other ranks
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
Gather = Callable[[Any], list[Any]]


class Board:
    """The posts of all ranks.

    Attributes:
        rank: number of this rank.
        size: number of ranks.
        timeout: seconds to wait for a post of another rank.
    """

    def __init__(self, file: int, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self._file = file
        finalize(self, os.close, file)  # not before: to close it releases the lock
        self._memory = mmap.mmap(file, _bytes(size))
        self._cells = memoryview(self._memory).cast("q")
        self._mine = rank * CELLS
        self._others = [r * CELLS for r in range(size) if r != rank]
        self._count, self._word = 0, 0
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)

    @classmethod
    def shared(cls, rank: int, size: int, timeout: float, gather: Gather) -> Board | None:
        """The board of some ranks; None on all of them if they do not share a machine.

        Args:
            rank: number of this rank.
            size: number of ranks.
            timeout: seconds to wait for a post of another rank.
            gather: returns the values of all ranks, by rank.

        Communication: two gathers of objects.
        """
        machine = BOOT_ID.read_text() if BOOT_ID.exists() else socket.gethostname()
        offered = gather((machine, _create(size) if rank == 0 else None))
        path = offered[0][1]
        board = None
        if path is not None and all(other == machine for other, _ in offered):
            board = cls._opened(path, rank, size, timeout)
        complete = all(gather(board is not None))
        if path is not None and rank == 0:
            Path(path).unlink()
        return board if complete else None

    @classmethod
    def _opened(cls, path: str, rank: int, size: int, timeout: float) -> Board | None:
        try:
            return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), rank, size, timeout)
        except OSError:  # another file system, as in a container
            return None

    def post(self, checksum: int, balance: int = 0) -> bool:
        """Post the next call.

        Args:
            checksum: 32 bits that must be equal on all ranks.
            balance: a number whose sum over the ranks must be zero (in 62 bits).

        Returns:
            Whether all ranks have posted the same call already.
        """
        self._count += 1
        slot = self._count & 1
        self._word = word = self._count << HALF | checksum
        cells = self._cells
        cells[self._mine + BALANCE + slot] = balance
        cells[self._mine + POST + slot] = word
        for other in self._others:
            if cells[other + POST + slot] != word:
                return False
        return self._balanced()

    def wait(self) -> int | None:
        """Wait until all ranks have posted this call, or two ranks different ones.

        Returns:
            A rank that will not post it, or has not within the time-out; None if there is none.
        """
        absent: int | None = self.rank
        try:
            absent = self._wait()
        finally:
            if absent is not None:  # also if interrupted: the others need not wait for this rank
                self._cells[self._mine + STATE] = RAISED
                self._cells[self._mine + POST + (self._count & 1)] = 0
        return absent

    def _wait(self) -> int | None:
        start = time.monotonic()
        while not self.differ() and (missing := self._missing()):
            waited = time.monotonic() - start
            if waited < YIELD:
                os.sched_yield()
                continue
            absent = next((r for r in missing if self.state(r)), None)
            if absent is None and waited > self.timeout:
                absent = missing[0]
            if absent is not None and absent in self._missing():  # not posted just before it ended
                return absent
            time.sleep(SLEEP)
        return None

    def differ(self) -> bool:
        """Whether a rank has posted another call; a rank that is ahead has made others."""
        posts = self._posts()
        return any(p >> HALF >= self._count and p != self._word for p in posts)

    def agree(self) -> bool:
        """Whether all ranks have posted the same call."""
        deadline = time.monotonic() + SETTLE
        while (balanced := self._balanced()) is False and time.monotonic() < deadline:
            os.sched_yield()  # memory of other cores may arrive in another order
        return balanced and not self.differ() and not self._missing()

    def texts(self, text: str) -> dict[int, str]:
        """The texts of the ranks that have posted this call, by rank; they have called this too.

        Args:
            text: the text of this rank.
        """
        data = text.encode()[: _text_bytes(self.size)]
        start = self._text(self.rank)
        self._memory[start : start + len(data)] = data
        self._cells[self._mine + LENGTH] = len(data)
        self._cells[self._mine + TEXT] = self._count
        posted = set(range(self.size)) - set(self._missing())
        deadline = time.monotonic() + TEXTS
        while time.monotonic() < deadline and any(not self._has_text(r) for r in posted):
            time.sleep(SLEEP)
        return {r: self._read(r) for r in sorted(posted) if self._has_text(r)}

    def state(self, rank: int) -> int:
        """ENDED or RAISED; 0 if the rank may still post."""
        state = self._cells[rank * CELLS + STATE]
        return state or (ENDED if rank != self.rank and self._is_free(rank) else 0)

    def count(self, rank: int) -> int:
        """Number of calls that a rank has posted."""
        first = rank * CELLS + POST
        return max(self._cells[first], self._cells[first + 1]) >> HALF

    def end(self) -> None:
        """Record that this rank makes no more calls."""
        self._cells[self._mine + STATE] = ENDED

    def _missing(self) -> list[int]:
        """Ranks that have not posted this call."""
        return [r for r, post in enumerate(self._posts()) if post >> HALF < self._count]

    def _posts(self) -> list[int]:
        slot = POST + (self._count & 1)
        return [self._cells[r * CELLS + slot] for r in range(self.size)]

    def _balanced(self) -> bool:
        slot = BALANCE + (self._count & 1)
        return not sum(self._cells[r * CELLS + slot] for r in range(self.size)) & MASK

    def _is_free(self, rank: int) -> bool:
        """Whether the lock of another rank has been released."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
        return True

    def _has_text(self, rank: int) -> bool:
        return self._cells[rank * CELLS + TEXT] == self._count

    def _read(self, rank: int) -> str:
        start = self._text(rank)
        stop = start + self._cells[rank * CELLS + LENGTH]
        return self._memory[start:stop].decode(errors="ignore")

    def _text(self, rank: int) -> int:
        return 8 * CELLS * self.size + _text_bytes(self.size) * rank


def _text_bytes(size: int) -> int:
    """Space for the text of a rank: a call, and two numbers of rows for every rank."""
    return 1024 + 64 * size


def _bytes(size: int) -> int:
    return size * (8 * CELLS + _text_bytes(size))


def _create(size: int) -> str | None:
    """A new file of zeros for a board, in memory if possible; None if it cannot be written."""
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    try:
        file, path = tempfile.mkstemp(prefix="meshshard-", dir=folder)
        with os.fdopen(file, "wb") as stream:
            stream.write(bytes(_bytes(size)))
    except OSError:
        return None
    return path
