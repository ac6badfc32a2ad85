"""What runs on an accelerator: exactness of operations and layers, and their speed; JSON.

`python benchmarks/gpu.py` needs CUDA; `--device cpu` runs the same on the CPU, to try the script.
`bash .ci/gpu` also runs the selftest, with NCCL on all GPUs of the machine.
"""

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch_geometric.nn as pyg
from graphs import grid
from measure import RESULTS, Record, compared, show
from slices import both_ways, forward, pair

from meshshard.comm import Domain, simulate
from meshshard.nn import MeshBlock, convert
from meshshard.tensor import ShardGraph, Sharding, shard

CHANNELS = 128
SPLIT = (0.5, 0.0, 0.2, 0.3)  # share of the rows of each simulated rank
Call = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--side", type=int, default=500, help="of the grid of graph layers [500]")
    parser.add_argument("--share", type=int, default=10, help="every n-th operation is run [10]")
    parser.add_argument("--save", action="store_true", help="write results/gpu.json")
    args = parser.parse_args()
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit("error: torch sees no CUDA device; --device cpu tries the script")
    warnings.simplefilter("ignore")
    cuda = args.device.startswith("cuda")
    record: dict[str, Any] = {
        "machine": {
            "device": torch.cuda.get_device_name() if cuda else "CPU",
            "devices": torch.cuda.device_count() if cuda else 0,
            "torch": torch.__version__,
        },
        "database": database(args.device, args.share),
        "layers": list(layers(args.device)),
        "speed": list(speed(args.device, args.side)),
    }
    show("layers on 4 simulated ranks against one: largest relative difference", record["layers"])
    show("speed: ms", record["speed"])
    if args.save:
        (RESULTS / "gpu.json").write_text(json.dumps(record, indent=1) + "\n")
    bad = [k for k in ("wrong", "diverged", "error") if record["database"].get(k)]
    if bad or any(row["ours"] > row["most"] for row in record["layers"]):
        raise SystemExit("error: not exact; see above")


# -------------------------------------------------------------------------------------- exactness
def database(device: str, share: int) -> dict[str, int]:
    """Outcomes of every n-th operation of PyTorch's database, two samples each."""
    os.environ["MESHSHARD_TEST_DEVICE"] = device
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from op_database import SUITES, judge

    counts: Counter[str] = Counter()
    suite = SUITES["operations"]
    for op in suite.entries()[::share]:
        if verdict := judge(suite, op, 2):
            counts[verdict.word] += 1
            if verdict.word in ("wrong", "diverged", "error"):
                print(f"{verdict.name}: {verdict.word} {verdict.examples[verdict.word]}")
    print("operations:", ", ".join(f"{n} {word}" for word, n in sorted(counts.items())))
    return dict(counts)


def layers(device: str) -> Iterator[Record]:
    """Outputs and gradients of layers on simulated ranks that share the device."""
    side = 24
    edges = grid(side).to(device)
    x = torch.randn(side * side, CHANNELS, dtype=torch.float64, device=device)
    torch.manual_seed(0)
    convs = {
        "GCNConv": pyg.GCNConv(CHANNELS, CHANNELS),
        "SAGEConv": pyg.SAGEConv(CHANNELS, CHANNELS),
        "GATv2Conv": pyg.GATv2Conv(CHANNELS, CHANNELS // 4, heads=4),
    }
    for name, conv in convs.items():
        conv = conv.double().to(device)
        yield _apart(name, device, x, lambda y, _, c=conv: c(y, edges), _on_graph(conv, edges))
    model = pair("model", (CHANNELS, 8, 32), layers=2)["ours"].double().to(device)
    yield _apart("Transolver", device, x[:, :3], lambda y, _: model(y), lambda y, _: model(y))


def _on_graph(conv: Any, edges: Any) -> Callable[[Any, Any], Any]:
    def _call(y: Any, sharding: Sharding) -> Any:
        return convert(conv)(y, ShardGraph.from_edge_index(edges, sharding))

    return _call


def _apart(
    name: str, device: str, x: Any, serial: Callable[..., Any], sharded: Callable[..., Any]
) -> Record:
    """Largest relative difference of the output and of the gradient of the input."""
    ends = [round(len(x) * sum(SPLIT[: i + 1])) for i in range(len(SPLIT))]
    sizes = [b - a for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    leaf = x.clone().requires_grad_()
    out = serial(leaf, None)
    (grad,) = torch.autograd.grad(out.square().sum(), leaf)

    def _rank(domain: Domain) -> float:
        own = shard(x.clone(), domain, sizes).requires_grad_()
        got = sharded(own, own.sharding)
        (back,) = torch.autograd.grad(got.square().sum(), own)
        pairs = ((got.detach().gather(), out.detach()), (back.gather(), grad))
        return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)

    apart = max(simulate(len(SPLIT), _rank, device))
    return {"what": name, "ours": apart, "most": 1e-10}


# ------------------------------------------------------------------------------------------ speed
def speed(device: str, side: int) -> Iterator[Record]:
    """One rank against plain tensors and PyG on the same device."""
    domain = Domain(device=device)
    plain = torch.randn(4096, CHANNELS, device=device)
    x = shard(plain.clone(), domain, [4096])
    weight = torch.randn(CHANNELS, CHANNELS, device=device)
    operations: dict[str, Callable[[Any], Any]] = {
        "add": lambda a: a + a,
        "linear": lambda a: torch.nn.functional.linear(a, weight),
        "mean": lambda a: a.mean(),
    }
    for name, op in operations.items():
        what = f"{name}, 4,096 x {CHANNELS} rows, against a plain tensor"
        yield compared(what, *_least(device, 50, _called(op, x), _called(op, plain)), None)
    edges = grid(side).to(device)
    graph = ShardGraph.from_edge_index(edges, Sharding(domain, [side * side]))
    y = torch.randn(side * side, CHANNELS, device=device, requires_grad=True)
    for name in ("GCNConv", "SAGEConv"):
        conv = getattr(pyg, name)(CHANNELS, CHANNELS).to(device)
        ours, peer = _backward(convert(conv), y, graph), _backward(conv, y, edges)
        what = f"{name}, {side * side:,} nodes, forward and backward, against PyG"
        yield compared(what, *_least(device, 5, ours, peer), None)
    e = torch.randn(edges.shape[1], CHANNELS, device=device)
    block = MeshBlock(CHANNELS).to(device)
    (ms,) = _least(device, 5, lambda: block(y, graph, e)[0].sum().backward())
    yield {"what": f"MeshBlock, {side * side:,} nodes, forward and backward", "ours": ms}
    models = pair("attention", (256, 8, 64))
    rows = torch.randn(1, side * side, 256, device=device)
    for way, call in (("forward", forward), ("forward and backward", both_ways)):
        ours, peer = (_called(call, models[k].to(device), rows.clone()) for k in ("ours", "peer"))
        what = f"slice attention of 256 channels, {way}, against the published form"
        yield compared(what, *_least(device, 5, ours, peer), None)


def _called(call: Callable[..., Any], *given: Any) -> Call:
    return lambda: call(*given)


def _backward(conv: Any, x: Any, where: Any) -> Call:
    def _step() -> None:
        x.grad = None
        conv(x, where).sum().backward()

    return _step


def _least(device: str, rounds: int, *calls: Call) -> list[float]:
    """Median milliseconds of each, called in turn, after a first round that does not count."""
    table = [[_milliseconds(device, call) for call in calls] for _ in range(rounds + 1)][1:]
    return [statistics.median(column) for column in zip(*table, strict=True)]


def _milliseconds(device: str, call: Call) -> float:
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    wait()
    start = time.perf_counter()
    call()
    wait()
    return (time.perf_counter() - start) * 1e3


if __name__ == "__main__":
    main()
