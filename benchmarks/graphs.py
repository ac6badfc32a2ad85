"""Graph convolutions: sparse products against PyG on edge_index, MeshGraphNet's block, two ranks.

    python benchmarks/graphs.py                            everything, as in the documentation
    python benchmarks/graphs.py --only products blocks     some sections

One thread a process. What is compared is called in turn in one run, the least of the rounds
counting; on ranks the slowest rank.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from groups import Call, environment, on_ranks, timed_together
from measure import Record, arguments, at_least, compared, in_child, run, verdict
from meshes import poly_surface

KEEP = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "8589934592"}
CHANNELS = 128
WAYS = ("forward", "forward + backward")
Tables = Iterator[tuple[str, list[Record]]]


def main() -> None:
    parser = arguments(__doc__, SECTIONS, "graphs.json")
    parser.add_argument("--side", type=int, default=1000, help="of the grid of products")
    parser.add_argument("--polygons", type=int, default=1_000_000)
    given = parser.parse_args()
    run(SECTIONS, given, given)


def grid(side: int) -> Any:
    """(2, n_edges) both ways along the sides and one diagonal of a square grid: six a node."""
    import torch

    at = torch.arange(side * side).view(side, side)
    pairs = [(at[:, :-1], at[:, 1:]), (at[:-1], at[1:]), (at[:-1, :-1], at[1:, 1:])]
    ends = torch.cat([torch.stack([a.reshape(-1), b.reshape(-1)]) for a, b in pairs], 1)
    both = torch.cat([ends, ends.flip(0)], 1)
    order = torch.argsort(both[1] * side * side + both[0])
    return both[:, order]


def seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def least(rounds: int, *calls: Call) -> list[float]:
    """Milliseconds, called in turn; the first round, which builds what is kept, seldom counts."""
    table = [[seconds(call) for call in calls] for _ in range(rounds)]
    return [min(column) * 1e3 for column in zip(*table, strict=True)]


# ----------------------------------------------------------------------------------------- products
def products(given: argparse.Namespace) -> Tables:
    """Converted GCN and SAGE on a grid, against the module itself on edge_index."""
    kept = "kept by glibc (MALLOC_MMAP_THRESHOLD_)"
    for memory, how, side in (("as glibc does", {}, given.side), (kept, KEEP, given.side // 2)):
        less = side * 7 // 10  # PyG's gradient of maxima takes more than 20 kB a node
        calls = [(name, way, side) for name in ("GCNConv", "SAGEConv mean") for way in WAYS]
        calls += [("SAGEConv max", "forward", side), ("SAGEConv max", "forward + backward", less)]
        rows = []
        for name, way, size in calls:
            with environment(**how):
                (ours, peer), _ = in_child(_products, name, way, size)
            what = f"{name}, {way}" + (f", {size**2:,} nodes" if size < side else "")
            rows.append(compared(what, ours, peer, 1 / 3))
        title = f"{side**2:,} nodes, about 6 edges a node, {CHANNELS} channels, one thread"
        yield f"{title}; memory {memory}: ms", rows


def _conv(name: str) -> Any:
    import torch_geometric.nn as pyg

    kind, *reduction = name.split()
    more = {"aggr": reduction[0]} if reduction else {}
    return getattr(pyg, kind)(CHANNELS, CHANNELS, **more)


def _products(name: str, way: str, side: int) -> list[float]:
    import torch

    from meshshard.comm import Domain
    from meshshard.nn import convert
    from meshshard.tensor import ShardGraph, Sharding

    torch.set_num_threads(1)
    edges = grid(side)
    graph = ShardGraph.from_edge_index(edges, Sharding(Domain(), [side * side]))
    x = torch.randn(side * side, CHANNELS, requires_grad=True)
    plain, ours = _conv(name), convert(_conv(name))

    def step(conv: Any, where: Any) -> None:
        x.grad = None
        conv(x, where).sum().backward()

    if way == "forward":
        with torch.no_grad():
            return least(2, lambda: ours(x, graph), lambda: plain(x, edges))
    return least(2, lambda: step(ours, graph), lambda: step(plain, edges))


# ------------------------------------------------------------------------------------------- blocks
def blocks(given: argparse.Namespace) -> Tables:
    """EdgeConv as it is, and MeshGraphNet's block, against PyG's way on edge_index."""
    side = given.side * 3 // 10
    with environment(**KEEP):
        answers = [in_child(job, side)[0] for job in (_edge_conv, _block)]
    names = ("EdgeConv", 1.0), ("MeshGraphNet block", 1 / 1.3)
    rows = []
    for (name, target), (forward, both) in zip(names, answers, strict=True):
        rows.append(compared(f"{name}, forward", *forward, target))
        rows.append(compared(f"{name}, forward + backward", *both, target))
    yield f"{side**2:,} nodes, about 6 edges a node, {CHANNELS} channels, one thread: ms", rows


def _edge_conv(side: int) -> tuple[list[float], list[float]]:
    import torch
    import torch_geometric.nn as pyg
    from torch import nn

    from meshshard.comm import Domain
    from meshshard.nn import convert
    from meshshard.tensor import ShardGraph, Sharding

    torch.set_num_threads(1)
    edges = grid(side)
    graph = ShardGraph.from_edge_index(edges, Sharding(Domain(), [side * side]))
    x = torch.randn(side * side, CHANNELS)

    def made() -> Any:
        return pyg.EdgeConv(nn.Sequential(nn.Linear(2 * CHANNELS, CHANNELS), nn.ReLU()))

    plain, ours = made(), convert(made())
    with torch.no_grad():
        forward = least(4, lambda: ours(x, graph), lambda: plain(x, edges))
    both = least(
        4, lambda: ours(x, graph).sum().backward(), lambda: plain(x, edges).sum().backward()
    )
    return forward, both


def _block(side: int) -> tuple[list[float], list[float]]:
    import torch

    from meshshard.comm import Domain
    from meshshard.nn import MeshBlock
    from meshshard.tensor import ShardGraph, Sharding

    torch.set_num_threads(1)
    edges = grid(side)
    graph = ShardGraph.from_edge_index(edges, Sharding(Domain(), [side * side]))
    x, e = torch.randn(side * side, CHANNELS), torch.randn(edges.shape[1], CHANNELS)
    block = MeshBlock(CHANNELS)

    def plain() -> Any:
        new = e + block.edges(torch.cat([x[edges[1]], x[edges[0]], e], -1))
        where = edges[1][:, None].expand(-1, CHANNELS)
        arrived = torch.zeros_like(x).scatter_add_(0, where, new)
        return x + block.nodes(torch.cat([x, arrived], -1)), new

    with torch.no_grad():
        forward = least(4, lambda: block(x, graph, e), plain)
    both = least(4, lambda: _back(block(x, graph, e)), lambda: _back(plain()))
    return forward, both


def _back(out: Any) -> None:
    (out[0].sum() + out[1].sum()).backward()


# ----------------------------------------------------------------------------------------- speed-up
def speedup(given: argparse.Namespace) -> Tables:
    """Two ranks against one, and against two processes that know nothing of each other."""
    rows, sent = [], []
    for name, n in (("SAGE", given.polygons), ("MeshGraphNet", given.polygons // 5)):
        with tempfile.TemporaryDirectory() as folder:
            shards = Path(folder, "surface.shards")
            in_child(_partitioned, n, shards)
            with environment(**KEEP):
                answers = on_ranks(2, _speeds, name, shards)
        one, alone, ours = answers[0][0]
        row = {"what": f"{name}, {n:,} polygons", "one rank ms": one, "two independent ms": alone}
        row |= {"two ranks ms": ours, "speed-up of two independent": one / alone}
        rows.append(row | {"speed-up": one / ours} | at_least(alone / ours, 0.9))
        sent += [{"what": f"{name}, rank {r}", **answer[1]} for r, answer in enumerate(answers)]
    yield "three layers of 64, forward + backward, surface in 2 shards, one thread a rank", rows
    yield "bytes of one layer, forward and backward: halo rows x width x 4 x 2", sent


def _partitioned(n: int, folder: Path) -> None:
    from meshshard.partitioning.partition import partition

    partition(poly_surface(n), 2).save(folder)


def _speeds(name: str, shards: Path) -> tuple[list[float], Record]:

    from meshshard.comm import Domain, init_domain
    from meshshard.comm.domain import count_traffic
    from meshshard.ranks.shard import load
    from meshshard.tensor import ShardGraph

    domain = init_domain()
    graph = load(shards, domain).graph
    whole = load(shards).graph if domain.rank == 0 else None
    mine = _own_part(graph, Domain())
    step = {"SAGE": _sage_step, "MeshGraphNet": _mesh_step}[name]
    calls = [
        step(whole, domain) if whole else lambda: None,
        step(mine, domain),
        step(graph, domain),
    ]
    assert isinstance(graph, ShardGraph)
    timed_together(1, calls)
    times = [min(column) for column in zip(*timed_together(5, calls), strict=True)]
    with count_traffic(domain) as traffic:
        calls[2]()
    forward, backward = traffic.counts["exchange"], traffic.counts["accumulate"]
    sent, halo = sum(graph.exchange.send), graph.exchange.n_halo
    due = 3 * 64 * 4 * (sent + halo)
    found = forward.bytes + backward.bytes
    counts = {"sent": sent, "halo": halo, "bytes": found, "due": due}
    return times, counts | verdict("= due", found == due, gate=True)


def _own_part(graph: Any, domain: Any) -> Any:
    """The graph without what crosses to the other rank, alone in the world."""
    import torch

    from meshshard.tensor import ShardGraph, Sharding

    inside = graph.indices < graph.nodes.own
    edges = torch.stack([graph.indices[inside], graph.destinations[inside]])
    return ShardGraph.from_edge_index(edges, Sharding(domain, [graph.nodes.own]))


def _sage_step(graph: Any, domain: Any) -> Call:
    import torch
    import torch_geometric.nn as pyg

    from meshshard.nn import convert
    from meshshard.tensor import ShardTensor

    model = convert(pyg.GraphSAGE(64, 64, 3, 64))
    own = torch.randn(graph.nodes.own, 64)

    def step() -> None:
        x = ShardTensor.from_local(own.clone(), graph.nodes).requires_grad_()
        model(x, graph).square().mean().backward()
        graph.domain.average_gradients(model)

    return step


def _mesh_step(graph: Any, domain: Any) -> Call:
    import torch

    from meshshard.models import MeshGraphNet
    from meshshard.tensor import ShardTensor

    model = MeshGraphNet(3, 4, 3, 64, 3)
    x = ShardTensor.from_local(torch.randn(graph.nodes.own, 3), graph.nodes)
    e = ShardTensor.from_local(torch.randn(graph.edges.own, 4), graph.edges)

    def step() -> None:
        model(x, graph, e).square().mean().backward()
        graph.domain.average_gradients(model)

    return step


SECTIONS: dict[str, Callable[[argparse.Namespace], Tables]] = {
    "products": products,
    "blocks": blocks,
    "speedup": speedup,
}

if __name__ == "__main__":
    main()
