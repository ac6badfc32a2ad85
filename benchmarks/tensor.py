"""ShardTensor: what one operation costs above its local tensor, calls of a step, import.

    python benchmarks/tensor.py                        everything, as in the documentation
    python benchmarks/tensor.py --only operations      some sections

Compares with torch's DTensor on even shards, and with PhysicsNeMo's ShardTensor where
`pip install nvidia-physicsnemo` has put it. Operations are timed in CPU time of the rank's main
thread, in turn, on 2 gloo ranks with one thread each: ranks share cores with whatever else runs.
"""

import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from groups import columns, environment, in_turn, on_ranks
from measure import NO_TARGET, Record, alternately, arguments, compared, limited, run, spent

ROWS, WIDTH, RANKS = 64, 128, 2
LAYERS = 4
NEMO = importlib.util.find_spec("physicsnemo") is not None
MOST = {"DTensor": {"add": 0.6, "linear": 0.6}, "PhysicsNeMo": dict.fromkeys(
    ("add", "linear", "layer_norm", "view"), 0.2)}  # fmt: skip
# glibc keeps memory: else the kernel's fresh pages are most of an addition of large tensors
KEEP = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "8589934592"}
Tables = Iterator[tuple[str, list[Record]]]
Operation = Callable[[Any, Any, Any], Any]


def main() -> None:
    parser = arguments(__doc__, SECTIONS, "tensor.json")
    given = parser.parse_args()
    run(SECTIONS, given)


# --------------------------------------------------------------------------------------- operations
def _operations(rows: int) -> dict[str, Operation]:
    import torch.nn.functional as F  # noqa: N812

    return {
        "add": lambda x, w, b: x + x,
        "linear": lambda x, w, b: F.linear(x, w, b),
        "layer_norm": lambda x, w, b: F.layer_norm(x, (WIDTH,), b, b),
        "view": lambda x, w, b: x.view(rows if is_local(x) else rows * RANKS, 8, WIDTH // 8),
    }


def is_local(x: Any) -> bool:
    """Whether a tensor is a plain one."""
    import torch

    return type(x) is torch.Tensor


def operations() -> Tables:
    """One operation on 64 x 128 rows a rank, above the same on the local tensor."""
    for peer in ["DTensor"] + ["PhysicsNeMo"] * NEMO:
        rows = on_ranks(RANKS, _overheads, peer)[0]
        yield f"one operation, {ROWS} x {WIDTH} rows a rank, against {peer}: CPU us", rows
        rows = on_ranks(RANKS, _means, peer)[0]
        yield f"a global mean, {ROWS} x {WIDTH} rows a rank, against {peer}: us", rows


def _overheads(peer: str) -> list[Record]:
    """Medians of the differences within each round."""
    ours, theirs, local = _both(peer, ROWS)
    table = []
    for name, op in _operations(ROWS).items():
        calls = [lambda t=t, op=op: op(*t) for t in (local, ours, theirs)]
        in_turn(1, 50, calls)
        rounds = in_turn(41, 60, calls)
        plain = columns(rounds)[0]
        above = columns([(r[1] - r[0], r[2] - r[0]) for r in rounds])
        row = compared(name, *above, MOST[peer].get(name))
        table.append({"operation": row.pop("what"), "on the local tensor": plain, **row})
    return table


def _means(peer: str) -> list[Record]:
    """A mean over all rows of all ranks: CPU and wall time, beside a bare all-reduce.

    After the first 1,000 calls, which wait until all ranks have posted the same one.
    """
    import torch.distributed as dist

    (x, *_), (y, *_), (local, *_) = _both(peer, ROWS)

    def bare() -> Any:
        total = local.sum()
        dist.all_reduce(total)
        return total / (RANKS * local.numel())

    calls = [lambda: x.mean(), lambda: y.mean().full_tensor(), bare]
    most = 0.5 if peer == "DTensor" else 0.2
    table = []
    for title, clock in (("CPU", time.thread_time), ("wall", time.perf_counter)):
        in_turn(1, 1_000, calls)
        rounds = in_turn(25, 60, calls, clock)
        ours, theirs, least = columns(rounds)
        table.append(
            compared(f"mean, {title}", ours, theirs, most) | {"sum + all_reduce alone": least}
        )
    return table


def _both(peer: str, rows: int) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    """Rows, weight and bias as ours, as the peer's and as local tensors."""
    import torch

    from meshshard.comm import init_domain
    from meshshard.tensor import Sharding, ShardTensor

    domain = init_domain()
    local, weight, bias = torch.randn(rows, WIDTH), torch.randn(WIDTH, WIDTH), torch.randn(WIDTH)
    ours = ShardTensor.from_local(local, Sharding(domain, (rows,) * RANKS))
    theirs = (_theirs if peer == "DTensor" else _nemo)(local, weight, bias)
    return (ours, weight, bias), theirs, (local, weight, bias)


def _theirs(local: Any, *parameters: Any) -> tuple[Any, ...]:
    """DTensors: rows sharded, parameters replicated."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (RANKS,))
    plain = [DTensor.from_local(p, mesh, [Replicate()], run_check=False) for p in parameters]
    return (DTensor.from_local(local, mesh, [Shard(0)], run_check=False), *plain)


def _nemo(local: Any, *parameters: Any) -> tuple[Any, ...]:
    """PhysicsNeMo's ShardTensor with plain parameters, which it promotes."""
    from physicsnemo.domain_parallel import ShardTensor, register_custom_ops
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    register_custom_ops()
    mesh = init_device_mesh("cpu", (RANKS,))
    shapes = {0: [local.shape] * RANKS}
    return (ShardTensor.from_local(local, mesh, [Shard(0)], shapes), *parameters)


# --------------------------------------------------------------------------------------------- size
def size() -> Tables:
    """The share of the overhead as rows become many."""
    with environment(**KEEP):
        rows = [r for n in (64, 1_000, 10_000, 100_000) for r in on_ranks(RANKS, _share, n)[0]]
    yield f"overhead of one operation by rows a rank, {WIDTH} wide: % of the local one", rows


def _share(rows: int) -> list[Record]:
    ours, _, local = _both("DTensor", rows)
    table = []
    loops = max(1, 20_000 // rows)
    for name, op in _operations(rows).items():
        calls = [lambda t=t, op=op: op(*t) for t in (local, ours)]
        in_turn(2, loops, calls)
        rounds = in_turn(31, loops, calls)
        plain, _ = columns(rounds)
        (percent,) = columns([(100 * (r[1] / r[0] - 1),) for r in rounds])
        counts = name != "view" and rows >= 100_000  # a view does not work on rows
        row = limited(f"{name}, {rows:,} rows", percent, 2.0, "%", gate=False)
        row |= {} if counts else NO_TARGET
        table.append(row | {"local us": plain})
    return table


# ----------------------------------------------------------------------------------------- traffic
def traffic() -> Tables:
    """Collective calls of one training step of a model with a communicating operation a layer."""
    most = 2 * LAYERS + 2 + 1
    rows = []
    for kind in ("halo exchange", "centered rows"):
        calls, buckets, by_kind = on_ranks(RANKS, _step, kind)[0]
        row = limited(f"meshshard, {kind}", calls + buckets, most)
        rows.append(row | {"domain": calls, "gradient buckets": buckets, "kinds": by_kind})
    if NEMO:
        rows.append({"what": "PhysicsNeMo, centered rows", "ours": on_ranks(RANKS, _step_nemo)[0]})
    yield f"collectives of one training step, {LAYERS} layers, DDP", rows


def _step(kind: str) -> tuple[int, int, str]:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F  # noqa: N812
    from torch.nn.parallel import DistributedDataParallel

    from meshshard.comm import count_traffic, init_domain
    from meshshard.tensor import Sharding, ShardTensor

    domain = init_domain()
    sharding = Sharding(domain, (ROWS, ROWS + 7))
    couple = _exchanged(domain, sharding) if kind == "halo exchange" else _centered
    model = DistributedDataParallel(_model(couple))
    buckets: list[int] = []

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buckets.append(bucket.index())
        work = dist.all_reduce(bucket.buffer().div_(RANKS), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(None, hook)
    x = ShardTensor.from_local(torch.randn(sharding.own, WIDTH), sharding)
    for _ in range(2):  # DDP orders its buckets after the first step
        buckets.clear()
        with count_traffic(domain) as traffic:
            F.mse_loss(model(x), x).backward()
    kinds = ", ".join(f"{n} {c.calls}" for n, c in traffic.counts.items())
    return traffic.total().calls, len(buckets), kinds


def _exchanged(domain: Any, sharding: Any) -> Callable[[Any], Any]:
    """A layer that adds the mean of its halo rows: one exchange."""
    import torch

    from meshshard.comm import Exchange
    from meshshard.tensor import ShardTensor

    counts = [0, 5] if domain.rank == 0 else [5, 0]
    plan = Exchange(domain, sharding.own, torch.arange(5), counts, counts)

    def couple(x: Any) -> Any:
        rows = domain.exchange(x.to_local(), plan)
        own = rows[: sharding.own] + rows[sharding.own :].mean(0)
        return ShardTensor.from_local(own, sharding)

    return couple


def _centered(x: Any) -> Any:
    return x - x.mean(0)


def _model(couple: Callable[[Any], Any]) -> Any:
    import torch

    class Layer(torch.nn.Linear):
        def forward(self, x: Any) -> Any:
            return x + torch.nn.functional.gelu(couple(super().forward(x)))

    return torch.nn.Sequential(*[Layer(WIDTH, WIDTH) for _ in range(LAYERS)])


def _step_nemo() -> int:
    """Collectives of the same step, as CommDebugMode sees them; parameters without DDP."""
    import torch
    import torch.nn.functional as F  # noqa: N812
    from torch.distributed.tensor.debug import CommDebugMode

    model = _model(_centered)
    x, *_ = _nemo(torch.randn(ROWS, WIDTH))
    with CommDebugMode() as seen:
        F.mse_loss(model(x), x).backward()
    return int(seen.get_total_counts())


# ------------------------------------------------------------------------------------------- import
def imports() -> Tables:
    """`import meshshard.tensor` against `import torch`."""
    names = ["meshshard.tensor", "torch"]
    ours, peer = alternately(7, *[lambda n=n: _imported(n) for n in names])
    row = compared("import meshshard.tensor, against import torch", ours, peer, 1.3)
    yield "imports: CPU seconds, medians", [row]


def _imported(module: str) -> float:
    words = [sys.executable, "-c", f"import {module}"]
    return spent(lambda: subprocess.run(words, check=True))[0]


SECTIONS: dict[str, Callable[[], Tables]] = {
    "operations": operations,
    "size": size,
    "traffic": traffic,
    "imports": imports,
}


if __name__ == "__main__":
    main()
