"""MeshGraphNet: messages along the edges of a mesh, on one scale or several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshshard.errors import MeshshardError, n_of
from meshshard.nn.graph.coarsen import Level
from meshshard.nn.graph.mesh_block import MeshBlock, mlp
from meshshard.tensor import ShardGraph, Sharding, ShardTensor

__all__ = ["MeshGraphNet"]


class MeshGraphNet(nn.Module):
    """Encoder of nodes and edges, blocks with residuals, decoder of nodes; on coarse levels too.

    With levels it is one V, down to the coarsest and up. A coarse node starts as the mean of its
    cluster, a coarse edge as what its ends make of each other; on the way up a node adds its
    cluster's row. Sharded it equals serial: all sums over in-edges run in the order of the whole
    graph.

    Pfaff et al. 2021, arXiv 2010.03409; levels after Fortunato et al. 2022, arXiv 2210.00612.

    Communication: one exchange for each block, and one for each way down or up, forward and
    backward, of `hidden` numbers for each halo row.
    """

    def __init__(
        self,
        in_dim: int,
        edge_dim: int,
        out_dim: int,
        hidden: int = 128,
        layers: int | Sequence[int] = 15,
        depth: int = 2,
    ) -> None:
        """A model with random weights.

        Args:
            in_dim: numbers of a node.
            edge_dim: numbers of an edge.
            out_dim: numbers that are predicted for each node.
            hidden: width of all layers.
            layers: blocks, so how many edges away a node is heard; with levels those of each, the
                finest first, and as many on its way up.
            depth: linear layers of every network.
        """
        super().__init__()
        each = (layers,) if isinstance(layers, int) else tuple(layers)
        self.encode_nodes = mlp(in_dim, hidden, hidden, depth)
        self.encode_edges = mlp(edge_dim, hidden, hidden, depth)
        self.joints = nn.ModuleList(mlp(2 * hidden, hidden, hidden, depth) for _ in each[1:])
        self.down = nn.ModuleList(_blocks(hidden, n, depth) for n in each)
        self.up = nn.ModuleList(_blocks(hidden, n, depth) for n in each[:-1])
        self.decode = mlp(hidden, hidden, out_dim, depth, norm=False)

    def forward(
        self, x: Any, graph: ShardGraph | Tensor, edge_attr: Any, levels: Sequence[Level] = ()
    ) -> Any:
        """Predict one row for each node.

        Args:
            x: (n_nodes, in_dim) nodes, sharded, or plain on one rank.
            graph: the edges; or PyG's (2, n_edges) edge_index, on one rank.
            edge_attr: (n_edges, edge_dim) edges, divided as `graph.edges`.
            levels: one fewer than there are `layers`, each made by `nn.coarsen` of the one before.

        Returns:
            (n_nodes, out_dim) the same kind as x.

        Raises:
            MeshshardError: another number of levels or edges, or rows that are divided otherwise.
        """
        if len(levels) != len(self.joints):
            raise MeshshardError(
                f"{n_of(len(levels), 'coarse levels')}; the model has {len(self.joints)}"
            )
        if isinstance(graph, Tensor):
            graph, edge_attr = _serial(graph, len(x), edge_attr)
        graphs = [graph, *[level.graph for level in levels]]
        nodes, edges = [self.encode_nodes(x)], [self.encode_edges(edge_attr)]
        for i, blocks in enumerate(self.down):
            if i:
                nodes.append(levels[i - 1].coarse(nodes[-1]))
                edges.append(self.joints[i - 1](_joined(nodes[-1], graphs[i])))
            nodes[i], edges[i] = _run(blocks, nodes[i], graphs[i], edges[i])
        for i in reversed(range(len(levels))):
            nodes[i] = nodes[i] + levels[i].fine(nodes[i + 1])
            nodes[i], edges[i] = _run(self.up[i], nodes[i], graphs[i], edges[i])
        return self.decode(nodes[0])


def _serial(edge_index: Tensor, n: int, edge_attr: Tensor) -> tuple[ShardGraph, Tensor]:
    """The graph on one rank, and its edges in the order that it has."""
    from meshshard.comm import Domain

    graph = ShardGraph.from_edge_index(edge_index, Sharding(Domain(), [n]))
    return graph, graph.take(edge_attr).to_local()


def _blocks(hidden: int, n: int, depth: int) -> nn.ModuleList:
    return nn.ModuleList(MeshBlock(hidden, depth=depth) for _ in range(n))


def _run(blocks: Any, x: Any, graph: ShardGraph, e: Any) -> tuple[Any, Any]:
    for block in blocks:
        x, e = block(x, graph, e)
    return x, e


def _joined(x: Any, graph: ShardGraph) -> Any:
    """Rows of both ends of every edge, the same kind as x."""
    both: Any = torch.cat(list(graph.lift(x)), -1)
    return both if isinstance(x, ShardTensor) else both.to_local()
