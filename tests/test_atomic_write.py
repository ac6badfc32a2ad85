"""Files and folders appear whole or not at all, whoever else writes and whenever a writer ends."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshshard import atomic_write
from meshshard.atomic_write import atomic_file, atomic_folder
from meshshard.errors import StoreError

KILLED = """
import os, sys
from pathlib import Path
from meshshard import atomic_write
target, exchange, last = Path(sys.argv[1]), sys.argv[2] == "True", int(sys.argv[3])
if not exchange:
    atomic_write._exchanged = lambda *_: False
calls = 0
def step(function):
    def call(*arguments):
        global calls
        calls += 1
        if calls == last:
            os._exit(9)
        return function(*arguments)
    return call
for name in ("_renamed", "_exchanged", "_discard", "sync"):
    setattr(atomic_write, name, step(getattr(atomic_write, name)))
Path.rename = step(Path.rename)
with atomic_write.atomic_folder(target, force=True) as folder:
    (folder / "a").write_text("new")
    (folder / "b").write_text("new")
"""


def content(folder: Path) -> set[str]:
    return {(folder / name).read_text() for name in ("a", "b")}


def fill(folder: Path, text: str) -> None:
    for name in ("a", "b"):
        (folder / name).write_text(text)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", [True, False])
def test_a_writer_that_ends_before_any_step_loses_nothing(tmp_path: Path, exchange: bool) -> None:
    """The next writer, which fails, leaves the old folder or the new one under the final name."""
    target = tmp_path / "x"
    found: list[set[str]] = []
    for last in range(1, 30):
        with atomic_folder(target, force=True) as folder:
            fill(folder, "old")
        command = [sys.executable, "-c", KILLED, str(target), str(exchange), str(last)]
        ended = subprocess.run(command, check=False).returncode
        with pytest.raises(KeyError), atomic_folder(target, force=True) as folder:
            raise KeyError
        found.append(content(target))
        assert [f.name for f in tmp_path.iterdir()] == ["x"]
        if ended == 0:
            break
    assert ended == 0
    assert {"old"} in found
    assert found[-1] == {"new"}
    assert found == sorted(found, key=lambda text: text == {"new"})


def leftover(tmp_path: Path, make: Callable[[Path], Any], machine: str = "") -> Path:
    path = tmp_path / f".writing.{machine or atomic_write._machine()}-01234567.x"
    make(path)
    return path


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch])
def test_a_hidden_name_in_use_is_not_a_leftover(tmp_path: Path, make: Callable[..., Any]) -> None:
    """A lock tells, not a process number, which means nothing in another container."""
    path = leftover(tmp_path, make)
    lock = atomic_write._locked(path)
    for _ in range(2):
        with atomic_folder(tmp_path / "x", force=True) as folder:
            fill(folder, "new")
        assert path.exists()
    os.close(lock)
    with atomic_folder(tmp_path / "x", force=True) as folder:
        fill(folder, "new")
    assert not path.exists()


def test_hidden_names_of_another_machine_are_kept_for_a_week(tmp_path: Path) -> None:
    path = leftover(tmp_path, Path.mkdir, "00000000")
    with atomic_file(tmp_path / "x") as part:
        part.write_text("new")
    assert path.exists()
    old = time.time() - 8 * 24 * 3600
    os.utime(path, (old, old))
    with atomic_file(tmp_path / "x") as part:
        part.write_text("new")
    assert [f.name for f in tmp_path.iterdir()] == ["x"]


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / ("long name " * 20 + ".png")
    with atomic_file(path) as part:
        assert part.suffix == ".png"
        assert part.parent == tmp_path
        part.write_text("new")
        assert not path.exists()
    with pytest.raises(IsADirectoryError), atomic_file(path) as part:
        tmp_path.write_text("")
    assert [f.read_text() for f in tmp_path.iterdir()] == ["new"]


def test_a_folder_that_exists_is_kept(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "x", force=False) as folder:
        fill(folder, "old")
    with (
        pytest.raises(StoreError, match="already exists"),
        atomic_folder(tmp_path / "x", force=False) as folder,
    ):
        fill(folder, "new")
    assert content(tmp_path / "x") == {"old"}


NAMESPACES = """
for i in $(seq 200); do /bin/true; done
unshare -Urpf {python} -c "$1" "$2" first &
until ls -A "$2" | grep -q writing; do sleep 0.05; done
unshare -Urpf {python} -c "$1" "$2" second
touch "$2/go"
wait %1
"""
WRITER = """
import sys, time
from pathlib import Path
from meshshard.atomic_write import atomic_folder
place, name = Path(sys.argv[1]), sys.argv[2]
with atomic_folder(place / "x", force=True) as folder:
    (folder / "a").write_text(name)
    while name == "first" and not (place / "go").exists():
        time.sleep(0.05)
    (folder / "b").write_text(name)
"""


@pytest.mark.slow
def test_two_writers_in_two_process_namespaces(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-Urpf", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system does not let users make namespaces")
    script = NAMESPACES.format(python=sys.executable)
    subprocess.run(["bash", "-ec", script, "bash", WRITER, str(tmp_path)], check=True)
    assert content(tmp_path / "x") == {"first"}
    assert sorted(f.name for f in tmp_path.iterdir()) == ["go", "x"]
