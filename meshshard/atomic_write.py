"""Atomic writes: a file or folder appears under its name complete, or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

from meshshard.errors import StoreError

__all__ = [
    "already_exists",
    "atomic_file",
    "atomic_folder",
    "report_write_errors",
    "write_and_sync",
]


@contextlib.contextmanager
def report_write_errors(target: Path) -> Iterator[None]:
    """Context manager: report OSError as StoreError('… cannot be written')."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{target}: cannot be written ({error.strerror or error}); "
            "free some space, or write to another directory"
        ) from None


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Context manager: yield a temporary name beside `path`, rename it to `path` at the end.

    After an exception the temporary file is removed and `path` is left as it was.
    """
    token = f"{threading.get_ident()}.{os.getpid()}"
    part = path.with_name(f".{path.name[:40]}.{token}.writing")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(target: Path, *, force: bool) -> Iterator[Path]:
    """Context manager: yield a new temporary folder beside `target`, rename it at the end.

    After an exception the temporary folder is removed and `target` is left as it was.

    Args:
        target: the final path; its parents are created.
        force: replace an existing folder.

    Raises:
        StoreError: it cannot be written, or `target` exists and `force` is False.
    """
    folder = _beside(target, "writing")
    with report_write_errors(target):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(target)
            folder.mkdir()
            yield folder
            _move_into_place(folder, target, force)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def already_exists(target: Path) -> StoreError:
    """The error for a folder that exists and is not to be replaced."""
    return StoreError(f"{target} already exists; replace it with force=True (--force in the shell)")


def write_and_sync(path: Path, data: bytes) -> None:
    """Write bytes and wait until they are on the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _move_into_place(folder: Path, target: Path, force: bool) -> None:
    """Rename a folder to its target; repeat where another writer was faster."""
    olds: list[Path] = []
    placed = False
    try:
        while not _renamed(folder, target):
            if not force:
                raise already_exists(target)
            olds.append(_beside(target, "old"))
            with contextlib.suppress(FileNotFoundError):
                target.rename(olds[-1])
        placed = True
    finally:
        if olds and not placed and not target.exists():
            with contextlib.suppress(FileNotFoundError):  # interrupted: restore the old folder
                _renamed(olds.pop(), target)
        for old in olds:
            _discard(old)


def _renamed(folder: Path, target: Path) -> bool:
    """Rename and return True, or return False if something exists at `target`."""
    try:
        folder.rename(target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise
        return False
    return True


def _beside(target: Path, what: str) -> Path:
    """A hidden name next to `target`, unique to this process and call."""
    return target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.{what}")


def _remove_leftovers(target: Path) -> None:
    """Remove temporary folders of `target` whose processes have ended."""
    for left in target.parent.iterdir():
        words = left.name.removeprefix(f".{target.name}.").split(".")
        if len(words) != 2 or words[1] not in ("writing", "old") or left.name[:1] != ".":
            continue
        pid = words[0].partition("-")[0]
        if pid.isdecimal() and not _alive(int(pid)):
            _discard(left)


def _discard(folder: Path) -> None:
    """Remove a folder, or the link to one."""
    if folder.is_symlink():
        folder.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
