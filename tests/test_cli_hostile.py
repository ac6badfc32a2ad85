"""Failures of the command line: signals, full disks, closed pipes, invalid options, Dask."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from samples import AHMED, assert_same, environment, meshshard, start, surface
from vtkmodules.vtkIOXML import vtkXMLPPolyDataReader

from meshshard import io, store
from meshshard.cli import main
from meshshard.cli.partition import Job, memory_note, partition_file, targets_of
from meshshard.errors import StoreError
from meshshard.mesh import Mesh

pytestmark = pytest.mark.slow


@pytest.fixture
def body(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    shutil.copy(AHMED, tmp_path / "body.vtp")
    return "body.vtp"


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A volume of 300 k hexahedra, which takes METIS seconds."""
    n = 67
    at = np.arange((n + 1) ** 3, dtype=np.int64).reshape(n + 1, n + 1, n + 1)
    corners = [(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0)]
    corners += [(i, j, 1) for i, j, _ in corners]
    cells = np.stack([at[i : i + n, j : j + n, k : k + n].ravel() for i, j, k in corners], -1)
    m = len(cells)
    offsets, types = np.arange(0, 8 * m + 1, 8), np.full(m, 12, np.uint8)
    mesh = Mesh(np.argwhere(at >= 0).astype(np.float32), cells.ravel(), offsets, types)
    path = tmp_path_factory.mktemp("large") / "large.vtu"
    io.write(mesh, path)
    return path


def processes_below(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def wait_for_metis(pid: int) -> list[psutil.Process]:
    for _ in range(30_000):
        found = [
            c
            for c in processes_below(pid)
            if "meshshard.partitioning.metis_child" in " ".join(c.cmdline())
        ]
        if found:
            time.sleep(0.4)  # into METIS itself
            return processes_below(pid)
        time.sleep(0.01)
    raise AssertionError("METIS did not start")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("jobs", [1, 2])
def test_a_signal_stops_all_processes(large: Path, tmp_path: Path, number: int, jobs: int) -> None:
    other = tmp_path / "other.vtu"
    other.symlink_to(large)
    out = tmp_path / "out"
    command = start("partition", large, other, "--parts", 64, "--out", out, "--jobs", jobs)
    below = wait_for_metis(command.pid)
    command.send_signal(number)
    said, err = command.communicate(timeout=200)  # only so that a failure does not hang
    assert command.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[signal.Signals(number)]
    _, alive = psutil.wait_procs(below, timeout=60)
    assert not alive
    assert not out.exists() or not [f for f in out.iterdir() if not f.name.startswith(".")]
    assert "Traceback" not in err
    assert err == (
        "error: interrupted; folders that were written are complete\n" if number == 2 else ""
    )
    assert "written" not in said


@pytest.mark.parametrize("jobs", [1, 2])
def test_no_process_outlives_a_killed_command(large: Path, tmp_path: Path, jobs: int) -> None:
    other = tmp_path / "other.vtu"
    other.symlink_to(large)
    command = start("partition", large, other, "--parts", 64, "--out", tmp_path, "--jobs", jobs)
    below = wait_for_metis(command.pid)
    command.kill()
    command.communicate()
    _, alive = psutil.wait_procs(below, timeout=60)
    assert not alive
    assert not list(tmp_path.glob("*.shards"))


def test_names_cannot_control_the_terminal(tmp_path: Path) -> None:
    """Nor break the files for ParaView, which list each other."""
    name = "a\x1b[2J\n\x9b<&\u202e"
    mesh = surface()
    fields = {f"{name}{i}\x01": np.arange(mesh.n_cells) for i in range(2)}
    fields |= {"p\x01": np.arange(mesh.n_cells), "p\x02": np.arange(mesh.n_cells)}
    source = tmp_path / f"{name}.npz"
    np.savez(source, points=mesh.points[: mesh.n_cells], **fields)
    words = ["partition", source, "--parts", 2, "--out", tmp_path, "--with-ghosts"]
    for command in (words, words, ["info", source], ["info", tmp_path / f"{name}.shards"],
                    ["info", "--json", source], ["info", source, f"--{name}"]):  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "meshshard", *map(str, command)],
            capture_output=True, text=True, env=environment(), check=False,
        )  # fmt: skip
        printed = done.stdout + done.stderr
        assert "\\u001b[2J" in printed
        assert not set("\x1b\x9b\u202e\x01").intersection(printed)
    reader = vtkXMLPPolyDataReader()
    reader.SetFileName(str(next(tmp_path.glob("*.paraview/*.pvtp"))))
    reader.Update()
    assert reader.GetOutput().GetNumberOfPoints() >= mesh.n_cells
    assert reader.GetOutput().GetPointData().GetNumberOfArrays() == len(fields) + 3


def test_a_closed_pipe(body: str) -> None:
    for reader in ("head -1", "true"):  # one reads a line, the other nothing
        command = f"{sys.executable} -m meshshard info {body} | {reader}; echo ${{PIPESTATUS[0]}}"
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, env=environment(), check=True
        )
        assert done.stdout.splitlines()[-1] == "0"
        assert done.stderr == ""


def test_closed_and_full_output(body: str) -> None:
    for where, code in ((">&-", 0), ("2>&-", 0), (">/dev/full", 1)):
        command = f"{sys.executable} -m meshshard info {body} {where}"
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, env=environment(), check=False
        )
        assert done.returncode == code, where
        assert "Traceback" not in done.stderr


def test_names_with_any_letters(tmp_path: Path) -> None:
    names = ["a b.vtp", "名前.vtp", "a[1]*.vtp", "a**b.vtp", "-x.vtp", "q\"'<&>.vtp"]
    for name in names:
        shutil.copy(AHMED, tmp_path / name)
    cut = ["--parts", "2", "--vtk", "-q", "--method", "rcb", "--force"]
    words = ["partition", *(f"./{name}" for name in names), *cut]
    for encoding in ("utf-8", "ascii"):
        env = {**environment(), "PYTHONIOENCODING": encoding}
        done = subprocess.run(
            [sys.executable, "-m", "meshshard", *words],
            cwd=tmp_path, env=env, capture_output=True, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, b"")
    for name in names:
        assert_same(store.load(tmp_path / f"{name[:-4]}.shards").check().gather(), io.read(AHMED))
    done = subprocess.run(
        [sys.executable, "-m", "meshshard", "info", "名前.shards"],
        cwd=tmp_path, env=env, capture_output=True, check=True,
    )  # fmt: skip
    assert rb"\u540d\u524d.vtp" in done.stdout


def test_a_file_name_that_is_not_utf8(tmp_path: Path) -> None:
    name = os.fsdecode(b"bad\xff.vtp")
    shutil.copy(AHMED, tmp_path / name)
    out, _ = meshshard("partition", name, "--parts", 2, cwd=tmp_path)
    assert "written" in out
    folder = store.load(tmp_path / f"{name[:-4]}.shards").check()
    assert folder.manifest["source"]["path"] == name
    meshshard("info", f"{name[:-4]}.shards", cwd=tmp_path)


INVALID: list[tuple[list[str], str, int]] = [
    ([], "give the number of shards: --parts K", 2),
    (["--parts", "0"], "not an integer above 0", 2),
    (["--parts", "x"], "not an integer above 0", 2),
    (["--parts", "9" * 30], "at most 32,768", 2),
    (["--targets", "1,-1"], "not a list of positive numbers", 2),
    (["--targets", "1,nan"], "not a list of positive numbers", 2),
    (["--targets", "1,inf"], "not a list of positive numbers", 2),
    (["--targets", "1,1", "--parts", "3"], "2 shares for --parts 3", 2),
    (["--parts", "2", "--weld", "nan"], "neither a distance nor the word no", 2),
    (["--parts", "2", "--weld", "-1"], "neither a distance nor the word no", 2),
    (["--parts", "2", "--halo", "300"], "1 to 255 hops", 1),
    (["--parts", "2", "--knn", "-3"], "knn -3", 1),
    (["--parts", "2", "--seed", "-1"], "seed -1", 1),
    (["--parts", "2", "--seed", "-1", "--method", "random"], "seed -1", 1),
    (["--parts", "2", "--imbalance", "nan"], "must be above 1", 1),
    (["--parts", "2", "--imbalance", "0.5"], "must be above 1", 1),
    (["--parts", "1000000"], "this would write 1,000,000 files and need 8,000 GB", 2),
    (["--parts", "2", "--method", "nothing"], "method 'nothing' is unknown", 1),
    (["--parts", "2", "--method", "."], "method '.' is unknown", 1),
    (["--parts", "2", "--method", "minus"], "line 1: '--5' is not a label", 1),
    (["--parts", "2", "--method", "long"], "line 1: '99999", 1),
    (["--parts", "2", "--method", "short"], "labels of shape (2,), expected (9794,)", 1),
    (["--parts", "2", "--method", "body.vtp"], "body.vtp", 1),
    (["--parts", "2", "--out", "body.vtp"], "body.vtp/body.shards: cannot be written", 1),
    (["--parts", "2", "--out", "/proc/nowhere"], "/proc/nowhere/body.shards: cannot", 1),
    (["--parts", "2", "--out", "x" * 300], "File name too long", 1),
]


@pytest.mark.parametrize(
    ("words", "said", "code"), INVALID, ids=[" ".join(a[0])[:40] for a in INVALID]
)
def test_invalid_options_are_one_line_errors(
    body: str, capsys: pytest.CaptureFixture[str], words: list[str], said: str, code: int
) -> None:
    Path("minus").write_text("--5\n")
    Path("long").write_text("9" * 30)
    Path("short").write_text("0 1")
    before = sorted(f.name for f in Path().iterdir())
    assert run(["partition", body, *words]) == code
    captured = capsys.readouterr()
    last = captured.err.splitlines()[-1]
    assert said in last
    assert "error: " in last
    assert code == 2 or captured.err.count("\n") == 1
    assert sorted(f.name for f in Path().iterdir()) == before


def run(argv: list[str]) -> int:
    try:
        return main(argv)
    except SystemExit as stop:  # raised by argparse
        return int(str(stop.code))


@pytest.mark.parametrize("parts", [1, 9, 40])
def test_one_shard_and_more_shards_than_cells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], parts: int
) -> None:
    mesh = surface(2, 2, orphans=0).with_fields()
    mesh = Mesh(mesh.points, mesh.connectivity, mesh.offsets, mesh.types)
    io.write(mesh, tmp_path / "s.vtp")
    out = str(tmp_path)
    argv = ["partition", f"{out}/s.vtp", "--parts", str(parts), "--out", out, "--with-ghosts"]
    assert main(argv) == 0
    err = capsys.readouterr().err
    assert ("will be empty" in err) == (parts > mesh.n_cells)
    assert_same(store.load(tmp_path / "s.shards").check().gather(), io.read(tmp_path / "s.vtp"))


def test_a_full_disk(body: str) -> None:
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
        "from meshshard.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    for method, said in (("morton", "body.shards: cannot be written"), ("metis", "METIS needs")):
        done = subprocess.run(
            [sys.executable, "-c", code, "partition", body, "--parts", "2", "--method", method],
            capture_output=True, text=True, env=environment(), check=False,
        )  # fmt: skip
        assert done.returncode == 1
        assert said in done.stderr
        assert "free some space" in done.stderr
        assert done.stderr.count("\n") == 1
        assert [f.name for f in Path().iterdir()] == [body]


def test_an_input_that_changes_while_it_is_read(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = io.read

    def touched(path: str, **options: Any) -> Mesh:
        mesh = read(path, **options)
        os.utime(path, ns=(1, 1))
        return mesh

    monkeypatch.setattr(io, "read", touched)
    outcome = partition_file(body, "body.shards", Job(parts=2))
    assert outcome["error"] == "body.vtp: has changed while it was read; partition it again"
    assert not Path("body.shards").exists()


def test_two_commands_on_one_folder(body: str) -> None:
    words = ("partition", body, "--parts", 5, "--method", "morton", "-q", "--force")
    commands = [start(*words) for _ in range(4)]
    for command in commands:
        _, err = command.communicate(timeout=60)
        assert (command.returncode, err) == (0, "")
    store.load("body.shards").check()
    assert sorted(f.name for f in Path().iterdir()) == ["body.shards", body]


def test_two_files_for_one_folder(body: str, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(body, "body.vtu")
    assert main(["partition", body, "body.vtu", "--parts", "2"]) == 1
    assert "would both become body.shards" in capsys.readouterr().err
    with pytest.raises(StoreError, match="would both become"):
        targets_of(["a/x.vtp", "b/x.vtp"], "o")
    assert targets_of(["a/x.1.vtp.gz", ".vtp"], "o") == {
        "a/x.1.vtp.gz": Path("o/x.1.shards"),
        ".vtp": Path("o/.vtp.shards"),
    }


def test_memory_is_predicted_for_large_files(tmp_path: Path) -> None:
    assert memory_note(str(tmp_path / "nowhere")) is None
    path = tmp_path / "large.vtp"
    with path.open("wb") as file:
        file.write(b"<VTKFile compressor='x'>")
        file.truncate(10**12)  # a hole
    note = memory_note(str(path))
    assert note is not None
    assert "1000.0 GB, needs about 13000.0 GB of memory; only" in note


# -------------------------------------------------------------------------------------------- Dask


@pytest.fixture
def cluster() -> Any:
    from distributed import LocalCluster

    with LocalCluster(
        n_workers=2, threads_per_worker=2, processes=False, dashboard_address=None
    ) as cluster:
        yield cluster


def test_dask(body: str, cluster: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(4):
        shutil.copy(body, f"run_{i}.vtp")
    points = np.random.default_rng(0).random((30, 3))
    nan = Mesh(points=points, point_fields={"p": np.full(30, np.nan)})
    io.write(nan, "nan.vtp")
    Path("bad.vtp").write_text("")
    np.savetxt("labels.part.3", np.arange(9794) % 3, fmt="%d")
    dask = ["--dask", cluster.scheduler_address, "--out", "o", "--json", "--parts", "3"]
    argv = ["partition", "run_*.vtp", "nan.vtp", "bad.vtp", *dask]
    assert main(argv) == 1
    captured = capsys.readouterr()
    answers = {a["input"]: a for a in json.loads(captured.out)}
    assert {name for name, a in answers.items() if a["status"] == "written"} == {
        "run_0.vtp", "run_1.vtp", "run_2.vtp", "run_3.vtp", "nan.vtp",
    }  # fmt: skip
    assert [name for name, a in answers.items() if a["warnings"]] == ["nan.vtp"]
    assert "bad.vtp" in answers["bad.vtp"]["error"]
    for i in range(4):
        store.load(f"o/run_{i}.shards").check()
    assert main(["partition", body, *dask, "--method", "labels.part.3"]) == 0
    assert store.load("o/body.shards").sizes.tolist() == [3265, 3265, 3264]


@pytest.mark.parametrize("address", ["nonsense://x", "tcp://localhost:abc", "tcp://127.0.0.1:1"])
def test_no_cluster(body: str, address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["partition", body, "--parts", "2", "--dask", address]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"error: no Dask scheduler answers at {address} (")
    assert err.count("\n") == 1
