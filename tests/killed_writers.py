"""Write a folder of shards, end the writer, and look at what is there; prints a line of JSON.

    python tests/killed_writers.py FOLDER steps|steps-without-exchange|times|full [MOMENTS]

`steps` ends the writer before each of its calls that open, rename, make or remove something,
`times` after random times, and `full` fills the file system of FOLDER, which must be small.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from samples import cut, surface

from meshshard import atomic_write, store
from meshshard.errors import StoreError
from meshshard.partitioning.partition import Partition

EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "ctypes.dlsym", "os.listdir")


def ended(write: Callable[[], object], arrange: Callable[[int], None] = lambda _: None) -> int:
    """Write in a fork of this process; `arrange` is called in it before, and with its number after.

    Returns:
        0 if the writer has written, else what ended it.
    """
    writer = os.fork()
    if writer == 0:
        try:
            arrange(0)
            write()
            os._exit(0)
        finally:
            os._exit(1)
    arrange(writer)
    return os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1])


def at_event(last: int) -> Callable[[int], None]:
    """End the process at the n-th event of Python's audit that touches a file system."""
    seen = 0

    def _hook(event: str, _: object) -> None:
        nonlocal seen
        if event in EVENTS:
            seen += 1
            if seen == last:
                os.kill(os.getpid(), signal.SIGKILL)

    return lambda number: None if number else sys.addaudithook(_hook)


def after(seconds: float) -> Callable[[int], None]:
    def _kill(number: int) -> None:
        if number:
            time.sleep(seconds)
            os.kill(number, signal.SIGKILL)

    return _kill


def whole(target: Path, contents: set[str]) -> str:
    """The hash of a folder that is one of the given contents in every byte."""
    content = str(store.load(target).check().manifest["content"])
    if content not in contents:
        raise AssertionError(f"{target} is neither the old folder nor the new one")
    return content


def steps(old: Partition, new: Partition, target: Path, forced: bool) -> Iterator[int]:
    """End the writer before each step."""
    for last in range(1, 10_000):
        prepare(old, target, forced)
        code = ended(lambda: new.save(target, force=forced), at_event(last))
        yield code
        if code == 0:
            return


def times(old: Partition, new: Partition, target: Path, forced: bool, n: int) -> Iterator[int]:
    """End the writer after random times."""
    rng = random.Random(0)
    began = time.perf_counter()
    new.save(target, force=True)
    took = time.perf_counter() - began
    for _ in range(n):
        prepare(old, target, forced)
        yield ended(lambda: new.save(target, force=forced), after(2 * took * rng.random()))


def full(old: Partition, new: Partition, target: Path, n: int) -> Iterator[int]:
    """Leave less and less room on the disk."""
    filler = target.parent / "filler"
    new.save(target, force=True)
    size = sum(f.stat().st_size for f in target.iterdir())
    for i in range(n):
        prepare(old, target, True)
        free = shutil.disk_usage(target.parent).free
        filler.write_bytes(bytes(max(0, free - size * i // n)))
        with pytest.raises(StoreError, match="cannot be written"):
            new.save(target, force=True)
        left = sorted(f.name for f in target.parent.iterdir())
        assert left == ["filler", target.name], left
        filler.unlink()
        yield 1


def prepare(old: Partition, target: Path, forced: bool) -> None:
    """The old folder is there, or with `forced` False nothing is."""
    if forced:
        old.save(target, force=True)
    else:
        shutil.rmtree(target, ignore_errors=True)


def restore(target: Path) -> None:
    """What also a writer does that fails, where names cannot be exchanged in one step."""
    with contextlib.suppress(KeyError), atomic_write.atomic_folder(target, force=True):
        raise KeyError


def main(place: str, what: str, moments: str = "100") -> None:
    """Run one kind, and check the folder after each writer."""
    target, n = Path(place) / "x.shards", int(moments)
    mesh = surface(60, 40) if what == "times" else surface()
    old, new = cut(mesh, 6), cut(mesh, 7)
    contents = {
        store.load(p.save(target, force=True)).manifest["content"]: name
        for name, p in (("old", old), ("new", new))
    }
    if what == "steps-without-exchange":
        atomic_write._exchanged = lambda *_: False  # as on some file systems
    found: Counter[str] = Counter()
    for forced in (True,) if what == "full" else (True, False):
        kinds = {"times": lambda f: times(old, new, target, f, n),
                 "full": lambda _: full(old, new, target, n)}  # fmt: skip
        for code in kinds.get(what, lambda f: steps(old, new, target, f))(forced):
            if forced and not target.exists():
                restore(target)
                found["restored by the next writer"] += 1
            state = contents[whole(target, set(contents))] if target.exists() else "none"
            assert state != "none" or not forced, "the old folder is lost"
            assert code or state == "new", "a writer that ends well has written"
            found[f"{'replace' if forced else 'create'}: {state}"] += 1
            found["ended"] += code != 0
    old.save(target, force=True)
    left = sorted(f.name for f in target.parent.iterdir())
    assert left == [target.name], left
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
