"""Atomic writes: a file or folder appears under its final name only when it is complete.

It is written under a hidden name in the same directory, synced to the disk, and renamed. A lock
(flock) marks a hidden name as in use: the kernel releases it when the writer ends, however it ends,
and it holds between containers, whose process numbers mean nothing to each other. What killed
writers have left is removed by the next one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from meshshard.errors import StoreError

__all__ = [
    "already_exists",
    "atomic_file",
    "atomic_folder",
    "check_directory",
    "report_write_errors",
    "sync",
    "write_and_sync",
]

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of Linux
WEEK = 7 * 24 * 3600  # seconds after which a hidden name of another machine is a leftover


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


def check_directory(path: str | Path) -> None:
    """Verify, before long work, that the directory of a file exists and can be written.

    Raises:
        StoreError: it does not exist, is not a directory, or may not be written.
    """
    parent = Path(path).absolute().parent
    if not parent.is_dir():
        raise StoreError(f"{path}: cannot be written, directory {parent} does not exist; create it")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise StoreError(f"{path}: cannot be written, {parent} does not permit it")


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Context manager: yield a temporary path next to `path`, and rename it to `path` at the end.

    It has the same suffix. After an exception it is removed and `path` is left as it was.
    """
    _remove_leftovers(path)
    with _hidden(path, Path.touch) as temporary:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)


@contextlib.contextmanager
def atomic_folder(target: Path, *, force: bool) -> Iterator[Path]:
    """Context manager: yield a temporary folder next to `target`, and rename it at the end.

    The files in it must have been synced. After an exception the temporary folder is removed and
    `target` is left as it was.

    Args:
        target: the final path; its parents are created.
        force: replace an existing folder.

    Raises:
        StoreError: it cannot be written, or `target` exists and `force` is False.
    """
    with report_write_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target)
        with _hidden(target, Path.mkdir) as folder:
            yield folder
            sync(folder)
            _move_into_place(folder, target, force)
            sync(target.parent)


def already_exists(target: Path) -> StoreError:
    """The error for a folder that exists and may not be replaced."""
    return StoreError(f"{target} already exists; replace it with force=True (--force in the shell)")


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that cannot sync folders
            raise
    finally:
        os.close(descriptor)


def write_and_sync(path: Path, data: bytes) -> None:
    """Write bytes and wait until they are on the disk."""
    path.write_bytes(data)
    sync(path)


def _move_into_place(folder: Path, target: Path, force: bool) -> None:
    """Rename a folder to its target; exchange it with what is there if `force`.

    Where the file system cannot exchange two names, the old folder is renamed first; if the writer
    is killed then, the next one renames it back.
    """
    with contextlib.ExitStack() as later:
        while not _renamed(folder, target):
            if not force:
                raise already_exists(target)
            if _exchanged(folder, target):
                return
            with contextlib.suppress(FileNotFoundError):  # another writer has moved it away
                old = _hidden_path(target, "old")
                later.callback(os.close, _locked(target))
                target.rename(old)
                later.callback(_discard_or_restore, old, target)


def _renamed(folder: Path, target: Path) -> bool:
    """Rename and return True, or return False if something exists at `target`."""
    try:
        folder.rename(target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise
        return False
    return True


def _exchanged(one: Path, other: Path) -> bool:
    """Exchange two names in one step and return True; False where that is not possible."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # not Linux
        return False
    return not rename(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE)


@contextlib.contextmanager
def _hidden(target: Path, make: Callable[[Path], None]) -> Iterator[Path]:
    """Context manager: a new locked file or folder next to `target`; removed at the end."""
    while True:
        path = _hidden_path(target, "writing")
        make(path)
        with contextlib.suppress(FileNotFoundError):  # removed by another writer before the lock
            lock = _locked(path)
            if path.exists():
                break
            os.close(lock)
    try:
        yield path
    finally:
        _discard(path)
        os.close(lock)


def _locked(path: Path) -> int:
    """An open descriptor of a path, with a shared lock where the file system has locks."""
    descriptor = os.open(path, os.O_RDONLY)
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def _hidden_path(target: Path, use: str) -> Path:
    """A new hidden path next to `target`, with the same suffix."""
    return target.with_name(f".{use}.{_machine()}-{secrets.token_hex(4)}.{_tail(target)}")


def _tail(target: Path) -> str:
    """The name of the target, without the start of a long one: hidden names are longer."""
    return os.fsdecode(os.fsencode(target.name)[-220:])


def _machine() -> str:
    """8 hexadecimal digits that differ between machines, and after a restart."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")[:8]
    except OSError:  # not Linux
        import uuid

        return f"{uuid.getnode() % 2**32:08x}"


def _remove_leftovers(target: Path) -> None:
    """Remove what killed writers of `target` have left; restore a folder that one has moved."""
    name = re.compile(
        rf"\.(writing|old)\.([0-9a-f]{{8}})-[0-9a-f]{{8}}\.{re.escape(_tail(target))}"
    )
    for found in map(name.fullmatch, os.listdir(target.parent)):  # noqa: PTH208 - half the time
        if not found:
            continue
        path = target.with_name(found[0])
        with contextlib.suppress(OSError), _abandoned(path, found[2]) as yes:
            if yes:
                _discard(path) if found[1] == "writing" else _discard_or_restore(path, target)


@contextlib.contextmanager
def _abandoned(path: Path, machine: str) -> Iterator[bool]:
    """Context manager: whether the writer of a hidden path has ended; the path is locked meanwhile.

    The writers of another machine may not see locks, so theirs are kept for a week.
    """
    if machine != _machine():
        yield time.time() - path.stat().st_mtime > WEEK
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(descriptor)


def _discard_or_restore(old: Path, target: Path) -> None:
    """Remove a folder that was moved away, or move it back if nothing has replaced it.

    It is renamed before it is removed, so that what is left of it is never moved back.
    """
    if target.exists() or not _renamed(old, target):
        rest = _hidden_path(target, "writing")
        old.rename(rest)
        _discard(rest)


def _discard(path: Path) -> None:
    """Remove a file, a symbolic link or a folder, if it exists."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)
