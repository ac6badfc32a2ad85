"""MeshGraphNet: message passing along the edges of a mesh, on one level or several."""

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
    """Encoders of nodes and edges, residual message-passing blocks, and a decoder of nodes.

    With coarse levels the blocks form a V-cycle, from the finest level to the coarsest and back. A
    coarse node starts as the mean of its cluster, a coarse edge as an MLP of its two ends; on the
    way back each node adds the row of its cluster. Sums over in-edges are in the order of the whole
    graph, so sharded results equal serial ones.

    Source: Pfaff et al. 2021 (2010.03409); levels after Fortunato et al. 2022 (2210.00612).

    Communication: for each block, and for each step to a coarser or finer level, one exchange of
    `hidden` numbers a halo row, forward and backward.
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
        """Create a model with random weights.

        Args:
            in_dim: number of features of a node.
            edge_dim: number of features of an edge.
            out_dim: number of outputs for each node.
            hidden: width of all hidden layers.
            layers: number of blocks, which is the number of hops that a node's features travel.
                With levels, the number of blocks on each level, the finest first; on the way back
                every level but the coarsest has the same number again.
            depth: number of linear layers in each MLP.
        """
        super().__init__()
        each = (layers,) if isinstance(layers, int) else tuple(layers)
        self.encode_nodes = mlp(in_dim, hidden, hidden, depth)
        self.encode_edges = mlp(edge_dim, hidden, hidden, depth)
        self.encode_coarse = nn.ModuleList(mlp(2 * hidden, hidden, hidden, depth) for _ in each[1:])
        self.down = nn.ModuleList(_blocks(hidden, n, depth) for n in each)
        self.up = nn.ModuleList(_blocks(hidden, n, depth) for n in each[:-1])
        self.decode = mlp(hidden, hidden, out_dim, depth, norm=False)

    def forward(
        self, x: Any, graph: ShardGraph | Tensor, edge_attr: Any, levels: Sequence[Level] = ()
    ) -> Any:
        """Outputs of all nodes.

        Args:
            x: (n_nodes, in_dim) node features, sharded by rows, or plain on one rank.
            graph: the graph; or PyG's edge_index (2, n_edges) int64, on one rank.
            edge_attr: (n_edges, edge_dim) edge features, sharded like `graph.edges`.
            levels: the coarse levels, one fewer than there are numbers in `layers`; each is made
                from the one before by `nn.coarsen`.

        Returns:
            (n_nodes, out_dim), sharded or plain like x.

        Raises:
            MeshshardError: another number of levels or edges, or another sharding.
        """
        if len(levels) != len(self.encode_coarse):
            raise MeshshardError(
                f"MeshGraphNet: got {n_of(len(levels), 'coarse levels')}, the model was built for "
                f"{len(self.encode_coarse)}"
            )
        if isinstance(graph, Tensor):
            graph, edge_attr = _serial(graph, len(x), edge_attr)
        graphs = [graph, *[level.graph for level in levels]]
        nodes, edges = [self.encode_nodes(x)], [self.encode_edges(edge_attr)]
        for i, blocks in enumerate(self.down):
            if i:
                nodes.append(levels[i - 1].coarse(nodes[-1]))
                edges.append(self.encode_coarse[i - 1](_both_ends(nodes[-1], graphs[i])))
            nodes[i], edges[i] = _pass_messages(blocks, nodes[i], graphs[i], edges[i])
        for i in reversed(range(len(levels))):
            nodes[i] = nodes[i] + levels[i].fine(nodes[i + 1])
            nodes[i], edges[i] = _pass_messages(self.up[i], nodes[i], graphs[i], edges[i])
        return self.decode(nodes[0])


def _serial(edge_index: Tensor, n: int, edge_attr: Tensor) -> tuple[ShardGraph, Tensor]:
    """The graph on one rank, and the edge features in its order of edges."""
    from meshshard.comm import Domain

    graph = ShardGraph.from_edge_index(edge_index, Sharding(Domain(), [n]))
    return graph, graph.take(edge_attr).to_local()


def _blocks(hidden: int, n: int, depth: int) -> nn.ModuleList:
    return nn.ModuleList(MeshBlock(hidden, depth=depth) for _ in range(n))


def _pass_messages(blocks: Any, x: Any, graph: ShardGraph, e: Any) -> tuple[Any, Any]:
    for block in blocks:
        x, e = block(x, graph, e)
    return x, e


def _both_ends(x: Any, graph: ShardGraph) -> Any:
    """Rows of both ends of every edge, concatenated, sharded or plain like x."""
    both: Any = torch.cat(list(graph.lift(x)), -1)
    return both if isinstance(x, ShardTensor) else both.to_local()
