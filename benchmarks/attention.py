"""Attention on sharded rows: speed-up and memory from 1 k to 64 k tokens, a trajectory of training.

    python benchmarks/attention.py                       everything, as in the documentation
    python benchmarks/attention.py --only speed --tokens 1024 16384

One training step of nn.MultiheadAttention (width 32, one head, float32): torch's own on all tokens
on one rank, and the same module, unmodified, on tokens that two gloo ranks share, one thread each.
Two independent processes that each attend with half of the queries to all keys say what this
machine can give. Times of the slowest rank, taken in turn in one run, least of the rounds; CPU
times beside wall times, for a machine that others use too.
Memory is the peak above the process after imports and a first small step, as in exchange.py.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from exchange import KEEP, SMALL
from groups import Call, above, environment, on_ranks
from measure import NO_TARGET, Record, arguments, at_least, limited, run

WIDTH, HEADS, RANKS = 32, 1, 2
TOKENS = (1_024, 4_096, 16_384, 65_536)
STEPS = 30
Tables = Iterator[tuple[str, list[Record]]]


def main() -> None:
    parser = arguments(__doc__, SECTIONS, "attention.json")
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, metavar="N")
    given = parser.parse_args()
    run(SECTIONS, given, given.tokens)


def _layer() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)


def _step(layer: Any, x: Any, keys: Any = None) -> None:
    """Forward and backward of attention to x itself, or to other keys."""
    keys = x if keys is None else keys
    out, _ = layer(x[None], keys[None], keys[None], need_weights=False)
    (out[0] + x).square().mean().backward()


def _sharded(tokens: int) -> Any:
    import torch

    from meshshard.comm import init_domain
    from meshshard.tensor import Sharding, ShardTensor

    domain = init_domain()
    half = tokens // domain.size
    sizes = [half] * domain.size
    own = torch.randn(sizes[domain.rank], WIDTH)
    return ShardTensor.from_local(own.requires_grad_(), Sharding(domain, sizes))


# ------------------------------------------------------------------------------------------- speed
def speed(every: Sequence[int]) -> Tables:
    """Two ranks against one, and against two processes that know nothing of each other."""
    rows = []
    with environment(**KEEP):
        for tokens in every:
            (alone, alone_cpu), (ours, ours_cpu) = on_ranks(RANKS, _speeds, tokens)[0]
            one = on_ranks(1, _one_rank, tokens)[0]
            row = {"tokens": tokens, "one rank ms": one, "two independent ms": alone}
            row |= {"two ranks ms": ours, "independent's speed-up": one / alone}
            row |= {"speed-up": one / ours, "ratio of CPU": alone_cpu / ours_cpu}
            row |= at_least(alone / ours, 0.9)
            rows.append(row if tokens >= 65_536 else row | NO_TARGET)
    yield "nn.MultiheadAttention, forward + backward, 2 ranks x 1 thread", rows


def _one_rank(tokens: int) -> float:
    """Milliseconds of torch's own on all tokens, the other core idle."""
    import torch

    layer, whole = _layer(), torch.randn(tokens, WIDTH, requires_grad=True)
    _step(layer, whole[:512])
    times = []
    for _ in range(min(_rounds(tokens), 3)):
        start = time.perf_counter()
        _step(layer, whole)
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def _speeds(tokens: int) -> list[tuple[float, float]]:
    """Wall and CPU of two ranks that know nothing of each other, and of two together."""
    import torch

    layer, mine = _layer(), _sharded(tokens)
    whole = torch.randn(tokens, WIDTH)
    half = whole[: tokens // RANKS].clone().requires_grad_()
    whole.requires_grad_()
    _timed(1, [lambda: _step(layer, _sharded(512))])
    calls: list[Call] = [lambda: _step(layer, half, whole), lambda: _step(layer, mine)]
    return _timed(_rounds(tokens), calls)


def _rounds(tokens: int) -> int:
    return max(1, min(11, 65_536 // tokens))


def _timed(rounds: int, calls: list[Call]) -> list[tuple[float, float]]:
    """Milliseconds of each call, wall and CPU, of the slowest rank; least of the rounds."""
    import torch
    import torch.distributed as dist

    least = torch.full((len(calls), 2), torch.inf, dtype=torch.float64)
    for i in range(rounds):
        times = torch.zeros_like(least)
        for j in range(len(calls))[:: 1 if i % 2 else -1]:
            dist.barrier()
            start = time.perf_counter(), time.process_time()
            calls[j]()
            end = time.perf_counter(), time.process_time()
            times[j] = torch.tensor([b - a for a, b in zip(start, end, strict=True)])
        times = times * 1e3
        dist.all_reduce(times, dist.ReduceOp.MAX)
        least = torch.minimum(least, times)
    return [(wall, cpu) for wall, cpu in least.tolist()]


# ------------------------------------------------------------------------------------------ memory
def memory(every: Sequence[int]) -> Tables:
    """The peak of a step on a rank of two against the same on one."""
    rows = []
    with environment(**SMALL):
        for tokens in every:
            whole = on_ranks(1, _peak, tokens)[0]
            most = max(on_ranks(RANKS, _peak, tokens))
            row = limited(f"{tokens:,} tokens", most / whole, 0.55)
            row |= {"one rank MiB": whole, "of two ranks MiB": most}
            rows.append(row if tokens >= 65_536 else row | NO_TARGET)
    yield "peak of nn.MultiheadAttention, forward + backward: a rank of two / one rank", rows


def _peak(tokens: int) -> float:
    """MiB above what the process had; one rank runs torch's own on a plain tensor."""
    import torch

    from meshshard.comm import init_domain

    layer, is_one = _layer(), init_domain().size == 1

    def step(n: int) -> None:
        x = torch.randn(n, WIDTH, requires_grad=True) if is_one else _sharded(n)
        _step(layer, x)

    step(256)
    return above(lambda: step(tokens))[0]


# -------------------------------------------------------------------------------------- trajectory
def trajectory(every: Sequence[int]) -> Tables:
    """A point transformer and a vision transformer, trained on shards and serial."""
    rows = []
    for name in MODELS:
        for dtype in ("float64", "float32"):
            apart, first, last = on_ranks(RANKS, _trajectory, name, dtype)[0]
            most = 1e-10 if dtype == "float64" else 1e-4
            row = limited(f"{name}, {dtype}", apart, most)
            rows.append(row | {"first loss": first, "last loss": last})
    yield f"largest relative difference of the loss to serial, {STEPS} steps of AdamW", rows


def _points() -> Any:
    """A transformer of points: its model, inputs (rows are sharded) and targets."""
    import torch
    from torch import nn

    block = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, norm_first=True)
    model = nn.Sequential(
        nn.Linear(3, 32), nn.TransformerEncoder(block, 3, enable_nested_tensor=False),
        nn.LayerNorm(32), nn.Linear(32, 1),
    )  # fmt: skip
    x = torch.rand(1, 500, 3)
    return model, x, torch.sin(6 * x).prod(-1, keepdim=True), 1, (183, 317)


def _picture() -> Any:
    """A vision transformer of pictures whose rows are sharded, with a class token."""
    import torch
    from torch import nn

    class ViT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch = nn.Conv2d(1, 32, 4, stride=4)
            self.cls = nn.Parameter(torch.zeros(1, 1, 32))
            self.pos = nn.Parameter(torch.randn(1, 65, 32) * 0.02)
            block = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
            self.blocks = nn.TransformerEncoder(block, 3, enable_nested_tensor=False)
            self.head = nn.Linear(32, 4)

        def forward(self, x: Any) -> Any:
            x = self.patch(x).flatten(2).transpose(1, 2)
            x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.pos
            return self.head(self.blocks(x)[:, 0])

    x = torch.randn(8, 1, 32, 32)
    return ViT(), x, torch.randn(8, 4), 2, (12, 20)


def _trajectory(name: str, dtype: str) -> tuple[float, float, float]:
    import torch

    from meshshard.comm import init_domain
    from meshshard.tensor import shard

    domain = init_domain()
    losses = []
    for is_sharded in (False, True):
        torch.manual_seed(1)
        model, x, target, dim, sizes = MODELS[name]()
        model, x, target = (t.to(getattr(torch, dtype)) for t in (model, x, target))
        if is_sharded:
            x = shard(x, domain, sizes, dim=dim)
            target = shard(target, domain, sizes, dim=dim) if name == "points" else target
        losses.append(list(_trained(model, x, target, domain if is_sharded else None)))
    pairs = zip(*losses, strict=True)
    return max(abs(a / b - 1) for b, a in pairs), losses[0][0], losses[0][-1]


def _trained(model: Any, x: Any, target: Any, domain: Any) -> Iterator[float]:
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        if domain is not None:
            domain.average_gradients(model)
        optimizer.step()
        yield loss.item()


MODELS = {"points": _points, "pictures": _picture}
SECTIONS = {"speed": speed, "memory": memory, "trajectory": trajectory}

if __name__ == "__main__":
    main()
