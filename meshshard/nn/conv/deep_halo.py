"""DeepHalo: one exchange for several layers, at the cost of recomputing halo nodes.

The halo has as many hops as the layers together. After each layer one hop less of it is exact. This
is faster where the latency of an exchange costs more than its rows: small shards, slow networks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from meshshard.comm import Domain, Exchange
from meshshard.errors import MeshshardError, n_of
from meshshard.nn._eval_mode import differ, eval_mode
from meshshard.nn.conv._subgraph import is_bipartite
from meshshard.nn.conv.pyg import is_norm_over_nodes
from meshshard.nn.graph._cached_on import cached_on
from meshshard.tensor import ShardGraph, Sharding, ShardTensor
from meshshard.tensor.shard_graph import offsets_of
from meshshard.tensor.shard_tensor import local_of, refuse

__all__ = ["DeepGraph", "DeepHalo", "deep_graph_of"]


@dataclass(frozen=True, eq=False)
class DeepGraph:
    """A graph with a halo of several hops, and the in-edges of all but its outermost nodes.

    Attributes:
        graph: the sharded graph.
        local: graph of the owned nodes, then halo nodes by ascending id, without exchange; random
            numbers have the keys of the sharded graph.
        rows: exchange that appends the rows of halo nodes to owned rows.
        fetch: exchange that appends attributes of halo nodes' in-edges to those of owned edges.
        order: (n_edges,) int64 position of each edge of `local` among those attributes.
        outermost: (n,) int64 rows of `local` whose in-edges are missing.
    """

    graph: ShardGraph
    local: ShardGraph
    rows: Exchange
    fetch: Exchange
    order: Tensor
    outermost: Tensor

    def with_other_edges(self, edge_attr: Tensor | None) -> tuple[ShardGraph, Tensor | None]:
        """The local graph with arbitrary in-edges of the outermost nodes."""
        local, n = self.local, len(self.outermost)
        to, order = torch.sort(torch.cat([local.destinations, self.outermost]), stable=True)
        # Sources other than the nodes themselves: convolutions may add self-loops already.
        other = (self.outermost - 1) % max(1, local.nodes.own)
        sources = torch.cat([local.indices, other])[order]
        keys = torch.cat([local.edges.sources(), self.outermost])[order]
        if edge_attr is not None:
            edge_attr = torch.cat([edge_attr, edge_attr.new_ones(n, *edge_attr.shape[1:])])[order]
        return _local_graph(sources, to, local.nodes, keys), edge_attr


class _PartOfRows(Domain):
    """The domain of a deep halo. It refuses collectives: they would count copies of rows."""

    whole = False

    def _refused(self, *args: Any, **kwargs: Any) -> Any:
        why = "it couples rows, but a deep halo has only some of them, with copies on other ranks"
        raise refuse("a layer in DeepHalo", (), None, why)

    all_reduce = all_gather = gather = scatter = redistribute = shift = share = _refused


def _local_graph(sources: Tensor, to: Tensor, nodes: Sharding, keys: Tensor) -> ShardGraph:
    """A graph of edges sorted by destination, with sources on this rank only."""
    indptr = offsets_of(torch.bincount(to, minlength=nodes.own))
    alone = Sharding(Domain(None, nodes.domain.device), [nodes.own], nodes.origin)
    graph = ShardGraph.from_ids(sources, indptr, alone, alone, keys)
    return replace(graph, nodes=nodes, sources=nodes)


def deep_graph_of(graph: ShardGraph, depth: int) -> DeepGraph:
    """A graph with a halo of `depth` hops, cached on the graph.

    Raises:
        MeshshardError: the graph is bipartite.

    Communication: five all-to-all per hop at the first call.
    """
    if is_bipartite(graph):
        raise MeshshardError(
            "DeepHalo: the graph is bipartite; expected the same nodes as sources and destinations"
        )
    return cached_on(graph, ("deep graph", depth), lambda: _make_deep_graph(graph, depth))


def _make_deep_graph(graph: ShardGraph, depth: int) -> DeepGraph:
    inner = graph.halo[:0]
    outer = graph.halo
    in_edges, fetch = _in_edges_of(graph, inner)
    for _ in range(depth - 1):
        inner = outer
        in_edges, fetch = _in_edges_of(graph, inner)
        first = graph.nodes.first
        sources = in_edges[:, 0]
        remote = sources[(sources < first) | (sources >= first + graph.nodes.own)]
        outer = torch.unique(torch.cat([outer, remote]))
    domain, nodes = graph.domain, graph.nodes
    rows = Exchange.of_halo(domain, nodes.sizes, outer, f"{depth}-hop halo exchange")
    owned = _owned_ids(graph)
    ids = torch.cat([owned, outer])
    by_id = torch.argsort(ids)
    one_hop = torch.cat([owned, graph.halo])
    ends = torch.cat([one_hop[graph.edge_index], in_edges[:, :2].T], 1).contiguous()
    sources, to = by_id[torch.searchsorted(ids, ends, sorter=by_id)]
    order = torch.argsort(to, stable=True)
    row_keys = domain.exchange(nodes.sources(domain.device), rows)
    edge_keys = torch.cat([graph.edges.sources(domain.device), in_edges[:, 2]])
    local_nodes = Sharding(_PartOfRows(None, domain.device), [len(ids)], row_keys)
    local = _local_graph(sources[order], to[order], local_nodes, edge_keys[order])
    outermost = torch.nonzero(~torch.isin(outer, inner))[:, 0] + nodes.own
    return DeepGraph(graph, local, rows, fetch, order, outermost)


def _in_edges_of(graph: ShardGraph, ids: Tensor) -> tuple[Tensor, Exchange]:
    """In-edges of nodes that other ranks own, and the exchange of their attributes.

    Returns:
        (n, 3) int64 ids of both ends and key of every edge, and the exchange.
    """
    domain, nodes = graph.domain, graph.nodes
    request = Exchange.of_halo(domain, nodes.sizes, ids, "recomputed nodes")
    rows = torch.as_tensor(request.send_rows)
    count = graph.indptr.diff()[rows]
    by_rank = torch.repeat_interleave(
        torch.arange(domain.size, device=domain.device),
        torch.tensor(request.send, device=domain.device),
    )
    send = torch.zeros(domain.size, dtype=torch.int64, device=domain.device)
    send.index_add_(0, by_rank, count)
    begin = graph.indptr[rows] - offsets_of(count)[:-1]
    edges = torch.arange(int(count.sum()), device=domain.device)
    edges = edges + torch.repeat_interleave(begin, count)
    local_ids = torch.cat([_owned_ids(graph), graph.halo])
    ends = [local_ids[graph.indices[edges]], local_ids[graph.destinations[edges]]]
    reply = torch.stack([*ends, graph.edges.sources(domain.device)[edges]], 1)
    in_edges, receive = domain.route(reply, send.tolist())
    fetch = Exchange(
        domain, graph.edges.own, edges, send.tolist(), receive, "in-edges of halo nodes"
    )
    return in_edges, fetch


def _owned_ids(graph: ShardGraph) -> Tensor:
    nodes = graph.nodes
    return torch.arange(nodes.own, device=graph.domain.device) + nodes.first


class DeepHalo(nn.Module):
    """Run several layers after one exchange of a halo of `depth` hops.

    The result equals that of the layers on the graph itself, dropout included. Besides convolutions
    the layers may contain functions of single rows only. Functions of all rows are refused, but use
    of the number of rows (`len(x)`, `x.shape[0]`) is not detected.

    The first call runs the layers three times, two of them in evaluation mode and without
    gradients, to check that the result does not depend on nodes more than `depth` hops away.

    Communication: one exchange of the rows of the deep halo, and one of its edge features if there
    are any, forward and backward. At the first call one gather of objects.
    """

    def __init__(self, layers: nn.Module, depth: int) -> None:
        """Wrap a converted model.

        Args:
            layers: called with (x, graph) or (x, graph, edge_attr); returns nodes, or nodes and
                edges.
            depth: largest number of hops between a node and another whose result it changes; one
                more if layers use degrees of neighbors.

        Raises:
            NoShardRule: a norm couples all rows.
            MeshshardError: `depth` is less than 1.
        """
        super().__init__()
        if depth < 1:
            raise MeshshardError(f"DeepHalo: expected a depth of 1 or more, got {depth}")
        for module in layers.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) or is_norm_over_nodes(module):
                raise refuse(f"{type(module).__name__} in DeepHalo", (), None, "it couples rows")
        self.layers, self.depth, self._checked = layers, depth, False

    def forward(self, x: Any, graph: ShardGraph, edge_attr: Any = None) -> Any:
        """Call the layers on the deep halo; return owned nodes, or owned nodes and edges."""
        deep = deep_graph_of(graph, self.depth)
        domain, sharded = graph.domain, type(x) is ShardTensor
        inputs: list[Any] = [domain.exchange(local_of(x), deep.rows)]
        if edge_attr is not None:
            inputs.append(domain.exchange(local_of(edge_attr), deep.fetch)[deep.order])
        if not self._checked:
            domain.run_collectively(lambda: self._check_depth(deep, inputs, sharded), "DeepHalo")
            self._checked = True
        out = self._call(deep.local, inputs, sharded)
        if not isinstance(out, tuple):
            return _owned(out, deep, sharded)
        nodes, edges = out
        return _owned(nodes, deep, sharded), _owned(edges, deep, sharded, of_edges=True)

    def _call(self, local: ShardGraph, inputs: Sequence[Any], sharded: bool) -> Any:
        """Call the layers on all local rows and edges."""
        wrapped = [
            ShardTensor.from_local(t, s) if sharded else t
            for t, s in zip(inputs, (local.nodes, local.edges), strict=False)
        ]
        return self.layers(wrapped[0], local, *wrapped[1:])

    def _check_depth(self, deep: DeepGraph, inputs: Sequence[Any], sharded: bool) -> None:
        """Raise if owned nodes change with the in-edges of the outermost nodes.

        Every rank makes both calls, so that a refused operation is refused on all ranks.
        """
        graph, edges = deep.with_other_edges(inputs[1] if len(inputs) > 1 else None)
        others = inputs[:1] if edges is None else [inputs[0], edges]
        with eval_mode(self.layers, deep.graph.device):
            outs = self._call(deep.local, inputs, sharded), self._call(graph, others, sharded)
        a, b = (local_of(out[0] if isinstance(out, tuple) else out) for out in outs)
        own = deep.graph.nodes.own
        if differ(a[:own], b[:own]):
            raise MeshshardError(
                f"DeepHalo: the result depends on nodes more than {n_of(self.depth, 'hops')} away; "
                "pass a larger depth"
            )


def _owned(out: Any, deep: DeepGraph, sharded: bool, of_edges: bool = False) -> Any:
    """Owned rows of nodes or edges."""
    graph, rows = deep.graph, local_of(out)
    local = deep.local.edges if of_edges else deep.local.nodes
    if len(rows) != local.own or sharded != (type(out) is ShardTensor):
        what = "edge" if of_edges else "node"
        why = f"expected a result with one row for each {what}, got shape {tuple(out.shape)}"
        raise refuse("DeepHalo", (), None, why)
    if not of_edges:
        owned, sharding = rows[: graph.nodes.own], graph.nodes
    else:
        owned, sharding = rows[torch.argsort(deep.order)[: graph.edges.own]], graph.edges
    return ShardTensor.from_local(owned, sharding) if sharded else owned
