"""`meshshard launch` and `meshshard selftest`: commands that run several ranks."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from meshshard.cli import options
from meshshard.errors import MeshshardError

__all__ = ["add_launch", "add_selftest"]


def add_launch(commands: Any) -> None:
    """`meshshard launch N script.py …`."""
    p = commands.add_parser("launch", help="run a script on several ranks of this machine")
    p.set_defaults(run=_launch)
    p.add_argument("ranks", type=options.positive, metavar="N", help="number of ranks")
    p.add_argument("words", nargs=argparse.REMAINDER, metavar="SCRIPT …",
                   help="script.py or -m module, and its arguments")  # fmt: skip


def add_selftest(commands: Any) -> None:
    """`meshshard selftest --ranks N`."""
    p = commands.add_parser("selftest", help="check that ranks give the results of one process")
    p.set_defaults(run=_selftest)
    p.add_argument("--ranks", type=options.positive, default=2, metavar="N",
                   help="number of ranks [2]")  # fmt: skip
    p.add_argument("--folder", metavar="DIR",
                   help="folder of shards with cell fields [that of the demo]")  # fmt: skip


def _launch(args: argparse.Namespace) -> int:
    from meshshard.ranks import launch

    if args.words in ([], ["-m"]):
        raise MeshshardError("nothing to run: meshshard launch N script.py …, or -m module …")
    script = args.words[0]
    if script != "-m" and not Path(script).is_file():
        raise MeshshardError(f"{script}: is not a file; give a script, or -m module")
    return launch.launch(args.ranks, args.words)


def _selftest(args: argparse.Namespace) -> int:
    from meshshard.ranks import launch

    folder = ["--folder", args.folder] if args.folder else []
    return launch.launch(args.ranks, ["-m", "meshshard.ranks.selftest", *folder])
