"""Atomic writes: a file or folder appears under its final name only when it is complete."""

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
    """Context manager: yield a temporary path next to `path`, and rename it to `path` at the end.

    After an exception the temporary file is removed and `path` is left as it was.
    """
    token = f"{threading.get_ident()}.{os.getpid()}"
    temporary = path.with_name(f".{path.name[:40]}.{token}.writing")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(target: Path, *, force: bool) -> Iterator[Path]:
    """Context manager: yield a temporary folder next to `target`, and rename it at the end.

    After an exception the temporary folder is removed and `target` is left as it was.

    Args:
        target: the final path; its parents are created.
        force: replace an existing folder.

    Raises:
        StoreError: it cannot be written, or `target` exists and `force` is False.
    """
    folder = _hidden_path(target, "writing")
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
    """The error for a folder that exists and may not be replaced."""
    return StoreError(f"{target} already exists; replace it with force=True (--force in the shell)")


def write_and_sync(path: Path, data: bytes) -> None:
    """Write bytes and wait until they are on the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _move_into_place(folder: Path, target: Path, force: bool) -> None:
    """Rename a folder to its target; retry if another process creates the target meanwhile."""
    replaced: list[Path] = []
    done = False
    try:
        while not _renamed(folder, target):
            if not force:
                raise already_exists(target)
            replaced.append(_hidden_path(target, "old"))
            with contextlib.suppress(FileNotFoundError):
                target.rename(replaced[-1])
        done = True
    finally:
        if replaced and not done and not target.exists():
            with contextlib.suppress(FileNotFoundError):  # interrupted: restore the old folder
                _renamed(replaced.pop(), target)
        for old in replaced:
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


def _hidden_path(target: Path, suffix: str) -> Path:
    """A hidden path next to `target` that is unique to this process and call."""
    return target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.{suffix}")


def _remove_leftovers(target: Path) -> None:
    """Remove temporary folders of `target` whose processes have ended."""
    for path in target.parent.iterdir():
        words = path.name.removeprefix(f".{target.name}.").split(".")
        if len(words) != 2 or words[1] not in ("writing", "old") or path.name[:1] != ".":
            continue
        pid = words[0].partition("-")[0]
        if pid.isdecimal() and not _alive(int(pid)):
            _discard(path)


def _discard(folder: Path) -> None:
    """Remove a folder, or a symbolic link to one."""
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
