"""Checks that a convolution, or a model on given data, gives on shards what it gives on one rank.

Ranks are threads of this process (`comm.simulate`), so no launcher is needed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshshard.comm import Domain, simulate
from meshshard.errors import MeshshardError, n_of
from meshshard.nn.conv.convert import convert
from meshshard.tensor import ShardGraph, Sharding, ShardTensor
from meshshard.tensor.shard_graph import offsets_of

__all__ = ["Consistency", "ConvCheck", "check_consistency", "check_conv"]

EXACT = 1e-10  # largest relative difference in float64
NODES, EDGES, SIZES = 40, 130, (17, 0, 22, 1)  # of the graph of check_conv


@dataclass(frozen=True)
class ConvCheck:
    """The result of `check_conv`.

    Attributes:
        name: class of the convolution.
        hops: how many hops make it exact; None if neither one nor two do.
        differences: by number of hops, the largest relative difference of output and gradients.
        error: the error that it raised, if any.
    """

    name: str
    hops: int | None
    differences: Mapping[int, float]
    error: str = ""

    @property
    def exact(self) -> bool:
        """Whether it is exact on shards."""
        return self.hops is not None

    def __str__(self) -> str:
        if self.hops is not None:
            return f"{self.name}: exact with {n_of(self.hops, 'hops')}"
        found = ", ".join(f"{n_of(n, 'hops')}: {d:.1e}" for n, d in self.differences.items())
        return f"{self.name}: NOT exact on shards ({self.error or f'differences with {found}'})"


def check_conv(
    conv: nn.Module, width: int | None = None, edge_width: int | None = None, weights: bool = False
) -> ConvCheck:
    """Compare a convolution on a small random sharded graph with itself on the whole graph.

    The graph is directed, with loops, parallel edges, isolated nodes and an empty shard.

    Args:
        conv: called with (x, edge_index) or (x, edge_index, edge_attr); it is not changed.
        width: channels of a node; `conv.in_channels` by default, or 8.
        edge_width: channels of an edge; no edge features by default.
        weights: pass (n_edges,) edge weights.

    Returns:
        The number of hops that it needs; `convert(conv, hops=check.hops)` uses it.
    """
    edges, data = _random_graph(width or int(getattr(conv, "in_channels", 8)), edge_width, weights)
    name, differences, message = type(conv).__name__, {}, ""
    for hops in (1, 2):
        try:
            differences[hops] = _difference_on_shards(conv, edges, data, hops)
        except (MeshshardError, RuntimeError, ValueError, IndexError) as error:
            message = str(error)
            continue
        if differences[hops] < EXACT:
            return ConvCheck(name, hops, differences)
    return ConvCheck(name, None, differences, message)


def _random_graph(width: int, edge_width: int | None, weights: bool) -> tuple[Tensor, list[Tensor]]:
    """Edges, and features of nodes and perhaps of edges."""
    generator = torch.Generator().manual_seed(1)
    edges = torch.randint(NODES - 3, (2, EDGES), generator=generator)
    edges += 1 + (edges > 11).long() + (edges > 28).long()  # three nodes are isolated
    edges[:, :4] = torch.arange(4)
    edges[:, 4] = edges[:, 5]
    data = [torch.randn(NODES, width, generator=generator, dtype=torch.float64)]
    if edge_width or weights:
        more = torch.rand(EDGES, edge_width or 1, generator=generator, dtype=torch.float64)
        data.append(more[:, 0] if weights else more)
    return edges, data


def _difference_on_shards(conv: nn.Module, edges: Tensor, data: list[Tensor], hops: int) -> float:
    """The largest relative difference of output and gradients on shards."""
    copies = [convert(copy.deepcopy(conv), hops).double().eval() for _ in SIZES]
    for each in copies:
        for module in each.modules():
            if hasattr(module, "_meshshard_hops"):
                setattr(module, "_meshshard_hops", hops)  # noqa: B010 - PyG's own classes too
    whole = copy.deepcopy(conv).double().eval()
    leaves = [d.clone().requires_grad_() for d in data]
    out = _backward(whole, leaves, edges)
    expected = [out, leaves[0].grad, *[p.grad for p in whole.parameters()]]

    def _job(domain: Domain) -> list[Any]:
        model, nodes = copies[domain.rank], Sharding(domain, SIZES)
        graph = ShardGraph.from_edge_index(edges, nodes)
        owned = data[0][nodes.first : nodes.first + nodes.own].clone()
        x: Any = ShardTensor.from_local(owned, nodes).requires_grad_()
        out = _backward(model, [x, *[graph.take(e).requires_grad_() for e in data[1:]]], graph)
        domain.average_gradients(model)
        return [out.gather(), x.grad.gather(), *[p.grad for p in model.parameters()]]

    found = simulate(len(SIZES), _job)[0]
    return max(_difference(a, b) for a, b in zip(found, expected, strict=True))


def _backward(conv: nn.Module, data: Sequence[Any], graph: Any) -> Any:
    """The output, after the backward pass of a nonlinear loss."""
    out = conv(data[0], graph, *data[1:])
    loss: Any = torch.sin(out * 2).sum()
    loss.backward()
    return out.detach()


def _difference(a: Any, b: Any) -> float:
    """The largest difference, relative to the largest value of b; None counts as zeros."""
    if a is None or b is None:
        left = a if b is None else b
        return 0.0 if left is None else float(left.abs().max())
    if not b.numel():
        return 0.0
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))


@dataclass
class Consistency:
    """The result of `check_consistency`, one row per number of ranks.

    Attributes:
        rows: for each number of ranks: `ranks`; `ids`, whether the exchange brings the right rows;
            `bitwise`, whether the output is bitwise equal; and the largest relative differences of
            the output (`forward`), of the `gradients` and of the losses of `training`.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Whether everything equals one rank, to 1e-10 in float64."""
        names = ("forward", "gradients", "training")
        return all(row["ids"] and max(row[name] for name in names) < EXACT for row in self.rows)

    def __str__(self) -> str:
        word = {True: "yes", False: "NO"}
        lines = [
            f"{r['ranks']:5}  {word[r['ids']]:>3}  {word[r['bitwise']]:>7}"
            f"  {r['forward']:7.1e}  {r['gradients']:9.1e}  {r['training']:8.1e}"
            for r in self.rows
        ]
        return "\n".join(["ranks  ids  bitwise  forward  gradients  training", *lines])


def check_consistency(
    model: nn.Module,
    data: Any,
    ranks: Sequence[int] = (1, 2, 3, 4),
    steps: int = 90,
    call: Callable[..., Any] | None = None,
) -> Consistency:
    """Run and train a model on shards of given data, on several numbers of ranks, against one rank.

    Args:
        model: a converted model; copies of it are run, in float64 and in evaluation mode.
        data: `x` (n, …), `edge_index`, the target `y` (n, …) and, optionally, `edge_attr`; as
            attributes (PyG's Data) or as keys.
        ranks: numbers of ranks; METIS partitions the nodes.
        steps: steps of Adam on the mean squared error, 1 or more.
        call: call(model, x, graph, edge_attr), if the model is not called as model(x, graph) or
            model(x, graph, edge_attr).

    Returns:
        The comparison; print it.

    Raises:
        MeshshardError: the data have no x, y or edge_index.
    """
    fields = _fields(data)
    report, serial = Consistency(), _train(model, fields, 1, steps, call or _call)
    for size in ranks:
        out, grads, losses, ids = _train(model, fields, size, steps, call or _call)
        pairs = zip(grads, serial[1], strict=True)
        report.rows.append({
            "ranks": size,
            "ids": ids,
            "bitwise": torch.equal(out, serial[0]),
            "forward": _difference(out, serial[0]),
            "gradients": max((_difference(a, b) for a, b in pairs), default=0.0),
            "training": _difference(losses, serial[2]),
        })  # fmt: skip
    return report


def _call(model: Any, x: Any, graph: Any, edge_attr: Any) -> Any:
    return model(x, graph) if edge_attr is None else model(x, graph, edge_attr)


def _fields(data: Any) -> dict[str, Any]:
    """x, y, edge_index and edge_attr of the data, in float64."""
    keys = ("x", "y", "edge_index", "edge_attr")
    given = data if isinstance(data, Mapping) else {k: getattr(data, k, None) for k in keys}
    fields: dict[str, Any] = {k: given.get(k) for k in keys}
    missing = [name for name, value in fields.items() if value is None and name != "edge_attr"]
    if missing:
        raise MeshshardError(f"check_consistency: the data have no {', no '.join(missing)}")
    floating = {n: t.double() for n, t in fields.items() if n != "edge_index" and t is not None}
    return fields | floating


def _partition(edge_index: Tensor, n: int, parts: int) -> tuple[Tensor, list[int]]:
    """Nodes in the order of their parts, and how many each part has."""
    from meshshard.graph import Graph
    from meshshard.partitioning.methods import Metis

    if parts == 1:
        return torch.arange(n), [n]
    order = torch.argsort(edge_index[1], stable=True)
    indptr = offsets_of(torch.bincount(edge_index[1], minlength=n))
    graph = Graph(indptr=indptr.numpy(), indices=edge_index[0][order].numpy())
    labels = torch.from_numpy(Metis()(graph, parts))
    return torch.argsort(labels, stable=True), torch.bincount(labels, minlength=parts).tolist()


def _train(
    model: nn.Module, fields: dict[str, Any], size: int, steps: int, call: Callable[..., Any]
) -> Any:
    """First output (in the order of the data) and gradients, all losses, and whether ids arrive."""
    order, sizes = _partition(fields["edge_index"], len(fields["x"]), size)
    place = torch.argsort(order)
    copies = [copy.deepcopy(model).double().eval() for _ in range(size)]

    def _job(domain: Domain) -> Any:
        model, nodes = copies[domain.rank], Sharding(domain, sizes)
        nodes.origin = order[nodes.first : nodes.first + nodes.own]
        graph = ShardGraph.from_edge_index(place[fields["edge_index"]], nodes)
        ids = graph.local(torch.arange(nodes.own) + nodes.first)
        arrived = domain.share(torch.equal(ids[nodes.own :], graph.halo))
        x, y = (ShardTensor.from_local(fields[n][nodes.origin], nodes) for n in ("x", "y"))
        edge_attr = fields["edge_attr"]
        edge_attr = None if edge_attr is None else graph.take(edge_attr)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        first, losses = None, []
        for _ in range(steps):
            optimizer.zero_grad()
            out = call(model, x, graph, edge_attr)
            loss: Any = (out - y).square().mean()
            loss.backward()
            domain.average_gradients(model)
            if first is None:
                first = out.detach().gather()[place], [p.grad for p in model.parameters()]
            optimizer.step()
            losses.append(loss.item())
        assert first is not None
        return *first, torch.tensor(losses, dtype=torch.float64), all(arrived)

    return simulate(size, _job)[0]
