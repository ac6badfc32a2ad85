"""Values of options: parsed and validated by argparse."""

from __future__ import annotations

import argparse
import math
from typing import Any

__all__ = ["describe", "numbers", "positive", "weld", "words"]


def positive(text: str) -> int:
    """An integer above 0."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer above 0")
    return number


def numbers(text: str) -> tuple[float, ...]:
    """Positive numbers separated by commas."""
    try:
        numbers = tuple(float(word) for word in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or not all(0 < n < math.inf for n in numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positive numbers like 2,1,1")
    return numbers


def words(text: str) -> tuple[str, ...]:
    """Words separated by commas."""
    return tuple(word for word in text.split(",") if word)


def weld(text: str) -> float:
    """A distance; -1 for "no"."""
    if text == "no":
        return -1.0
    try:
        distance = float(text)
    except ValueError:
        distance = -1.0
    if not 0 <= distance < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a distance nor the word no")
    return distance


def describe(commands: Any) -> None:
    """Set the description of each command to its line in the list of commands."""
    for listed in commands._choices_actions:
        line = listed.help
        commands.choices[listed.dest].description = f"{line[0].upper()}{line[1:]}."
