"""Training steps on one rank and two, and what more ranks would take.

    python benchmarks/scaling.py                        everything, as in the documentation
    python benchmarks/scaling.py --only strong weak     some sections

Steps of a Transolver (4 layers of 64) and a MeshGraphNet (3 layers of 64) with gradients averaged;
gloo ranks of one thread, wall times of the slowest rank, the least of the rounds. The projection is
arithmetic, not a measurement: rows and halo rows of real partitions, the time of a row and the
bytes of a halo row as measured here, and a network that the table names.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from groups import Call, environment, on_ranks
from measure import Record, arguments, in_child, run
from meshes import poly_surface

KEEP = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "8589934592"}
MODELS = {"Transolver": 60_000, "MeshGraphNet": 60_000}  # rows of a rank
LARGE, RANKS = 1_000_000, (2, 4, 8, 16, 64)
BANDWIDTH, LATENCY = 12.5e9, 10e-6  # bytes/s and s a message: a network of 100 Gb/s
FAST = 100  # how much faster than a core here an accelerator may be
POINTS, SHARDS = 1_200_000, 8
Tables = Iterator[tuple[str, list[Record]]]


class Found(NamedTuple):
    """A step on one rank: time, owned rows, and rows sent."""

    ms: float
    rows: int
    halo: int
    halo_bytes: int
    other_bytes: int
    messages: int


def main() -> None:
    parser = arguments(__doc__, SECTIONS, "scaling.json")
    parser.add_argument("--polygons", type=int, default=LARGE, help="of the projection")
    parser.add_argument("--points", type=int, default=POINTS, help="of the three steps")
    given = parser.parse_args()
    run(SECTIONS, given, given)


def _partitioned(n: int, k: int, folder: Path) -> None:
    from meshshard.partitioning.partition import partition

    partition(poly_surface(n), k).save(folder)


def measured(name: str, n: int, ranks: int) -> list[Found]:
    """A step on every rank."""
    with tempfile.TemporaryDirectory() as folder, environment(**KEEP):
        shards = Path(folder, "surface.shards")
        in_child(_partitioned, n, 2, shards)
        return on_ranks(ranks, _measured, name, shards)


def _measured(name: str, shards: Path) -> Found:
    import torch.distributed as dist

    from meshshard.comm import init_domain
    from meshshard.comm.domain import count_traffic
    from meshshard.ranks.shard import load

    domain = init_domain()
    shard = load(shards, domain)
    step = _step(name, shard)
    step()
    times = []
    for _ in range(4):
        if domain.size > 1:
            dist.barrier()
        start = time.perf_counter()
        step()
        times.append(max(domain.share(time.perf_counter() - start)))
    with count_traffic(domain) as traffic:
        step()
    counts = traffic.counts
    halo = sum(counts[kind].bytes for kind in ("exchange", "accumulate") if kind in counts)
    total = traffic.total()
    rows = shard.sharding.own
    moved = (shard.exchange.n_halo + sum(shard.exchange.send)) if name == "MeshGraphNet" else 0
    return Found(min(times) * 1e3, rows, moved, halo, total.bytes - halo, total.calls)


def _step(name: str, shard: Any) -> Call:
    import torch

    import meshshard as ms

    torch.manual_seed(0)
    x, domain = shard["center"].float(), shard.sharding.domain
    if name == "Transolver":
        model: Any = ms.models.Transolver(3, 1, 64, 4, 4, 32)
        inputs: tuple[Any, ...] = (x,)
    else:
        model = ms.models.MeshGraphNet(3, 3, 1, 64, 3)
        inputs = x, shard.graph, ms.nn.edge_vectors(x, shard.graph)

    def step() -> None:
        model.zero_grad()
        model(*inputs).square().mean().backward()
        domain.average_gradients(model)

    return step


# ------------------------------------------------------------------------------- strong, weak, more
def strong(given: argparse.Namespace) -> Tables:
    """One mesh on one rank and on two."""
    yield "one surface on 1 and 2 ranks", [_pair(name, 2 * n, 2 * n) for name, n in MODELS.items()]


def weak(given: argparse.Namespace) -> Tables:
    """As many rows on every rank."""
    title = "as many rows a rank, on 1 and 2 ranks"
    yield title, [_pair(name, n, 2 * n) for name, n in MODELS.items()]


def _pair(name: str, first: int, second: int) -> Record:
    one, two = measured(name, first, 1), measured(name, second, 2)
    work = second / first
    gain = one[0].ms / two[0].ms * work
    row: Record = {"what": f"{name}, {first:,} / {second:,} rows", "1 rank: ms": one[0].ms}
    row |= {"2 ranks: ms": two[0].ms, "gain": gain, "efficiency": gain / 2}
    return row | {"bytes a rank": max(f.halo_bytes + f.other_bytes for f in two)}


def projection(given: argparse.Namespace) -> Tables:
    """More ranks than this machine has."""
    tables = in_child(_divided, given.polygons)[0]
    for name, n in MODELS.items():
        one, two = measured(name, n, 1)[0], measured(name, 2 * n, 2)[0]
        a_row = one.ms / one.rows / 1e3
        a_halo_row = two.halo_bytes / two.halo if two.halo else 0.0
        rows = []
        for ranks, (own, moved) in tables.items():
            moved = moved if two.halo else 0
            travel = moved * a_halo_row + 2 * (ranks - 1) / ranks * two.other_bytes
            sent = travel / BANDWIDTH + two.messages * LATENCY * math.ceil(math.log2(ranks))
            step = own * a_row + sent
            gain = given.polygons * a_row / step
            row: Record = {"ranks": ranks, "rows of the largest": own, "halo rows moved": moved}
            row |= {"step: ms, projected": step * 1e3, "of it network": sent * 1e3}
            fast = given.polygons * a_row / FAST / (own * a_row / FAST + sent) / ranks
            row |= {"gain, projected": gain, "efficiency": gain / ranks}
            rows.append(row | {f"efficiency, ranks {FAST} times as fast": fast})
        yield (
            (
                f"PROJECTION, not measured: {name}, {given.polygons:,} polygons, a core of this "
                f"machine a rank, {BANDWIDTH / 1e9:g} GB/s and {LATENCY * 1e6:g} us a message"
            ),
            rows,
        )


def _divided(n: int) -> dict[int, tuple[int, int]]:
    """Own rows of the largest shard, and most halo rows that one sends and receives."""
    from meshshard.partitioning.partition import partition

    mesh, out = poly_surface(n), {}
    for k in RANKS:
        found = partition(mesh, k).quality
        most = max(a + b for a, b in zip(found.halo, found.sent, strict=True))
        out[k] = max(found.owned), most
    return out


# ------------------------------------------------------------------------------------- three steps
def steps(given: argparse.Namespace) -> Tables:
    """Three steps of AdamW on many points: the same losses on one rank and on two."""
    with tempfile.TemporaryDirectory() as folder:
        shards = Path(folder, "surface.shards")
        in_child(_partitioned, given.points, SHARDS, shards)
        one, two = (on_ranks(r, _three, shards)[0] for r in (1, 2))
    rows = []
    for i, (a, b) in enumerate(zip(one[0], two[0], strict=True)):
        row: Record = {"step": i + 1, "1 rank: loss": f"{a:.15f}", "2 ranks: loss": f"{b:.15f}"}
        rows.append(row | {"apart": abs(a - b) / abs(a)})
    yield f"{given.points:,} points, {SHARDS} shards, float64, small Transolver", rows
    gain = {"1 rank: s a step": one[1], "2 ranks: s a step": two[1], "gain": one[1] / two[1]}
    yield f"{given.points:,} points, {SHARDS} shards: time", [{"what": "a step", **gain}]


def _three(shards: Path) -> tuple[list[float], float]:
    import torch

    import meshshard as ms

    torch.manual_seed(0)
    domain = ms.comm.init_domain()
    shard = ms.load(shards, domain)
    x = shard["center"].double()
    truth = (3 * x).sin().sum(1, keepdim=True)
    model = ms.models.Transolver(3, 1, 32, 2, 4, 16).double()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses, start = [], time.perf_counter()
    for _ in range(3):
        loss = (model(x) - truth).square().mean()
        optimizer.zero_grad()
        loss.backward()
        domain.average_gradients(model)
        optimizer.step()
        losses.append(loss.item())
    return losses, (time.perf_counter() - start) / 3


SECTIONS: dict[str, Callable[[argparse.Namespace], Tables]] = {
    "strong": strong,
    "weak": weak,
    "projection": projection,
    "steps": steps,
}

if __name__ == "__main__":
    main()
