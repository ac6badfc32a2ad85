"""Slice attention and Transolver: time and memory against the maths written plainly in einsum.

    python benchmarks/slices.py                        everything, as in the documentation
    python benchmarks/slices.py --only attention       some sections

The peer here is the published maths of Transolver (names of parameters too) in ordinary PyTorch.
Everything runs in fresh processes with one thread. Times are CPU time of that thread, in turn, the
least of all rounds; memory is the peak above what the process has before. A step on two ranks is
compared, in wall time, with the same model on local tensors with one all-reduce a layer by hand.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

from groups import above, environment, in_turn, on_ranks
from measure import Record, arguments, compared, limited, run

ROWS, ROUNDS = 100_000, 5
SMALL_ROWS = 20_000  # of the training section: the peer takes 157 kB a row
SIZES = {(256, 8, 64): (1 / 1.35, 1 / 1.4, 1 / 4.5), (128, 8, 32): (1 / 1.7, 1 / 1.9, 1 / 4)}
LAYERS = 8
WARM = 5_000  # rows: enough for tiles
MILLION = 1_000_000
STEP_ROWS = (256, 2_048, 16_384)
Tables = Iterator[tuple[str, list[Record]]]
TRIM = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # else freed memory stays, and peaks show no gain


def main() -> None:
    parser = arguments(__doc__, SECTIONS, "slices.json")
    parser.add_argument("--rows", type=int, default=ROWS)
    given = parser.parse_args()
    run(SECTIONS, given, given.rows)


# ---------------------------------------------------------------------------------------- the peer
def plain_attention(sizes: tuple[int, int, int], merge: Any = lambda x: x) -> Any:
    """The published maths; `merge` adds up over ranks."""
    import torch
    from torch import nn

    C, H, G = sizes
    D = C // H

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.full((1, H, 1, 1), 0.5))
            self.in_project_x, self.in_project_fx = nn.Linear(C, C), nn.Linear(C, C)
            self.in_project_slice = nn.Linear(D, G)
            self.to_q, self.to_k, self.to_v = (nn.Linear(D, D, bias=False) for _ in range(3))
            self.to_out = nn.Sequential(nn.Linear(C, C), nn.Dropout(0.0))

        def forward(self, x: Any) -> Any:
            B, N, _ = x.shape
            f = self.in_project_fx(x).reshape(B, N, H, D).permute(0, 2, 1, 3).contiguous()
            m = self.in_project_x(x).reshape(B, N, H, D).permute(0, 2, 1, 3).contiguous()
            w = torch.softmax(self.in_project_slice(m) / self.temperature, -1)
            sums = torch.einsum("bhnc,bhng->bhgc", f, w)
            both = merge(torch.cat([sums, w.sum(2)[..., None]], -1))
            s = both[..., :-1] / (both[..., -1:] + 1e-5)
            scores = self.to_q(s) @ self.to_k(s).transpose(-1, -2) * D**-0.5
            o = torch.softmax(scores, -1) @ self.to_v(s)
            y = torch.einsum("bhgc,bhng->bhnc", o, w)
            return self.to_out(y.permute(0, 2, 1, 3).reshape(B, N, C))

    return Attention()


def plain_model(layers: int, sizes: tuple[int, int, int], merge: Any = lambda x: x) -> Any:
    """The published model, of 3 inputs and one output, MLPs twice as wide."""
    import torch
    from torch import nn

    from meshshard.models.transolver import MLP

    C = sizes[0]

    class Block(nn.Module):
        def __init__(self, last: bool) -> None:
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(C), nn.LayerNorm(C)
            self.Attn, self.mlp = plain_attention(sizes, merge), MLP(C, 2 * C, C)
            if last:
                self.ln_3, self.mlp2 = nn.LayerNorm(C), nn.Linear(C, 1)
            self.last = last

        def forward(self, x: Any) -> Any:
            x = self.Attn(self.ln_1(x)) + x
            x = self.mlp(self.ln_2(x)) + x
            return self.mlp2(self.ln_3(x)) if self.last else x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.preprocess = MLP(3, 2 * C, C)
            self.placeholder = nn.Parameter(torch.rand(C) / C)
            self.blocks = nn.ModuleList(Block(i == layers - 1) for i in range(layers))

        def forward(self, x: Any) -> Any:
            h = self.preprocess(x[None]) + self.placeholder
            for block in self.blocks:
                h = block(h)
            return h[0]

    return Model()


def pair(kind: str, sizes: tuple[int, int, int], layers: int = LAYERS) -> dict[str, Any]:
    """Ours and the peer, with equal parameters."""
    import torch

    from meshshard.models import Transolver
    from meshshard.nn import SliceAttention

    torch.manual_seed(0)
    if kind == "attention":
        peer = plain_attention(sizes)
        ours = SliceAttention(*sizes)
        kept = SliceAttention(*sizes, keep_weights=True)
        kept.load_state_dict(peer.state_dict())
        models = {"ours": ours, "weights kept": kept, "peer": peer}
    else:
        ours, peer = Transolver(3, 1, sizes[0], layers, *sizes[1:]), plain_model(layers, sizes)
        models = {"ours": ours, "peer": peer}
    ours.load_state_dict(peer.state_dict())
    return models


def forward(model: Any, x: Any) -> Any:
    import torch

    with torch.no_grad():
        return getattr(model, "predict", model)(x)


def both_ways(model: Any, x: Any) -> Any:
    model.zero_grad()
    y = model(x.requires_grad_())
    y.backward(x.detach() if x.shape == y.shape else x[:, :1].detach())
    x.grad = None
    return y.detach()


# --------------------------------------------------------------------------------- one layer, whole
def times(kind: str, sizes: tuple[int, int, int], rows: int, way: str, rounds: int) -> Any:
    """Least microseconds per row of each model, and the largest difference of their outputs."""
    models = pair(kind, sizes)
    x, call = rows_for(kind, sizes, rows), WAYS[way]
    outs = [call(model, x) for model in models.values()]
    apart = max(((y - outs[-1]).abs().max() / outs[-1].abs().max()).item() for y in outs)
    calls = [lambda m=m: call(m, x) for m in models.values()]
    least = [min(column) / rows for column in zip(*in_turn(rounds, 1, calls), strict=True)]
    return dict(zip(models, least, strict=True)), apart


def peak(kind: str, sizes: tuple[int, int, int], rows: int, way: str, whose: str) -> float:
    """Kilobytes a row of one of them."""
    model, x = pair(kind, sizes)[whose], rows_for(kind, sizes, rows)
    WAYS[way](model, rows_for(kind, sizes, WARM))  # code that loads once is not a row's memory
    return above(lambda: WAYS[way](model, x))[0] * 1024 * 1.024 / rows


def rows_for(kind: str, sizes: tuple[int, int, int], rows: int) -> Any:
    import torch

    torch.manual_seed(0)
    return torch.randn(1, rows, sizes[0]) if kind == "attention" else torch.randn(rows, 3)


WAYS = {"forward": forward, "forward and backward": both_ways}


def attention(rows: int) -> Tables:
    """One layer."""
    for sizes, most in SIZES.items():
        table = []
        for way, limit in zip(WAYS, most, strict=False):
            (found, apart), *_ = on_ranks(1, times, "attention", sizes, rows, way, ROUNDS)
            peer = found.pop("peer")
            for name, value in found.items():
                wanted = limit if name == "ours" or way != "forward" else None
                row = compared(f"{way}, {name}: us a row", value, peer, wanted)
                table.append(row | {"apart": apart})
        way = "forward and backward"
        with environment(**TRIM):
            kb = {
                whose: on_ranks(1, peak, "attention", sizes, rows, way, whose)[0]
                for whose in ("ours", "weights kept", "peer")
            }
        for name in ("ours", "weights kept"):
            wanted = most[2] if name == "ours" else None
            table.append(
                compared(f"{way}, {name}: kB a row", kb[name], kb["peer"], wanted, gate=True)
            )
        yield "slice attention of {} channels, {} heads, {} slices".format(*sizes), table


def inference(rows: int) -> Tables:
    """A whole model."""
    sizes, way = next(iter(SIZES)), "forward"
    (found, apart), *_ = on_ranks(1, times, "model", sizes, rows, way, 1)
    with environment(**TRIM):
        ours, peer = (
            on_ranks(1, peak, "model", sizes, rows, way, whose)[0] for whose in ("ours", "peer")
        )
    time_row = compared("predict: us a row", found["ours"], found["peer"], 1 / 1.7)
    memory = compared("predict: kB a row", ours, peer, 1 / 3.5, gate=True)
    yield f"inference, {LAYERS} layers, {rows:,} rows", [time_row | {"apart": apart}, memory]


def million(rows: int) -> Tables:
    """A whole model on a million rows: ours alone."""
    with environment(**TRIM):
        kb = on_ranks(1, peak, "model", next(iter(SIZES)), MILLION, "forward", "ours")[0]
    row = limited("predict, 1 M rows", kb * MILLION / 1e3, 1_100, "MB")
    yield f"inference, {LAYERS} layers, {MILLION:,} rows", [row]


def training(rows: int) -> Tables:
    """Forward and backward of a whole model."""
    sizes, way, rows = next(iter(SIZES)), "forward and backward", min(rows, SMALL_ROWS)
    (found, apart), *_ = on_ranks(1, times, "model", sizes, rows, way, 2)
    with environment(**TRIM):
        ours, peer = (
            on_ranks(1, peak, "model", sizes, rows, way, whose)[0] for whose in ("ours", "peer")
        )
    time_row = compared("step: us a row", found["ours"], found["peer"], 1.15)
    memory = limited("step: kB a row", ours, 20) | {"peer": peer, "ratio": ours / peer}
    yield f"training, {LAYERS} layers, {rows:,} rows", [time_row | {"apart": apart}, memory]


# ----------------------------------------------------------------------------------- on two ranks
def step(rows: int) -> Tables:
    """A training step on two ranks, beside local tensors and an all-reduce by hand."""
    table = []
    for n in STEP_ROWS:
        ours, peer = on_ranks(2, _steps, n, max(1, 4_096 // n))[0]
        table.append(compared(f"{n:,} rows a rank: ms", ours / 1e3, peer / 1e3, 1.1))
    yield "a step of a Transolver of 4 layers on 2 ranks, against one all-reduce by hand", table


def _steps(rows: int, loops: int) -> tuple[float, float]:
    import torch
    import torch.distributed as dist

    from meshshard.comm import init_domain
    from meshshard.models import Transolver
    from meshshard.tensor import Sharding, ShardTensor

    class Add(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            x = x.clone()
            dist.all_reduce(x)
            return x

        backward = forward

    domain = init_domain()
    peer = plain_model(4, (256, 8, 64), Add.apply)
    ours = Transolver(3, 1, 256, 4, 8, 64)
    ours.load_state_dict(peer.state_dict())
    local = torch.randn(rows, 3)
    x = ShardTensor.from_local(local, Sharding(domain, (rows, rows)))

    def mine() -> None:
        ours.zero_grad()
        ours(x).square().mean().backward()

    def theirs() -> None:
        peer.zero_grad()
        (Add.apply(peer(local).square().sum()) / (2 * rows)).backward()

    in_turn(1, 1, [mine, theirs])
    rounds = in_turn(9, loops, [mine, theirs], time.perf_counter)
    least_ours, least_peer = (min(column) for column in zip(*rounds, strict=True))
    return least_ours, least_peer


SECTIONS: dict[str, Callable[[int], Tables]] = {
    "attention": attention,
    "inference": inference,
    "million": million,
    "training": training,
    "step": step,
}


if __name__ == "__main__":
    main()
