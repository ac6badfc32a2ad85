"""How the benchmarks measure: CPU seconds by stage, peak memory of a child, tables, JSON.

CPU is user + system of a process and of the children that it has waited for: other work on the
machine disturbs it little. Peak memory is the resident set of a child and of its own children,
added up at every look: ru_maxrss of a process that was started by a large one is the large one's.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import resource
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

Record = dict[str, Any]  # a row of a table: docs/generate.py makes the same tables of the JSON

RESULTS = Path(__file__).parent / "results"
POLL_SECONDS = 0.01  # between two readings of the memory of a child process
PACKAGES = (
    "numpy",
    "scipy",
    "pymetis",
    "pyvista",
    "vtk",
    "torch",
    "torch-geometric",
    "nvidia-physicsnemo",
)


class Cpu(NamedTuple):
    """Seconds of this process, and of its finished children together."""

    user: float = 0.0
    system: float = 0.0
    children: float = 0.0

    @classmethod
    def now(cls) -> "Cpu":
        own, others = (
            resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        )
        return cls(own.ru_utime, own.ru_stime, others.ru_utime + others.ru_stime)

    @property
    def total(self) -> float:
        return sum(self)

    def since(self, start: "Cpu") -> "Cpu":
        return Cpu(*(a - b for a, b in zip(self, start, strict=True)))

    def plus(self, other: "Cpu") -> "Cpu":
        return Cpu(*(a + b for a, b in zip(self, other, strict=True)))


class Stages:
    """Charges CPU to the innermost stage that is open, each second to one stage."""

    def __init__(self) -> None:
        self.spent: dict[str, Cpu] = defaultdict(Cpu)
        self._open: list[str] = []
        self._last = Cpu.now()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._charge()
        self._open.append(name)
        yield
        self._charge()
        self._open.pop()

    def watch(self, module: ModuleType, function: str, name: str) -> None:
        """Make a stage of every call of a module's function."""
        inner = getattr(module, function)

        def watched(*given: Any, **named: Any) -> Any:
            with self(name):
                return inner(*given, **named)

        setattr(module, function, watched)

    def _charge(self) -> None:
        now = Cpu.now()
        if self._open:
            self.spent[self._open[-1]] = self.spent[self._open[-1]].plus(now.since(self._last))
        self._last = now


def spent(call: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of one call, and what it returned."""
    start = Cpu.now()
    result = call()
    return Cpu.now().since(start).total, result


def alternately(times: int, *calls: Callable[[], float]) -> list[float]:
    """Medians of what each call returns, called in turn: A B A B."""
    rounds = [[call() for call in calls] for _ in range(times)]
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


# ----------------------------------------------------------------------------------------- children
def in_child(job: Callable[..., Any], *given: Any) -> tuple[Any, float]:
    """Run a job in a fresh process: what it returned, and the peak of its memory in MiB."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_work, args=(there, job, given))
    child.start()
    there.close()
    assert child.pid is not None
    peak = 0.0
    while not here.poll(POLL_SECONDS):
        peak = max(peak, _resident(child.pid))
    try:
        result = here.recv()
    except EOFError:
        raise SystemExit(f"{job.__name__}{given} died; see above") from None
    finally:
        child.join()
    return result, peak


def _work(answer: Connection, job: Callable[..., Any], given: tuple[Any, ...]) -> None:
    answer.send(job(*given))


def _resident(pid: int) -> float:
    """MiB in memory of a process and all processes below it (Linux)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0.0
    lines = dict(line.split(":", 1) for line in status.splitlines())
    own = int(lines.get("VmRSS", "0 kB").split()[0]) / 1024
    return own + sum(_resident(int(child)) for child in below)


# ------------------------------------------------------------------------------------------- tables
def compared(
    what: str, ours: float, peer: float, target: float | None, gate: bool = False
) -> Record:
    """A row: our number, the peer's, their ratio, and the most it may be."""
    ratio = ours / peer
    row = {"what": what, "ours": ours, "peer": peer, "ratio": ratio}
    if target is None:
        return row | NO_TARGET
    return row | verdict(f"<= {target:g}", ratio <= target, gate)


def limited(what: str, value: float, most: float, unit: str = "", gate: bool = True) -> Record:
    """A row: a number and the most it may be."""
    row = {"what": what, "ours": value, "unit": unit}
    return row | verdict(f"<= {most:g}", value <= most, gate)


def at_least(ratio: float, least: float) -> Record:
    """The last columns of a row: a ratio of times and the least it should be."""
    return {"ratio": ratio} | verdict(f">= {least:g}", ratio >= least, gate=False)


def verdict(target: str, met: bool, gate: bool) -> Record:
    """The columns of a target.

    A gate (counts, bytes, memory, accuracy) must be met on every machine, or the script fails. The
    other targets, times above all, are goals: they depend on the machine.
    """
    return {"target": target, "met": "yes" if met else "NO", "gate": "yes" if gate else ""}


NO_TARGET: Record = {"target": "", "met": "", "gate": ""}


def show(title: str, rows: Sequence[Record]) -> None:
    """Print a table in plain text."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = [columns, *([_text(row.get(name, "")) for name in columns] for row in rows)]
    width = [max(len(line[i]) for line in table) for i in range(len(columns))]
    print(f"\n{title}")
    for first, *others in table:
        cells = [c.rjust(w) for c, w in zip(others, width[1:], strict=True)]
        print("  ".join([first.ljust(width[0]), *cells]))
    sys.stdout.flush()


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def arguments(
    description: str | None, sections: Iterable[str], results: str
) -> argparse.ArgumentParser:
    """The options that all scripts have: which sections to run, and the file for the results."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=sections, default=list(sections))
    parser.add_argument("--json", type=Path, default=RESULTS / results, metavar="OUT")
    return parser


def run(
    sections: dict[str, Callable[..., Iterator[tuple[str, list[Record]]]]],
    given: argparse.Namespace,
    *inputs: Any,
) -> None:
    """Print and store the tables of the chosen sections, each as it is done.

    Raises:
        SystemExit: a gate was not met.
    """
    failed = []
    for name in given.only:
        tables = {}
        for title, rows in sections[name](*inputs):
            show(title, rows)
            tables[title] = rows
            failed += [f"{title}: {row}" for row in rows if row.get("gate") and row["met"] != "yes"]
        if tables:
            store(given.json, {name: tables})
    if failed:
        raise SystemExit("gates that were not met:\n" + "\n".join(failed))


def store(path: Path, sections: dict[str, dict[str, list[Record]]]) -> None:
    """Put sections into a JSON file; those that were not measured this time stay as they are."""
    known = json.loads(path.read_text()) if path.exists() else {}
    known |= {"machine": _machine(), **sections}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(known, indent=1) + "\n")


def _machine() -> dict[str, str]:
    from torch.backends.cpu import get_cpu_capability  # how wide its vectors are decides much

    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    cores = len(os.sched_getaffinity(0))
    system = f"{platform.system()} {platform.machine()}, {get_cpu_capability()}"
    return {"system": system, "cores": str(cores)} | versions
