"""DGCNN: edge convolutions over neighbors that are found anew in feature space at each layer."""

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

    x'_i = max over neighbors j of h([x_i, x_j - x_i]), the row itself among its neighbors, as in
    PyG's layer of this name (which needs compiled extras). A maximum that several edges reach
    shares its gradient among them. Which rows are near is found in float64 and has no gradient.
    """

    def __init__(self, h: nn.Module, k: int) -> None:
        """A layer.

        Args:
            h: maps (n_edges, 2 C) to (n_edges, C'); it sees all edges as one sharded tensor, so
                norms and dropout in it are those of the whole graph.
            k: neighbors of each row.
        """
        super().__init__()
        self.h, self.k = h, k

    def forward(self, x: Tensor, graph: ShardGraph | None = None) -> Tensor:
        """New features of every row.

        Args:
            x: (n, C) features, sharded along their rows, or plain.
            graph: take these in-edges instead of the k nearest; a row without any becomes zero.

        Returns:
            (n, C') features.

        Communication: that of `knn_graph`, where there is no graph; one exchange of features
        forward and backward; and that of `h`.
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
        """What print shows."""
        return f"k={self.k}"


class DGCNN(nn.Module):
    """Dynamic graph CNN, one output a point (Wang et al. 2019, after PyG's segmentation example).

    Edge convolutions of width `hidden`, their outputs side by side through an MLP. The same model
    on a sharded cloud and on a whole one.
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
        """A model.

        Args:
            in_dim: features of a point, its coordinates among them.
            out_dim: numbers for each point.
            k: neighbors, the point itself among them.
            hidden: width of an edge convolution.
            layers: how many of them.
            norm: "batch" as in the paper (over all edges of all ranks), "layer", or None.
            dropout: of the head.

        Raises:
            MeshshardError: no layer, or an unknown norm.
        """
        super().__init__()
        if layers < 1:
            raise MeshshardError(f"a DGCNN of {layers} layers; it needs one at least")
        if norm is not None and norm not in NORMS:
            raise MeshshardError(f"DGCNN: norm {norm!r} is unknown: {', '.join(NORMS)} or None")
        widths = [in_dim] + [hidden] * layers
        self.k = k
        self.convs = nn.ModuleList(
            DynamicEdgeConv(_mlp([2 * a, b, b], norm), k) for a, b in pairwise(widths)
        )
        head = _mlp([hidden * layers, 4 * hidden, 2 * hidden], norm)
        self.head = nn.Sequential(*head, nn.Dropout(dropout), nn.Linear(2 * hidden, out_dim))

    def forward(self, x: Tensor, pos: Tensor | None = None) -> Tensor:
        """Predict.

        Args:
            x: (n, in_dim) features, sharded along their rows, or plain.
            pos: (n, d) coordinates in which the first layer looks for neighbors, else in `x`.

        Returns:
            (n, out_dim), as sharded as `x`.

        Communication: that of each edge convolution, and of the norms: two all-reduces each,
        forward and backward, where it is "batch".
        """
        graph = None if pos is None else knn_graph(pos, self.k, loop=True)
        features = [self.convs[0](x, graph)]
        for conv in self.convs[1:]:
            features.append(conv(features[-1]))
        out: Tensor = self.head(torch.cat(features, dim=1))
        return out


def _mlp(widths: list[int], norm: str | None) -> nn.Sequential:
    """Linear layers, each with ReLU and norm, as PyG's example has them."""
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), *([NORMS[norm](b)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers)
