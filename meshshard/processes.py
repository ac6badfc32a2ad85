"""Child processes: that they end with their parent, and how they ended."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["die_with_parent", "how_it_ended"]

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to kill this process when its parent ends (Linux; elsewhere nothing).

    Args:
        parent: process number of the parent, if it may have ended already.
    """
    if sys.platform == "linux":
        parent = os.getppid() if parent is None else parent
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            raise SystemExit("the parent process has ended")


def how_it_ended(code: int, said: bytes) -> str:
    """A few words on a child that failed: the signal, or the last line that it wrote.

    Args:
        code: its return code, negative for a signal.
        said: what it wrote.
    """
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL (out of memory?)"
    if code < 0:
        names = {s.value: s.name for s in signal.Signals}
        return f"was killed by {names.get(-code, f'signal {-code}')}"
    lines = said.decode("utf-8", "replace").strip().splitlines()
    return f"failed: {lines[-1][:300]}" if lines else f"failed with exit code {code}"
