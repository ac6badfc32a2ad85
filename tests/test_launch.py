"""Launching ranks on this machine, the selftest, and the examples of the documentation."""

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from meshshard import cli, io
from meshshard.partitioning.partition import partition
from meshshard.tensor import FAMILIES
from meshshard.tensor.shard_tensor import name_of

pytestmark = pytest.mark.slow

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
ONE_FAILS = """
import sys, time
import torch
from meshshard.comm import init_domain
domain = init_domain()
if domain.rank == 1:
    {}
domain.all_reduce(torch.ones(3))
time.sleep(60)
"""
OWN_GROUP = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(2)
dist.all_reduce(x)
print(dist.get_rank(), x.sum().item(), flush=True)
dist.destroy_process_group()
"""
SLEEPS = """
import os, subprocess, sys, time

{}
open(f"{{os.getpid()}}.pid", "w").close()
time.sleep(60)
"""
DOMAIN = "from meshshard.comm import init_domain; domain = init_domain()"
CHILD = "open(f'{subprocess.Popen([\"sleep\", \"60\"]).pid}.pid', 'w').close()"
ABOVE = "tensor([0., 0., 0., 0., 1., 1., 1., 1.])\n"


def run(*words, cwd):
    """Run a meshshard command of this checkout in a child process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "meshshard", *map(str, words)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def start(tmp_path, text, n_pids, ranks=2):
    """Launch a script that sleeps, and wait until it has written the numbers of its processes."""
    (tmp_path / "sleeps.py").write_text(SLEEPS.format(text))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "meshshard", "launch", str(ranks), "sleeps.py"]
    launcher = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE)
    wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == n_pids or launcher.poll() is not None)
    return launcher, [int(file.stem) for file in tmp_path.glob("*.pid")]


def wait_until(condition):
    """Wait for a condition; pytest's time limit ends the test if it never holds."""
    while not condition():
        time.sleep(0.05)


def is_running(number):
    """Whether a process exists and is not a zombie."""
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def listening(number):
    """Addresses on which a process and its descendants listen."""
    process = psutil.Process(number)
    every = [c for p in (process, *process.children(True)) for c in p.net_connections("inet")]
    return [c.laddr.ip for c in every if c.status == psutil.CONN_LISTEN]


def example(word):
    """The first example of the documentation that contains a word."""
    text = (ROOT / "docs" / "ranks.md").read_text(encoding="utf-8")
    return next(e for e in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if word in e)


def test_every_rank_runs_the_script(tmp_path):
    (tmp_path / "hello.py").write_text(HELLO)
    assert run("launch", 3, "hello.py", tmp_path, cwd=tmp_path).returncode == 0
    assert {f.name for f in tmp_path.glob("* of *")} == {"0 of 3", "1 of 3", "2 of 3"}


def test_a_rank_that_fails_ends_the_others(tmp_path):
    (tmp_path / "fails.py").write_text(FAILS)
    assert run("launch", 2, "fails.py", cwd=tmp_path).returncode != 0


@pytest.mark.skipif(sys.platform != "linux", reason="only the kernel of Linux ends children")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP])
def test_no_rank_outlives_the_launcher(tmp_path, number):
    launcher, ranks = start(tmp_path, "", 2)
    launcher.send_signal(number)
    _, errors = launcher.communicate()
    wait_until(lambda: not any(map(is_running, ranks)))
    assert b"Traceback" not in errors


def test_children_of_ranks_end_with_the_launcher(tmp_path):
    launcher, pids = start(tmp_path, CHILD, 4)
    launcher.terminate()
    launcher.communicate()
    wait_until(lambda: not any(map(is_running, pids)))


def test_children_of_a_rank_that_fails_end_with_it(tmp_path):
    text = f"import os, subprocess\n{CHILD}\nos._exit(3)"
    (tmp_path / "fails.py").write_text(text)
    assert run("launch", 1, "fails.py", cwd=tmp_path).returncode == 3
    (number,) = [int(file.stem) for file in tmp_path.glob("*.pid")]
    wait_until(lambda: not is_running(number))


def test_a_rank_that_ignores_sigterm_is_killed(tmp_path):
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    launcher, ranks = start(tmp_path, ignore, 2)
    launcher.terminate()
    launcher.communicate()
    wait_until(lambda: not any(map(is_running, ranks)))


@pytest.mark.parametrize("text", [DOMAIN, "import torch.distributed as d; d.init_process_group()"])
def test_nothing_listens_outside_the_loopback_interface(tmp_path, text):
    launcher, _ = start(tmp_path, text, 2)
    addresses = listening(launcher.pid)
    launcher.terminate()
    launcher.communicate()
    assert len(addresses) >= 3  # the store, and gloo of each rank
    assert set(addresses) <= {"127.0.0.1", "::1"}


def test_a_single_process_does_not_listen(tmp_path):
    text = DOMAIN + "; import torch; domain.all_reduce(torch.ones(2)); print(1); input()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", text], env=environment, **pipes) as process:
        process.stdout.readline()
        assert not listening(process.pid)
        process.communicate(b"\n")


def test_a_script_may_initialize_torch_distributed_itself(tmp_path):
    (tmp_path / "own.py").write_text(OWN_GROUP)
    done = run("launch", 2, "own.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 4.0", "1 4.0"]


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_lines_of_ranks_do_not_mix(tmp_path, monkeypatch, unbuffered):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    text = "import os\nfor i in range(2000): print(*[os.environ['RANK']] * 9)"
    (tmp_path / "lines.py").write_text(text)
    done = run("launch", 2, "lines.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [" ".join([rank] * 9) for rank in "01"]
    assert sorted(done.stdout.splitlines()) == sorted(lines * 2000)


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
def test_the_first_failure_is_the_last_line(tmp_path, failing, code, last):
    (tmp_path / "fails.py").write_text(ONE_FAILS.format(failing))
    done = run("launch", 2, "fails.py", cwd=tmp_path)
    assert done.returncode == code
    assert done.stderr.splitlines()[-1].startswith(last)
    for unwanted in ("FAILED", "elastic", "runpy", "run_script.py", "launch.py"):
        assert unwanted not in done.stderr


def test_a_rank_that_fails_first_but_ends_last_is_the_first(tmp_path):
    slow = "import atexit; atexit.register(time.sleep, 4); raise ValueError('first')"
    text = ONE_FAILS.replace("{}", slow).replace(
        "domain.all_reduce", "time.sleep(1); raise Exception"
    )
    (tmp_path / "fails.py").write_text(text)
    done = run("launch", 2, "fails.py", cwd=tmp_path)
    assert done.stderr.splitlines()[-1] == "error: rank 1: ValueError: first"
    assert done.returncode == 1


def test_a_script_runs_as_without_the_launcher(tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "beside.py").write_text("WORD = 'beside'\n")
    (tmp_path / "here" / "script.py").write_text(
        "import pickle, sys\nimport beside\nassert 'torch' not in sys.modules\n"
        "class Defined:\n    pass\n"
        "assert type(pickle.loads(pickle.dumps(Defined()))) is Defined\n"
        "print(__name__, beside.WORD, sys.argv, __file__)\n"
    )
    done = run("launch", 1, "here/script.py", "-m", "--x", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "__main__ beside ['here/script.py', '-m', '--x'] here/script.py\n"


@pytest.mark.parametrize(
    ("words", "why"),
    [([], "nothing to run"), (["-m"], "nothing to run"), (["--fast"], "--fast: is not a file")],
)
def test_a_missing_script_is_one_line(capsys, words, why):
    assert cli.main(["launch", "2", *words]) == 1
    assert why in capsys.readouterr().err


def test_selftest_on_a_given_folder(tmp_path):
    mesh = io.read(ROOT / "datasets/ahmed/run_8/boundary_8.vtp")
    folder = partition(mesh, 5).save(tmp_path / "own.shards")
    done = run("selftest", "--ranks", 3, "--folder", folder, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "3 ranks and one: equal" in done.stdout
    assert len(done.stdout.splitlines()) == 7


def test_the_documented_training_gives_the_same_loss_on_two_ranks(tmp_path):
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


def test_the_documented_rule(capsys):
    exec(compile(example("custom_op"), "ranks.md", "exec"), {"__name__": "example"})
    assert capsys.readouterr().out == ABOVE


def test_the_documented_rule_on_ranks(tmp_path):
    (tmp_path / "rule.py").write_text(example("custom_op"))
    done = run("launch", 3, "rule.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(ABOVE.strip()) == 3


def test_the_documented_compiled_layer(tmp_path, monkeypatch):
    mesh = io.read(ROOT / "datasets/ahmed/run_8/boundary_8.vtp")
    (tmp_path / "meshshard-demo").mkdir()
    partition(mesh, 2).save(tmp_path / "meshshard-demo" / "boundary_1.shards")
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "example"}
    source = example("torch.compile").replace("fullgraph", "backend='aot_eager', fullgraph")
    exec(compile(source, "ranks.md", "exec"), names)
    assert names["y"].shape == (mesh.n_cells, 8)
    assert names["y"].gather().mean(0).abs().max() < 1e-5


def test_the_page_of_rules_lists_every_function():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    page = generate.rules_page()
    for family, rules in FAMILIES.items():
        assert f"## {family}" in page
        assert all(f"`{name_of(func)}`" in page for func in rules)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_children_of_ranks_end_however_the_launcher_ends(tmp_path, number):
    launcher, pids = start(tmp_path, CHILD, 4)
    launcher.send_signal(number)
    _, errors = launcher.communicate()
    wait_until(lambda: not any(map(is_running, pids)))
    said = b"error: interrupted; folders that were written are complete\n"
    assert errors == (said if number == signal.SIGINT else b"")


def test_a_message_of_a_rank_has_no_control_characters(tmp_path):
    (tmp_path / "fails.py").write_text("raise SystemExit('\\x1b[2Jgone\\nhere')")
    done = run("launch", 1, "fails.py", cwd=tmp_path)
    assert done.stderr.splitlines()[-1] == "error: rank 0: \\u001b[2Jgone here"


@pytest.mark.parametrize("local", [True, False])
def test_ranks_that_others_start_on_one_machine_listen_on_loopback(tmp_path, local):
    """As torchrun does, or by hand with a loopback address."""
    text = SLEEPS.format(DOMAIN)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = {**os.environ, "PYTHONPATH": str(ROOT), "WORLD_SIZE": "2", "MASTER_PORT": str(port)}
    common |= {"MASTER_ADDR": "127.0.0.1"} | ({"LOCAL_WORLD_SIZE": "2"} if local else {})
    ranks = []
    for rank in range(2):
        environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, "-c", text]
        ranks.append(subprocess.Popen(command, cwd=tmp_path, env=environment))
    try:
        wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 2 or ranks[0].poll() is not None)
        addresses = [ip for rank in ranks for ip in listening(rank.pid)]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert len(addresses) >= 3
    assert set(addresses) <= {"127.0.0.1", "::1"}
