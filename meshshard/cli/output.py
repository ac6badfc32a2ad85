"""Output of the commands: options, JSON, and messages on standard error."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from meshshard.errors import MeshWarning, printable

__all__ = ["add_output_options", "fail", "print_json", "print_warnings", "say", "warn"]


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add --json, --verbose and --quiet."""
    parser.add_argument("--json", action="store_true", help="print JSON on standard output")
    parser.add_argument("-v", "--verbose", action="store_true", help="print more")
    parser.add_argument("-q", "--quiet", action="store_true", help="print errors only")


def say(text: str, *, to_stderr: bool = False) -> None:
    """Print lines of text; all output of the commands comes here."""
    lines = "\n".join(map(printable, text.split("\n")))
    print(lines, file=sys.stderr if to_stderr else None)


def print_json(value: Any) -> None:
    """Print a value as JSON on standard output."""
    say(json.dumps(value, indent=1, ensure_ascii=False))


def warn(line: str) -> None:
    """Print a warning on standard error."""
    say(f"warning: {printable(line)}", to_stderr=True)


def fail(line: str, code: int = 1) -> int:
    """Print an error on standard error and return the exit code."""
    say(f"error: {printable(line)}", to_stderr=True)
    return code


@contextlib.contextmanager
def print_warnings() -> Iterator[None]:
    """Context manager: print each MeshWarning as one line on standard error."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", MeshWarning)
        warnings.showwarning = lambda message, *_, **__: warn(str(message))
        yield
