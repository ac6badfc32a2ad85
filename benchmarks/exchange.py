"""The exchange of real plans, memory by rank and size, speed-up, and the size below which neither.

    python benchmarks/exchange.py                             everything, as in the documentation
    python benchmarks/exchange.py --only memory crossover     some sections

gloo ranks, each a process with one thread. Times are wall times, what is compared taken in turn in
one run, the slowest rank counting; memory is the peak above the process after imports and a first
small step, with MALLOC_MMAP_THRESHOLD_=65536, without which glibc hides what was freed.
"""

import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from groups import Call, above, columns, environment, on_ranks, timed_together
from measure import Record, arguments, at_least, compared, in_child, limited, run, verdict
from meshes import poly_surface

POLYGONS, PARTS, CHANNELS = 1_000_000, 8, 128
SMALL = {"MALLOC_MMAP_THRESHOLD_": "65536"}
KEEP = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "8589934592"}
WIDTH = 64
Tables = Iterator[tuple[str, list[Record]]]


def main() -> None:
    parser = arguments(__doc__, SECTIONS, "exchange.json")
    parser.add_argument("--polygons", type=int, default=POLYGONS)
    given = parser.parse_args()
    run(SECTIONS, given, given.polygons)


def _partitioned(n: int, folder: Path) -> None:
    from meshshard.partitioning.partition import partition

    partition(poly_surface(n), PARTS).save(folder)


# ----------------------------------------------------------------------------------------- exchange
def exchange(polygons: int) -> Tables:
    """The halo of 8 shards of a surface on 4 ranks."""
    with tempfile.TemporaryDirectory() as folder:
        shards = Path(folder, "surface.shards")
        in_child(_partitioned, polygons, shards)
        with environment(**KEEP):
            answers = on_ranks(4, _exchange, shards)
    title = f"exchange, {polygons:,} polygons in {PARTS} shards on 4 ranks, {CHANNELS} channels"
    yield f"{title}: ms", answers[0][0]
    yield "bytes of one exchange, as counted and as the plan has them", [a[1] for a in answers]


def _exchange(shards: Path) -> tuple[list[Record], Record]:
    import torch
    import torch.distributed as dist

    from meshshard.comm import count_traffic, init_domain
    from meshshard.ranks.shard import load

    domain = init_domain()
    shard = load(shards, domain)
    plan = shard.exchange
    x = torch.randn(plan.n_owned, CHANNELS)
    domain.exchange(x, plan)
    with count_traffic(domain) as traffic:
        domain.exchange(x, plan)
    sent = traffic.counts["exchange"]
    due = sum(plan.send) * CHANNELS * x.element_size()

    def bare() -> Any:
        rows = x.index_select(0, plan.send_rows)
        halo = rows.new_empty(plan.n_halo, CHANNELS)
        dist.all_to_all_single(halo, rows, list(plan.receive), list(plan.send))
        return halo

    pairs = [
        (lambda: plan.start(x)._pending.wait(), bare),  # type: ignore[union-attr]
        (lambda: domain.exchange(x, plan), lambda: torch.cat([x, bare()])),
    ]
    for pair in (
        pairs
    ):  # one pair after the other: copies of owned rows would leave the next call cold caches
        timed_together(5, pair)
    (alone, least), (joined, both) = (columns(timed_together(61, pair)) for pair in pairs)
    rows = [
        compared("halo rows, against index_select + all_to_all_single", alone, least, 1.15),
        compared("joined behind owned rows, against the same + cat", joined, both, 1.15),
    ]
    counts = {"owned rows": plan.n_owned, "halo rows": plan.n_halo, "sent rows": sum(plan.send)}
    counts |= {"bytes": sent.bytes, "plan": due}
    return rows, {"rank": domain.rank, **counts, **verdict("= plan", sent.bytes == due, gate=True)}


# ------------------------------------------------------------------------------------------- memory
def memory(polygons: int) -> Tables:
    """A training step on a folder, on 1, 2 and 4 ranks: peaks by rank."""
    n = polygons // 4
    with tempfile.TemporaryDirectory() as folder:
        shards = Path(folder, "surface.shards")
        in_child(_partitioned, n, shards)
        with environment(**SMALL):
            found = {k: on_ranks(k, _peak_of_step, shards) for k in (1, 2, 4)}
    (whole, owned, _) = found[1][0]
    rows = []
    for k in (2, 4):
        for rank, (peak, own, halo) in enumerate(found[k]):
            due = whole / owned * (own + halo)
            row = compared(f"rank {rank} of {k}", peak, due, 1.1, gate=True)
            rows.append({"what": row.pop("what"), "owned rows": own, "halo rows": halo, **row})
    title = f"peak of a training step, {n:,} polygons, against the serial peak a row ({whole:.0f}"
    yield f"{title} MiB) times local rows: MiB", rows


def _peak_of_step(shards: Path) -> tuple[float, int, int]:
    """Peak in MiB, owned rows and halo rows."""
    import torch

    from meshshard.comm import init_domain
    from meshshard.ranks.shard import load
    from meshshard.tensor import Sharding, ShardTensor

    domain = init_domain()
    model = mlp(3)
    small = ShardTensor.from_local(torch.randn(64, 3), Sharding(domain, (64,) * domain.size))
    _local_step(model, small, lambda x: x)

    def step() -> tuple[int, int]:
        shard = load(shards, domain)

        def halo(x: Any) -> Any:
            own = shard.local(x)[: shard.exchange.n_owned]
            return ShardTensor.from_local(own, shard.sharding)

        _local_step(model, shard["center"].to(torch.float32), halo)
        return shard.exchange.n_owned, shard.exchange.n_halo

    peak, (owned, halo) = above(step)
    return peak, owned, halo


def _local_step(model: Any, x: Any, couple: Callable[[Any], Any]) -> None:
    for layer in model:
        x = couple(layer(x)) if x.shape[-1] == WIDTH else layer(x)
    (x * x).mean().backward()


def mlp(inputs: int = WIDTH) -> Any:
    """Three layers with norms."""
    import torch
    from torch import nn

    torch.manual_seed(1)
    inner = [nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()]
    return nn.Sequential(nn.Linear(inputs, WIDTH), nn.GELU(), *inner, nn.Linear(WIDTH, WIDTH))


# ----------------------------------------------------------------------------------------- speed-up
def speedup(polygons: int, rows: int = 400_000) -> Tables:
    """Two ranks against one, and against two processes that know nothing of each other."""
    with environment(**KEEP):
        one, alone, ours = on_ranks(2, _speeds, rows)[0]
    row = {"one rank ms": one, "two independent ms": alone, "two ranks ms": ours}
    row |= {"speed-up of two independent": one / alone, "speed-up": one / ours}
    row |= at_least(alone / ours, 0.92)
    yield f"MLP forward + backward, {rows:,} x {WIDTH} rows, 2 ranks x 1 thread", [row]


def _speeds(rows: int) -> list[float]:
    import torch

    whole = torch.randn(rows, WIDTH)
    plain, parallel, x, domain = _models(rows)
    half = whole[: rows // 2]
    calls = [
        lambda: _step(plain, whole) if domain.rank == 0 else None,
        lambda: _step(plain, half),
        lambda: _step(parallel, x),
    ]
    timed_together(2, calls)
    return columns(timed_together(9, calls))


def _models(rows: int) -> tuple[Any, Any, Any, Any]:
    """A model, the same under DDP, sharded rows and the domain."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from meshshard.comm import init_domain
    from meshshard.tensor import Sharding, ShardTensor

    domain = init_domain()
    sizes = [rows // domain.size] * domain.size
    own = torch.randn(sizes[domain.rank], WIDTH)
    x = ShardTensor.from_local(own, Sharding(domain, sizes))
    return mlp(), DistributedDataParallel(mlp()), x, domain


def _step(model: Any, x: Any, optimizer: Any = None) -> None:
    model.zero_grad()
    (model(x) - x).square().mean().backward()
    if optimizer is not None:
        optimizer.step()


# ------------------------------------------------------------------------------------------- growth
LENGTHS = {1: (16_384, 32_768, 65_536), 2: (128, 256, 512), 3: (32, 64)}


def growth(polygons: int) -> Tables:
    """Bytes saved for backward as data grow, and as ranks become many; weak scaling."""
    rows = []
    for dims, lengths in LENGTHS.items():
        found = [on_ranks(2, _grid_bytes, dims, n)[0] for n in lengths]
        for i, n in enumerate(lengths[1:]):
            exponent = math.log2(found[i + 1] / found[i])
            row = limited(f"{dims}-D, {lengths[i]} to {n}", abs(exponent - dims), 0.1)
            row["ours"] = exponent
            rows.append(row | {"target": f"{dims} +- 0.1", "bytes": found[i + 1]})
    yield "exponent of saved bytes a rank, doubled grids, 2 ranks, two convolutions", rows
    rows = []
    for dims in LENGTHS:
        n = LENGTHS[dims][-1]
        whole = on_ranks(1, _grid_bytes, dims, n)[0]
        for k in (2, 4):
            most = max(on_ranks(k, _grid_bytes, dims, n))
            what = f"{dims}-D grid of {n}, {k} ranks: saved bytes x ranks / serial"
            rows.append(limited(what, most * k / whole, 1.1) | {"bytes": most})
    yield "saved bytes of the fullest rank against an equal share", rows
    yield "weak scaling, 100,000 rows a rank: peaks and bytes against one rank", list(_weak())


def _weak() -> Iterator[Record]:
    with environment(**SMALL):
        found = {k: on_ranks(k, _weak_step, 100_000) for k in (1, 2, 4)}
    for column, what in enumerate(("peak MiB", "saved bytes", "sent bytes")):
        base = found[2 if what == "sent bytes" else 1][0][column]
        for k in (2, 4):
            most = max(answer[column] for answer in found[k])
            row = compared(f"{what}, {k} ranks", most, base, 1.05, gate=True)
            yield row | {"peer": base}


def _weak_step(rows: int) -> tuple[float, int, int]:
    import torch

    from meshshard.comm import count_traffic, init_domain
    from meshshard.tensor import Sharding, ShardTensor

    domain = init_domain()
    model = mlp()
    sizes = (rows,) * domain.size

    def step(n: int) -> int:
        x = ShardTensor.from_local(torch.randn(n, WIDTH), Sharding(domain, (n,) * domain.size))
        bytes_ = saved(lambda: _step(model, x))
        domain.average_gradients(model)
        return bytes_

    step(64)
    with count_traffic(domain) as traffic:
        peak, kept = above(lambda: step(sizes[0]))
    return peak, kept, traffic.total().bytes


def _grid_bytes(dims: int, n: int) -> int:
    """Bytes that two convolutions of a row-sharded grid save for backward, on this rank."""
    import torch
    import torch.nn.functional as F  # noqa: N812

    from meshshard.comm import init_domain
    from meshshard.tensor import Sharding, ShardTensor

    domain = init_domain()
    conv = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[dims]
    sizes = [n // domain.size] * domain.size
    own = torch.randn(1, 4, sizes[domain.rank], *[n] * (dims - 1))
    x = ShardTensor.from_local(own, Sharding(domain, sizes), 2)
    weights = [torch.randn(4, 4, *[3] * dims, requires_grad=True) for _ in range(2)]

    def step() -> None:
        out = x
        for weight in weights:
            out = F.gelu(conv(out, weight, None, 1, 1))
        out.square().mean().backward()

    return saved(step)


def saved(call: Call) -> int:
    """Bytes that a call keeps for backward, each storage once."""
    import torch

    seen: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            storage = x.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        call()
    return sum(seen.values())


# ---------------------------------------------------------------------------------------- crossover
def crossover(polygons: int) -> Tables:
    """From how many rows on two ranks are faster than one: a training step of an MLP."""
    rows, pays = [], []
    for n in (256, 1_024, 4_096, 8_192, 16_384, 32_768, 65_536, 131_072):
        one, two = on_ranks(2, _training, n)[0]
        rows.append({"rows": n, "one rank ms": one, "two ranks ms": two, "ratio": two / one})
        pays.append(n if two < one else 0)
    first = next((n for i, n in enumerate(pays) if all(pays[i:])), 0)
    yield f"training step of an MLP, {WIDTH} wide, AdamW, DDP", rows
    yield "sharding pays", [{"from rows": first, "a rank": first // 2, "on ranks": 2}]


def _training(rows: int) -> list[float]:
    import torch

    whole = torch.randn(rows, WIDTH)
    plain, parallel, x, domain = _models(rows)
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (plain, parallel)]
    calls = [
        lambda: _step(plain, whole, optimizers[0]) if domain.rank == 0 else None,
        lambda: _step(parallel, x, optimizers[1]),
    ]
    timed_together(5, calls)
    return columns(timed_together(max(9, min(101, 400_000 // rows)), calls))


SECTIONS: dict[str, Callable[[int], Tables]] = {
    "exchange": exchange,
    "memory": memory,
    "speedup": speedup,
    "growth": growth,
    "crossover": crossover,
}


if __name__ == "__main__":
    main()
