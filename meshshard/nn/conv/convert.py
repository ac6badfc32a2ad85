"""convert: let a whole PyG model run on shards, in one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn

from meshshard.nn.conv._context import RUNNING
from meshshard.nn.conv._rules import on_owned_rows
from meshshard.nn.conv._subclass import is_swapped, swap_class
from meshshard.nn.conv.graph_conv import convert_conv
from meshshard.nn.conv.pyg import is_norm_over_nodes, refusal
from meshshard.tensor import ShardTensor
from meshshard.tensor.shard_tensor import refuse

__all__ = ["convert"]

M = TypeVar("M", bound=nn.Module)


def convert(model: M, hops: int | None = None) -> M:
    """Let a model of PyG modules run on shards; in place, like convert_sync_batchnorm.

    Where the model takes an `edge_index`, pass a ShardGraph. Node and edge features are
    ShardTensors (edges sharded like `graph.edges`), or plain tensors on one rank. Convolutions,
    user-defined ones included, get the halo of their nodes; norms and readouts are over all rows by
    the rules of ShardTensor. Parameters, state_dict and the behavior with an edge_index stay.

    Args:
        model: any module; a single convolution too.
        hops: what convolutions without a row in the table of PyG's classes need: 1 if they use
            edges in `message` and aggregation only, 2 (the default) if they use degrees of
            neighbors.

    Returns:
        The model.

    Raises:
        NoShardRule: a module cannot be exact on shards; raised before anything is changed. Also
            raised by the first call of a user-defined convolution whose result depends on what
            differs between shards: numbers or order of rows, rows that are not neighbors.
        DomainError: the same on several ranks, on every one.

    Communication: each convolution exchanges the halo of its input once, forward and backward, and
    once more for each further propagate; with two hops also that of its edge features. The first
    call of a user-defined convolution calls it twice more to check it, and gathers objects once.

    Examples:
        >>> from torch_geometric.nn import SAGEConv
        >>> from meshshard.ranks.shard import load
        >>> shard = load("boundary_8.shards")
        >>> conv = convert(SAGEConv(3, 8))
        >>> conv(shard["center"], shard.graph).shape
        torch.Size([4778, 8])
    """
    from torch_geometric.nn import MessagePassing

    convs = [m for m in model.modules() if isinstance(m, MessagePassing)]
    inside = {module for conv in convs for module in conv.modules()}
    for module in model.modules():
        if why := refusal(module, module in inside):
            raise refuse(f"torch_geometric.nn.{type(module).__name__}", (), None, why)
    for conv in convs:
        _require_forward_edges(conv)
    for conv in convs:
        if not is_swapped(conv):
            convert_conv(conv, hops)
        for module in conv.modules():
            if is_norm_over_nodes(module):
                swap_class(module, over_all_ranks)
    return model


def _require_forward_edges(conv: Any) -> None:
    name = type(conv).__name__
    if conv.flow != "source_to_target":
        why = "an edge is owned by the rank of its destination; reverse the edges instead"
        raise refuse(f"{name}(flow={conv.flow!r})", (), None, why)
    if conv.decomposed_layers != 1:
        why = "it propagates without the hook that exchanges halo rows"
        raise refuse(f"{name}(decomposed_layers={conv.decomposed_layers})", (), None, why)


def over_all_ranks(cls: type[Any]) -> type[Any]:
    """The subclass of a norm that, inside a convolution, is over the owned rows of all ranks."""

    class OverAllRanks(cls):  # type: ignore[misc]
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
            """Normalize owned rows as a ShardTensor."""
            run = RUNNING.get()
            norm: Callable[..., Any] = super().forward
            if run is None or type(x) is ShardTensor:
                return norm(x, *args, **kwargs)
            if any(a is not None for a in (*args, *kwargs.values())):
                why = "it gets a batch of several graphs"
                raise refuse(f"{cls.__name__} inside {run.name}", (), None, why)
            return on_owned_rows(run, x, norm)

    return OverAllRanks
