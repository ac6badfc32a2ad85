"""mesh_block: a layer that updates edges and then nodes, that of MeshGraphNets.

The first linear layer of the edges is one of [x_i, x_j, e]. Told apart, its products with nodes are
made once for each node, not for each edge; the halo of the product travels while the edges' own is
computed. Exact but for the order of three additions.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from meshshard.comm import linear
from meshshard.errors import MeshshardError
from meshshard.nn.graph._sparse import Ends
from meshshard.tensor import ShardGraph, Sharding, ShardTensor

__all__ = ["MeshBlock", "mlp"]

RUN = 8192  # edges whose rows are added at a time


def mlp(inputs: int, hidden: int, out: int, depth: int = 2, norm: bool = True) -> nn.Sequential:
    """Linear layers, `depth` of them, with SiLU between them, and LayerNorm behind them.

    Raises:
        MeshshardError: no layer at all.
    """
    if depth < 1:
        raise MeshshardError(f"networks of {depth} linear layers; take 1 or more")
    sizes = [inputs, *[hidden] * (depth - 1), out]
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.SiLU()]
    return nn.Sequential(*layers[:-1], *([nn.LayerNorm(out)] if norm else []))


class MeshBlock(nn.Module):
    """e + MLP([x_i, x_j, e]) of every edge j -> i, then x + MLP([x, sum of the new e]).

    The block of MeshGraphNets (Pfaff et al. 2021, arXiv 2010.03409).

    Communication: one exchange forward and backward, of `hidden` numbers for each halo row.
    """

    def __init__(self, width: int, hidden: int | None = None, depth: int = 2) -> None:
        """Networks of `depth` linear layers.

        Args:
            width: numbers of a node and of an edge.
            hidden: width of the layers between.
            depth: linear layers of each network.
        """
        super().__init__()
        hidden = hidden or width
        self.width = width
        self.edges = mlp(3 * width, hidden, width, depth)
        self.nodes = mlp(2 * width, hidden, width, depth)

    def forward(self, x: Any, graph: ShardGraph, e: Any) -> tuple[Any, Any]:
        """New nodes and edges.

        Args:
            x: (n_nodes, width) nodes, sharded, or plain on one rank.
            graph: the edges.
            e: (n_edges, width) edges, divided as `graph.edges`.

        Returns:
            The same two, new.

        Raises:
            MeshshardError: on every rank, where nodes or edges are divided otherwise.
        """
        sharded = type(x) is ShardTensor
        if sharded:
            _agree(x, graph.nodes, "nodes")
            _agree(e, graph.edges, "edges")
        rows, own = (x.to_local(), e.to_local()) if sharded else (x, e)
        new_edges = own + self.edges[1:](self._first(rows, graph, own))
        arrived = linear.apply(Ends.of(graph).arriving, new_edges)
        new_nodes = rows + self.nodes(torch.cat([rows, arrived], -1))
        if not sharded:
            return new_nodes, new_edges
        return (
            ShardTensor.from_local(new_nodes, graph.nodes),
            ShardTensor.from_local(new_edges, graph.edges),
        )

    def _first(self, x: Tensor, graph: ShardGraph, e: Tensor) -> Tensor:
        """The first linear layer of the edges, told apart."""
        first: Any = self.edges[0]
        to, source, edge = first.weight.split(self.width, dim=1)
        running = graph.exchange.start(F.linear(x, source))
        at = F.linear(x, to)
        out = F.linear(e, edge, first.bias)
        joined: Tensor = _Joined.apply(out, running.finish(), at, Ends.of(graph))  # type: ignore[no-untyped-call]
        return joined


def _agree(x: Any, wanted: Sharding, what: str) -> None:
    """The same on every rank, for no rank may go on alone."""
    if type(x) is not ShardTensor or x.sharding != wanted or x.sharded_dim != 0:
        kind = f"dim {x.sharded_dim} in {x.sharding}" if type(x) is ShardTensor else "plain"
        raise MeshshardError(
            f"MeshBlock: {what} {tuple(x.shape)}, {kind}, are not divided as the graph's: "
            f"{wanted}; of a whole edge_attr graph.take(edge_attr) makes own rows"
        )


class _Joined(torch.autograd.Function):
    """Rows of edges, with those of both ends added in place."""

    @staticmethod
    def forward(ctx: Any, e: Tensor, x: Tensor, at: Tensor, ends: Ends) -> Tensor:
        """The value."""
        ctx.ends = ends
        ctx.mark_dirty(e)
        for a in range(0, e.shape[0], RUN):
            some = slice(a, a + RUN)
            rows = e[some]
            rows += at.index_select(0, ends.destinations.index[some])
            rows += x.index_select(0, ends.sources.index[some])
        return e

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """The value of the adjoint."""
        ends: Ends = ctx.ends
        x = linear.apply(ends.sources.adjoint(), grad)
        return grad, x, linear.apply(ends.arriving, grad), None
