"""The probe matrix: every operation of tests/cases.py on shards, against itself on the whole.

    python benchmarks/probe_matrix.py                          everything, as in the documentation
    python benchmarks/probe_matrix.py --libraries meshshard    one library

meshshard, torch's DTensor and, where `pip install nvidia-physicsnemo` has put it, PhysicsNeMo's
ShardTensor; uneven, METIS and empty shards on 2 and 4 gloo ranks; float64, forward and the
gradients of all four inputs under a loss that weights every number differently.

    exact      values and gradients equal the whole's to 1e-10
    single     they do to 1e-6
    refused    every rank raises at once
    crash      a rank dies or hangs, or some ranks raise and others do not
    WRONG      no error, other numbers

meshshard's own refusals must be NoShardRule, the reason in one line: another error is a crash.
"""

import argparse
import contextlib
import importlib.util
import json
import math
import multiprocessing
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from libraries import LIBRARIES, Held
from measure import Record, show, store
from meshes import poly_surface
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from cases import FAMILIES, REFUSED
from ranks import Ranks

from meshshard.partitioning.partition import partition

TOLERANCE, SINGLE = 1e-10, 1e-6  # relative to the largest number
# Seconds: what a rank waits for others, the matrix for a rank, and for others once one has raised
PATIENCE, LIMIT, GRACE = 4, 12, 2
AT_ONCE = 3  # most of the time ranks wait for one that does not come
OUTCOMES = ("exact", "single", "refused", "crash", "WRONG")  # from best to worst
CASES = {family: list(cases) for family, cases in (FAMILIES | {"all rows": REFUSED}).items()}
EVERY = {name: case for cases in (*FAMILIES.values(), REFUSED) for name, case in cases.items()}
PEERS = ("DTensor", "PhysicsNeMo")
KINDS = ("uneven", "METIS", "empty")


class Outcome(NamedTuple):
    """What happened, and the first line of why."""

    word: str
    why: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [n for n in LIBRARIES if n != "PhysicsNeMo" or importlib.util.find_spec("physicsnemo")]
    parser.add_argument("--libraries", nargs="+", choices=known, default=known)
    parser.add_argument("--cases", nargs="+", help="names of operations; all by default")
    results = Path(__file__).parent / "results" / "probe_matrix.json"
    parser.add_argument("--keep", type=Path, help="a folder: go on where another run has stopped")
    parser.add_argument("--json", type=Path, default=results, metavar="OUT")
    given = parser.parse_args()
    found = probe_all(given.libraries, given.cases or list(EVERY), given.keep)
    counts, table = counted(found), tabled(found)
    show("rows by their worst outcome", counts)
    show("operations", table)
    if not given.cases:
        store(given.json, {"counts": counts, "operations": table, "reasons": reasons(found)})


# ------------------------------------------------------------------------------------------ running
def layouts() -> dict[tuple[str, int], tuple[int, ...]]:
    """Sizes by kind and number of ranks; METIS' are those of a real partition."""
    sizes = {("uneven", 2): (3, 11), ("empty", 2): (14, 0)}
    sizes |= {("uneven", 4): (5, 1, 6, 2), ("empty", 4): (0, 0, 13, 1)}
    for k in (2, 4):
        sizes["METIS", k] = tuple(partition(poly_surface(70), k).sizes.tolist())
    return sizes


Found = dict[tuple[str, str, str, int], Outcome]  # by library, operation, kind of sizes, ranks


def probe(library: str, kind: str, k: int, cases: list[str], keep: Path | None) -> Found:
    """Outcomes of one library on one division of rows, or those that are kept."""
    file = keep and keep / f"{library}-{kind}-{k}.json"
    if file and file.exists():
        known = json.loads(file.read_text())
        return {(library, case, kind, k): Outcome(*known[case]) for case in cases}
    warnings.simplefilter("ignore")
    _warm(library)
    sizes, pool = layouts()[kind, k], Pool(k, PATIENCE)
    found = {(library, case, kind, k): pool.outcome(library, case, sizes) for case in cases}
    pool.stop()
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({key[1]: outcome for key, outcome in found.items()}))
    print(f"{library}, {kind}, {k} ranks: done", file=sys.stderr, flush=True)
    return found


def _warm(library: str) -> None:
    """Import here what every new rank would import: with pretended peers, an operation or two."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if library == "PhysicsNeMo":
        from physicsnemo.domain_parallel import register_custom_ops

        register_custom_ops()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    for case in ("add", "linear", "layer_norm", "mse", "softmax rows", "reshape heads"):
        one(library, case, (7, 7))
    dist.destroy_process_group()


def probe_all(libraries: list[str], cases: list[str], keep: Path | None) -> Found:
    """Outcomes of all, each division of rows of each library in a process with ranks of its own."""
    found: Found = {}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(AT_ONCE, spawn, max_tasks_per_child=1) as workers:
        jobs = [
            workers.submit(probe, library, kind, k, cases, keep)
            for library in libraries
            for k in (2, 4)
            for kind in KINDS
        ]
        for job in jobs:
            found |= job.result()
    return found


class Pool(Ranks):
    """Ranks that are started anew after anything but an answer of all."""

    def outcome(self, library: str, case: str, sizes: tuple[int, ...]) -> Outcome:
        """What one operation does on one division of rows."""
        start = time.monotonic()
        answers = self._answers(one, library, case, sizes)
        if time.monotonic() - start > PATIENCE:  # all raised, but after waiting for each other
            answers = [a if isinstance(a, list) else None for a in answers]
        outcome = self._judged(library, answers)
        if outcome.word in ("exact", "crash"):
            return outcome
        settled = self._answers(settle)
        if None not in settled:
            return outcome
        self.stop()
        return Outcome("crash", f"ranks make different calls, then: {outcome.why}")

    def _judged(self, library: str, answers: list[Any]) -> Outcome:
        raised = [a for a in answers if isinstance(a, str)]
        lost = [a for a in answers if a is None]
        if lost or (raised and len(raised) < len(answers)):
            self.stop()
            why = raised[0] if raised else ""
            return Outcome("crash", f"{len(lost)} ranks died or hung, {len(raised)} raised: {why}")
        if raised:
            meant = library != "meshshard" or raised[0].startswith("NoShardRule")
            return Outcome("refused" if meant else "crash", raised[0])
        worst = max(range(5), key=lambda i: max(a[i] for a in answers))
        error = max(a[worst] for a in answers)
        if error <= TOLERANCE:
            return Outcome("exact")
        what = ("value", "gradient of x", "of y", "of w", "of c")[worst]
        return Outcome("WRONG" if error > SINGLE else "single", f"{what} off by {error:.1e}")

    def _answers(self, job: Callable[..., Any], *given: Any) -> list[Any]:
        """Of every rank: errors, the text of what it raised, or None where it died or hung."""
        if not self.processes:
            self.start()
        with contextlib.suppress(BrokenPipeError):  # a rank that has died gives no answer
            for pipe in self.pipes:
                pipe.send((job, given))
        answers: list[Any] = [None] * self.size
        left = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        deadline = time.monotonic() + LIMIT
        while left and (ready := wait(list(left), max(0, deadline - time.monotonic()))):
            for pipe in ready:
                rank = left.pop(pipe)
                answers[rank] = _received(pipe)
                if not isinstance(answers[rank], list):
                    deadline = min(deadline, time.monotonic() + GRACE)
        return answers


def _received(pipe: Any) -> Any:
    try:
        error, value = pipe.recv()
    except (EOFError, OSError):
        return None
    return (value or []) if error is None else None


# ------------------------------------------------------------------------------------- on the ranks
def one(library: str, case: str, sizes: tuple[int, ...]) -> list[float] | str:
    """Errors of the value and of four gradients, or what was raised."""
    warnings.simplefilter("ignore")
    wanted = serial(case, sum(sizes))
    try:
        return _sharded(library, case, sizes, wanted)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {lines[0][:160]}"


def settle() -> None:
    """Ranks that no longer agree fail here, not in the next operation."""
    dist.barrier()


def inputs(n: int) -> tuple[Tensor, ...]:
    """x, y (n, 6), w (6, 6), c (6,), labels (n,): the same on every rank."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((n, 6), (n, 6), (6, 6), (6,))
    drawn = [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]
    return (*drawn, torch.arange(n) * 5 % 6)


def serial(case: str, n: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Value, the weights of the loss and gradients, on the whole."""
    *leaves, labels = inputs(n)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    out = EVERY[case](*leaves, labels)
    weights = torch.cos(torch.arange(out.numel(), dtype=torch.float64)).reshape(out.shape)
    grads = torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True)
    pairs = zip(grads, leaves, strict=True)
    return out.detach(), weights, [torch.zeros_like(t) if g is None else g for g, t in pairs]


def _sharded(
    library: str, case: str, sizes: tuple[int, ...], wanted: tuple[Tensor, Tensor, list[Tensor]]
) -> list[float]:
    whole, weights, grads = wanted
    held = LIBRARIES[library]()
    x, y, w, c, n = inputs(sum(sizes))
    first = sum(sizes[: dist.get_rank()])
    own = slice(first, first + sizes[dist.get_rank()])
    sx, sy = (held.rows(t[own].clone(), sizes).requires_grad_() for t in (x, y))
    sn = held.rows(n[own].clone(), sizes)
    pw, pc = (held.plain(t).requires_grad_() for t in (w, c))
    with held.around():
        out = EVERY[case](sx, sy, pw, pc, sn)
        part = held.held(out.detach())
        parts = tuple(_everybody(0 if part.dim is None else part.local.shape[part.dim]))
        right = _fits(part, parts, whole)
        error = far(part.local, _own(whole, part.dim, parts)) if right else math.inf
        if max(_everybody(error)) > SINGLE:
            return [error, 0, 0, 0, 0]
        scale = _own(weights, part.dim, parts)
        scale = held.plain(scale) if part.dim is None else held.rows(scale, parts, part.dim)
        (out * scale).sum().backward()
    errors = [error]
    for leaf, grad in zip((sx, sy), grads[:2], strict=True):
        errors.append(_gradient(held, leaf, grad, sizes))
    for leaf, grad in zip((pw, pc), grads[2:], strict=True):
        errors.append(min(far(g, grad) for g in held.gradients(leaf)))
    return errors


def _gradient(held: Any, leaf: Any, wanted: Tensor, sizes: tuple[int, ...]) -> float:
    """Error of the gradient of owned rows."""
    if leaf.grad is None:
        return far(torch.zeros_like(wanted), wanted)
    part = held.held(leaf.grad)
    if part.dim is None:
        return far(part.local, wanted)
    return far(part.local, _own(wanted, part.dim, sizes))


def _everybody(value: Any) -> list[Any]:
    """The value of every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _fits(part: Held, parts: tuple[int, ...], whole: Tensor) -> bool:
    """Whether shapes are right, if all parts are put together."""
    shape = list(part.local.shape)
    if part.dim is not None:
        shape[part.dim] = sum(parts)
    return shape == list(whole.shape)


def _own(x: Tensor, dim: int | None, sizes: tuple[int, ...]) -> Tensor:
    if dim is None:
        return x
    rank = dist.get_rank()
    return x.narrow(dim, sum(sizes[:rank]), sizes[rank])


def far(got: Tensor, wanted: Tensor) -> float:
    """Largest difference, relative to the largest number."""
    if got.shape != wanted.shape:
        return math.inf
    if not got.numel():
        return 0.0
    error = ((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-3)).item()
    return math.inf if math.isnan(error) else float(error)


# ------------------------------------------------------------------------------------------- tables
def tabled(found: Found) -> list[Record]:
    """A row for each operation: ours on all sizes, the peers' by kind of sizes."""
    libraries = list(dict.fromkeys(key[0] for key in found))
    probed = {key[1] for key in found}
    rows = []
    for family, cases in CASES.items():
        for case in (c for c in cases if c in probed):
            row: Record = {"family": family, "operation": case}
            for library in libraries:
                row |= {
                    column: worst(found, library, case, kinds)
                    for column, kinds in columns(library).items()
                }
            rows.append(row)
    return rows


def columns(library: str) -> dict[str, tuple[str, ...]]:
    """Columns of a library and the kinds of sizes in each: one for ours, one a kind for a peer."""
    if library == "meshshard":
        return {library: KINDS}
    return {f"{library}, {kind}": (kind,) for kind in KINDS}


def worst(found: Found, library: str, case: str, kinds: tuple[str, ...]) -> str:
    """The worst outcome on 2 and 4 ranks."""
    words = [found[library, case, kind, k].word for kind in kinds for k in (2, 4)]
    return max(words, key=OUTCOMES.index)


def counted(found: Found) -> list[Record]:
    """How many operations end how, by library and kind of sizes."""
    rows = []
    for library in dict.fromkeys(key[0] for key in found):
        cases = dict.fromkeys(key[1] for key in found)
        for title, kinds in (*((k, (k,)) for k in KINDS), ("all", KINDS)):
            counts = Counter(worst(found, library, case, kinds) for case in cases)
            row: Record = {"library": library, "sizes": title, "operations": len(cases)}
            rows.append(row | {word: counts[word] for word in OUTCOMES})
    return rows


def reasons(found: Found) -> list[Record]:
    """The first reason of every operation that is not exact, by library."""
    first: dict[tuple[str, str], Record] = {}
    for (library, case, kind, k), outcome in found.items():
        if outcome.word == "exact" or outcome.word != worst(found, library, case, KINDS):
            continue
        row = {"library": library, "operation": case, "sizes": f"{kind}, {k} ranks"}
        first.setdefault((library, case), row | {"outcome": outcome.word, "why": outcome.why})
    return list(first.values())


if __name__ == "__main__":
    main()
