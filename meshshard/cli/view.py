"""`meshshard view`: draw a folder of shards."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from math import isfinite
from typing import Any

from meshshard.atomic_write import check_directory
from meshshard.cli.output import add_output_options, fail, print_warnings, say
from meshshard.errors import n_of

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
    p.add_argument("--against", metavar="NAME",
        help="draw this field, --field with the same colors, and their difference")  # fmt: skip
    _add_style(p)
    add_output_options(p)


def _add_style(p: argparse.ArgumentParser) -> None:
    """Options of `viz.Style`; a value that starts with a minus sign needs `=`."""
    add = p.add_argument
    add("--cmap", default="", metavar="MAP", help="color map of matplotlib")
    add("--clim", type=_numbers(2), metavar="A,B", help="values of the first and last color")
    add("--unit", default="", help="unit of the field, for the color bar")
    add("--view", type=_numbers(3), metavar="X,Y,Z", help="direction to the eye, as --view=-1,0,1")
    add("--zoom", type=_positive, default=1.0, metavar="F", help="magnification [1]")
    add("--focus", type=_focus, default="auto", metavar="X0,X1,Y0,Y1,Z0,Z1",
        help="box that fills the picture; all; auto: where a volume is densest [auto]")  # fmt: skip
    add("--clip", default="auto", metavar="PLANE",
        help="keep what is below x or y=0.5, or above: --clip=-x; none; [auto]")  # fmt: skip
    add("--slice", default="", metavar="PLANE", help="draw the plane x or y=0.5 of a volume")
    add("--size", type=_size, default=(1200, 760), metavar="WxH", help="pixels [1200x760]")


def _run(args: argparse.Namespace) -> int:
    from meshshard import viz
    from meshshard.viz.rendering import check_picture, save_picture

    if not (args.png or args.html or args.show):
        return fail("give an output: --png FILE, --html FILE or --show", 2)
    colors = [f"--{name}" for name in ("cmap", "clim", "unit") if getattr(args, name)]
    if colors and args.field is None:
        return fail(f"{' and '.join(colors)}: only fields have colors of a scale; give --field", 2)
    style = viz.Style(
        size=args.size, direction=args.view, clip="" if args.clip == "none" else args.clip,
        slice=args.slice, focus=args.focus, zoom=args.zoom, cmap=args.cmap, clim=args.clim,
        unit=args.unit,
    )  # fmt: skip
    if args.against and (not (args.png and args.field) or args.html or args.show or args.explode):
        return fail("--against compares fields in a picture: it needs --field and --png only", 2)
    with print_warnings():
        if args.against:
            check_directory(args.png)
            names = (args.against, args.field)
            check_picture(args.png)
            made = viz.plot_prediction(args.folder, *names, names=names, style=style)
            save_picture(made, args.png)
        else:
            viz.view(args.folder, png=args.png, html=args.html, show=args.show,
                 explode=args.explode, field=args.field, style=style)  # fmt: skip
    if not args.quiet:
        say("\n".join(f"{path}: written" for path in (args.png, args.html) if path))
    return 0


def _numbers(n: int) -> Callable[[str], tuple[float, ...]]:
    """A reader of n numbers with commas between them."""

    def read(text: str) -> tuple[float, ...]:
        try:
            values = tuple(float(word) for word in text.split(","))
        except ValueError:
            values = ()
        if len(values) != n or not all(map(isfinite, values)):
            raise argparse.ArgumentTypeError(
                f"{text!r}; expected {n_of(n, 'numbers')} such as 0,1.5,-2"
            )
        return values

    return read


def _positive(text: str) -> float:
    (value,) = _numbers(1)(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a positive number")
    return value


def _focus(text: str) -> str | tuple[float, ...]:
    return {"auto": "auto", "all": ""}[text] if text in ("auto", "all") else _numbers(6)(text)


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    if not (width.isdecimal() and height.isdecimal() and 99 < min(int(width), int(height)) < 20000):
        raise argparse.ArgumentTypeError(f"{text!r}; expected pixels such as 1200x760")
    return int(width), int(height)
