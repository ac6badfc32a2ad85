"""checks: is this convolution, or this model on this data, on shards what it is on the whole?

Ranks are threads of this process (`comm.simulate`), so a check needs no launcher.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshshard.comm import Domain, simulate
from meshshard.errors import MeshshardError
from meshshard.nn.conv.convert import convert
from meshshard.tensor import ShardGraph, Sharding, ShardTensor
from meshshard.tensor.shard_graph import offsets_of

__all__ = ["Consistency", "ConvCheck", "check_consistency", "check_conv"]

EXACT = 1e-10
NODES, EDGES, SIZES = 40, 130, (17, 0, 22, 1)


@dataclass(frozen=True)
class ConvCheck:
    """What `check_conv` has found.

    Attributes:
        name: of the convolution.
        hops: how many it needs to be exact, None where neither one nor two are enough.
        differences: by number of hops, the largest relative difference of output and gradients.
        error: what it raised, if it did.
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
        if self.exact:
            return f"{self.name}: exact with {self.hops} hop{'s' * (self.hops == 2)}"
        found = ", ".join(f"{far:.1e} with {n}" for n, far in self.differences.items())
        return f"{self.name}: NOT exact on shards ({self.error or f'{found} hops'})"


def check_conv(conv: nn.Module, width: int | None = None, edge_width: int | None = None,
               weights: bool = False) -> ConvCheck:  # fmt: skip
    """Compare a convolution on a small random sharded graph with itself on the whole graph.

    The graph is directed, with loops, parallel edges, isolated nodes and an empty shard.

    Args:
        conv: takes (x, edge_index) or (x, edge_index, edge_attr); it is not changed.
        width: numbers of a node, by default its `in_channels`.
        edge_width: numbers of an edge, none by default.
        weights: pass edge features as (n_edges,) weights.

    Returns:
        What it needs; `convert(conv, hops=check.hops)` makes it so.
    """
    width = width if width is not None else int(getattr(conv, "in_channels", 8))
    generator = torch.Generator().manual_seed(1)
    edges = torch.randint(NODES - 3, (2, EDGES), generator=generator)
    edges += 1 + (edges > 11).long() + (edges > 28).long()  # some nodes are alone
    edges[:, :4] = torch.arange(4)
    edges[:, 4] = edges[:, 5]
    data = [torch.randn(NODES, width, generator=generator, dtype=torch.float64)]
    if edge_width or weights:
        more = torch.rand(EDGES, edge_width or 1, generator=generator, dtype=torch.float64)
        data.append(more[:, 0] if weights else more)
    name, found, said = type(conv).__name__, {}, ""
    for hops in (1, 2):
        try:
            found[hops] = _farthest_conv(conv, edges, data, hops)
        except (MeshshardError, RuntimeError, ValueError, IndexError) as error:
            said = str(error)
            continue
        if found[hops] < EXACT:
            return ConvCheck(name, hops, found)
    return ConvCheck(name, None, found, said)


def _farthest_conv(conv: nn.Module, edges: Tensor, data: list[Tensor], hops: int) -> float:
    templates = [convert(copy.deepcopy(conv), hops).double().eval() for _ in SIZES]
    for one in templates:
        for module in one.modules():
            if hasattr(module, "_meshshard_hops"):
                setattr(module, "_meshshard_hops", hops)  # noqa: B010
    whole = copy.deepcopy(conv).double().eval()
    leaves = [d.clone().requires_grad_() for d in data]
    want = _run(whole, leaves, edges)

    def _rank(domain: Domain) -> list[Any]:
        nodes = Sharding(domain, SIZES)
        graph = ShardGraph.from_edge_index(edges, nodes)
        own = slice(nodes.first, nodes.first + nodes.own)
        x: Any = ShardTensor.from_local(data[0][own].clone(), nodes).requires_grad_()
        shards = [x, *[graph.take(e).requires_grad_() for e in data[1:]]]
        got = _run(templates[domain.rank], shards, graph)
        domain.average_gradients(templates[domain.rank])
        grads = [p.grad for p in templates[domain.rank].parameters()]
        return [got.gather(), x.grad.gather(), *grads]

    found = simulate(len(SIZES), _rank)[0]
    expected = [want, leaves[0].grad, *[p.grad for p in whole.parameters()]]
    return max(_distance(a, b) for a, b in zip(found, expected, strict=True))


def _run(conv: nn.Module, data: Sequence[Any], graph: Any) -> Any:
    """The output, once gradients of a number made of it are in the leaves."""
    out = conv(data[0], graph, *data[1:])
    loss: Any = torch.sin(out * 2).sum()
    loss.backward()
    return out.detach()


def _distance(a: Any, b: Any) -> float:
    """Largest difference relative to the largest number of the second."""
    if a is None or b is None:
        left = a if b is None else b
        return 0.0 if left is None else float(left.abs().max())
    if not b.numel():
        return 0.0
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))


# ------------------------------------------------------------------------------------- whole models
@dataclass
class Consistency:
    """What `check_consistency` has found, a row for each number of ranks.

    Attributes:
        rows: ranks, whether the plan's ids arrive, whether the forward is bitwise, and the largest
            relative differences of forward, gradients and of the losses of training.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Whether everything equals one rank, to 1e-10 in float64."""
        far = ("forward", "gradients", "training")
        return all(row["ids"] and max(row[name] for name in far) < EXACT for row in self.rows)

    def __str__(self) -> str:
        head = "ranks  ids  bitwise  forward  gradients  training"
        said = {True: "yes", False: "NO"}
        lines = [
            f"{r['ranks']:5}  {said[r['ids']]:>3}  {said[r['bitwise']]:>7}"
            f"  {r['forward']:7.1e}  {r['gradients']:9.1e}  {r['training']:8.1e}"
            for r in self.rows
        ]
        return "\n".join([head, *lines])


def check_consistency(
    model: nn.Module,
    data: Any,
    ranks: Sequence[int] = (1, 2, 3, 4),
    steps: int = 90,
    call: Callable[..., Any] | None = None,
) -> Consistency:
    """Run and train a model on shards of some data, on several numbers of ranks, against one.

    Args:
        model: a converted model; copies of it are run, in float64.
        data: `x` (n, …) and `edge_index`, `y` (n, …) to train towards, `edge_attr` if there is; as
            attributes (PyG's Data) or keys.
        ranks: numbers of ranks; the nodes are cut by METIS.
        steps: of Adam, with the mean square error.
        call: call(model, x, graph, edge_attr) where the model is not called so.

    Returns:
        What was found; print it.

    Raises:
        MeshshardError: data without x, y or edge_index.
    """
    given = _Given(data, call or _called)
    report = Consistency()
    serial = _answer(model, given, 1, steps)
    for size in ranks:
        out, grads, losses, ids = _answer(model, given, size, steps)
        far = [_distance(a, b) for a, b in zip(grads, serial[1], strict=True)]
        report.rows.append({
            "ranks": size,
            "ids": ids,
            "bitwise": torch.equal(out, serial[0]),
            "forward": _distance(out, serial[0]),
            "gradients": max(far, default=0.0),
            "training": _distance(losses, serial[2]),
        })  # fmt: skip
    return report


def _called(model: Any, x: Any, graph: Any, edge_attr: Any) -> Any:
    return model(x, graph) if edge_attr is None else model(x, graph, edge_attr)


class _Given:
    """The data in float64, and how a model is called with them."""

    def __init__(self, data: Any, call: Callable[..., Any]) -> None:
        has = isinstance(data, Mapping)
        names = ("x", "y", "edge_index", "edge_attr")
        found: list[Any] = [data.get(n) if has else getattr(data, n, None) for n in names]
        lacking = [n for n, a in zip(names[:3], found, strict=False) if a is None]
        if lacking:
            raise MeshshardError(f"check_consistency: the data have no {', no '.join(lacking)}")
        self.x, self.y, self.edge_index, self.edge_attr = found
        self.x, self.y, self.call = self.x.double(), self.y.double(), call
        if self.edge_attr is not None:
            self.edge_attr = self.edge_attr.double()

    def cut(self, parts: int) -> tuple[Tensor, list[int]]:
        """Nodes in the order of their parts, and how many each has."""
        from meshshard.graph import Graph
        from meshshard.partitioning.methods import Metis

        n = len(self.x)
        if parts == 1:
            return torch.arange(n), [n]
        order = torch.argsort(self.edge_index[1], stable=True)
        count = torch.bincount(self.edge_index[1], minlength=n)
        whole = Graph(indptr=offsets_of(count).numpy(), indices=self.edge_index[0][order].numpy())
        labels = torch.from_numpy(Metis()(whole, parts))
        return torch.argsort(labels, stable=True), torch.bincount(labels, minlength=parts).tolist()


def _answer(model: nn.Module, given: _Given, size: int, steps: int) -> Any:
    """Output in the order of the data, gradients, losses and whether ids arrive."""
    order, sizes = given.cut(size)
    place = torch.argsort(order)
    edges = place[given.edge_index]
    models = [copy.deepcopy(model).double() for _ in range(size)]

    def _rank(domain: Domain) -> Any:
        nodes = Sharding(domain, sizes)
        own = slice(nodes.first, nodes.first + nodes.own)
        nodes.origin = order[own]
        graph = ShardGraph.from_edge_index(edges, nodes)
        ids = graph.local(torch.arange(own.start, own.stop))
        arrived = torch.equal(ids[nodes.own :], graph.halo)
        x, y = (ShardTensor.from_local(t[order[own]], nodes) for t in (given.x, given.y))
        e = None if given.edge_attr is None else graph.take(given.edge_attr)
        run = _Run(models[domain.rank], domain, lambda m: given.call(m, x, graph, e), y)
        out, grads = run.once()
        return out[place], grads, run.trained(steps), all(domain.share(arrived))

    return simulate(size, _rank)[0]


@dataclass
class _Run:
    model: nn.Module
    domain: Domain
    call: Callable[[nn.Module], Any]
    target: Any

    def once(self) -> tuple[Tensor, list[Any]]:
        """Output in evaluation, gradients of the loss."""
        self.model.eval()
        out = self.call(self.model)
        self._step(out)
        return out.detach().gather(), [p.grad for p in self.model.parameters()]

    def trained(self, steps: int) -> Tensor:
        """Losses of training, of evaluation's draws: replicated ones are shared by threads."""
        optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            losses.append(self._step(self.call(self.model)))
            optimizer.step()
        return torch.tensor(losses, dtype=torch.float64)

    def _step(self, out: Any) -> float:
        loss = (out - self.target).square().mean()
        loss.backward()
        self.domain.average_gradients(self.model)
        return float(loss.detach())
