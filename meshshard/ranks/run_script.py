"""The script of one rank: run as it would be alone; if it fails, the launcher learns by what.

`python -m meshshard.ranks.run_script script.py …` or `-m module …`, as `launch` starts it.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path
from types import TracebackType

from meshshard.processes import die_with_parent

__all__ = ["main"]

RUNPY = runpy.run_path.__code__.co_filename


def main(words: list[str]) -> int:
    """Run a script, or `-m module`, with its arguments, as the main program of this process.

    Returns:
        The exit code.
    """
    die_with_parent()
    try:
        _run(words)
    except SystemExit as ended:
        if isinstance(ended.code, int) and ended.code:
            _leave_word(f"ended with exit code {ended.code}", ended.code)
        elif ended.code:
            _leave_word(str(ended.code).removeprefix("error: "))
        raise
    except Exception as error:
        _leave_word(f"{type(error).__name__}: {error}")
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
    """A traceback without the lines that have only started the script."""
    while trace and trace.tb_frame.f_code.co_filename in (__file__, RUNPY):
        trace = trace.tb_next
    return trace


def _leave_word(why: str, code: int = 1) -> None:
    """Say why, and when, in the file where torchrun looks for it."""
    now = time.time()
    told = {"message": why, "extraInfo": {"timestamp": str(int(now))}, "time": now, "code": code}
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")  # torchrun's own name for it
    if path:
        Path(path).write_text(json.dumps({"message": told}), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
