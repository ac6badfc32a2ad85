"""Ring: blocks of rows pass from rank to rank; the next one is sent while one is used.

The third of three mechanisms, for all pairs of rows: no rank holds more than its owned rows and one
block of another rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshshard.comm.ranks import Pending, Ranks

__all__ = ["Block", "Ring"]

Take = Callable[[int, int], Tensor]  # take(start, stop): these owned rows as (stop - start, width)
Add = Callable[[int, Tensor], None]  # add(start, x): add (n, width) to the owned rows from `start`
ROWS = 1024  # at most in a block: what is being sent is small beside the rows of a rank


@dataclass(frozen=True)
class Block:
    """Consecutive rows of one rank.

    Attributes:
        source: the rank that owns them.
        number: index of the block among those of its owner.
        rows: (n, width) the rows; None for the owned rows of this rank.
        start: the owner's row at which the block starts.
        stop: the owner's row before which it stops.
        first: global id of its first row.
    """

    source: int
    number: int
    rows: Tensor | None
    start: int
    stop: int
    first: int


class Ring:
    """Brings every block of rows to every rank, once; not differentiable.

    All ranks have the same number of blocks, so that all make the same calls. The blocks of a rank
    differ in size from those of others, and may be empty.

    Attributes:
        ranks: the ranks.
        sizes: owned rows of every rank.
        number: number of blocks of every rank.
    """

    def __init__(self, ranks: Ranks, sizes: Sequence[int]) -> None:
        self.ranks = ranks
        self.sizes = tuple(sizes)
        self.number = max(1, -(-max(self.sizes) // ROWS))
        self._back: tuple[int, Pending] | None = None

    def cut(self, source: int, number: int) -> tuple[int, int]:
        """Start and stop of a block, as rows of its owner."""
        n = self.sizes[source]
        return n * number // self.number, n * (number + 1) // self.number

    def blocks(self, take: Take) -> Iterator[Block]:
        """All owned rows as one block, then every block of every other rank.

        The next block is being received while one is used.

        Args:
            take: returns some of the owned rows.

        Communication: ranks - 1 all-to-alls, each with one peer, for each block of a rank.
        """
        rank, size = self.ranks.rank, self.ranks.size
        steps = [(number, step) for number in range(self.number) for step in range(1, size)]
        pending = self._start(steps[0], take, None) if steps else None
        yield Block(rank, 0, None, 0, self.sizes[rank], self.ranks.offset(self.sizes))
        for i, (number, step) in enumerate(steps):
            assert pending is not None
            rows = pending.wait()
            pending = self._start(steps[i + 1], take, rows) if i + 1 < len(steps) else None
            source = (rank - step) % size
            start, stop = self.cut(source, number)
            yield Block(source, number, rows, start, stop, sum(self.sizes[:source]) + start)

    def _start(self, at: tuple[int, int], take: Take, rows: Tensor | None) -> Pending:
        """Start one step of one block: send owned rows first, then the rows just received."""
        number, step = at
        if step == 1:
            rows = take(*self.cut(self.ranks.rank, number))
        assert rows is not None
        start, stop = self.cut((self.ranks.rank - step) % self.ranks.size, number)
        return self._send(rows, 1, stop - start, "ring")

    def give_back(self, block: Block, grads: Tensor, add: Add) -> None:
        """Send the gradients of another rank's block to its owner, and add those sent here before.

        Call `finish` after the last block.

        Args:
            block: as yielded by `blocks`.
            grads: (n, width) gradients of its rows.
            add: adds gradients from any rank to owned rows.

        Communication: one all-to-all with one peer.
        """
        self.finish(add)
        start, stop = self.cut(self.ranks.rank, block.number)
        steps = (self.ranks.rank - block.source) % self.ranks.size
        self._back = start, self._send(grads, -steps, stop - start, "ring back")

    def finish(self, add: Add) -> None:
        """Wait for the gradients that are being received, and add them."""
        if self._back is None:
            return
        start, pending = self._back
        add(start, pending.wait())
        self._back = None

    def _send(self, rows: Tensor, steps: int, n_receive: int, kind: str) -> Pending:
        """Start to send to the rank `steps` after this one, and to receive from `steps` before."""
        size, rank = self.ranks.size, self.ranks.rank
        send, receive = [0] * size, [0] * size
        send[(rank + steps) % size] = len(rows)
        receive[(rank - steps) % size] = n_receive
        with torch.no_grad():
            return self.ranks.start_all_to_all(rows, send, receive, kind)
