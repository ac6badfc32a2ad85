"""check_permutation_invariance: the check of a user-defined convolution at its first call.

On a shard, the result at a node may depend only on its neighbors and in-edges. So the convolution
is called twice more, the second time on a subgraph in another row order, with padding rows and
padding edges; the results at the owned nodes must be equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from meshshard.nn._eval_mode import differ, eval_mode
from meshshard.nn.conv._subgraph import HaloSubgraph, is_bipartite, pad_rows, unused_count
from meshshard.tensor.shard_tensor import NoShardRule, local_of

__all__ = ["PermutedSubgraph", "check_permutation_invariance"]

WHY = (
    "the result at a node may depend only on its neighbors and in-edges, but it depends on the "
    "number or the order of rows or edges, on rows that are not neighbors, or on edges that leave "
    "a node, as x.size(0), x[0], x.mean(0), edge_index.flip(0) and sums at edge_index[0] do; "
    "compute such numbers outside and pass them in, and give it a graph with edges both ways"
)


@dataclass(frozen=True, eq=False, kw_only=True)
class PermutedSubgraph(HaloSubgraph):
    """A halo subgraph in a random row order, with an eighth more rows and edges as padding.

    Features of padding rows lie above the largest or, every third, below the smallest value of
    their column, so that sums, medians, maxima and minima over rows change. Integer features are
    copies of real rows.
    Where not all edges that leave a node are known, padding edges leave the real rows.

    Attributes:
        order: (n_rows,) int64 row of the original subgraph at each place, or a padding row.
    """

    order: Tensor

    @staticmethod
    def of(subgraph: HaloSubgraph) -> PermutedSubgraph:
        """The permuted and padded copy of a subgraph."""
        old, two = len(subgraph.edge_keys), is_bipartite(subgraph.graph)
        n_edges = _larger(old, [])
        used = [n_edges, n_edges + 1]
        n_to = _larger(subgraph.n_destinations, used) if two else 0
        n_rows = _larger(subgraph.n_rows, [*used, n_to])
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(n_rows, generator=generator).to(subgraph.edge_keys.device)
        place = torch.argsort(order)
        sources = torch.arange(n_edges - old, device=order.device) % subgraph.n_rows
        if subgraph.hops == 2:
            sources = torch.full_like(sources, subgraph.n_rows)
        padding = torch.stack([sources, torch.full_like(sources, subgraph.n_destinations)])
        source, to = torch.cat([subgraph.edge_index, padding], 1)
        return PermutedSubgraph(
            subgraph.graph,
            subgraph.hops,
            n_rows,
            n_to or n_rows,
            torch.stack([place[source], to if two else place[to]]),
            pad_rows(subgraph.row_keys, n_rows)[order],
            pad_rows(subgraph.edge_keys, n_edges),
            subgraph.fetch,
            order=order,
        )

    @cached_property
    def owned_places(self) -> Tensor:
        """(own sources,) int64 place of each owned row."""
        return torch.argsort(self.order)[: self.graph.sources.own]

    def rows(self, owned: Tensor) -> Tensor:
        """(n_rows, …) owned rows, their halo, and padding, in the permuted order."""
        return super().rows(owned)[self.order]

    def owned(self, x: Tensor) -> Tensor:
        """Owned rows of (n_rows, …)."""
        return x[self.owned_places]

    def place(self, owned: Tensor) -> Tensor:
        """(n_rows, …) owned rows in their places, zeros elsewhere."""
        zeros = owned.new_zeros(self.n_rows, *owned.shape[1:])
        return zeros.index_copy(0, self.owned_places, owned)

    @property
    def edge_sum(self) -> None:
        """None: edges are not sorted by destination."""
        return

    def _pad(self, x: Tensor, n: int) -> Tensor:
        if not len(x) or not x.is_floating_point():
            return x[torch.arange(n, device=x.device) % len(x)] if len(x) else pad_rows(x, n)
        high, low = x.amax(0), x.amin(0)
        high, low = torch.maximum(3 * high, high / 3), torch.minimum(3 * low, low / 3)
        rows = torch.stack([high, low, high])[torch.arange(n - len(x), device=x.device) % 3]
        return torch.cat([x, rows])


def _larger(n: int, used: Sequence[int]) -> int:
    return unused_count(n + n // 8 + 1, used)


def check_permutation_invariance(
    conv: nn.Module, subgraph: HaloSubgraph, call: Callable[[HaloSubgraph], Any], name: str
) -> None:
    """Raise on all ranks if a convolution depends on what differs between shards.

    Args:
        conv: the convolution.
        subgraph: what it is called with.
        call: returns its result at the owned nodes, given a subgraph.
        name: its name in errors.

    Raises:
        NoShardRule: on one rank.
        DomainError: on several ranks, on every one.

    Communication: that of two calls, and on several ranks one gather of objects.
    """
    results = []
    for each in (subgraph, PermutedSubgraph.of(subgraph)):
        with eval_mode(conv, subgraph.graph.device):
            results.append(call(each))
    domain = subgraph.graph.domain
    if domain.size == 1:
        _require_equal(results[0], results[1], name)
    else:
        domain.run_collectively(lambda: _require_equal(results[0], results[1], name), name)


def _require_equal(a: Any, b: Any, name: str) -> None:
    if isinstance(a, (tuple, list)):
        for p, q in zip(a, b, strict=True):
            _require_equal(p, q, name)
    elif isinstance(a, Tensor) and differ(local_of(a), local_of(b)):
        raise NoShardRule(f"{name} is not exact on shards: {WHY}")
