"""Run a script as one rank, as `python script.py` would, and report a failure to the launcher.

`launch` starts each rank as `python -m meshshard.ranks.run_script PIPE LAUNCHER script.py …` (or
`-m module …` in place of the script). PIPE is the file descriptor that failures are written to;
LAUNCHER is the process ID of the launcher.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import select
import sys
from functools import partial
from pathlib import Path
from types import TracebackType

from meshshard.processes import die_with_parent

__all__ = ["main"]

RUNPY_FILE = runpy.run_path.__code__.co_filename


def main(argv: list[str]) -> int:
    """Run a script or a module as `__main__` of this process.

    Args:
        argv: PIPE, LAUNCHER, then the script or `-m module`, and its arguments.

    Returns:
        The exit code.
    """
    pipe, launcher = map(int, argv[:2])
    die_with_parent(launcher)
    os.set_inheritable(pipe, False)
    _write_whole_lines()
    report = partial(_report, pipe, os.environ["RANK"])
    try:
        _run(argv[2:])
    except SystemExit as exited:
        if isinstance(exited.code, int):
            report(exited.code & 0xFF, f"ended with exit code {exited.code & 0xFF}")
        elif exited.code is not None:
            report(1, str(exited.code).removeprefix("error: "))
        raise
    except Exception as error:
        report(1, f"{type(error).__name__}: {error}")
        error.__traceback__ = _script_frames(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _write_whole_lines() -> None:
    """Write to stdout and stderr line by line, so that lines of several ranks do not mix.

    Under PYTHONUNBUFFERED, `print(a, b)` would make a write for each of its parts.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _run(argv: list[str]) -> None:
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        sys.path[0] = str(Path(argv[0]).resolve().parent)
        runpy.run_path(argv[0], run_name="__main__")


def _script_frames(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of this file and of runpy, which started the script."""
    while trace and trace.tb_frame.f_code.co_filename in (__file__, RUNPY_FILE):
        trace = trace.tb_next
    return trace


def _report(pipe: int, rank: str, code: int, reason: str) -> None:
    """Send a failure to the launcher as one line; exit code 0 is not reported.

    A write of at most PIPE_BUF bytes is atomic, so lines of several ranks do not mix.
    """
    line = f"{rank} {code} {' '.join(reason.split())}"
    if code:
        with contextlib.suppress(OSError):  # the script may have closed the pipe
            os.write(pipe, line.encode(errors="replace")[: select.PIPE_BUF - 1] + b"\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
