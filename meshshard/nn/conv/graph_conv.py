"""graph_conv: a convolution of PyG, or a user's, on the nodes of a shard, with its code unchanged.

The class of the convolution is replaced by a subclass of it, as FSDP2 does with modules:
parameters, state_dict and isinstance stay. Called with a ShardGraph in place of edge_index, it runs
on the halo subgraph of the shard and returns owned rows; called with an edge_index, it is
unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from meshshard.errors import MeshshardError
from meshshard.nn.conv._context import RUNNING, ConvContext
from meshshard.nn.conv._fast_paths import run_fast_path
from meshshard.nn.conv._permutation_check import check_permutation_invariance
from meshshard.nn.conv._rules import RULES
from meshshard.nn.conv._subclass import swap_class
from meshshard.nn.conv._subgraph import (
    HaloSubgraph,
    halo_subgraph_of,
    has_rows_of,
    is_bipartite,
    pad_rows,
)
from meshshard.nn.conv.pyg import hops_of, pyg_class
from meshshard.tensor import ShardGraph, ShardTensor
from meshshard.tensor._torch_private import not_compiled
from meshshard.tensor.shard_tensor import refuse, sharded_in

__all__ = ["convert_conv"]


def convert_conv(conv: Any, hops: int | None = None) -> None:
    """Let a convolution take a ShardGraph, in place.

    Args:
        conv: the convolution.
        hops: how many hops it needs if it is not in the table of `pyg`; 2 by default.
    """
    conv._meshshard_hops = hops_of(conv, hops)
    conv._meshshard_checked = pyg_class(conv) is not None
    swap_class(conv, on_shards)
    for module in conv.modules():
        if hasattr(module, "q") and hasattr(module, "interpolation"):
            swap_class(module, with_nonempty_first_segment)


def on_shards(cls: type[Any]) -> type[Any]:
    """The subclass of a convolution's class that takes a ShardGraph."""

    class OnShards(cls):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            """Run on the shard of a ShardGraph; without one, as the class does."""
            if not _graphs_in((*args, *kwargs.values())):
                return super().forward(*args, **kwargs)
            return _run(self, super().forward, args, kwargs)

        def propagate(self, edge_index: Any, size: Any = None, **arguments: Any) -> Any:
            """Propagate as the class does, with halo rows that are up to date."""
            run = RUNNING.get()
            if run is None:
                return super().propagate(edge_index, size=size, **arguments)
            arguments = run.before_propagate(self, edge_index, arguments)
            out = super().propagate(edge_index, size=size, **arguments)
            run.in_propagate, run.stale = False, True
            return out

        def edge_updater(self, edge_index: Any, size: Any = None, **arguments: Any) -> Any:
            """Update edges as the class does, with halo rows that are up to date."""
            run = RUNNING.get()
            if run is None:
                return super().edge_updater(edge_index, size=size, **arguments)
            arguments = run.before_propagate(self, edge_index, arguments)
            out = super().edge_updater(edge_index, size=size, **arguments)
            run.in_propagate = False
            return out

        def get_attention_loss(self) -> Any:
            """Refused."""
            why = "it draws edges at random"
            raise refuse(f"{cls.__name__}.get_attention_loss", (), None, why)

    if not hasattr(cls, "get_attention_loss"):
        del OnShards.get_attention_loss
    return OnShards


def with_nonempty_first_segment(cls: type[Any]) -> type[Any]:
    """The subclass of a quantile aggregation that works if the first node has no in-edges.

    PyG's raises an error then; here a segment of one row is put in front and its result dropped.
    """

    class WithNonemptyFirstSegment(cls):  # type: ignore[misc]
        def forward(
            self, x: Tensor, index: Any = None, ptr: Any = None, dim_size: Any = None, dim: int = -2
        ) -> Tensor:
            """Aggregate as the class does, after one more segment."""
            x = x.movedim(dim, 0)
            index = torch.cat([index.new_zeros(1), index + 1])
            longer = torch.cat([torch.zeros_like(x[:1]), x]).movedim(0, dim)
            size = None if dim_size is None else dim_size + 1
            out: Tensor = super().forward(longer, index, None, size, dim)
            return out.narrow(dim, 1, out.shape[dim] - 1)

    return WithNonemptyFirstSegment


def _run(conv: Any, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """The result of a convolution at the owned nodes of a ShardGraph."""
    names = list(signature(forward).parameters)
    arguments = dict(zip(names, args, strict=False)) | kwargs
    name, row = type(conv).__name__, pyg_class(conv)
    graph = _only_graph((*args, *kwargs.values()), name)
    _require_no_bipartite_loops(conv, graph, name)
    has_size = isinstance(arguments.get("size"), (tuple, list))
    if has_size:
        _require_size_of(graph, arguments["size"], name)
    plain = not sharded_in(arguments.values())
    if plain and graph.domain.size > 1:
        raise MeshshardError(
            f"{name}: the graph is sharded over {graph.domain.size} ranks, but the features are "
            f"plain tensors; pass shard(x, domain, graph.nodes)"
        )
    if row and row.fast_path:
        out = run_fast_path(row.fast_path, conv, arguments, graph)
        if out is not None:
            return out

    def _call(subgraph: HaloSubgraph) -> Any:
        local = {n: _local(n, a, subgraph, name) for n, a in arguments.items()}
        unknown = "size" in names and local.get("size") is None
        if has_size or (unknown and is_bipartite(graph)):
            local["size"] = (subgraph.n_rows, subgraph.n_destinations)
        with ConvContext(subgraph, name, RULES, row is not None and row.max_over_ranks):
            return _owned(forward(**local), subgraph, plain, name)

    subgraph = halo_subgraph_of(graph, conv._meshshard_hops)
    if not conv._meshshard_checked:
        check_permutation_invariance(conv, subgraph, _call, name)
        conv._meshshard_checked = True
    return _call(subgraph)


not_compiled(_run)  # compiled models break their graph here: exchanges and hooks run uncompiled


def _graphs_in(arguments: Iterable[Any]) -> list[ShardGraph]:
    """Every graph among arguments, one level of lists and dicts deep."""
    found = []
    for a in arguments:
        each = a.values() if isinstance(a, dict) else a if isinstance(a, (list, tuple)) else (a,)
        found += [b for b in each if isinstance(b, ShardGraph)]
    return found


def _only_graph(arguments: Sequence[Any], name: str) -> ShardGraph:
    """The graph of a call.

    Raises:
        NoShardRule: there are several, or it is in a list or a dict; on every rank.
    """
    direct = [a for a in arguments if isinstance(a, ShardGraph)]
    found = _graphs_in(arguments)
    if len(found) > len(direct):
        why = "it got a list of graphs, as Batch.from_data_list makes; call it once for each graph"
        raise refuse(name, (), None, why)
    if len({id(graph) for graph in found}) > 1:
        why = (
            f"it got {len(found)} graphs, but halo rows are exchanged for one; use one convolution "
            "for each graph and combine their results"
        )
        raise refuse(name, (), None, why)
    return found[0]


def _require_no_bipartite_loops(conv: Any, graph: ShardGraph, name: str) -> None:
    """Refuse self-loops from row i of the sources to row i of the nodes: ranks may differ."""
    if is_bipartite(graph) and getattr(conv, "add_self_loops", None) is True:
        why = (
            "in a bipartite graph it adds loops between rows of the same number, which different "
            "ranks may own; pass add_self_loops=False and, if you want these loops, add them to "
            "the edge_index given to ShardGraph.from_edge_index"
        )
        raise refuse(f"{name}(add_self_loops=True)", (), None, why)


def _require_size_of(graph: ShardGraph, size: Any, name: str) -> None:
    expected = graph.sources.total, graph.nodes.total
    if any(n not in (None, m) for n, m in zip(size, expected, strict=True)):
        raise MeshshardError(
            f"{name}: expected size {expected}, all sources and nodes of the graph, got "
            f"{tuple(size)}"
        )


def _local(name: str, a: Any, subgraph: HaloSubgraph, conv: str) -> Any:
    """An argument as the ordinary convolution gets it."""
    if isinstance(a, ShardGraph):
        return subgraph.edge_index
    if isinstance(a, (tuple, list)) and any(isinstance(b, Tensor) for b in a):
        return tuple(_local_of_pair(name, b, i, subgraph, conv) for i, b in enumerate(a))
    if not isinstance(a, Tensor):
        return a
    return _local_rows(a, _kind(name, a, subgraph.graph, conv), subgraph)


def _local_of_pair(name: str, a: Any, position: int, subgraph: HaloSubgraph, conv: str) -> Any:
    """The features of the sources (position 0) or of the destinations (1)."""
    if not isinstance(a, Tensor):
        return a
    kind = _kind(name, a, subgraph.graph, conv)
    if is_bipartite(subgraph.graph) and kind != "edges":
        kind = "nodes" if position else "rows"
    return _local_rows(a, kind, subgraph)


def _kind(name: str, a: Tensor, graph: ShardGraph, conv: str) -> str:
    """What the rows of an argument are; its name decides where the number of rows does not."""
    mine = a.sharding if type(a) is ShardTensor else None
    if type(a) is ShardTensor and a.sharded_dim != 0:
        raise MeshshardError(
            f"{conv}: {name} {tuple(a.shape)} has its rows on dim {a.sharded_dim}, expected dim 0; "
            f"put several samples or steps into the columns, x.movedim({a.sharded_dim}, 0)"
            ".flatten(1), or call it for one after the other"
        )
    if mine is graph.edges or mine is graph.nodes is graph.sources:
        return "edges" if mine is graph.edges else "rows"
    shardings = {"rows": graph.sources, "nodes": graph.nodes, "edges": graph.edges}
    kinds = list(shardings)
    if "edge" in name or name in ("pseudo", "norm"):
        kinds = ["edges", "rows", "nodes"]
    for kind in kinds:
        if has_rows_of(a, shardings[kind]):
            return kind
    if type(a) is not ShardTensor and (a.ndim == 0 or a.shape[0] != graph.nodes.total):
        return ""
    raise MeshshardError(
        f"{conv}: {name} {tuple(a.shape)} is not sharded like the {graph.nodes.total} nodes or the "
        f"{graph.edges.total} edges of the graph; use shard(…, domain, graph.nodes), graph.take(…)"
    )


def _local_rows(a: Tensor, kind: str, subgraph: HaloSubgraph) -> Tensor:
    owned = a.to_local() if type(a) is ShardTensor else a
    if kind == "rows":
        return subgraph.rows(owned)
    if kind == "edges":
        return subgraph.edges(owned)
    return pad_rows(owned, subgraph.n_destinations) if kind == "nodes" else owned


def _owned(out: Any, subgraph: HaloSubgraph, plain: bool, name: str) -> Any:
    """The owned rows of a result, sharded like the nodes or the edges."""
    if isinstance(out, (tuple, list)):
        return type(out)(_owned(o, subgraph, plain, name) for o in out)
    if not isinstance(out, Tensor):
        return out
    graph, n = subgraph.graph, out.shape[0] if out.ndim else -1
    known = {len(subgraph.edge_keys): graph.edges, subgraph.n_destinations: graph.nodes}
    sharding = known.get(n)
    if sharding is None or out.data_ptr() == subgraph.edge_index.data_ptr():
        why = f"its result {tuple(out.shape)} has neither a row per node nor a row per edge"
        if out.dtype == torch.int64 and n == 2:
            why = "it returns its edges, self-loops included: omit return_attention_weights"
        raise refuse(name, (), None, why)
    of_nodes = sharding is graph.nodes and not is_bipartite(graph)
    owned = subgraph.owned(out) if of_nodes else out[: sharding.own]
    return owned if plain else ShardTensor.from_local(owned, sharding)
