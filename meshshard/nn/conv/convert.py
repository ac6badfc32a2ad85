"""convert: a whole PyG model made one that runs on shards, in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import Tensor, nn

from meshshard.nn.conv._context import RUNNING
from meshshard.nn.conv._rules import on_own_rows
from meshshard.nn.conv._subclass import swap_class
from meshshard.nn.conv.graph_conv import convert_conv
from meshshard.tensor import ShardTensor
from meshshard.tensor.shard_tensor import refuse

__all__ = ["convert"]

M = TypeVar("M", bound=nn.Module)

REFUSED = {
    "its choice of nodes is one of all, and changes the graph: coarsen with nn.coarsen": (
        "TopKPooling", "SAGPooling", "ASAPooling", "PANPooling", "EdgePooling", "ClusterPooling",
        "SelectTopK",
    ),
    "it searches neighbors itself: EdgeConv on nn.knn_graph": (
        "DynamicEdgeConv", "GravNetConv", "XConv",
    ),
    "it turns the nodes of a graph into one dense matrix": ("MemPooling", "GPSConv", "GMTPooling"),
    "its edges join nodes and hyperedges: two bipartite layers": ("HypergraphConv",),
    "it has several kinds of nodes": ("HeteroConv", "HGTConv", "HANConv", "HEATConv"),
}  # fmt: skip
READOUTS = {
    "it turns the nodes of a graph into one dense matrix": (
        "SortAggregation", "SetTransformerAggregation", "GraphMultisetTransformer",
        "LSTMAggregation", "GRUAggregation", "MLPAggregation", "LCMAggregation",
        "PatchTransformerAggregation",
    ),
    "it orders the rows of all ranks": ("MedianAggregation", "QuantileAggregation"),
    "its energy is differentiated by a tensor that is alike on every rank": (
        "EquilibriumAggregation",
    ),
}  # fmt: skip
NORMS = (
    "GraphNorm", "InstanceNorm", "PairNorm", "LayerNorm", "MeanSubtractionNorm", "DiffGroupNorm",
    "GraphSizeNorm",
)  # fmt: skip


def convert(model: M, hops: int | None = None) -> M:
    """Let a model of PyG modules run on shards; in place, as convert_sync_batchnorm's convention.

    Where an `edge_index` stood, pass a ShardGraph; node and edge features are ShardTensors (edges
    divided as `graph.edges`), or plain tensors on one rank. Convolutions, a user's own included,
    see the halo of their nodes; norms and readouts work over all rows by the rules of ShardTensor.
    Parameters, state_dict and what the model does with an edge_index stay as they are.

    Args:
        model: any module, a single convolution included.
        hops: what convolutions that PyG does not have need: 1 where they look at edges only in
            `message` and aggregation, 2 (by default) where they ask for degrees of neighbors.

    Returns:
        The model.

    Raises:
        NoShardRule: naming a module that cannot be exact on shards, before anything is changed.
        DomainError: from the first call of a user's convolution, on every rank, where its result
            depends on what a shard does not know: numbers or order of rows, rows far away.

    Communication: each convolution one exchange of its input's halo, forward and backward, and one
    more for each further propagate; with two hops one of its edge features. The first call of a
    user's, on several ranks, runs it twice more to prove it, and gathers objects once.
    """
    from torch_geometric.nn import MessagePassing

    inside = {
        m for conv in model.modules() if isinstance(conv, MessagePassing) for m in conv.modules()
    }
    for module in model.modules():
        _refuse(module, REFUSED if module in inside else REFUSED | READOUTS)
    for module in list(model.modules()):
        if isinstance(module, MessagePassing):
            convert_conv(module, hops)
            for norm in _norms(module):
                swap_class(norm, coupled)
    return model


def _refuse(module: nn.Module, refused: dict[str, tuple[str, ...]]) -> None:
    name = type(module).__name__
    if not type(module).__module__.startswith("torch_geometric."):
        return
    for why, names in refused.items():
        if name in names:
            raise refuse(f"torch_geometric.nn.{name}", (), None, why)


def _norms(conv: nn.Module) -> Iterator[nn.Module]:
    """Norms of PyG within a convolution, which see plain local rows there."""
    for module in conv.modules():
        ours = type(module).__module__.startswith("torch_geometric.nn.norm")
        whole = getattr(module, "mode", "graph") == "graph"
        if ours and whole and type(module).__name__ in NORMS:
            yield module


def coupled(cls: type[Any]) -> type[Any]:
    """The subclass of a norm that, within a convolution, is one over the rows of all ranks."""

    class Coupled(cls):  # type: ignore[misc]
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
            """The class's own, of own rows as a sharded tensor."""
            run = RUNNING.get()
            norm: Callable[..., Any] = super().forward
            if run is None or type(x) is ShardTensor:
                return norm(x, *args, **kwargs)
            if any(a is not None for a in (*args, *kwargs.values())):
                raise refuse(f"{cls.__name__} inside {run.name}", (), None, "of several graphs")
            return on_own_rows(run, x, norm)

    return Coupled
