"""PyTorch's operator database on sharded tensors: how many operations are exact, refused or wrong.

`python benchmarks/op_database.py` takes the first samples of every operation (`--samples 0`: all
of them; `--seconds 60`: as many as 60 s allow), sharded in every way over three simulated ranks,
and compares values, types, shapes and gradients with serial PyTorch. It prints a line for each
operation that is not exact, then a table of operations, of operations with `out=`, and of the
module database.
"""

import argparse
import json
import math
import multiprocessing
import sys
import warnings
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from op_database import SUITES, Verdict, judge

RESULTS = Path(__file__).parent / "results" / "op_database.json"
WORDS = ("exact", "partly", "refused", "wrong", "diverged", "error")


class Job(NamedTuple):
    """An entry of a suite.

    Attributes:
        suite: name of the suite.
        number: of the entry.
        samples: how many of its samples are taken; None for all.
        seconds: after which no further call is made.
    """

    suite: str
    number: int
    samples: int | None
    seconds: float


def verdict(job: Job) -> Verdict | None:
    """The verdict on one entry."""
    suite = SUITES[job.suite]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    entry = suite.entries()[job.number]
    return judge(suite, entry, job.samples, job.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="operations; all by default")
    parser.add_argument("--samples", type=int, default=4, help="of each operation; 0: all [4]")
    parser.add_argument("--seconds", type=float, default=math.inf, help="per operation [no limit]")
    parser.add_argument("--jobs", type=int, default=1, help="processes [1]")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    args = parser.parse_args()
    record: dict[str, object] = {"samples": args.samples, "seconds": min(args.seconds, 1e9)}
    for name, suite in SUITES.items():
        chosen = [
            Job(name, i, args.samples or None, args.seconds)
            for i, entry in enumerate(suite.entries())
            if not args.names or suite.name(entry) in args.names or entry.name in args.names
        ]
        if args.jobs > 1:
            with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
                verdicts = [v for v in pool.imap(verdict, chosen) if v]
        else:
            verdicts = [v for job in chosen if (v := verdict(job))]
        tell(name, verdicts)
        record[name] = [asdict(v) for v in verdicts]
    if args.save:
        RESULTS.write_text(json.dumps(record, indent=1) + "\n")


def tell(suite: str, verdicts: list[Verdict]) -> None:
    """Print the verdicts that are not exact, and how many there are of each."""
    for v in verdicts:
        if v.word != "exact":
            kind = "refused" if v.word == "partly" else v.word
            print(f"{v.name}: {v.word} {v.counts} {v.examples[kind]}"[:400])
    counts = Counter(v.word for v in verdicts)
    calls = sum(sum(v.counts.values()) for v in verdicts)
    cut = sum(not v.complete for v in verdicts)
    print(
        f"{suite}: {len(verdicts)} with something to shard, {calls} calls; {cut} not in all samples"
    )
    for word in WORDS:
        print(f"{word:>9} {counts[word]:4} {100 * counts[word] / max(len(verdicts), 1):5.1f} %")


if __name__ == "__main__":
    main()
