"""deep: one exchange for several layers, paid for with nodes that are computed twice.

The halo is as deep as the layers reach; every layer is right on one hop less. Worth it where a
message costs more than the rows: small shards, slow networks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshshard.comm import Domain, Exchange
from meshshard.errors import MeshshardError
from meshshard.nn._eval_mode import differ, evaluated
from meshshard.nn.conv._subgraph import bipartite
from meshshard.nn.conv.convert import NORMS
from meshshard.nn.graph._sparse import kept
from meshshard.tensor import ShardGraph, Sharding, ShardTensor
from meshshard.tensor.shard_graph import offsets_of
from meshshard.tensor.shard_tensor import local_of, refuse

__all__ = ["DeepGraph", "DeepHalo", "deepened"]


@dataclass(frozen=True, eq=False)
class DeepGraph:
    """A graph with a halo of several hops, and the in-edges of all but the last of them.

    Attributes:
        graph: the graph that it was made of.
        local: own nodes, then those of the halo by ascending id, as a graph of this rank alone; its
            draws are keyed as those of the whole.
        rows: brings halo rows behind own rows.
        fetch: brings the attributes of in-edges of halo nodes behind those of own edges.
        order: (n_edges,) int64 where each edge of `local` is among those.
        last: (n,) int64 rows of `local` whose in-edges are not there.
    """

    graph: ShardGraph
    local: ShardGraph
    rows: Exchange
    fetch: Exchange
    order: Tensor
    last: Tensor

    def otherwise(self, edge_attr: Tensor | None) -> tuple[ShardGraph, Tensor | None]:
        """The local graph with other in-edges of the last rows: what hears of these differs."""
        local, n = self.local, len(self.last)
        to, order = torch.sort(torch.cat([local.destinations, self.last]), stable=True)
        more = (self.last - 1) % local.nodes.own  # not themselves: convolutions add loops
        sources = torch.cat([local.indices, more])[order]
        names = torch.cat([local.edges.sources(), self.last])[order]
        indptr = offsets_of(torch.bincount(to, minlength=local.nodes.own))
        local.domain.whole = True
        graph = ShardGraph.from_ids(sources, indptr, local.nodes, local.nodes, names)
        local.domain.whole = False
        if edge_attr is not None:
            edge_attr = torch.cat([edge_attr, edge_attr.new_ones(n, *edge_attr.shape[1:])])[order]
        return graph, edge_attr


class _Near(Domain):
    """Some rows of all: what goes over all rows, with a message or without, is refused."""

    whole = True  # until its graph is made

    def _refused(self, *args: Any, **kwargs: Any) -> Any:
        raise refuse("a layer in DeepHalo", (), None, "it couples rows, of which some are here")

    all_reduce = all_gather = gather = scatter = redistribute = shift = _refused

    def share(self, value: Any) -> list[Any]:
        """What functions ask for that search, pick or count rows."""
        return super().share(value) if self.whole else self._refused()


def deepened(graph: ShardGraph, depth: int) -> DeepGraph:
    """A graph with a halo of `depth` hops, made once.

    Raises:
        MeshshardError: the graph is bipartite.

    Communication: five all-to-all for each hop at the first call.
    """
    if bipartite(graph):
        raise MeshshardError("a bipartite graph has one layer: there is nothing to deepen")
    return kept(graph, f"deep {depth}", lambda: _made(graph, depth))


def _made(graph: ShardGraph, depth: int) -> DeepGraph:
    inner = graph.halo[:0]
    outer = graph.halo
    names, edges = _asked(graph, inner)
    for _ in range(depth - 1):
        inner = outer
        names, edges = _asked(graph, inner)
        first = graph.nodes.first
        away = names[:, 0][(names[:, 0] < first) | (names[:, 0] >= first + graph.nodes.own)]
        outer = torch.unique(torch.cat([outer, away]))
    domain, nodes = graph.domain, graph.nodes
    rows = Exchange.of_halo(domain, nodes.sizes, outer, f"exchange of {depth} hops")
    own = torch.arange(nodes.own, device=domain.device) + nodes.first
    ids = torch.cat([own, outer])
    place = torch.argsort(ids)
    near = torch.cat([own, graph.halo])
    ends = torch.cat([near[graph.edge_index], names[:, :2].T], 1).contiguous()
    sources, to = place[torch.searchsorted(ids, ends, sorter=place)]
    order = torch.argsort(to, stable=True)
    origins = domain.exchange(nodes.sources(domain.device), rows)
    some = _Near(None, domain.device)
    alone = Sharding(some, [len(ids)], origins)
    called = torch.cat([graph.edges.sources(domain.device), names[:, 2]])[order]
    indptr = offsets_of(torch.bincount(to, minlength=len(ids)))
    local = ShardGraph.from_ids(sources[order], indptr, alone, alone, called)
    some.whole = False
    last = torch.nonzero(~torch.isin(outer, inner))[:, 0] + nodes.own
    return DeepGraph(graph, local, rows, edges, order, last)


def _asked(graph: ShardGraph, wanted: Tensor) -> tuple[Tensor, Exchange]:
    """In-edges of nodes of other ranks: ids of both ends with names, and how attributes come."""
    domain, nodes = graph.domain, graph.nodes
    ask = Exchange.of_halo(domain, nodes.sizes, wanted, "nodes that are computed twice")
    rows = torch.as_tensor(ask.send_rows)
    count = graph.indptr.diff()[rows]
    by_rank = torch.repeat_interleave(
        torch.arange(domain.size, device=domain.device),
        torch.tensor(ask.send, device=domain.device),
    )
    send = torch.zeros(domain.size, dtype=torch.int64, device=domain.device)
    send.index_add_(0, by_rank, count)
    begin = graph.indptr[rows] - offsets_of(count)[:-1]
    edges = torch.arange(int(count.sum()), device=domain.device)
    edges = edges + torch.repeat_interleave(begin, count)
    own = torch.arange(nodes.own, device=domain.device) + nodes.first
    ids = torch.cat([own, graph.halo])
    ends = [ids[graph.indices[edges]], ids[graph.destinations[edges]]]
    named = torch.stack([*ends, graph.edges.sources(domain.device)[edges]], 1)
    found, receive = domain.route(named, send.tolist())
    fetch = Exchange(domain, graph.edges.own, edges, send.tolist(), receive, "edges of hops")
    return found, fetch


class DeepHalo(nn.Module):
    """Layers that exchange once, before the first of them, as deep as they reach together.

    Equal to the layers on the graph itself, dropout included. They must treat single rows beside
    their convolutions: what goes over all rows is refused, though not a mere number of rows.

    The first call runs the layers twice more, without gradients and in evaluation, to see whether
    they reach farther than `depth`.

    Communication: one exchange of the deep halo's rows, and one of its edge features if there are
    any, forward and backward; none within. At the first call one gather of objects.
    """

    def __init__(self, layers: nn.Module, depth: int) -> None:
        """Wrap a converted model.

        Args:
            layers: takes (x, graph) or (x, graph, edge_attr), gives nodes or (nodes, edges).
            depth: how many edges away a node is heard; one more where degrees of neighbors are.

        Raises:
            NoShardRule: a norm couples all rows.
            MeshshardError: a depth of less than one.
        """
        super().__init__()
        if depth < 1:
            raise MeshshardError(f"DeepHalo: a depth of {depth}; take 1 or more")
        for module in layers.modules():
            if type(module).__name__ in COUPLED or getattr(module, "mode", "") == "graph":
                raise refuse(f"{type(module).__name__} in DeepHalo", (), None, "it couples rows")
        self.layers, self.depth, self._proved = layers, depth, False

    def forward(self, x: Any, graph: ShardGraph, edge_attr: Any = None) -> Any:
        """What the layers make of nodes and edges."""
        deep = deepened(graph, self.depth)
        domain, sharded = graph.domain, type(x) is ShardTensor
        seen: list[Any] = [domain.exchange(local_of(x), deep.rows)]
        if edge_attr is not None:
            seen.append(domain.exchange(local_of(edge_attr), deep.fetch)[deep.order])
        if not self._proved:
            domain.run_collectively(lambda: self._prove(deep, seen, sharded), "DeepHalo")
            self._proved = True
        out = self._out(deep.local, seen, sharded)
        if not isinstance(out, tuple):
            return _given(out, deep, sharded)
        nodes, edges = out
        return _given(nodes, deep, sharded), _given(edges, deep, sharded, of_edges=True)

    def _out(self, local: ShardGraph, seen: Sequence[Any], sharded: bool) -> Any:
        """What the layers make of all local rows and edges."""
        inputs = [
            ShardTensor.from_local(t, s) if sharded else t
            for t, s in zip(seen, (local.nodes, local.edges), strict=False)
        ]
        return self.layers(inputs[0], local, *inputs[1:])

    def _prove(self, deep: DeepGraph, seen: Sequence[Any], sharded: bool) -> None:
        """Refuse layers whose own nodes hear of in-edges that are not there."""
        if not len(deep.last):
            return
        graph, edges = deep.otherwise(seen[1] if len(seen) > 1 else None)
        every = seen[:1] if edges is None else [seen[0], edges]
        with evaluated(self.layers, deep.graph.device):
            outs = self._out(deep.local, seen, sharded), self._out(graph, every, sharded)
        mine, other = (local_of(o[0] if isinstance(o, tuple) else o) for o in outs)
        own = deep.graph.nodes.own
        if differ(mine[:own], other[:own]):
            raise MeshshardError(f"the layers reach farther than depth {self.depth}; give a larger")


COUPLED = {"BatchNorm", "BatchNorm1d", "SyncBatchNorm", *NORMS} - {"LayerNorm"}  # but by its mode


def _given(out: Any, deep: DeepGraph, sharded: bool, of_edges: bool = False) -> Any:
    """Own rows of nodes or edges."""
    graph, rows = deep.graph, local_of(out)
    local = deep.local.edges if of_edges else deep.local.nodes
    if len(rows) != local.own or sharded != (type(out) is ShardTensor):
        why = f"a result {tuple(out.shape)} has no row for each {'edge' if of_edges else 'node'}"
        raise refuse("DeepHalo", (), None, why)
    if of_edges:
        places = torch.argsort(deep.order)[: graph.edges.own]
        own, sharding = rows[places], graph.edges
    else:
        own, sharding = rows[: graph.nodes.own], graph.nodes
    return ShardTensor.from_local(own, sharding) if sharded else own
