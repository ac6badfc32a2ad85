"""MeshGraphNet: messages along the edges of a mesh, as a complete surrogate."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from meshshard.nn.mesh_block import MeshBlock, mlp
from meshshard.tensor import ShardGraph, Sharding

__all__ = ["MeshGraphNet"]


class MeshGraphNet(nn.Module):
    """Encoder of nodes and edges, blocks with residuals, decoder of nodes.

    Pfaff et al. 2021, arXiv 2010.03409. Sharded it equals serial: all sums over in-edges run in the
    order of the whole graph.

    Communication: one exchange for each layer, forward and backward, of `hidden` numbers for each
    halo row.
    """

    def __init__(
        self,
        node_in: int,
        edge_in: int,
        out: int,
        hidden: int = 128,
        layers: int = 15,
        depth: int = 2,
    ) -> None:
        """A model with random weights.

        Args:
            node_in: numbers of a node.
            edge_in: numbers of an edge.
            out: numbers that are predicted for each node.
            hidden: width of all layers.
            layers: blocks, so how many edges away a node is heard.
            depth: linear layers of every network.
        """
        super().__init__()
        self.encode_nodes = mlp(node_in, hidden, hidden, depth)
        self.encode_edges = mlp(edge_in, hidden, hidden, depth)
        self.blocks = nn.ModuleList(MeshBlock(hidden, depth=depth) for _ in range(layers))
        self.decode = mlp(hidden, hidden, out, depth, norm=False)

    def forward(self, x: Any, graph: ShardGraph | Tensor, edge_attr: Any) -> Any:
        """Predict one row for each node.

        Args:
            x: (n_nodes, node_in) nodes, sharded, or plain on one rank.
            graph: the edges; or PyG's (2, n_edges) edge_index, on one rank.
            edge_attr: (n_edges, edge_in) edges, divided as `graph.edges`.

        Returns:
            (n_nodes, out) the same kind as x.
        """
        if isinstance(graph, Tensor):
            graph, edge_attr = _serial(graph, len(x), edge_attr)
        x, e = self.encode_nodes(x), self.encode_edges(edge_attr)
        for block in self.blocks:
            x, e = block(x, graph, e)
        return self.decode(x)


def _serial(edge_index: Tensor, n: int, edge_attr: Tensor) -> tuple[ShardGraph, Tensor]:
    """The graph on one rank, and its edges in the order that it has."""
    from meshshard.comm import Domain

    graph = ShardGraph.from_edge_index(edge_index, Sharding(Domain(), [n]))
    return graph, graph.take(edge_attr).to_local()
