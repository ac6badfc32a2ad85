"""Proof: a user's convolution, run on rows that are numbered otherwise, must give the same.

What is right on a shard minds neither how many rows there are, nor which is the first, nor what
rows that are no neighbours hold. So its first call runs it twice more, once among strangers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from meshshard.nn._evaluated import differ, evaluated
from meshshard.nn.conv._rings import Rings, apart, bipartite, padded
from meshshard.tensor.core import local_of, refuse

__all__ = ["Shuffled", "prove"]

WHY = (
    "its result depends on the number or the order of rows or edges, on rows that are no "
    "neighbours, or on edges that leave a node, as with x.size(0), x[0], a sum over rows, flipped "
    "edges: give it such numbers from outside, and a graph with the edges of both ways"
)


@dataclass(frozen=True, eq=False, kw_only=True)
class Shuffled(Rings):
    """Rings whose rows are numbered otherwise, with strangers among them, and edges of these.

    Attributes:
        order: (n_rows,) int64 which row of the plain rings stands where; beyond them strangers.
    """

    order: Tensor

    @staticmethod
    def of(rings: Rings) -> Shuffled:
        """The same edges; rows in a random order, and an eighth more of both than there were."""
        n_edges = _more(len(rings.names), [])
        taken = [n_edges, n_edges + 1]
        two = bipartite(rings.graph)
        n_to = _more(rings.n_to, taken) if two else 0
        n_rows = _more(rings.n_rows, [*taken, n_to])
        order = torch.randperm(n_rows, generator=torch.Generator().manual_seed(0))
        order = order.to(rings.names.device)
        strange = [rings.n_rows, rings.n_to]  # both ends of the other edges
        ends = rings.edge_index.new_tensor(strange)[:, None].expand(-1, n_edges - len(rings.names))
        source, to = torch.cat([rings.edge_index, ends], 1)
        place = torch.argsort(order)
        return Shuffled(
            rings.graph,
            n_rows,
            n_to or n_rows,
            torch.stack([place[source], to if two else place[to]]),
            padded(rings.origins, n_rows)[order],
            padded(rings.names, n_edges),
            rings.fetch,
            order=order,
        )

    @cached_property
    def place(self) -> Tensor:
        """(own sources,) where own rows stand."""
        return torch.argsort(self.order)[: self.graph.sources.own]

    def rows(self, x: Tensor) -> Tensor:
        """Own rows with their halo, and copies of them as strangers: (n_rows, …)."""
        local = self.graph.domain.exchange(x, self.graph.exchange)
        return _repeated(local, self.n_rows)[self.order]

    def edges(self, x: Tensor) -> Tensor:
        """Attributes of the edges, and copies of them for the others: (n_edges, …)."""
        every = x if self.fetch is None else self.graph.domain.exchange(x, self.fetch)
        return _repeated(every, len(self.names))

    def own(self, x: Tensor) -> Tensor:
        """Own rows of (n_rows, …)."""
        return x[self.place]

    def around(self, own: Tensor) -> Tensor:
        """Own rows where they stand, zeros elsewhere: (n_rows, …)."""
        return own.new_zeros(self.n_rows, *own.shape[1:]).index_copy(0, self.place, own)

    @property
    def arriving(self) -> None:
        """None: edges are not sorted by these destinations."""
        return


def _more(n: int, taken: Sequence[int]) -> int:
    return apart(n + n // 8 + 1, taken)


def _repeated(x: Tensor, n: int) -> Tensor:
    """The rows again and again, up to a number; zeros where there are none."""
    return x[torch.arange(n, device=x.device) % len(x)] if len(x) else padded(x, n)


def prove(conv: nn.Module, rings: Rings, out: Callable[[Rings], Any], name: str) -> None:
    """Refuse a convolution that minds what a shard does not know, on all ranks.

    Args:
        conv: the module.
        rings: what it runs on.
        out: what it makes of rings, own rows.
        name: what to call it.

    Communication: that of two calls, and one gather of objects.
    """
    found = []
    for each in (rings, Shuffled.of(rings)):
        with evaluated(conv, rings.graph.device):
            found.append(out(each))
    rings.graph.domain.together(lambda: _compare(found[0], found[1], name), name)


def _compare(mine: Any, other: Any, name: str) -> None:
    if isinstance(mine, (tuple, list)):
        for a, b in zip(mine, other, strict=True):
            _compare(a, b, name)
    elif isinstance(mine, Tensor) and differ(local_of(mine), local_of(other)):
        raise refuse(name, (), None, WHY)
