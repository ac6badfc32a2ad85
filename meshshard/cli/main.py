"""The command `meshshard`: the parser of all commands, and `main`.

The arguments and the function of each command are in the file of its subject. Heavy packages are
imported in these functions, so that the help texts are fast.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from meshshard.cli import demo, gather, options, partition, rank_commands, report, view
from meshshard.cli.output import fail
from meshshard.errors import MeshshardError, printable

__all__ = ["build_parser", "main"]

EPILOG = "exit codes: 0 success; 1 an input failed; 2 wrong usage; 130 and 143 stopped by a signal"
COMMANDS = (
    partition.add_partition,
    report.add_info,
    report.add_validate,
    gather.add_gather,
    view.add_view,
    demo.add_demo,
    rank_commands.add_launch,
    rank_commands.add_selftest,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: arguments after `meshshard`; those of the process if None.

    Returns:
        The exit code.
    """
    _make_printable()
    args = build_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return fail("interrupted; folders that were written are complete", 130)
    except BrokenPipeError:  # standard output was closed, as by `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (MeshshardError, OSError, MemoryError) as error:
        return fail(" ".join(str(error).split()) or type(error).__name__)


def _make_printable() -> None:
    """Make standard output accept any file name, also if it is closed."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115 - for good
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = _Parser(
        prog="meshshard",
        description="Cut one mesh or point cloud into balanced shards.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, help="print the version")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in COMMANDS:
        add(commands)
    options.describe(commands)
    return parser


class _Parser(argparse.ArgumentParser):
    """A parser, and those of its commands, whose messages have no control characters."""

    def _print_message(self, message: str, file: Any = None) -> None:
        super()._print_message("\n".join(map(printable, message.split("\n"))), file)


class _Version(argparse.Action):
    """Prints the version, which is only looked up then."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:  # noqa: A002
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        import importlib.metadata

        try:
            print(f"meshshard {importlib.metadata.version('meshshard')}")
        except importlib.metadata.PackageNotFoundError:
            print("meshshard (from source, not installed)")
        parser.exit()
