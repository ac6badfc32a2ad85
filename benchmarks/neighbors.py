"""Neighbors: one rank against scipy's k-d tree, two against independent halves, what is sent.

    python benchmarks/neighbors.py                           everything, as in the documentation
    python benchmarks/neighbors.py --only serial candidates  some sections

Clouds are shuffled points of a bumpy ellipsoid (surface) and of a cube (volume). Times are the
smallest of rounds in which what is compared is called in turn; CPU seconds are those of all threads
of a process, and disturbed less by other work on the machine. One rank makes a whole `ShardGraph`,
scipy the table of neighbors alone.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from groups import Call, environment, on_ranks
from measure import Record, arguments, at_least, compared, in_child, limited, run

POINTS, NEIGHBORS = 1_000_000, 16
KEEP = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "8589934592"}
KINDS = ("surface", "volume")
Tables = Iterator[tuple[str, list[Record]]]


def main() -> None:
    parser = arguments(__doc__, SECTIONS, "neighbors.json")
    parser.add_argument("--points", type=int, default=POINTS)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    run(SECTIONS, given, given.points, given.rounds)


def cloud(kind: str, n: int) -> Any:
    """(n, 3) points in random order."""
    rng = np.random.default_rng(0)
    if kind == "volume":
        return rng.random((n, 3))
    points = rng.normal(size=(n, 3))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    points *= [2.0, 0.9, 0.7]
    return points * (1 + 0.02 * np.sin(7 * points[:, [1, 2, 0]]))


def divided(points: Any, how: str, ranks: int) -> tuple[Any, list[int]]:
    """Rows in the order of the shards, and how many each has."""
    from meshshard.graph import knn_graph
    from meshshard.graph.morton import morton_order
    from meshshard.partitioning.methods import Metis

    if how == "morton":
        order = morton_order(points)
        return order, [len(part) for part in np.array_split(order, ranks)]
    labels = Metis()(knn_graph(points, 6).symmetrized(), ranks)
    return np.argsort(labels, kind="stable"), np.bincount(labels, minlength=ranks).tolist()


def best(rounds: int, calls: Sequence[Call], together: Call | None = None) -> list[Any]:
    """Smallest (wall, CPU) seconds of each call, in turn."""
    table = []
    for i in range(rounds):
        times = [(0.0, 0.0)] * len(calls)
        for j in range(len(calls))[:: 1 if i % 2 else -1]:
            if together is not None:
                together()
            wall, cpu = time.perf_counter(), time.process_time()
            calls[j]()
            times[j] = time.perf_counter() - wall, time.process_time() - cpu
        table.append(times)
    return [[min(t[c][what] for t in table) for what in (0, 1)] for c in range(len(calls))]


# ------------------------------------------------------------------------------------------- serial
def serial(points: int, rounds: int) -> Tables:
    """One rank against scipy's cKDTree called plainly, with the same threads."""
    rows = []
    for kind in KINDS:
        (ours, floor, scipy), _ = in_child(_serial, kind, points, rounds)
        for i, unit in enumerate(("s", "CPU s")):
            rows.append(compared(f"{kind}: nn.knn_graph, {unit}", ours[i], scipy[i], 0.6))
            rows.append(compared(f"{kind}: graph.knn_graph, {unit}", floor[i], scipy[i], 0.6))
    yield f"{points:,} shuffled points, k = {NEIGHBORS}, 2 threads, against scipy's cKDTree", rows


def _serial(kind: str, n: int, rounds: int) -> list[Any]:
    import torch
    from scipy.spatial import cKDTree

    from meshshard import nn
    from meshshard.graph import knn_graph

    torch.set_num_threads(2)
    points = cloud(kind, n)
    whole = torch.from_numpy(points)
    nn.knn_graph(whole[:1000], 4)
    return best(
        rounds,
        [
            lambda: nn.knn_graph(whole, NEIGHBORS),
            lambda: knn_graph(points, NEIGHBORS),
            lambda: cKDTree(points).query(points, NEIGHBORS + 1, workers=2),
        ],
    )


# ------------------------------------------------------------------------------------------ speedup
def speedup(points: int, rounds: int) -> Tables:
    """Two ranks, against two processes that know nothing of each other's half."""
    rows = []
    for kind in KINDS:
        with environment(**KEEP):
            found = on_ranks(2, _speeds, kind, points, rounds)
        one = found[0][0]
        alone, ours = ([max(f[c][u] for f in found) for u in (0, 1)] for c in (1, 2))
        for i, unit in enumerate(("s", "CPU s")):
            row: Record = {"what": f"{kind}, {unit}", "one rank": one[i], "two alone": alone[i]}
            row |= {"two ranks": ours[i], "gain alone": one[i] / alone[i]}
            rows.append(row | {"gain": one[i] / ours[i]} | at_least(alone[i] / ours[i], 0.85))
    yield f"{points:,} points cut along a Morton curve, k = {NEIGHBORS}, ranks of one thread", rows


def _speeds(kind: str, n: int, rounds: int) -> list[Any]:
    import torch
    import torch.distributed as dist

    from meshshard import nn

    x, points = _sharded(kind, n, "morton")
    whole, half = torch.from_numpy(points), x.to_local()
    nn.knn_graph(whole[:1000], 4)

    def one() -> None:
        if x.sharding.domain.rank == 0:
            nn.knn_graph(whole, NEIGHBORS)

    calls = [one, lambda: nn.knn_graph(half, NEIGHBORS), lambda: nn.knn_graph(x, NEIGHBORS)]
    return best(rounds, calls, dist.barrier)


def _sharded(kind: str, n: int, how: str, order: Any = None, sizes: Any = None) -> tuple[Any, Any]:
    """Own rows of a cloud in random order, and all points."""
    import torch

    from meshshard.comm import init_domain
    from meshshard.tensor import Sharding, ShardTensor

    domain = init_domain()
    points = cloud(kind, n)
    if order is None:
        order, sizes = divided(points, how, domain.size)
    first = domain.offset(sizes)
    mine = np.random.default_rng(1).permutation(order[first : first + sizes[domain.rank]])
    sharding = Sharding(domain, sizes, torch.from_numpy(mine))
    return ShardTensor.from_local(torch.from_numpy(points[mine]), sharding), points


# --------------------------------------------------------------------------------------- candidates
def candidates(points: int, rounds: int) -> Tables:
    """Points that are sent because they may be neighbors, against the halo that results."""
    n = points // 5
    rows = []
    for kind in KINDS:
        for how in ("morton", "metis"):
            for ranks in (2, 8):
                order, sizes = divided(cloud(kind, n), how, ranks)
                found = on_ranks(ranks, _candidates, kind, n, order, sizes)
                sent, asked, halo, bytes_ = (sum(c) for c in zip(*found, strict=True))
                row = limited(f"{kind}, {how}, {ranks} ranks", sent / halo, 3, "x halo")
                counts = {"candidates": sent, "halo": halo, "places that asked": asked}
                rows.append(row | counts | {"bytes a halo row": bytes_ / halo})
    yield (
        f"{n:,} points, k = {NEIGHBORS}: candidates sent, halo, all bytes",
        rows,
    )


def _candidates(kind: str, n: int, order: Any, sizes: Any) -> tuple[int, int, int, int]:
    from meshshard import nn
    from meshshard.comm.domain import count_traffic
    from meshshard.nn.points import _search

    search: Any = _search
    x, _ = _sharded(kind, n, "", order, sizes)
    seen = []
    fetch = search.fetch_candidates

    def watched(*given: Any) -> Any:
        seen.append(fetch(*given))
        return seen[0]

    search.fetch_candidates = watched
    with count_traffic(x.sharding.domain) as traffic:
        graph = nn.knn_graph(x, NEIGHBORS)
    sent = traffic.total().bytes
    return len(seen[0].rows.ids), len(seen[0].queries), len(graph.halo), sent


SECTIONS: dict[str, Callable[[int, int], Tables]] = {
    "serial": serial,
    "speedup": speedup,
    "candidates": candidates,
}


if __name__ == "__main__":
    main()
