"""Fused: convolutions of PyG whose message is the source's row, weighed by degrees or not at all.

They are told again as a sparse product and what stands before and after it. What a convolution has
that is not told here (weights of edges, another aggregation) leaves it to `graph_conv`.
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
from meshshard.nn.conv._affine import affine
from meshshard.nn.graph._sparse import Total, kept
from meshshard.nn.graph.aggregate import NeighborSum, aggregate, in_edges
from meshshard.tensor import ShardGraph, ShardTensor
from meshshard.tensor.shard_graph import offsets_of
from meshshard.tensor.shard_tensor import local_of

__all__ = ["fused"]

Known = Callable[[Any, Any, Any, ShardGraph], Any]
PLAIN = ("torch.nn.modules.linear.Linear", "torch_geometric.nn.dense.linear.Linear")
REDUCTIONS = {"add": "sum", "sum": "sum", "mean": "mean", "max": "max"}


def fused(conv: Any, given: dict[str, Any], graph: ShardGraph) -> Any:
    """What a convolution makes of its arguments, or None where it is not one of these."""
    _, cls = type(conv)._meshshard_of
    run = KNOWN.get(cls.__name__) if cls.__module__.startswith("torch_geometric.") else None
    others = [a for name, a in given.items() if name != "x" and not isinstance(a, ShardGraph)]
    if run is None or any(a is not None for a in others) or conv.explain:
        return None
    x = given["x"]
    source, target = x if isinstance(x, (tuple, list)) else (x, x)
    if not isinstance(source, Tensor) or source.ndim != 2 or not _fits(source, graph.sources):
        return None
    if isinstance(target, Tensor) and not _fits(target, graph.nodes):
        return None
    return run(conv, source, target, graph)


def _fits(x: Tensor, sharding: Any) -> bool:
    if type(x) is ShardTensor:
        return bool(x.sharding == sharding) and x.sharded_dim == 0
    return bool(sharding.domain.size == 1 and x.shape[0] == sharding.total)


def _reduction(conv: Any) -> str | None:
    return REDUCTIONS.get(conv.aggr if isinstance(conv.aggr, str) else "")


def _reduced(conv: Any, x: Any, graph: ShardGraph) -> Any:
    reduce = _reduction(conv)
    return None if reduce is None else aggregate(x, graph, reduce)


def _sage(conv: Any, x: Any, target: Any, graph: ShardGraph) -> Any:
    if getattr(conv, "project", False):
        x = conv.lin(x).relu()
    root = conv.lin_r if conv.root_weight and target is not None else None
    out = _mixed(conv, (x, target), conv.lin_l, root, graph)
    if out is None:
        return None
    return F.normalize(out, p=2.0, dim=-1) if conv.normalize else out


def _graph(conv: Any, x: Any, target: Any, graph: ShardGraph) -> Any:
    root = None if target is None else conv.lin_root
    return _mixed(conv, (x, target), conv.lin_rel, root, graph)


def _mixed(conv: Any, pair: tuple[Any, Any], lin: Any, root: Any, graph: ShardGraph) -> Any:
    """A linear layer of what arrives at a node, and one of its own row."""
    x, target = pair
    alone = root is None or root.bias is None
    reduce = _reduction(conv)
    if reduce is not None and alone and _simple(x, lin, root):
        op = in_edges(graph) if reduce == "max" else NeighborSum.of(graph, reduce == "mean")
        return _affine(op, pair, (lin, lin.bias), root, graph)
    out = _reduced(conv, x, graph)
    if out is None:
        return None
    out = lin(out)
    return out if root is None else out + root(target)


def _affine(
    op: NeighborSum | Total,
    pair: tuple[Any, Any],
    layer: tuple[Any, Any],
    root: Any,
    graph: ShardGraph,
) -> Any:
    x, z = (local_of(a) for a in pair)
    if pair[1] is pair[0]:
        z = x
    if isinstance(op, Total):
        x = graph.local(x)
    own = None if root is None or z is x else z
    out = affine(op, x, layer[0].weight, layer[1], None if root is None else root.weight, own)
    return ShardTensor.from_local(out, graph.nodes) if type(pair[0]) is ShardTensor else out


def _simple(x: Any, *layers: Any) -> bool:
    """Whether layers are plain products: no adapters, nothing hooked to them, sharded or cast."""
    return not torch.is_autocast_enabled(x.device.type) and all(
        f"{type(lin).__module__}.{type(lin).__name__}" in PLAIN
        and lin.weight.__class__ is Parameter
        and lin.weight.dtype == x.dtype
        and not has_hooks(lin)
        for lin in layers
        if lin is not None
    )


def _gin(conv: Any, x: Any, target: Any, graph: ShardGraph) -> Any:
    out = _reduced(conv, x, graph)
    if out is None:
        return None
    return conv.nn(out if target is None else out + (1 + conv.eps) * target)


def _gcn(conv: Any, x: Any, target: Any, graph: ShardGraph) -> Any:
    if conv.aggr not in ("add", "sum") or not conv.normalize or graph.sources is not graph.nodes:
        return None
    if not _simple(x, conv.lin) or conv.lin.weight.shape[0] < conv.lin.weight.shape[1]:
        return _added(_normalized(conv.lin(x), conv, graph), conv.bias)
    return _affine(_laplacian(conv, graph, x.dtype), (x, x), (conv.lin, conv.bias), None, graph)


def _sg(conv: Any, x: Any, target: Any, graph: ShardGraph) -> Any:
    if conv.aggr not in ("add", "sum") or conv.cached or graph.sources is not graph.nodes:
        return None
    for _ in range(conv.K):
        x = _normalized(x, conv, graph)
    return conv.lin(x)


def _normalized(x: Any, conv: Any, graph: ShardGraph) -> Any:
    """One product with the normalized adjacency of GCN (Kipf and Welling 2017)."""
    sums = _laplacian(conv, graph, x.dtype)
    out = linear.apply(sums, local_of(x))
    return ShardTensor.from_local(out, graph.nodes) if type(x) is ShardTensor else out


def _laplacian(conv: Any, graph: ShardGraph, dtype: torch.dtype) -> NeighborSum:
    loop = 0.0 if not conv.add_self_loops else 2.0 if getattr(conv, "improved", False) else 1.0
    return kept(graph, f"gcn {loop} {dtype}", lambda: _gcn_sum(graph, loop, dtype))


def _gcn_sum(graph: ShardGraph, loop: float, dtype: torch.dtype) -> NeighborSum:
    """D^-1/2 (A + loops) D^-1/2; a node that has a loop keeps it, of weight one.

    Communication: one exchange of degrees.
    """
    n, rows, indices = graph.nodes.own, graph.destinations, graph.indices
    weights = torch.ones(len(indices), dtype=dtype, device=indices.device)
    if loop:
        is_loop = indices == rows
        at = torch.arange(n, device=indices.device)
        more = torch.full((n,), loop, dtype=dtype, device=indices.device)
        more[rows[is_loop]] = 1
        rows = torch.cat([rows[~is_loop], at])
        weights = torch.cat([weights[~is_loop], more])
        indices = torch.cat([indices[~is_loop], at])
        order = torch.argsort(rows, stable=True)
        rows, weights, indices = rows[order], weights[order], indices[order]
    degree = weights.new_zeros(n).index_add_(0, rows, weights)
    factor = degree.pow(-0.5).masked_fill_(degree == 0, 0)
    factors = graph.domain.exchange(factor, graph.exchange)
    weights = factors[indices] * weights * factors[rows]
    return NeighborSum(
        graph.exchange, offsets_of(torch.bincount(rows, minlength=n)), indices, weights
    )


def _added(x: Any, bias: Any) -> Any:
    return x if bias is None else x + bias


KNOWN: dict[str, Known] = {
    "SAGEConv": _sage,
    "GraphConv": _graph,
    "GINConv": _gin,
    "GCNConv": _gcn,
    "SGConv": _sg,
}
