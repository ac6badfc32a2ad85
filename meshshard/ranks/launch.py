"""Launch: several ranks of a script on this machine, without a word to the network."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

__all__ = ["command_of", "launch"]


def launch(ranks: int, words: Sequence[str], *, quiet: bool = False) -> int:
    """Run a script on `ranks` processes by torchrun, and wait for them.

    torchrun looks the host's name up unless it is told addresses, and can hang there; here it is.
    No rank outlives this process (on Linux). One that fails ends the others; what it failed by is
    the last line on standard error.

    Args:
        ranks: processes.
        words: `script.py` or `-m module`, and its arguments.
        quiet: say nothing on standard error.

    Returns:
        The exit code: 0 where all ranks ended well, else that of the first that failed, as a shell
        has it.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    errors = subprocess.DEVNULL if quiet else None
    return subprocess.run(command_of(ranks, words), env=environment, stderr=errors).returncode


def command_of(ranks: int, words: Sequence[str]) -> list[str]:
    """The torchrun command: a rendezvous on this machine, at a port that torchrun finds itself."""
    return [
        sys.executable, "-m", "meshshard.ranks.torchrun",
        "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks),
        "-m", "meshshard.ranks.run_script", *words,
    ]  # fmt: skip
