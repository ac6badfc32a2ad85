"""MeshBlock: the layer of MeshGraphNets, which updates the edges and then the nodes.

The first linear layer of the edges acts on [x_i, x_j, e]. It is split into three, so that the node
terms are computed once per node rather than once per edge, and the halo of one of them is exchanged
while the edge term is computed. Exact up to the order of three additions.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from meshshard.comm import linear
from meshshard.errors import MeshshardError
from meshshard.nn.graph._sparse import Incidence
from meshshard.tensor import ShardGraph, Sharding, ShardTensor

__all__ = ["MeshBlock", "mlp"]

RUN = 8192  # edges whose rows are added at a time


def mlp(inputs: int, hidden: int, out: int, depth: int = 2, norm: bool = True) -> nn.Sequential:
    """`depth` linear layers with SiLU between them, and a LayerNorm at the end if `norm`.

    Raises:
        MeshshardError: `depth` is less than 1.
    """
    if depth < 1:
        raise MeshshardError(f"networks of {depth} linear layers; depth must be 1 or more")
    sizes = [inputs, *[hidden] * (depth - 1), out]
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.SiLU()]
    return nn.Sequential(*layers[:-1], *([nn.LayerNorm(out)] if norm else []))


class MeshBlock(nn.Module):
    """Every edge j -> i becomes e + MLP([x_i, x_j, e]), then every node x + MLP([x, sum of its e]).

    The block of MeshGraphNets (Pfaff et al. 2021, arXiv 2010.03409).

    Communication: one exchange forward and one backward, of `hidden` numbers per halo row.
    """

    def __init__(self, width: int, hidden: int | None = None, depth: int = 2) -> None:
        """Create the edge network and the node network.

        Args:
            width: channels of nodes and edges.
            hidden: width of the hidden layers; `width` by default.
            depth: linear layers of each network.
        """
        super().__init__()
        hidden = hidden or width
        self.width = width
        self.edges = mlp(3 * width, hidden, width, depth)
        self.nodes = mlp(2 * width, hidden, width, depth)

    def forward(self, x: Any, graph: ShardGraph, e: Any) -> tuple[Any, Any]:
        """Update nodes and edges.

        Args:
            x: (n_nodes, width) nodes, sharded like `graph.nodes`; or plain on one rank.
            graph: the edges.
            e: (n_edges, width) edges, sharded like `graph.edges`; or plain on one rank.

        Returns:
            The new nodes and the new edges.

        Raises:
            MeshshardError: nodes or edges are sharded differently; raised on every rank.
        """
        sharded = type(x) is ShardTensor
        if sharded:
            _require_sharding(x, graph.nodes, "nodes")
            _require_sharding(e, graph.edges, "edges")
        rows, own = (x.to_local(), e.to_local()) if sharded else (x, e)
        new_edges = own + self.edges[1:](self._first_layer(rows, graph, own))
        incoming = linear.apply(Incidence.of(graph).incoming, new_edges)
        new_nodes = rows + self.nodes(torch.cat([rows, incoming], -1))
        if not sharded:
            return new_nodes, new_edges
        return (
            ShardTensor.from_local(new_nodes, graph.nodes),
            ShardTensor.from_local(new_edges, graph.edges),
        )

    def _first_layer(self, x: Tensor, graph: ShardGraph, e: Tensor) -> Tensor:
        """The first linear layer of the edges, as a sum of three products."""
        first: Any = self.edges[0]
        to, source, edge = first.weight.split(self.width, dim=1)
        pending = graph.exchange.start(F.linear(x, source))
        at = F.linear(x, to)
        out = F.linear(e, edge, first.bias)
        added: Tensor = _AddNodeTerms.apply(out, pending.finish(), at, Incidence.of(graph))  # type: ignore[no-untyped-call]
        return added


def _require_sharding(x: Any, wanted: Sharding, what: str) -> None:
    """Raise unless rows are sharded as expected; the outcome is the same on every rank."""
    if type(x) is not ShardTensor or x.sharding != wanted or x.sharded_dim != 0:
        got = "plain"
        if type(x) is ShardTensor:
            got = f"sharded on dim {x.sharded_dim} with {x.sharding}"
        raise MeshshardError(
            f"MeshBlock: {what} {tuple(x.shape)} are {got}; expected the graph's {wanted} on dim "
            f"0: shard(x, domain, graph.nodes), graph.take(edge_attr)"
        )


class _AddNodeTerms(torch.autograd.Function):
    """Add the rows of both ends to the rows of edges, in place."""

    @staticmethod
    def forward(ctx: Any, e: Tensor, x: Tensor, at: Tensor, ends: Incidence) -> Tensor:
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
        ends: Incidence = ctx.ends
        x = linear.apply(ends.sources.adjoint(), grad)
        return grad, x, linear.apply(ends.incoming, grad), None
