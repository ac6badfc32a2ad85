"""Fast paths: PyG convolutions whose message is the source's row, unweighted or with GCN's weights.

Each is computed as a sparse matrix product with the layers before and after it. A fast path returns
None for what it does not cover (edge weights, another aggregation); the convolution then runs
unchanged (see `graph_conv`). Which class has which fast path is in the table of `pyg`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn import Parameter

from meshshard.comm import linear
from meshshard.nn._unmodified import has_hooks
from meshshard.nn.conv._aggregate_linear import aggregate_linear
from meshshard.nn.conv._subgraph import has_rows_of
from meshshard.nn.graph._cached_on import cached_on
from meshshard.nn.graph.aggregate import NeighborSum, aggregate, in_edge_sum
from meshshard.tensor import ShardGraph, ShardTensor
from meshshard.tensor.shard_graph import offsets_of
from meshshard.tensor.shard_tensor import local_of

__all__ = ["FastPath", "gcn", "gin", "graph", "run_fast_path", "sage", "sg"]

FastPath = Callable[[Any, Any, Any, ShardGraph], Any]  # (conv, x, target, graph) -> rows or None
LINEAR = ("torch.nn.modules.linear.Linear", "torch_geometric.nn.dense.linear.Linear")
REDUCTIONS = {"add": "sum", "sum": "sum", "mean": "mean", "max": "max"}


def run_fast_path(path: FastPath, conv: Any, arguments: dict[str, Any], graph: ShardGraph) -> Any:
    """The result of a fast path, or None where it does not cover the arguments."""
    known = {name for name, a in arguments.items() if isinstance(a, ShardGraph)} | {"x", "size"}
    others = (a for name, a in arguments.items() if name not in known)
    if conv.node_dim != -2 or conv.explain or any(a is not None for a in others):
        return None
    x = arguments["x"]
    source, target = x if isinstance(x, (tuple, list)) else (x, x)
    if not isinstance(source, Tensor) or source.ndim != 2:
        return None
    if not has_rows_of(source, graph.sources):
        return None
    if isinstance(target, Tensor) and not has_rows_of(target, graph.nodes):
        return None
    return path(conv, source, target, graph)


def sage(conv: Any, x: Any, target: Any, graph: ShardGraph) -> Any:
    """SAGEConv (Hamilton et al. 2017)."""
    if getattr(conv, "project", False):
        x = conv.lin(x).relu()
    root = conv.lin_r if conv.root_weight and target is not None else None
    out = _neighbors_and_root(conv, (x, target), conv.lin_l, root, graph)
    return F.normalize(out, p=2.0, dim=-1) if out is not None and conv.normalize else out


def graph(conv: Any, x: Any, target: Any, graph: ShardGraph) -> Any:
    """GraphConv (Morris et al. 2019)."""
    root = None if target is None else conv.lin_root
    return _neighbors_and_root(conv, (x, target), conv.lin_rel, root, graph)


def gin(conv: Any, x: Any, target: Any, graph: ShardGraph) -> Any:
    """GINConv (Xu et al. 2019)."""
    out = _aggregated(conv, x, graph)
    if out is None:
        return None
    return conv.nn(out if target is None else out + (1 + conv.eps) * target)


def gcn(conv: Any, x: Any, target: Any, graph: ShardGraph) -> Any:
    """GCNConv (Kipf and Welling 2017)."""
    if conv.aggr not in ("add", "sum") or not conv.normalize or graph.sources is not graph.nodes:
        return None
    if conv.improved and conv.add_self_loops:  # what it means without weights depends on PyG
        return None
    out_channels, in_channels = conv.lin.weight.shape
    if _are_plain(x, conv.lin) and out_channels >= in_channels:
        op = _normalized_adjacency(conv, graph, x.dtype)
        return aggregate_linear(op, graph, (x, x), conv.lin.weight, conv.bias)
    out = _normalized_sum(conv.lin(x), conv, graph)
    return out if conv.bias is None else out + conv.bias


def sg(conv: Any, x: Any, target: Any, graph: ShardGraph) -> Any:
    """SGConv (Wu et al. 2019)."""
    if conv.aggr not in ("add", "sum") or conv.cached or graph.sources is not graph.nodes:
        return None
    for _ in range(conv.K):
        x = _normalized_sum(x, conv, graph)
    return conv.lin(x)


def _reduction(conv: Any) -> str | None:
    return REDUCTIONS.get(conv.aggr if isinstance(conv.aggr, str) else "")


def _aggregated(conv: Any, x: Any, graph: ShardGraph) -> Any:
    reduce = _reduction(conv)
    return None if reduce is None else aggregate(x, graph, reduce)


def _neighbors_and_root(
    conv: Any, pair: tuple[Any, Any], lin: Any, root: Any, graph: ShardGraph
) -> Any:
    """A linear layer of the aggregated neighbors, plus one of the node's own row."""
    x, target = pair
    reduce = _reduction(conv)
    if reduce and (root is None or root.bias is None) and _are_plain(x, lin, root):
        op = in_edge_sum(graph) if reduce == "max" else NeighborSum.of(graph, reduce == "mean")
        root_weight = None if root is None else root.weight
        return aggregate_linear(op, graph, pair, lin.weight, lin.bias, root_weight)
    out = _aggregated(conv, x, graph)
    if out is None:
        return None
    return lin(out) if root is None else lin(out) + root(target)


def _are_plain(x: Any, *layers: Any) -> bool:
    """Whether layers are plain products: no adapter, hook, sharded parameter or autocast."""
    return not torch.is_autocast_enabled(x.device.type) and all(
        f"{type(lin).__module__}.{type(lin).__name__}" in LINEAR
        and lin.weight.__class__ is Parameter
        and lin.weight.dtype == x.dtype
        and not has_hooks(lin)
        for lin in layers
        if lin is not None
    )


def _normalized_sum(x: Any, conv: Any, graph: ShardGraph) -> Any:
    """One product with GCN's normalized adjacency."""
    out = linear.apply(_normalized_adjacency(conv, graph, x.dtype), local_of(x))
    return ShardTensor.from_local(out, graph.nodes) if type(x) is ShardTensor else out


def _normalized_adjacency(conv: Any, graph: ShardGraph, dtype: torch.dtype) -> NeighborSum:
    loops = bool(conv.add_self_loops)
    key = "normalized adjacency", loops, dtype
    return cached_on(graph, key, lambda: _make_normalized_adjacency(graph, loops, dtype))


def _make_normalized_adjacency(graph: ShardGraph, loops: bool, dtype: torch.dtype) -> NeighborSum:
    """D^-1/2 A D^-1/2; with `loops`, every node has exactly one self-loop.

    Communication: one exchange of degrees.
    """
    n, rows, indices = graph.nodes.own, graph.destinations, graph.indices
    if loops:
        other = indices != rows
        nodes = torch.arange(n, device=indices.device)
        rows, order = torch.sort(torch.cat([rows[other], nodes]), stable=True)
        indices = torch.cat([indices[other], nodes])[order]
    weights = torch.ones(len(indices), dtype=dtype, device=indices.device)
    degree = weights.new_zeros(n).index_add_(0, rows, weights)
    factor = degree.pow(-0.5).masked_fill_(degree == 0, 0)
    factors = graph.domain.exchange(factor, graph.exchange)
    weights = factors[indices] * weights * factors[rows]
    indptr = offsets_of(torch.bincount(rows, minlength=n))
    return NeighborSum(graph.exchange, indptr, indices, weights)
