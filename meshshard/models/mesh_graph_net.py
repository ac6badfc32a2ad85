"""MeshGraphNet: messages along the edges of a mesh, as a complete surrogate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshshard.errors import MeshshardError
from meshshard.nn.graph.coarsen import Level
from meshshard.nn.graph.mesh_block import MeshBlock, mlp
from meshshard.tensor import ShardGraph, Sharding, ShardTensor

__all__ = ["MeshGraphNet", "MultiScaleGraphNet"]


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

        Raises:
            MeshshardError: edges of another number, or rows that are divided otherwise.
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


class MultiScaleGraphNet(nn.Module):
    """MeshGraphNet on a graph and on coarse levels of it, in one V: down to the coarsest, and up.

    A coarse node starts as the mean of its cluster, a coarse edge as what its ends make of each
    other; on the way up a node adds its cluster's row. After multi-scale MeshGraphNets (Fortunato
    et al. 2022, arXiv 2210.00612).

    Communication: one exchange for each block, and one for each way down or up, forward and
    backward.
    """

    def __init__(
        self,
        node_in: int,
        edge_in: int,
        out: int,
        hidden: int = 128,
        layers: Sequence[int] = (4, 4),
        depth: int = 2,
    ) -> None:
        """A model with random weights.

        Args:
            node_in: numbers of a node.
            edge_in: numbers of an edge.
            out: numbers that are predicted for each node.
            hidden: width of all layers.
            layers: blocks of every level, the finest first; as many are on its way up.
            depth: linear layers of every network.
        """
        super().__init__()
        self.encode_nodes = mlp(node_in, hidden, hidden, depth)
        self.encode_edges = mlp(edge_in, hidden, hidden, depth)
        self.joints = nn.ModuleList(mlp(2 * hidden, hidden, hidden, depth) for _ in layers[1:])
        self.way_down = nn.ModuleList(_blocks(hidden, n, depth) for n in layers)
        self.way_up = nn.ModuleList(_blocks(hidden, n, depth) for n in layers[:-1])
        self.decode = mlp(hidden, hidden, out, depth, norm=False)

    def forward(self, x: Any, graph: ShardGraph, edge_attr: Any, levels: Sequence[Level]) -> Any:
        """Predict one row for each node.

        Args:
            x: (n_nodes, node_in) nodes, sharded, or plain on one rank.
            graph: the finest.
            edge_attr: (n_edges, edge_in) edges, divided as `graph.edges`.
            levels: one fewer than `layers`, each made by `nn.coarsen` of the one before.

        Returns:
            (n_nodes, out) the same kind as x.

        Raises:
            MeshshardError: another number of levels, or rows that are divided otherwise.
        """
        if len(levels) != len(self.joints):
            raise MeshshardError(f"{len(levels)} coarse levels; the model has {len(self.joints)}")
        graphs = [graph, *[level.graph for level in levels]]
        nodes, edges = [self.encode_nodes(x)], [self.encode_edges(edge_attr)]
        for i, blocks in enumerate(self.way_down):
            if i:
                nodes.append(levels[i - 1].coarse(nodes[-1]))
                edges.append(self.joints[i - 1](_joined(nodes[-1], graphs[i])))
            nodes[i], edges[i] = _run(blocks, nodes[i], graphs[i], edges[i])
        for i in reversed(range(len(levels))):
            nodes[i] = nodes[i] + levels[i].fine(nodes[i + 1])
            nodes[i], edges[i] = _run(self.way_up[i], nodes[i], graphs[i], edges[i])
        return self.decode(nodes[0])


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
