"""A damaged folder is a StoreError; a killed writer never leaves an incomplete folder."""

import json
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from samples import assert_same, cut, environment, surface, volume

from meshshard import atomic_write, store
from meshshard.cli import report
from meshshard.errors import MeshshardError, StoreError
from meshshard.mesh import Mesh
from meshshard.store.manifest import why_foreign

pytestmark = pytest.mark.slow


def change(folder: Path, **to: Any) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest |= to
    path.write_text(json.dumps({k: v for k, v in manifest.items() if v != "lost"}))


def use(folder: Path) -> Mesh:
    """Call every method of a folder."""
    found = store.load(folder)
    for p in range(found.k):
        found.plan(p), found.piece(p), found.origin(p)
    found.labels()
    "".join(report.lines(report.about(folder)))
    return found.check().gather()


def test_a_cut_file(folder: Path) -> None:
    path = folder / "shard_00001.safetensors"
    whole = path.read_bytes()
    for size in (0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        for step in (lambda f: f.plan(1), lambda f: f.piece(1), lambda f: f.gather()):
            with pytest.raises(StoreError, match="shard_00001"):
                step(store.load(folder))
        store.load(folder).plan(0)
    path.write_bytes(whole + b"x")
    with pytest.raises(StoreError, match=r"has \d+ bytes instead of \d+"):
        store.load(folder).plan(1)


def test_a_flipped_byte(folder: Path) -> None:
    path = folder / "shard_00002.safetensors"
    whole = path.read_bytes()
    for at in random.Random(0).sample(range(len(whole)), 40):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        for prove in (store.Folder.check, store.Folder.gather):
            with pytest.raises(StoreError, match="shard_00002"):
                prove(store.load(folder))
    path.write_bytes(whole)
    store.load(folder).check()


def test_a_missing_shard(folder: Path) -> None:
    (folder / "shard_00000.safetensors").unlink()
    store.load(folder).plan(1)
    with pytest.raises(StoreError, match=r"shard_00000.*is missing"):
        store.load(folder).plan(0)
    with pytest.raises(StoreError, match="shard_00000"):
        store.load(folder).gather()
    for number in (-1, 3):
        with pytest.raises(StoreError, match=f"has no shard {number}; shards are 0 to 2"):
            store.load(folder).plan(number)


def test_a_shard_of_another_folder(folder: Path, tmp_path: Path) -> None:
    other = cut(surface(), 3).save(tmp_path / "other.shards")
    shutil.copy(other / "shard_00001.safetensors", folder)
    with pytest.raises(StoreError, match="shard_00001"):
        store.load(folder).plan(1)
    shutil.copy(folder / "shard_00000.safetensors", folder / "shard_00002.safetensors")
    with pytest.raises(StoreError, match="shard_00002"):
        store.load(folder).plan(2)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"schema": 1}, "has schema 1, this meshshard reads 2"),
    ({"schema": "1"}, "not the manifest of a folder of shards"),
    ({"sizes": [1, 2]}, "2 sizes for 3 shards"),
    ({"sizes": 3}, "no 'sizes' of type list"),
    ({"sizes": [[], {}, None]}, "not all integers of 0 or more"),
    ({"sizes": [10**18, 1, 1]}, "are not the owned rows"),
    ({"sizes": [], "shards": []}, "0 sizes for 0 shards"),
    ({"shards": [1, 2, 3]}, "shard 0 has no 'file'"),
    ({"n_points": 10**15}, "shards hold"),
    ({"n_cells": -1}, "add up"),
    ({"entity": "nodes"}, "entity 'nodes'"),
    ({"source": 5}, "source"),
    *[({key: "lost"}, f"no '{key}'") for key in ("id", "name", "entity", "quality", "method")],
]


@pytest.mark.parametrize(("to", "said"), WRONG, ids=[str(w[0])[:40] for w in WRONG])
def test_a_manifest_that_is_wrong(folder: Path, to: dict[str, Any], said: str) -> None:
    change(folder, **to)
    with pytest.raises(StoreError, match=said) as caught:
        store.load(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "3", '"x"', "\xff", "[" * 100_000, "{}", "NaN", '{"schema":2}']
)
def test_a_manifest_that_is_none(folder: Path, text: str) -> None:
    (folder / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(StoreError, match=r"manifest\.json"):
        store.load(folder)


def test_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "dir" / "manifest.json").mkdir(parents=True)
    for name, said in (("no", "does not exist"), ("file", "is a file"), ("dir", "damaged")):
        with pytest.raises(StoreError, match=said):
            store.load(tmp_path / name)
    with pytest.raises(StoreError, match=r"has no manifest\.json"):
        store.load(tmp_path)


def result_or_error(work: Callable[[], Any]) -> Any:
    """The result, or the text of the StoreError."""
    try:
        return work()
    except StoreError as error:
        return str(error)


def mutations(whole: bytes, rng: random.Random, end: int) -> bytes:
    out = bytearray(whole)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        at = rng.randrange(end)
        kind = rng.randrange(3)
        if kind == 0:
            out[at] = rng.randrange(256)
        elif kind == 1:
            out[at] = rng.choice(b'0123456789-,"[]{}')
        else:
            out[at] ^= 1 << rng.randrange(8)
    return bytes(out)


@pytest.mark.parametrize("name", ["manifest.json", "shard_00000.safetensors"])
def test_random_damage_is_an_error_or_harmless(folder: Path, name: str) -> None:
    path, rng = folder / name, random.Random(name)
    whole, truth = path.read_bytes(), surface()
    end = len(whole) if name == "manifest.json" else 8 + int.from_bytes(whole[:8], "little")
    for _ in range(250):
        path.write_bytes(mutations(whole, rng, end))
        back = result_or_error(lambda: use(folder))
        if isinstance(back, str):
            assert "\n" not in back
        else:  # the damage is in a value that is only printed, or undid itself
            np.testing.assert_array_equal(back.points, truth.points)
            np.testing.assert_array_equal(back.connectivity, truth.connectivity)
    path.write_bytes(whole)
    assert_same(use(folder), truth)


def test_damaged_results(folder: Path) -> None:
    found = store.load(folder)
    for p in range(3):
        path = found.put(p, {"p": np.arange(found.sizes[p])})
    whole, rng = path.read_bytes(), random.Random(1)
    for _ in range(200):
        path.write_bytes(mutations(whole, rng, 8 + int.from_bytes(whole[:8], "little")))
        assert "\n" not in str(result_or_error(lambda: list(found.gather_put())))


def killed(place: Path, what: str, moments: int, *before: str) -> dict[str, int]:
    script = str(Path(__file__).parent / "killed_writers.py")
    words = [*before, sys.executable, "-W", "ignore", script, str(place), what, str(moments)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment())
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("what", ["steps", "steps-without-exchange", "times"])
def test_a_writer_killed_at_any_moment(tmp_path: Path, what: str) -> None:
    """There is the old folder, the new one or none; the next writer removes temporary ones."""
    found = killed(tmp_path, what, 20)
    assert found["ended"] >= (1 if what == "times" else 50)
    assert found.get("restored by the next writer", 0) == (what == "steps-without-exchange")
    if what != "times":
        for state in ("replace: old", "replace: new", "create: none", "create: new"):
            assert found[state]


def test_a_disk_that_is_full_at_any_moment(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o size=4m none {tmp_path}"
    space = ["unshare", "-Urm", "bash", "-ec"]
    if subprocess.run([*space, mount], capture_output=True, check=False).returncode:
        pytest.skip("this system does not let users mount a small file system")
    found = killed(tmp_path, "full", 20, *space, f'{mount}; exec "$@"', "bash")
    assert found == {"replace: old": 20, "ended": 20}


def test_an_interrupted_replacement_restores_the_old_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic_write, "_exchanged", lambda *_: False)  # as on some file systems
    before = store.load(folder).manifest["id"]
    rename, calls = Path.rename, []

    def stop_at_the_third(self: Path, to: Any) -> Path:
        calls.append(to)
        if len(calls) == 3:  # after the old folder was moved away, before the new one is renamed
            raise KeyboardInterrupt
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        cut(surface(), 3).save(folder, force=True)
    assert store.load(folder).check().manifest["id"] == before
    assert [f.name for f in folder.parent.iterdir()] == ["x.shards"]


def in_threads(work: Callable[[], Any], n: int = 4) -> list[str]:
    """Call it in n threads at the same time; returns the errors."""
    wrong: list[str] = []

    def one() -> None:
        try:
            work()
        except MeshshardError as error:
            wrong.append(str(error))

    threads = [threading.Thread(target=one) for _ in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


def test_concurrent_writers(tmp_path: Path) -> None:
    mesh = volume()
    made = cut(mesh, 4)
    target = tmp_path / "x.shards"
    wrong = in_threads(lambda: made.save(target))
    assert len(wrong) == 3
    assert all("already exists" in line for line in wrong)
    wrong = in_threads(lambda: [made.save(target, force=True) for _ in range(5)])
    assert not wrong
    assert_same(store.load(target).check().gather(), mesh)
    assert [f.name for f in tmp_path.iterdir()] == ["x.shards"]


def test_a_folder_that_is_being_replaced_is_not_foreign(tmp_path: Path) -> None:
    target = tmp_path / "x.shards"
    done = threading.Event()
    text = json.dumps(dict.fromkeys(("schema", "id", "sizes", "shards")))

    def renew() -> None:
        old = tmp_path / "old"
        while not done.is_set():
            fresh = tmp_path / "new"
            fresh.mkdir()
            (fresh / "manifest.json").write_text(text)
            if target.exists():
                target.rename(old)
            fresh.rename(target)
            shutil.rmtree(old, ignore_errors=True)

    writer = threading.Thread(target=renew)
    writer.start()
    try:
        assert not any(why_foreign(target) for _ in range(5_000))
    finally:
        done.set()
        writer.join()
    (target / "manifest.json").unlink()
    assert why_foreign(target) == "is not a folder of shards"
