"""`meshshard view`: draw a folder of shards."""

from __future__ import annotations

import argparse
from typing import Any

from meshshard.cli.output import add_output_options, fail, print_warnings

__all__ = ["add_view"]


def add_view(commands: Any) -> None:
    """`meshshard view DIR --png FILE`."""
    p = commands.add_parser("view", help="draw a folder of shards")
    p.set_defaults(run=_run)
    p.add_argument("folder", metavar="DIR", help="folder of shards")
    p.add_argument("--png", metavar="FILE", help="write a picture")
    p.add_argument("--html", metavar="FILE", help="write an interactive page for a browser")
    p.add_argument("--show", action="store_true", help="open a window")
    p.add_argument("--explode", type=float, default=0.0, metavar="G", help="move shards apart [0]")
    p.add_argument("--field", metavar="NAME", help="color by a field instead of by shard")
    add_output_options(p)


def _run(args: argparse.Namespace) -> int:
    from meshshard import viz

    if not (args.png or args.html or args.show):
        return fail("give an output: --png FILE, --html FILE or --show", 2)
    with print_warnings():
        viz.view(args.folder, png=args.png, html=args.html, show=args.show,
                 explode=args.explode, field=args.field)  # fmt: skip
    if not args.quiet:
        print("\n".join(f"{path}: written" for path in (args.png, args.html) if path))
    return 0
