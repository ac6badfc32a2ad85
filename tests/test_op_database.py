"""A tenth of PyTorch's operator and module databases on sharded tensors, another with each commit.

benchmarks/op_database.py runs all of it.
"""

import subprocess
import warnings
from pathlib import Path

import pytest
from op_database import SUITES, judge

pytestmark = pytest.mark.slow
PARTS, SAMPLES = 10, 2


def part_of_this_commit():
    """A number below `PARTS` that is another with each commit; 0 outside of a clone."""
    root = Path(__file__).parent.parent
    told = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True)
    return int(told.stdout[:8], 16) % PARTS if told.returncode == 0 else 0


@pytest.mark.parametrize("suite", SUITES)
def test_every_call_is_exact_or_refused(suite):
    found = SUITES[suite]
    part, bad = part_of_this_commit(), {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for entry in found.entries()[part::PARTS]:
            verdict = judge(found, entry, SAMPLES)
            if verdict and verdict.word not in ("exact", "partly", "refused"):
                bad[verdict.name] = verdict.examples[verdict.word]
    assert not bad, f"part {part} of {PARTS}"
