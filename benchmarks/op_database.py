"""PyTorch's operator database on sharded tensors: how many operations are exact, refused or wrong.

`python benchmarks/op_database.py` takes the first samples of every operation (--samples 0: all of
them), sharded in every way over three simulated ranks, and compares values, types, shapes and
gradients with serial PyTorch. It prints a line for each operation that is not exact, then a table.
"""

import argparse
import json
import sys
import warnings
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from op_database import judge, operations

RESULTS = Path(__file__).parent / "results" / "op_database.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="operations; all by default")
    parser.add_argument("--samples", type=int, default=4, help="of each operation; 0: all [4]")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    chosen = [op for op in operations() if not args.names or op.name in args.names]
    verdicts = [v for op in chosen if (v := judge(op, args.samples or None))]
    for verdict in verdicts:
        if verdict.word != "exact":
            worst = list(verdict.examples.items())[-1]
            print(f"{verdict.name}: {verdict.word} {verdict.counts} {': '.join(worst)}"[:300])
    counts = Counter(v.word for v in verdicts)
    print(f"{len(verdicts)} operations with something to shard")
    for word in ("exact", "partly", "refused", "wrong", "diverged", "error"):
        print(f"{word:>9} {counts[word]:4} {100 * counts[word] / max(len(verdicts), 1):5.1f} %")
    if args.save:
        record = {"samples": args.samples, "operations": [asdict(v) for v in verdicts]}
        RESULTS.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
