"""Random programs of torch operations on sharded tensors, compared with serial PyTorch.

A program is drawn from a seed: four to ten steps on a few tensors, among them views, in-place
operations, autocast, no_grad, cat and split; then the gradients of a sum of all results. It is
drawn while it runs serially, so that every step is valid there, and then run on simulated ranks.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from outcomes import Outcome, differs, global_gradient, on_ranks, unequal, worst

from meshshard.tensor import shard

AUTOCAST, SINGLE = 6e-2, 1e-5  # tolerances of programs that compute with bfloat16 or float32
# torch's own check, which may find a change of rows that it has saved where serial it saved a copy
IN_PLACE = "modified by an inplace operation"
Step = tuple[Callable[..., Any], tuple[int, ...], str]  # function, numbers of its tensors, as text


@dataclass
class Program:
    """Steps on tensors that are numbered: leaves first, then the results of the steps.

    Attributes:
        seed: what it was drawn from.
        sizes: owned rows of each rank.
        leaves: tensors before the first step, and whether each is sharded.
        steps: what is called on which tensors.
    """

    seed: int
    sizes: tuple[int, ...]
    leaves: list[tuple[torch.Tensor, bool]]
    steps: list[Step] = field(default_factory=list)

    def __str__(self) -> str:
        leaves = [f"t{i}: {tuple(x.shape)}{' sharded' * s}" for i, (x, s) in enumerate(self.leaves)]
        steps = [f"{text} of {', '.join(f't{i}' for i in at)}" for _, at, text in self.steps]
        return f"seed {self.seed}, sizes {self.sizes}: {'; '.join([*leaves, *steps])}"


def leaves_of(program: Program) -> list[torch.Tensor]:
    return [x.clone().requires_grad_(x.is_floating_point()) for x, _ in program.leaves]


def run(steps: list[Step], tensors: list[Any]) -> list[Any]:
    """Run the steps; results are appended to the tensors."""
    for function, at, _ in steps:
        out = function(*(tensors[i] for i in at))
        tensors.extend(out if isinstance(out, (tuple, list)) else [out])
    return tensors


def loss_of(tensors: list[Any]) -> Any:
    """A sum of all results in which every element has another weight."""
    loss = 0.0
    for x in tensors:
        if isinstance(x, torch.Tensor) and x.requires_grad and x.is_floating_point():
            weights = torch.cos(torch.arange(x.numel(), dtype=torch.float64)).view(x.shape)
            loss = loss + (x.double() * weights).sum() + (x.double() ** 2).mean()
    return loss


# ------------------------------------------------------------------------------- what is drawn
def dims(x: torch.Tensor) -> list[int]:
    return [d for d, n in enumerate(x.shape) if n > 0]


def one(draw: random.Random, x: torch.Tensor) -> tuple[Callable[..., Any], str] | None:
    """A step on one tensor."""
    if x.ndim == 0:
        return draw.choice([(lambda a: a * 2.5, "a * 2.5"), (torch.tanh, "tanh")])
    dim, other = draw.choice(range(x.ndim)), draw.choice(range(x.ndim))
    n = x.shape[dim]
    start = draw.randrange(n + 1)
    keep = draw.choice([True, False])
    number = draw.choice([-1.5, 0.5, 2.0])
    scan = draw.choice([torch.cumsum, torch.cumprod, torch.logcumsumexp])
    reduce = draw.choice([torch.sum, torch.mean, torch.amax, torch.amin, torch.std, torch.var])
    smooth = draw.choice([torch.softmax, torch.log_softmax])
    wave = draw.choice([torch.sin, torch.tanh, torch.exp, torch.abs, torch.sigmoid])
    shift = draw.randrange(-n, n + 1)
    turn = draw.choice([torch.flip, torch.roll])
    sizes = list(x.shape)
    flat = [*sizes[:dim], -1, *sizes[min(dim + 2, x.ndim) :]]
    order = draw.sample(range(x.ndim), x.ndim)
    width = draw.randrange(1, 4)
    choices: list[tuple[Callable[..., Any], str]] = [
        (wave, wave.__name__),
        (lambda a: a * number + 1, f"a * {number} + 1"),
        (lambda a: reduce(a, dim, keepdim=keep), f"{reduce.__name__}({dim}, keepdim={keep})"),
        (lambda a: reduce(a), f"{reduce.__name__}()"),
        (lambda a: smooth(a, dim), f"{smooth.__name__}({dim})"),
        (lambda a: scan(a * 0.5, dim), f"{scan.__name__}({dim})"),
        (lambda a: a.transpose(dim, other), f"transpose({dim}, {other})"),
        (lambda a: a.permute(order), f"permute({order})"),
        (lambda a: a.unsqueeze(dim), f"unsqueeze({dim})"),
        (lambda a: a.squeeze(), "squeeze()"),
        (lambda a: a.narrow(dim, start, n - start), f"narrow({dim}, {start}, {n - start})"),
        (lambda a: a.reshape(flat), f"reshape({flat})"),
        (lambda a: a.flatten(), "flatten()"),
        (lambda a: a[(slice(None),) * dim + (slice(start, None, width),)],
         f"[dim {dim}: {start}::{width}]"),
        (lambda a: a.split(width, dim), f"split({width}, {dim})"),
        (lambda a: a.chunk(width, dim), f"chunk({width}, {dim})"),
        (lambda a: torch.cat([a, a * 2], dim), f"cat(a, a * 2; {dim})"),
        (lambda a: torch.stack([a, a + 1], dim), f"stack(a, a + 1; {dim})"),
        (lambda a: turn(a, shift, dim) if turn is torch.roll else turn(a, [dim]),
         f"{turn.__name__}({dim}, {shift})"),
        (lambda a: torch.sort(a, dim, stable=True).values, f"sort({dim})"),
        (lambda a: a.clone().mul_(number), f"clone().mul_({number})"),
        (lambda a: a.contiguous(), "contiguous()"),
        (lambda a: a.detach() * 2, "detach() * 2"),
        (lambda a: torch.where(a > 0, a, number), f"where(a > 0, a, {number})"),
        (lambda a: a.masked_fill(a > 1, number), f"masked_fill(a > 1, {number})"),
        (lambda a: torch.nn.functional.layer_norm(a, a.shape[-1:]), "layer_norm"),
        (lambda a: a / a.norm(dim=dim, keepdim=True).clamp_min(1e-3), f"a / norm({dim})"),
        (lambda a: a - a.mean(dim, keepdim=True), f"a - mean({dim})"),
        (lambda a: a.expand(2, *a.shape), "expand(2, ...)"),
        (lambda a: a.T if a.ndim == 2 else a.mT if a.ndim > 2 else a, "T"),
        (lambda a: a.to(torch.float32).to(torch.float64), "float32 and back"),
    ]  # fmt: skip
    if n:
        row = draw.randrange(n)
        choices += [
            (lambda a: a.select(dim, row), f"select({dim}, {row})"),
            (lambda a: a.index_select(dim, torch.tensor([row, 0, row])),
             f"index_select({dim}, [{row}, 0, {row}])"),
            (lambda a: torch.max(a, dim).values, f"max({dim})"),
            (lambda a: torch.topk(a, 1 + row // 2, dim).values, f"topk({1 + row // 2}, {dim})"),
        ]  # fmt: skip
    return draw.choice(choices)


def written(draw: random.Random, x: torch.Tensor) -> tuple[Callable[..., Any], str] | None:
    """A step that changes a tensor, or a view of it, in place."""
    if x.ndim == 0 or not x.numel():
        return None
    dim = draw.choice(dims(x))
    n, number = x.shape[dim], draw.choice([-1.0, 0.25, 2.0])
    start = draw.randrange(n)

    def _assign(a: Any) -> Any:
        a[(slice(None),) * dim + (slice(start, None),)] = number
        return ()

    def _mask(a: Any) -> Any:
        a[a > 0] = number
        return ()

    return draw.choice([
        (lambda a: (a.mul_(number), ())[1], f"mul_({number})"),
        (lambda a: (a.narrow(dim, start, n - start).add_(number), ())[1],
         f"narrow({dim}, {start}, {n - start}).add_({number})"),
        (lambda a: (a.transpose(0, -1).sub_(number), ())[1], f"transpose(0, -1).sub_({number})"),
        (lambda a: (a.select(dim, start).fill_(number), ())[1],
         f"select({dim}, {start}).fill_({number})"),
        (lambda a: (a.clamp_(-2, 2), ())[1], "clamp_(-2, 2)"),
        (_assign, f"[dim {dim}: {start}:] = {number}"),
        (_mask, f"[a > 0] = {number}"),
    ])  # fmt: skip


def two(draw: random.Random, x: torch.Tensor, y: torch.Tensor) -> tuple[Callable[..., Any], str]:
    """A step on two tensors."""
    dim = draw.choice(range(max(x.ndim, 1)))
    return draw.choice([
        (torch.add, "add"), (torch.mul, "mul"), (torch.maximum, "maximum"),
        (lambda a, b: a / (b * b + 1), "a / (b * b + 1)"),
        (torch.matmul, "matmul"), (lambda a, b: a @ b.mT, "a @ b.mT"),
        (lambda a, b: a.mT @ b, "a.mT @ b"),
        (lambda a, b: torch.cat([a, b], dim), f"cat({dim})"),
        (lambda a, b: torch.where(a > b, a, b), "where(a > b, a, b)"),
        (lambda a, b: torch.nn.functional.mse_loss(a, b), "mse_loss"),
        (lambda a, b: (a.clone().add_(b)), "clone().add_"),
        (lambda a, b: torch.einsum("...i,...i->...", a, b), "einsum(...i,...i->...)"),
        (lambda a, b: torch.nn.functional.linear(a, b), "linear"),
    ])  # fmt: skip


def modified(draw: random.Random, function: Callable[..., Any], text: str) -> Any:
    """The step as it is, mostly; or without gradients, or under autocast."""
    kind = draw.random()
    if kind < 0.08:
        return (lambda *a: torch.no_grad()(function)(*a)), f"no_grad {text}"
    if kind < 0.16:
        cast = torch.autocast("cpu", dtype=torch.bfloat16)
        return (lambda *a: cast(function)(*(x.float() for x in a))), f"autocast {text}"
    return function, text


def draw_program(seed: int) -> Program:
    """The program of a seed."""
    draw = random.Random(seed)
    ranks = draw.choice([2, 3, 4])
    rows = draw.randrange(2, 9)
    cuts = sorted(draw.randrange(rows + 1) for _ in range(ranks - 1))
    sizes = tuple(b - a for a, b in zip([0, *cuts], [*cuts, rows], strict=True))
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows, 3), (rows, 3), (rows, 4, 2), (rows,)]
    plain = [(3,), (3, 3), (rows, 3), (4, 2)]
    leaves = [
        (torch.randn(shape, dtype=torch.float64, generator=generator), i < 2)
        for i, shape in enumerate([*draw.sample(shapes, 2), draw.choice(plain)])
    ]
    program = Program(seed, sizes, leaves)
    tensors: list[Any] = leaves_of(program)
    length = draw.randrange(4, 11)
    for _ in range(60):
        if len(program.steps) == length:
            break
        if (step := draw_step(draw, tensors)) and works(program, step):
            program.steps.append(step)
            tensors = run(program.steps, list(leaves_of(program)))
    return program


def draw_step(draw: random.Random, tensors: list[torch.Tensor]) -> Step | None:
    """A step on some of the tensors; later ones are drawn more often."""
    usable = [i for i, x in enumerate(tensors) if isinstance(x, torch.Tensor) and x.numel() < 400]
    at = [draw.choice(usable[-4:] if draw.random() < 0.6 else usable) for _ in range(2)]
    kind = draw.random()
    if kind < 0.55:
        found, used = one(draw, tensors[at[0]]), 1
    elif kind < 0.7:
        found, used = written(draw, tensors[at[0]]), 1
    else:
        found, used = two(draw, tensors[at[0]], tensors[at[1]]), 2
    if found is None:
        return None
    function, text = modified(draw, *found) if kind < 0.55 or kind >= 0.7 else found
    return function, tuple(at[:used]), text


def works(program: Program, step: Step) -> bool:
    """Whether serial PyTorch runs the program with one more step, forward and backward."""
    try:
        leaves = leaves_of(program)
        tensors = run([*program.steps, step], list(leaves))
        loss = loss_of(tensors)
        torch.autograd.grad(loss, leaves, allow_unused=True)
    except Exception:
        return False
    finite = [bool(x.isfinite().all()) for x in tensors if isinstance(x, torch.Tensor)]
    return all(finite) and len(tensors) < 40


# --------------------------------------------------------------------------------- the judgment
def on_rank(domain: Any, program: Program, want: list[Any], grads: list[Any]) -> str:
    """Run a program on one rank; what differs from serial, empty where nothing does."""
    loose = any("autocast" in text for _, _, text in program.steps)
    slack = AUTOCAST if loose else SINGLE if "float32" in str(program) else 0.0
    leaves: list[Any] = []
    for x, sharded in program.leaves:
        leaf = shard(x.clone(), domain, program.sizes) if sharded else x.clone()
        leaves.append(leaf.requires_grad_())
    tensors = run(program.steps, list(leaves))
    for number, (got, value) in enumerate(zip(tensors, want, strict=True)):
        if wrong := differs(got, value, slack):
            return f"t{number}: {wrong}"
    loss = loss_of(tensors)
    if not isinstance(loss, torch.Tensor):
        return ""
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    for number, (g, v) in enumerate(zip(found, grads, strict=True)):
        whole = global_gradient(domain, leaves[number], g)
        v = torch.zeros_like(program.leaves[number][0]) if v is None else v
        whole = torch.zeros_like(v) if whole is None else whole
        if wrong := unequal(whole, v, max(10 * slack, 1e-8)):
            return f"gradient of t{number}: {wrong}"
    return ""


def judge(program: Program) -> Outcome:
    """What became of a program on simulated ranks."""
    leaves = leaves_of(program)
    want = run(program.steps, list(leaves))
    loss = loss_of(want)
    grads: list[Any] = [None] * len(leaves)
    if isinstance(loss, torch.Tensor):
        grads = list(torch.autograd.grad(loss, leaves, allow_unused=True))
    found = on_ranks(len(program.sizes), lambda domain: on_rank(domain, program, want, grads))
    changed = any(IN_PLACE in outcome.why for outcome in found)
    if changed and not any(outcome.kind == "exact" for outcome in found):
        return Outcome("refused", IN_PLACE)
    return worst(found)


__all__ = ["Program", "draw_program", "judge"]
