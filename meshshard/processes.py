"""Processes: children that end with their parent, how they ended, memory, loopback interface."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from pathlib import Path

__all__ = ["available_memory", "die_with_parent", "how_it_ended", "loopback_interface"]

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


def how_it_ended(code: int, output: bytes) -> str:
    """Why a child process failed, for a message: the signal, or its last line of output.

    Args:
        code: its return code; negative if a signal ended it.
        output: what it wrote.
    """
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL (out of memory?)"
    if code < 0:
        names = {s.value: s.name for s in signal.Signals}
        return f"was killed by {names.get(-code, f'signal {-code}')}"
    lines = output.decode("utf-8", "replace").strip().splitlines()
    return f"failed: {lines[-1][:300]}" if lines else f"failed with exit code {code}"


def available_memory() -> int | None:
    """Bytes of memory that are available without swapping; None if the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found = [line for line in lines if line.startswith("MemAvailable")]
        return int(found[0].split()[1]) * 1024
    except (OSError, IndexError):
        return None


def loopback_interface() -> str:
    """Name of the network interface that only this machine reaches."""
    return "lo0" if "lo0" in [name for _, name in socket.if_nameindex()] else "lo"
