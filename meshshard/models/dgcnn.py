"""DGCNN: edge convolutions over nearest neighbors in the feature space of each layer."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from meshshard.errors import MeshshardError
from meshshard.nn import knn_graph
from meshshard.nn.graph._sparse import Incidence, segment_max
from meshshard.tensor import ShardGraph, ShardTensor
from meshshard.tensor.shard_tensor import wrap

__all__ = ["DGCNN", "DynamicEdgeConv"]

NORMS: dict[str, type[nn.Module]] = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm}


class DynamicEdgeConv(nn.Module):
    """The edge convolution of Wang et al. 2019, over the k nearest rows in feature space.

    x'_i = max over neighbors j of h([x_i, x_j - x_i]), where each row is also its own neighbor, as
    in PyG's layer of this name (which needs compiled extensions). Edges that tie for the maximum
    share its gradient. The neighbor search runs in float64 and has no gradient.
    """

    def __init__(self, h: nn.Module, k: int) -> None:
        """Create the layer.

        Args:
            h: module from (n_edges, 2 C) to (n_edges, C'). Its input is one sharded tensor of all
                edges, so norms and dropout are those of the whole graph.
            k: number of neighbors of each row, including the row itself.
        """
        super().__init__()
        self.h, self.k = h, k

    def forward(self, x: Tensor, graph: ShardGraph | None = None) -> Tensor:
        """New features of every row.

        Args:
            x: (n, C) features, sharded by rows or plain.
            graph: in-edges to use instead of those from the k nearest rows; a row without in-edges
                becomes zero.

        Returns:
            (n, C') features, sharded like x.

        Communication: that of `knn_graph` if no graph is given; one exchange of features forward
        and backward; and that of `h`.
        """
        graph = knn_graph(x, self.k, loop=True) if graph is None else graph
        local = graph.local(x)
        ends = local[: graph.nodes.own][graph.destinations]
        pairs = torch.cat([ends, local[graph.indices] - ends], dim=1)
        incoming = Incidence.of(graph).incoming
        if not isinstance(x, ShardTensor):
            return segment_max(incoming, self.h(pairs))
        messages = self.h(wrap(pairs, graph.edges, 0))
        return wrap(segment_max(incoming, messages.to_local()), graph.nodes, 0)

    def extra_repr(self) -> str:
        """Arguments that `print` shows."""
        return f"k={self.k}"


class DGCNN(nn.Module):
    """Dynamic graph CNN with an output for each point, as in PyG's segmentation example.

    The outputs of all edge convolutions, concatenated, go through an MLP.

    Source: Wang et al., Dynamic Graph CNN for Learning on Point Clouds (2019).
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        k: int = 20,
        hidden: int = 64,
        layers: int = 3,
        norm: str | None = "batch",
        dropout: float = 0.0,
    ) -> None:
        """Create a model with random weights.

        Args:
            in_dim: number of features of a point, including its coordinates.
            out_dim: number of outputs for each point.
            k: number of neighbors of each point, including the point itself.
            hidden: width of an edge convolution.
            layers: number of edge convolutions.
            norm: "batch" as in the paper (over all edges of all ranks), "layer", or None.
            dropout: dropout probability in the head.

        Raises:
            MeshshardError: fewer than one layer, or an unknown norm.
        """
        super().__init__()
        if layers < 1:
            raise MeshshardError(f"DGCNN: expected 1 layer or more, got {layers}")
        if norm is not None and norm not in NORMS:
            raise MeshshardError(
                f"DGCNN: expected a norm of {', '.join(NORMS)} or None, got {norm!r}"
            )
        widths = [in_dim] + [hidden] * layers
        self.k = k
        self.convs = nn.ModuleList(
            DynamicEdgeConv(_mlp([2 * a, b, b], norm), k) for a, b in pairwise(widths)
        )
        head = _mlp([hidden * layers, 4 * hidden, 2 * hidden], norm)
        self.head = nn.Sequential(*head, nn.Dropout(dropout), nn.Linear(2 * hidden, out_dim))

    def forward(self, x: Tensor, pos: Tensor | None = None) -> Tensor:
        """Outputs of all points.

        Args:
            x: (n, in_dim) features, sharded by rows or plain.
            pos: (n, d) coordinates in which the first layer searches neighbors; `x` by default.

        Returns:
            (n, out_dim), sharded like `x`.

        Communication: that of each edge convolution; for each batch norm two all-reduces, forward
        and backward.
        """
        graph = None if pos is None else knn_graph(pos, self.k, loop=True)
        features = [self.convs[0](x, graph)]
        for conv in self.convs[1:]:
            features.append(conv(features[-1]))
        out: Tensor = self.head(torch.cat(features, dim=1))
        return out


def _mlp(widths: list[int], norm: str | None) -> nn.Sequential:
    """Linear layers, each followed by a norm and a ReLU, as in PyG's example."""
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), *([NORMS[norm](b)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers)
