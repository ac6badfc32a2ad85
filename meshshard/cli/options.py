"""Options: words of the command line as values, or why they are none."""

from __future__ import annotations

import argparse
import math
from typing import Any

__all__ = ["describe", "numbers", "positive", "weld", "words"]


def positive(text: str) -> int:
    """A whole number above 0."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return number


def numbers(text: str) -> tuple[float, ...]:
    """Positive numbers between commas."""
    try:
        numbers = tuple(float(word) for word in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or not all(0 < n < math.inf for n in numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of positive numbers like 2,1,1")
    return numbers


def words(text: str) -> tuple[str, ...]:
    """Words between commas."""
    return tuple(word for word in text.split(",") if word)


def weld(text: str) -> float:
    """A distance, or -1 for no."""
    if text == "no":
        return -1.0
    try:
        distance = float(text)
    except ValueError:
        distance = -1.0
    if not 0 <= distance < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a distance nor no")
    return distance


def describe(commands: Any) -> None:
    """The help of a command begins with the line that the list of commands has of it."""
    for listed in commands._choices_actions:
        line = listed.help
        commands.choices[listed.dest].description = f"{line[0].upper()}{line[1:]}."
