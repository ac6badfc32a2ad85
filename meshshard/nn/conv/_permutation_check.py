"""Proof: a user's convolution, run on rows that are numbered otherwise, must give the same.

What is right on a shard minds neither how many rows there are, nor which is the first, nor what
rows that are no neighbors hold. So its first call runs it twice more, once among strangers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from meshshard.nn._eval_mode import differ, evaluated
from meshshard.nn.conv._subgraph import HaloSubgraph, apart, bipartite, padded
from meshshard.tensor.shard_tensor import local_of, refuse

__all__ = ["PermutedSubgraph", "check_permutation_invariance"]

WHY = (
    "its result depends on the number or the order of rows or edges, on rows that are no "
    "neighbors, or on edges that leave a node, as with x.size(0), x[0], a sum over rows, flipped "
    "edges: give it such numbers from outside, and a graph with the edges of both ways"
)


@dataclass(frozen=True, eq=False, kw_only=True)
class PermutedSubgraph(HaloSubgraph):
    """A halo subgraph in another row order, with padding rows and padding edges among the others.

    Attributes:
        order: (n_rows,) int64 which row of the plain hops stands where; beyond them strangers.
    """

    order: Tensor

    @staticmethod
    def of(hops: HaloSubgraph) -> PermutedSubgraph:
        """The same edges; rows in a random order, and an eighth more of both than there were."""
        n_edges = _more(len(hops.names), [])
        taken = [n_edges, n_edges + 1]
        two = bipartite(hops.graph)
        n_to = _more(hops.n_to, taken) if two else 0
        n_rows = _more(hops.n_rows, [*taken, n_to])
        order = torch.randperm(n_rows, generator=torch.Generator().manual_seed(0))
        order = order.to(hops.names.device)
        strange = [hops.n_rows, hops.n_to]  # both ends of the other edges
        ends = hops.edge_index.new_tensor(strange)[:, None].expand(-1, n_edges - len(hops.names))
        source, to = torch.cat([hops.edge_index, ends], 1)
        place = torch.argsort(order)
        return PermutedSubgraph(
            hops.graph,
            n_rows,
            n_to or n_rows,
            torch.stack([place[source], to if two else place[to]]),
            padded(hops.origins, n_rows)[order],
            padded(hops.names, n_edges),
            hops.fetch,
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


def check_permutation_invariance(
    conv: nn.Module, hops: HaloSubgraph, out: Callable[[HaloSubgraph], Any], name: str
) -> None:
    """Refuse a convolution that minds what a shard does not know, on all ranks.

    Args:
        conv: the module.
        hops: what it runs on.
        out: what it makes of hops, own rows.
        name: what to call it.

    Communication: that of two calls, and one gather of objects.
    """
    found = []
    for each in (hops, PermutedSubgraph.of(hops)):
        with evaluated(conv, hops.graph.device):
            found.append(out(each))
    hops.graph.domain.run_collectively(lambda: _compare(found[0], found[1], name), name)


def _compare(mine: Any, other: Any, name: str) -> None:
    if isinstance(mine, (tuple, list)):
        for a, b in zip(mine, other, strict=True):
            _compare(a, b, name)
    elif isinstance(mine, Tensor) and differ(local_of(mine), local_of(other)):
        raise refuse(name, (), None, WHY)
