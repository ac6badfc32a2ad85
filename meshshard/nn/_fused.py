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

from meshshard.comm import linear
from meshshard.nn._sparse import kept, starts
from meshshard.nn.aggregate import NeighbourSum, aggregate
from meshshard.tensor import ShardGraph, ShardTensor

__all__ = ["fused"]

Known = Callable[[Any, Any, Any, ShardGraph], Any]
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


def _reduced(conv: Any, x: Any, graph: ShardGraph) -> Any:
    reduce = REDUCTIONS.get(conv.aggr if isinstance(conv.aggr, str) else "")
    return None if reduce is None else aggregate(x, graph, reduce)


def _sage(conv: Any, x: Any, target: Any, graph: ShardGraph) -> Any:
    if getattr(conv, "project", False):
        x = conv.lin(x).relu()
    out = _reduced(conv, x, graph)
    if out is None:
        return None
    out = conv.lin_l(out)
    if conv.root_weight and target is not None:
        out = out + conv.lin_r(target)
    return F.normalize(out, p=2.0, dim=-1) if conv.normalize else out


def _graph(conv: Any, x: Any, target: Any, graph: ShardGraph) -> Any:
    out = _reduced(conv, x, graph)
    if out is None:
        return None
    out = conv.lin_rel(out)
    return out if target is None else out + conv.lin_root(target)


def _gin(conv: Any, x: Any, target: Any, graph: ShardGraph) -> Any:
    out = _reduced(conv, x, graph)
    if out is None:
        return None
    return conv.nn(out if target is None else out + (1 + conv.eps) * target)


def _gcn(conv: Any, x: Any, target: Any, graph: ShardGraph) -> Any:
    if conv.aggr not in ("add", "sum") or not conv.normalize or graph.sources is not graph.nodes:
        return None
    return _added(_normalised(conv.lin(x), conv, graph), conv.bias)


def _sg(conv: Any, x: Any, target: Any, graph: ShardGraph) -> Any:
    if conv.aggr not in ("add", "sum") or conv.cached or graph.sources is not graph.nodes:
        return None
    for _ in range(conv.K):
        x = _normalised(x, conv, graph)
    return conv.lin(x)


def _normalised(x: Any, conv: Any, graph: ShardGraph) -> Any:
    """One product with the normalised adjacency of GCN (Kipf and Welling 2017)."""
    loop = 0.0 if not conv.add_self_loops else 2.0 if getattr(conv, "improved", False) else 1.0
    sums = kept(graph, f"gcn {loop} {x.dtype}", lambda: _gcn_sum(graph, loop, x.dtype))
    rows = x.to_local() if type(x) is ShardTensor else x
    out = linear.apply(sums, rows)
    return ShardTensor.from_local(out, graph.nodes) if type(x) is ShardTensor else out


def _gcn_sum(graph: ShardGraph, loop: float, dtype: torch.dtype) -> NeighbourSum:
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
    return NeighbourSum(graph.exchange, starts(torch.bincount(rows, minlength=n)), indices, weights)


def _added(x: Any, bias: Any) -> Any:
    return x if bias is None else x + bias


KNOWN: dict[str, Known] = {
    "SAGEConv": _sage,
    "GraphConv": _graph,
    "GINConv": _gin,
    "GCNConv": _gcn,
    "SGConv": _sg,
}
