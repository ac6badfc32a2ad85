"""Torchrun, which says in one line what failed instead of in a block of its own."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Sequence
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from meshshard.processes import die_with_parent, how_it_ended

__all__ = ["main"]


def main(words: Sequence[str]) -> int:
    """Run ranks, each by `meshshard.ranks.run_script`.

    Args:
        words: as torchrun takes them.

    Returns:
        The exit code: of the first rank that failed, as a shell has it.
    """
    die_with_parent()
    logging.disable(logging.ERROR)  # torchrun tells of every signal that it sends
    try:
        run.main(list(words))
    except ChildFailedError as error:
        rank, failure = min(error.failures.items(), key=lambda one: _when(one[1]))
        word = _word(failure)
        why = word["message"] if word else how_it_ended(failure.exitcode, b"")
        sys.stderr.write(f"error: rank {rank}: {' '.join(why.split())}\n")
        code = int(word.get("code", failure.exitcode))
        return code if code > 0 else 128 - code
    return 0


def _word(failure: Any) -> dict[str, Any]:
    """What a rank has left as it failed, nothing where it could not."""
    return failure.message if isinstance(failure.message, dict) else {}


def _when(failure: Any) -> tuple[bool, float]:
    """When a rank failed; those that were told to end, as another had failed, come last.

    One that has failed by itself may be told too, as its process takes a while to end.
    """
    word = _word(failure)
    told = not word and failure.exitcode == -signal.SIGTERM
    return told, word.get("time", failure.timestamp)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
