"""Run a script as one rank, as it would run alone; if it fails, report why to the launcher.

`python -m meshshard.ranks.run_script PIPE LAUNCHER script.py …` or `… -m module …`, as `launch`
starts it: PIPE is an open file descriptor, LAUNCHER the number of its process.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import select
import sys
from functools import partial
from pathlib import Path
from types import TracebackType

from meshshard.processes import die_with_parent

__all__ = ["main"]

RUNPY = runpy.run_path.__code__.co_filename


def main(words: list[str]) -> int:
    """Run a script, or `-m module`, with its arguments, as the main program of this process.

    Args:
        words: see above.

    Returns:
        The exit code.
    """
    pipe, launcher = map(int, words[:2])
    die_with_parent(launcher)
    os.set_inheritable(pipe, False)
    report = partial(_report, pipe, os.environ["RANK"])
    try:
        _run(words[2:])
    except SystemExit as ended:
        if isinstance(ended.code, int):
            report(ended.code & 0xFF, f"ended with exit code {ended.code & 0xFF}")
        elif ended.code is not None:
            report(1, str(ended.code).removeprefix("error: "))
        raise
    except Exception as error:
        report(1, f"{type(error).__name__}: {error}")
        error.__traceback__ = _of_script(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _run(words: list[str]) -> None:
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames that started the script."""
    while trace and trace.tb_frame.f_code.co_filename in (__file__, RUNPY):
        trace = trace.tb_next
    return trace


def _report(pipe: int, rank: str, code: int, reason: str) -> None:
    """Send one line to the launcher; a write of at most PIPE_BUF bytes is atomic."""
    line = f"{rank} {code} {' '.join(reason.split())}"
    if code:
        with contextlib.suppress(OSError):  # the script has closed the pipe
            os.write(pipe, line.encode(errors="replace")[: select.PIPE_BUF - 1] + b"\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
