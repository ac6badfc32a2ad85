"""Random programs of torch operations on sharded tensors: how many are exact, refused or wrong.

`python benchmarks/programs.py --first 0 --programs 5000` prints every program that is neither exact
nor refused alike on all ranks, with the seed that it is drawn from, then a table.
"""

import argparse
import json
import sys
import warnings
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from programs import draw_program, judge

RESULTS = Path(__file__).parent / "results" / "programs.json"
WORDS = ("exact", "refused", "wrong", "diverged", "error")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0, help="first seed [0]")
    parser.add_argument("--programs", type=int, default=5000, help="number of seeds [5000]")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    steps, refused = 0, Counter[str]()
    for seed in range(args.first, args.first + args.programs):
        program = draw_program(seed)
        kind, why = judge(program)
        counts[kind] += 1
        steps += len(program.steps)
        if kind == "refused":
            refused[why.split(" has no exact rule")[0]] += 1
        elif kind != "exact":
            print(f"{kind}: {why}\n  {program}")
    print(f"seeds {args.first} to {args.first + args.programs - 1}, {steps} steps")
    for word in WORDS:
        print(f"{word:>9} {counts[word]:5} {100 * counts[word] / args.programs:5.1f} %")
    print("refused most:", ", ".join(f"{name} {n}" for name, n in refused.most_common(12)))
    if args.save:
        record = {
            "first": args.first, "programs": args.programs, "steps": steps,
            "counts": dict(counts), "refused": dict(refused.most_common()),
        }  # fmt: skip
        RESULTS.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
