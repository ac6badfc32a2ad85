"""Ranks of a script on this machine, the selftest, and the examples of the documentation."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshshard import cli, io
from meshshard.partitioning.partition import partition
from meshshard.tensor import FAMILIES
from meshshard.tensor.shard_tensor import name_of

ROOT = Path(__file__).parent.parent
HELLO = """
import sys
from meshshard.comm import init_domain
domain = init_domain()
open(f"{sys.argv[1]}/{domain.rank} of {domain.size}", "w").close()
domain.close()
"""
FAILS = """
import sys, time
from meshshard.comm import init_domain
domain = init_domain()
if domain.rank == 1:
    raise SystemExit(7)
time.sleep(60)
"""
TOLD = """
import sys, time
import torch
from meshshard.comm import init_domain
domain = init_domain()
if domain.rank == 1:
    {}
domain.all_reduce(torch.ones(3))
time.sleep(60)
"""
ABOVE = "tensor([0., 0., 0., 0., 1., 1., 1., 1.])\n"


def run(*words, cwd):
    """A command in a child process that finds this checkout."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "meshshard", *map(str, words)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def soon(condition, seconds=30):
    """Whether a condition holds within some time."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.1)
    return condition()


def runs(number):
    """Whether a process is there, and not dead and waiting to be asked for its exit code."""
    try:
        return bool(Path(f"/proc/{number}/cmdline").read_bytes())
    except OSError:
        return False


def example(word):
    """The first example of the documentation with a word in it."""
    text = (ROOT / "docs" / "ranks.md").read_text(encoding="utf-8")
    return next(e for e in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if word in e)


def test_every_rank_runs_the_script(tmp_path):
    (tmp_path / "hello.py").write_text(HELLO)
    assert run("launch", 3, "hello.py", tmp_path, cwd=tmp_path).returncode == 0
    assert {f.name for f in tmp_path.glob("* of *")} == {"0 of 3", "1 of 3", "2 of 3"}


def test_a_rank_that_fails_ends_the_others(tmp_path):
    (tmp_path / "fails.py").write_text(FAILS)
    assert run("launch", 2, "fails.py", cwd=tmp_path).returncode != 0


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc, and the kernel to end children")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_the_launcher(tmp_path, how):
    text = "import os, time\nopen(f'{os.getpid()}.pid', 'w').close()\ntime.sleep(60)\n"
    (tmp_path / "waits.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "meshshard", "launch", "2", "waits.py"]
    launcher = subprocess.Popen(command, cwd=tmp_path, env=environment)
    assert soon(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
    launcher.send_signal(how)
    launcher.wait()
    numbers = [file.stem for file in tmp_path.glob("*.pid")]
    assert soon(lambda: not any(runs(number) for number in numbers))


@pytest.mark.parametrize(
    ("failing", "code", "last"),
    [
        ("raise ValueError('so it\\n is')", 1, "error: rank 1: ValueError: so it is"),
        ("sys.exit(7)", 7, "error: rank 1: ended with exit code 7"),
        ("sys.exit('error: plainly')", 1, "error: rank 1: plainly"),
        ("import os; os._exit(9)", 9, "error: rank 1: failed with exit code 9"),
        ("import os; os.kill(os.getpid(), 9)", 137, "error: rank 1: was killed by SIGKILL"),
    ],
)
def test_what_failed_first_is_the_last_line(tmp_path, failing, code, last):
    (tmp_path / "fails.py").write_text(TOLD.format(failing))
    done = run("launch", 2, "fails.py", cwd=tmp_path)
    assert done.returncode == code
    assert done.stderr.splitlines()[-1].startswith(last)
    for unwanted in ("FAILED", "elastic", "runpy", "_rank.py"):
        assert unwanted not in done.stderr


def test_a_rank_that_takes_long_to_end_is_still_the_first(tmp_path):
    slow = "import atexit; atexit.register(time.sleep, 20); raise ValueError('first')"
    text = TOLD.replace("{}", slow).replace("domain.all_reduce", "time.sleep(3); raise Exception")
    (tmp_path / "fails.py").write_text(text)
    done = run("launch", 2, "fails.py", cwd=tmp_path)
    assert done.stderr.splitlines()[-1] == "error: rank 1: ValueError: first"
    assert done.returncode == 1


def test_a_script_runs_as_it_would_alone(tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "beside.py").write_text("WORD = 'beside'\n")
    (tmp_path / "here" / "script.py").write_text(
        "import pickle, sys\nimport beside\nassert 'torch' not in sys.modules\n"
        "class Own:\n    pass\n"
        "assert type(pickle.loads(pickle.dumps(Own()))) is Own\n"
        "print(__name__, beside.WORD, sys.argv, __file__)\n"
    )
    done = run("launch", 1, "here/script.py", "-m", "--x", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "__main__ beside ['here/script.py', '-m', '--x'] here/script.py\n"


@pytest.mark.parametrize(
    ("words", "why"),
    [([], "nothing to run"), (["-m"], "nothing to run"), (["--fast"], "--fast: is not a file")],
)
def test_nothing_to_launch_is_one_line(capsys, words, why):
    assert cli.main(["launch", "2", *words]) == 1
    assert why in capsys.readouterr().err


def test_selftest_on_a_folder_of_ones_own(tmp_path):
    mesh = io.read(ROOT / "datasets/ahmed/run_8/boundary_8.vtp")
    folder = partition(mesh, 5).save(tmp_path / "own.shards")
    done = run("selftest", "--ranks", 3, "--folder", folder, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "3 ranks and one: equal" in done.stdout
    assert len(done.stdout.splitlines()) == 7


def test_the_training_of_the_documentation_is_the_same_on_two_ranks(tmp_path):
    mesh = io.read(ROOT / "datasets/ahmed/run_8/boundary_8.vtp")
    (tmp_path / "meshshard-demo").mkdir()
    partition(mesh, 4).save(tmp_path / "meshshard-demo" / "boundary_1.shards")
    (tmp_path / "train.py").write_text(example("train.py"))
    losses = []
    for ranks in (1, 2):
        done = run("launch", ranks, "train.py", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        losses.append(float(done.stdout.split()[-1]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_rule_of_the_documentation(capsys):
    exec(compile(example("custom_op"), "ranks.md", "exec"), {"__name__": "example"})
    assert capsys.readouterr().out == ABOVE


def test_the_rule_of_the_documentation_on_ranks(tmp_path):
    (tmp_path / "rule.py").write_text(example("custom_op"))
    done = run("launch", 3, "rule.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(ABOVE.strip()) == 3


def test_the_compiled_layer_of_the_documentation(tmp_path, monkeypatch):
    mesh = io.read(ROOT / "datasets/ahmed/run_8/boundary_8.vtp")
    (tmp_path / "meshshard-demo").mkdir()
    partition(mesh, 2).save(tmp_path / "meshshard-demo" / "boundary_1.shards")
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "example"}
    source = example("torch.compile").replace("fullgraph", "backend='aot_eager', fullgraph")
    exec(compile(source, "ranks.md", "exec"), names)
    assert names["y"].shape == (mesh.n_cells, 8)
    assert names["y"].gather().mean(0).abs().max() < 1e-5


def test_the_page_of_rules_names_every_function():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    page = generate.rules_page()
    for family, rules in FAMILIES.items():
        assert f"## {family}" in page
        assert all(f"`{name_of(func)}`" in page for func in rules)
