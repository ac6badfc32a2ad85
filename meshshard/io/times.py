"""Time steps of files that hold several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meshshard.errors import ReadError

__all__ = ["time_step"]

LISTED = 20  # times in a message, and the last


def time_step(path: Path, times: Sequence[float], time: float | None) -> float | None:
    """The time to read: the given one, or the only one; None if the file has none.

    Args:
        path: the file, for messages.
        times: the times in the file, in any order.
        time: the requested time.

    Raises:
        ReadError: `time` is None and there are several, or there is none at `time`.
    """
    times = sorted({float(t) for t in times})
    words = [repr(t).removesuffix(".0") for t in times]  # all digits: each can be typed
    listed = ", ".join([*words[:LISTED], *(["…", words[-1]] if len(words) > LISTED else [])])
    if time is None and len(times) > 1:
        raise ReadError(f"{path}: {len(times)} time steps ({listed}); choose one with --time T")
    if time is not None and time not in times:
        choice = f"choose one of {listed}" if times else "leave out --time"
        raise ReadError(f"{path}: has no time step {repr(time).removesuffix('.0')}; {choice}")
    return time if time is not None or not times else times[0]
