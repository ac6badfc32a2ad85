"""The scripts of benchmarks/ run, on small inputs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
RUNS = {
    "partition.py": ["--only", "pipeline", "--size", "10000"],
    "tensor.py": ["--only", "imports"],
    "op_database.py": ["linalg.cross", "--samples", "1"],
    "programs.py": ["--programs", "3"],
}


@pytest.mark.slow
@pytest.mark.parametrize("script", RUNS)
def test_a_script_runs(tmp_path, script):
    command = [sys.executable, BENCHMARKS / script, *RUNS[script]]
    if script in ("partition.py", "tensor.py"):
        command += ["--json", tmp_path / "out.json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    if "--json" in command:
        assert json.loads((tmp_path / "out.json").read_text())
