"""Ring: blocks of rows go round the ranks, the next one under way while one is used.

The third of three mechanisms: every row meets every row, and no rank holds more than its own and a
block of another's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshshard.comm import process_group
from meshshard.comm.domain import Domain

__all__ = ["Block", "Ring"]

Take = Callable[[int, int], Tensor]  # own rows from one to before another, (n, width)
Add = Callable[[int, Tensor], None]  # add (n, width) to own rows from one on
ROWS = 1024  # of a block: what is under way is small beside the rows of a rank


@dataclass(frozen=True)
class Block:
    """Rows of one rank.

    Attributes:
        source: the rank that owns them.
        number: which of its blocks this is.
        rows: (n, width) the rows, None where they are own ones.
        start: row of the owner where they begin.
        stop: row of the owner before which they end.
        first: id of the first of them.
    """

    source: int
    number: int
    rows: Tensor | None
    start: int
    stop: int
    first: int


class Ring:
    """The blocks of all ranks, each met once by every rank; not differentiable.

    Every rank has equally many blocks, of uneven size, some empty: all make the same calls.

    Attributes:
        domain: the ranks.
        sizes: rows of each rank.
        number: blocks of each rank.
    """

    def __init__(self, domain: Domain, sizes: Sequence[int]) -> None:
        self.domain = domain
        self.sizes = tuple(sizes)
        self.number = max(1, -(-max(self.sizes) // ROWS))
        self._back: tuple[int, process_group.Pending] | None = None

    def cut(self, source: int, number: int) -> tuple[int, int]:
        """Rows of their owner, first and last but one, that are in a block."""
        n = self.sizes[source]
        return n * number // self.number, n * (number + 1) // self.number

    def blocks(self, take: Take) -> Iterator[Block]:
        """All own rows, then every block of every other rank; the next comes while one is used.

        Communication: ranks - 1 all-to-alls, each to one peer, for each block of a rank.
        """
        rank, size = self.domain.rank, self.domain.size
        steps = [(number, step) for number in range(self.number) for step in range(1, size)]
        under_way = self._start(steps[0], take, None) if steps else None
        yield Block(rank, 0, None, 0, self.sizes[rank], sum(self.sizes[:rank]))
        for i, (number, step) in enumerate(steps):
            assert under_way is not None
            rows = under_way.wait()
            under_way = self._start(steps[i + 1], take, rows) if i + 1 < len(steps) else None
            source = (rank - step) % size
            start, stop = self.cut(source, number)
            yield Block(source, number, rows, start, stop, sum(self.sizes[:source]) + start)

    def _start(self, at: tuple[int, int], take: Take, rows: Tensor | None) -> process_group.Pending:
        """The message of one block and step: own rows first, then what has come goes on."""
        number, step = at
        if step == 1:
            rows = take(*self.cut(self.domain.rank, number))
        assert rows is not None
        start, stop = self.cut((self.domain.rank - step) % self.domain.size, number)
        return self._send(rows, 1, stop - start, "ring")

    def give_back(self, block: Block, grads: Tensor, add: Add) -> None:
        """Add what was found for a block of another rank to its own rows; `finish` after the last.

        Args:
            block: as it came.
            grads: (n, width) for the rows of the block.
            add: what adds a share of any rank to own rows.

        Communication: one all-to-all to one peer.
        """
        self.finish(add)
        start, stop = self.cut(self.domain.rank, block.number)
        steps = (self.domain.rank - block.source) % self.domain.size
        self._back = start, self._send(grads, -steps, stop - start, "ring back")

    def finish(self, add: Add) -> None:
        """Add what is under way."""
        if self._back is None:
            return
        start, under_way = self._back
        add(start, under_way.wait())
        self._back = None

    def _send(self, rows: Tensor, steps: int, receive: int, kind: str) -> process_group.Pending:
        """Rows to the rank `steps` further, others from the rank `steps` before."""
        size, rank = self.domain.size, self.domain.rank
        to, come = [0] * size, [0] * size
        to[(rank + steps) % size] = len(rows)
        come[(rank - steps) % size] = receive
        with torch.no_grad():
            return process_group.start_all_to_all(self.domain, rows, to, come, kind)
