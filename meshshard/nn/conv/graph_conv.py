"""graph_conv: a convolution of PyG, or of a user, on the nodes of a shard, without a change to it.

The convolution becomes one of a subclass of its own class, as FSDP2 does with modules: parameters,
state_dict and isinstance stay. Given a ShardGraph where edge_index stands it runs on its hops (see
`_rings`) and gives back own rows; given an edge_index it is what it was.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from meshshard.errors import MeshshardError
from meshshard.nn.conv._context import RUNNING, ConvContext
from meshshard.nn.conv._fast_paths import fused
from meshshard.nn.conv._permutation_check import check_permutation_invariance
from meshshard.nn.conv._rules import RULES
from meshshard.nn.conv._subclass import is_changed, swap_class
from meshshard.nn.conv._subgraph import HaloSubgraph, bipartite, halo_subgraph_of, padded
from meshshard.tensor import ShardGraph, Sharding, ShardTensor
from meshshard.tensor.shard_tensor import _eagerly, refuse

__all__ = ["convert_conv"]

# Convolutions that look at the edges only as they gather and scatter along them. Others may ask for
# the degree of a neighbor, and get the second hop.
ONE_HOP = {
    "AGNNConv", "CGConv", "ClusterGCNConv", "EdgeConv", "FeaStConv", "FiLMConv", "GATConv",
    "GATv2Conv", "GENConv", "GINConv", "GINEConv", "GMMConv", "GatedGraphConv", "GeneralConv",
    "GraphConv", "LEConv", "MFConv", "NNConv", "PNAConv", "PPFConv", "PointGNNConv", "PointNetConv",
    "PointTransformerConv", "RGATConv", "RGCNConv", "ResGatedGraphConv", "SAGEConv", "SimpleConv",
    "SplineConv", "TransformerConv",
}  # fmt: skip

_ORDER = "it depends on the order of the edges; mean, max, softmax, std or median do not"
_FULLEST = "it depends on the in-degree of the fullest of all nodes; mean, max or softmax do not"
AGGREGATIONS = {
    "LSTMAggregation": _ORDER,
    "GRUAggregation": _ORDER,
    "MLPAggregation": _ORDER,
    "LCMAggregation": _FULLEST,
    "PatchTransformerAggregation": _FULLEST,
    "EquilibriumAggregation": "it seeks the least energy of all nodes at once",
}


def convert_conv(conv: Any, hops: int | None = None) -> None:
    """Let a convolution take a ShardGraph, in place.

    Args:
        conv: the module.
        hops: 1 where it looks at edges only in `message`, `edge_update` and aggregation; 2 where
            it asks for degrees of neighbors. By default 1 for those of PyG known to, else 2.

    Raises:
        NoShardRule: it aggregates in an order, or along edges the other way.
    """
    if is_changed(conv):
        return
    _refuse_orders(conv)
    conv._meshshard_hops = hops or _hops_needed(conv)
    conv._meshshard_proved = False
    swap_class(conv, on_shards)
    for module in conv.modules():
        if hasattr(module, "q") and hasattr(module, "interpolation"):
            swap_class(module, led)


def _refuse_orders(conv: Any) -> None:
    if conv.flow != "source_to_target":
        why = "an edge lives with its destination: reverse the edges and let it flow forward"
        raise refuse(f"{type(conv).__name__}(flow={conv.flow!r})", (), None, why)
    if conv.decomposed_layers != 1:
        what = f"{type(conv).__name__}(decomposed_layers={conv.decomposed_layers})"
        raise refuse(what, (), None, "it would pass by what refreshes the halo")
    for module in conv.modules():
        kind = type(module).__name__
        if kind in AGGREGATIONS:
            why = AGGREGATIONS[kind]
            raise refuse(f"{kind} of {type(conv).__name__}", (), None, why)


def _hops_needed(conv: Any) -> int:
    name = type(conv).__name__
    if not type(conv).__module__.startswith("torch_geometric."):
        return 2
    if name == "GCNConv":
        return 2 if conv.normalize else 1
    return 1 if name in ONE_HOP else 2


def on_shards(cls: type[Any]) -> type[Any]:
    """The subclass of a convolution's class that takes a ShardGraph."""

    class OnShards(cls):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            """On a ShardGraph the way of this module, else the class's own."""
            if not any(isinstance(a, ShardGraph) for a in (*args, *kwargs.values())):
                return super().forward(*args, **kwargs)
            return _run(self, super().forward, args, kwargs)

        def propagate(self, edge_index: Any, size: Any = None, **given: Any) -> Any:
            """The class's own, on halo rows that are up to date."""
            run = RUNNING.get()
            if run is None:
                return super().propagate(edge_index, size=size, **given)
            given = run.before(self, edge_index, given)
            out = super().propagate(edge_index, size=size, **given)
            run.within, run.stale = False, True
            return out

        def edge_updater(self, edge_index: Any, size: Any = None, **given: Any) -> Any:
            """The same of edges."""
            run = RUNNING.get()
            if run is None:
                return super().edge_updater(edge_index, size=size, **given)
            given = run.before(self, edge_index, given)
            out = super().edge_updater(edge_index, size=size, **given)
            run.within = False
            return out

        def get_attention_loss(self) -> Any:
            """Refused."""
            raise refuse(f"{cls.__name__}.get_attention_loss", (), None, "it draws edges at random")

    if not hasattr(cls, "get_attention_loss"):
        del OnShards.get_attention_loss
    return OnShards


def led(cls: type[Any]) -> type[Any]:
    """Quantiles that may start with a row without in-edges, on which PyG's fail: one leads it."""

    class Led(cls):  # type: ignore[misc]
        def forward(
            self, x: Tensor, index: Any = None, ptr: Any = None, dim_size: Any = None, dim: int = -2
        ) -> Tensor:
            """The class's own, behind a row that is dropped again."""
            x = x.movedim(dim, 0)
            index = torch.cat([index.new_zeros(1), index + 1])
            first = torch.cat([torch.zeros_like(x[:1]), x]).movedim(0, dim)
            size = None if dim_size is None else dim_size + 1
            out: Tensor = super().forward(first, index, None, size, dim)
            return out.narrow(dim, 1, out.shape[dim] - 1)

    return Led


def _run(conv: Any, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Own rows of what a convolution makes of the hops."""
    names = list(signature(forward).parameters)
    given = dict(zip(names, args, strict=False)) | kwargs
    graph = next(a for a in given.values() if isinstance(a, ShardGraph))
    name = type(conv).__name__
    _all_sharded(given, graph, name)
    quick = fused(conv, given, graph) if conv.node_dim == -2 else None
    if quick is not None:
        return quick
    hops = halo_subgraph_of(graph, conv._meshshard_hops)
    unknown = not type(conv).__module__.startswith("torch_geometric.")
    plain = not any(_is_sharded(a) for a in given.values())

    def _out(hops: HaloSubgraph) -> Any:
        local = {n: _local(n, a, hops, name) for n, a in given.items()}
        if bipartite(graph) and "size" in names and local.get("size") is None:
            local["size"] = (hops.n_rows, hops.n_to)
        with ConvContext(hops, name, RULES, unknown):
            return _own(forward(**local), hops, plain, name)

    if unknown and graph.domain.size > 1 and not conv._meshshard_proved:
        check_permutation_invariance(conv, hops, _out, name)
        conv._meshshard_proved = True
    return _out(hops)


def _is_sharded(a: Any) -> bool:
    many = a if isinstance(a, (tuple, list)) else (a,)
    return any(type(b) is ShardTensor for b in many)


_eagerly(_run)  # compiled models break their graph here: exchanges and hooks run as they are


def _all_sharded(given: dict[str, Any], graph: ShardGraph, name: str) -> None:
    """Plain rows are the whole only where one rank holds it."""
    if graph.domain.size > 1 and not any(_is_sharded(a) for a in given.values()):
        raise MeshshardError(
            f"{name} on a graph over {graph.domain.size} ranks wants sharded features: "
            f"shard(x, domain, graph.nodes)"
        )


def _local(name: str, a: Any, hops: HaloSubgraph, conv: str) -> Any:
    """An argument as the plain convolution sees it."""
    if isinstance(a, ShardGraph):
        return hops.edge_index
    if isinstance(a, (tuple, list)) and any(isinstance(b, Tensor) for b in a):
        return _pair(name, a, hops, conv)
    if not isinstance(a, Tensor):
        return a
    kind = _kind(name, a, hops.graph, conv)
    return _as_seen(a, kind, hops)


def _pair(name: str, pair: Any, hops: HaloSubgraph, conv: str) -> Any:
    """Features of sources and of destinations."""
    seen = []
    for at, a in enumerate(pair):
        if not isinstance(a, Tensor):
            seen.append(a)
            continue
        kind = _kind(name, a, hops.graph, conv)
        if bipartite(hops.graph) and kind != "edges":
            kind = "nodes" if at else "rows"
        seen.append(_as_seen(a, kind, hops))
    return tuple(seen)


def _kind(name: str, a: Tensor, graph: ShardGraph, conv: str) -> str:
    """What the rows of an argument are; where numbers do not tell, its name does."""
    on_edges = "edge" in name or name in ("pseudo", "norm")
    mine = a.sharding if type(a) is ShardTensor else None
    if type(a) is ShardTensor and a.sharded_dim != 0:
        raise MeshshardError(
            f"{conv}: {name} {tuple(a.shape)} has its rows on dim {a.sharded_dim}, not 0: several "
            f"samples or steps go into the columns, x.movedim({a.sharded_dim}, 0).flatten(1), or "
            "one after the other"
        )
    if mine is graph.edges or mine is graph.nodes is graph.sources:
        return "edges" if mine is graph.edges else "rows"
    shardings = {"edges": graph.edges, "rows": graph.sources, "nodes": graph.nodes}
    order = ["edges", "rows", "nodes"] if on_edges else ["rows", "nodes", "edges"]
    for kind in order:
        if _fits(a, shardings[kind]):
            return kind
    if type(a) is not ShardTensor and (a.ndim == 0 or a.shape[0] != graph.nodes.total):
        return ""
    raise MeshshardError(
        f"{conv}: {name} {tuple(a.shape)} is not divided as the {graph.nodes.total} nodes or the "
        f"{graph.edges.total} edges of the graph: shard(…, domain, graph.nodes), graph.take(…)"
    )


def _fits(a: Tensor, sharding: Sharding) -> bool:
    if type(a) is ShardTensor:
        return a.sharded_dim == 0 and a.sharding == sharding
    return sharding.domain.size == 1 and a.ndim > 0 and a.shape[0] == sharding.total


def _as_seen(a: Tensor, kind: str, hops: HaloSubgraph) -> Tensor:
    own = a.to_local() if type(a) is ShardTensor else a
    if kind == "rows":
        return hops.rows(own)
    if kind == "edges":
        return hops.edges(own)
    return padded(own, hops.n_to) if kind == "nodes" else own


def _own(out: Any, hops: HaloSubgraph, plain: bool, name: str) -> Any:
    """Own rows of a result, sharded as they are."""
    if isinstance(out, (tuple, list)):
        return type(out)(_own(o, hops, plain, name) for o in out)
    if not isinstance(out, Tensor):
        return out
    rows = out.shape[0] if out.ndim else -1
    found = {len(hops.names): hops.graph.edges, hops.n_to: hops.graph.nodes}.get(rows)
    if found is None or out.data_ptr() == hops.edge_index.data_ptr():
        why = f"a result {tuple(out.shape)} has neither a row for each node nor for each edge"
        if out.dtype == torch.int64 and rows == 2:
            why = "it gives back its edges, self-loops and all: without return_attention_weights"
        raise refuse(name, (), None, why)
    of_rows = found is hops.graph.nodes and not bipartite(hops.graph)
    own = hops.own(out) if of_rows else out[: found.own]
    return own if plain else ShardTensor.from_local(own, found)
