"""All layers against their peers: slices, graphs, neighbors, attention, each in its own process.

python benchmarks/layers.py                  about half an hour on two quiet cores
python benchmarks/layers.py slices graphs    some of them; each has options of its own
"""

import argparse
import subprocess
import sys
from pathlib import Path

PARTS = ("slices", "graphs", "neighbors", "attention", "scaling")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=PARTS, metavar="PART", help=", ".join(PARTS))
    for part in parser.parse_args().parts:
        print(f"\n=== {part}", flush=True)
        subprocess.run([sys.executable, Path(__file__).with_name(f"{part}.py")], check=True)


if __name__ == "__main__":
    main()
