"""The command `meshshard`. Heavy packages are imported by the functions that need them."""

from __future__ import annotations

import argparse
import glob
import io
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from meshshard.cli import options, rank_commands
from meshshard.errors import MeshshardError, MeshWarning, n_of

__all__ = ["build_parser", "main"]

EPILOG = """\
exit codes: 0 all well; 1 an input failed; 2 wrong usage; 130 and 143 stopped by a signal
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: words after `meshshard`; those of the process by default.

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
        return _fail("interrupted; finished folders are complete", 130)
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (MeshshardError, OSError, MemoryError) as error:
        return _fail(" ".join(str(error).split()) or type(error).__name__)


def _make_printable() -> None:
    """Whatever a file is called, its name can be printed; also where nobody listens."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115 - for good
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command."""
    parser = argparse.ArgumentParser(
        prog="meshshard",
        description="Cut one mesh or point cloud into balanced shards.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, help="print the version")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_partition(commands)
    _add_info(commands)
    _add_validate(commands)
    _add_gather(commands)
    _add_view(commands)
    _add_demo(commands)
    rank_commands.add_launch(commands)
    rank_commands.add_selftest(commands)
    options.describe(commands)
    return parser


class _Version(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:  # noqa: A002
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        import importlib.metadata

        try:
            print(f"meshshard {importlib.metadata.version('meshshard')}")
        except importlib.metadata.PackageNotFoundError:
            print("meshshard (its source, not installed)")
        parser.exit()


# ------------------------------------------------------------------------------------- partition


def _add_partition(commands: Any) -> None:
    p = commands.add_parser("partition", help="cut meshes into shards, write a folder for each")
    p.set_defaults(run=_partition)
    p.add_argument("inputs", nargs="+", metavar="IN", help="mesh or cloud; patterns are expanded")
    p.add_argument("--parts", type=options.positive, metavar="K", help="number of shards")
    p.add_argument("--out", default=".", metavar="DIR", help="where NAME.shards goes [.]")
    cut = p.add_argument_group("how to cut")
    cut.add_argument("--on", choices=("auto", "cells", "points"), default="auto",
                     help="what is sharded [auto: what has fields, cells first]")  # fmt: skip
    cut.add_argument(
        "--method", default="metis", help="metis, morton, rcb, random, or a .part.K file [metis]"
    )
    cut.add_argument("--objective", choices=("volume", "cut"), default="volume",
                     help="of METIS: rows sent, or edges cut [volume]")  # fmt: skip
    cut.add_argument("--imbalance", type=float, default=1.005, metavar="B",
                     help="largest load over the mean [1.005]")  # fmt: skip
    cut.add_argument("--seed", type=int, default=0, help="of METIS and random [0]")
    cut.add_argument("--contiguous", action="store_true", help="ask METIS for connected parts")
    cut.add_argument("--weight", metavar="NAME", help="a field, or area, as the load")
    cut.add_argument("--targets", type=options.numbers, default=(), metavar="2,1,1",
                     help="a share for each part")  # fmt: skip
    cut.add_argument("--knn", type=int, metavar="N", help="cut the graph of N nearest neighbors")
    cut.add_argument(
        "--halo", type=options.positive, default=1, metavar="L", help="hops of halo rows [1]"
    )
    cut.add_argument(
        "--order", choices=("file", "morton", "rcm"), default="file", help="rows in a shard [file]"
    )
    data = p.add_argument_group("what is read and written")
    data.add_argument("--fields", type=options.words, metavar="A,B", help="keep these fields only")
    data.add_argument("--weld", type=options.weld, metavar="TOL|no",
                      help="merge points of open edges within TOL")  # fmt: skip
    data.add_argument("--time", type=float, metavar="T", help="step of a file that holds several")
    data.add_argument("--vtk", action="store_true", help="also write pieces for ParaView")
    data.add_argument("--with-ghosts", action="store_true", help="pieces with their halo, flagged")
    data.add_argument("--force", action="store_true", help="replace folders that are there")
    data.add_argument("--if-changed", action="store_true", help="skip what is there and up to date")
    data.add_argument("--dry-run", action="store_true", help="cut and measure, write nothing")
    many = p.add_argument_group("many files")
    many.add_argument("--jobs", type=options.positive, default=1, metavar="N", help="processes [1]")
    many.add_argument("--dask", metavar="ADDRESS", help="send the files to a Dask cluster")
    _add_output(p)


def _partition(args: argparse.Namespace) -> int:
    from meshshard.cli import partition

    parts = args.parts or len(args.targets)
    if not parts:
        return _fail("say how many shards: --parts K", 2)
    if args.targets and len(args.targets) != parts:
        return _fail(f"--targets has {len(args.targets)} shares for --parts {parts}", 2)
    inputs = list(dict.fromkeys(path for pattern in args.inputs for path in _expand(pattern)))
    same = ("out", "targets", "on", "method", "weight", "objective", "imbalance", "seed",
            "contiguous", "knn", "halo", "order", "weld", "fields", "time", "vtk", "force",
            "if_changed", "dry_run")  # fmt: skip
    job = partition.Job(
        parts=parts,
        ghosts=args.with_ghosts,
        command=" ".join(["meshshard", *sys.argv[1:]]),
        **{name: getattr(args, name) for name in same},
    )
    folders = partition.targets_of(inputs, args.out)
    for path in folders:
        note = partition.memory_note(path)
        if note and not args.quiet:
            print(note, file=sys.stderr)
    results = partition.partition_files(folders, job, args.jobs, args.dask)
    done = [_report(outcome, args, len(folders)) for outcome in _progress(results, args, folders)]
    if args.json:
        print(json.dumps(done if len(done) > 1 else done[0], indent=1, ensure_ascii=False))
    failed = sum(outcome["status"] == "failed" for outcome in done)
    if len(done) > 1 and not args.quiet:
        print(f"{len(done) - failed} of {len(done)} files done", file=sys.stderr)
    return 1 if failed else 0


def _report(outcome: dict[str, Any], args: argparse.Namespace, count: int) -> dict[str, Any]:
    """Tell what became of one file."""
    for line in outcome["warnings"]:
        _warn(line)
    if outcome["status"] == "failed":
        _fail(outcome["error"])
    table = outcome.pop("table", "")
    if args.json or args.quiet:
        return outcome
    for line in outcome["said"]:
        print(line)
    if table:
        print(table if count == 1 or args.verbose else table.splitlines()[-3])
    ends = {"written": f"written: {outcome['folder']}", "unchanged": "up to date",
            "tried": "nothing written (--dry-run)"}  # fmt: skip
    if outcome["status"] in ends:
        seconds = f" in {outcome['seconds']:.2f} s" if args.verbose else ""
        print(f"{outcome['input']}: {ends[outcome['status']]}{seconds}")
    return outcome


def _progress(
    results: Iterator[dict[str, Any]], args: argparse.Namespace, folders: dict[str, Path]
) -> Iterator[dict[str, Any]]:
    """A bar on a terminal where there are several files; plain lines otherwise."""
    if len(folders) == 1 or args.quiet or args.json or not sys.stderr.isatty():
        yield from results
        return
    from tqdm import tqdm

    yield from tqdm(results, total=len(folders), unit="file")


# ---------------------------------------------------------------------------------- other commands


def _add_info(commands: Any) -> None:
    p = commands.add_parser("info", help="what a file or a folder of shards holds")
    p.set_defaults(run=_info)
    p.add_argument("path", metavar="FILE|DIR", help="mesh, cloud or folder of shards")
    p.add_argument("--time", type=float, metavar="T", help="step of a file that holds several")
    _add_output(p)


def _info(args: argparse.Namespace) -> int:
    from meshshard.cli import report

    with _warned():
        about = report.about(args.path, args.time)
    if args.json:
        print(json.dumps(about, indent=1, ensure_ascii=False))
    elif not args.quiet:
        print("\n".join(report.lines(about)))
    return 0


def _add_validate(commands: Any) -> None:
    p = commands.add_parser("validate", help="prove a file or a folder of shards, byte by byte")
    p.set_defaults(run=_validate)
    p.add_argument("paths", nargs="+", metavar="FILE|DIR", help="meshes, folders of shards")
    p.add_argument("--strict", action="store_true", help="warnings count as errors")
    _add_output(p)


def _validate(args: argparse.Namespace) -> int:
    from meshshard.cli import report

    verdicts = []
    for path in args.paths:
        verdict = report.verdict(path)
        verdicts.append(verdict)
        for line in verdict["warnings"]:
            _warn(line)
        if verdict["error"]:
            _fail(verdict["error"])
        elif not args.json and not args.quiet:
            print(f"{path}: {verdict['proved']}")
    if args.json:
        print(json.dumps(verdicts, indent=1, ensure_ascii=False))
    bad = [v for v in verdicts if v["error"] or (args.strict and v["warnings"])]
    return 1 if bad else 0


def _add_gather(commands: Any) -> None:
    p = commands.add_parser("gather", help="put shards together again, in the order of the file")
    p.set_defaults(run=_gather)
    p.add_argument("folder", metavar="DIR", help="of shards")
    p.add_argument("-o", "--output", required=True, metavar="FILE", help=".vtp, .vtu or .npz")
    p.add_argument("--source", metavar="IN", help="the file, for fields that were not sharded")
    p.add_argument("--with", dest="sets", action="append", metavar="NAME",
                   help="results saved per shard [all there are]")  # fmt: skip
    _add_output(p)


def _gather(args: argparse.Namespace) -> int:
    from meshshard import store
    from meshshard.io import write

    folder = store.load(args.folder)
    with _warned():
        mesh = folder.gather() if args.source is None else _on_source(folder, args.source)
    results: dict[str, Any] = {}
    present = mesh.cell_fields if folder.entity == "cells" else mesh.point_fields
    for name in folder.puts() if args.sets is None else args.sets:
        found = folder.gather_put(name)
        for field in found.keys() & {*present, *results}:
            _warn(f"{args.output}: field {field!r} is now that of {name!r}")
        results |= found
    write(mesh.with_fields(**{folder.entity.removesuffix("s"): results}), args.output)
    if args.json:
        about = {"output": args.output, "cells": mesh.n_cells, "points": mesh.n_points}
        print(json.dumps(about | {"results": list(results)}, indent=1, ensure_ascii=False))
    elif not args.quiet:
        extra = f", with {', '.join(results)}" if results else ""
        print(
            f"{args.output}: {n_of(mesh.n_cells, 'cells')}, {n_of(mesh.n_points, 'points')}{extra}"
        )
    return 0


def _on_source(folder: Any, source: str) -> Any:
    """The mesh of the source file, once it is proved to be the one that was cut."""
    from meshshard import store
    from meshshard.errors import StoreError
    from meshshard.io import read

    recorded = (folder.manifest.get("source") or {}).get("sha256")
    if recorded and store.sha256(source) != recorded:
        raise StoreError(f"{source}: is not the file that {folder.path} was made from")
    time = folder.manifest.get("request", {}).get("time")
    whole, mine = read(source, time=time), folder.gather()
    if (whole.n_cells, whole.n_points) != (mine.n_cells, mine.n_points):
        raise StoreError(f"{source}: has another number of cells or points than {folder.path}")
    return whole.with_fields(cell=mine.cell_fields, point=mine.point_fields)


def _add_view(commands: Any) -> None:
    p = commands.add_parser("view", help="look at a folder of shards")
    p.set_defaults(run=_view)
    p.add_argument("folder", metavar="DIR", help="of shards")
    p.add_argument("--png", metavar="FILE", help="write a picture")
    p.add_argument("--html", metavar="FILE", help="write a page that can be turned in a browser")
    p.add_argument("--show", action="store_true", help="open a window")
    p.add_argument("--explode", type=float, default=0.0, metavar="G", help="move shards apart")
    p.add_argument("--field", metavar="NAME", help="color by a field instead of the shard")
    _add_output(p)


def _view(args: argparse.Namespace) -> int:
    from meshshard import viz

    if not (args.png or args.html or args.show):
        return _fail("say where to: --png FILE, --html FILE or --show", 2)
    with _warned():
        viz.view(args.folder, png=args.png, html=args.html, show=args.show,
                 explode=args.explode, field=args.field)  # fmt: skip
    if not args.quiet:
        print("\n".join(f"{path}: written" for path in (args.png, args.html) if path))
    return 0


def _add_demo(commands: Any) -> None:
    p = commands.add_parser("demo", help="the whole way on a small surface that comes along")
    p.set_defaults(run=_demo)
    p.add_argument("--out", default="meshshard-demo", metavar="DIR",
                   help="where its files go [meshshard-demo]")  # fmt: skip
    p.add_argument("--parts", type=options.positive, default=8, metavar="K",
                   help="number of shards [8]")  # fmt: skip
    _add_output(p)


def _demo(args: argparse.Namespace) -> int:
    from meshshard.cli import demo

    for line in demo.run(Path(args.out), args.parts):
        if not args.quiet:
            print(line)
    return 0


# ------------------------------------------------------------------------------------------- words


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for programs, on standard output")
    parser.add_argument("-v", "--verbose", action="store_true", help="say more")
    parser.add_argument("-q", "--quiet", action="store_true", help="say errors only")


def _expand(pattern: str) -> list[str]:
    """Files that a pattern names; the pattern itself where it names a file."""
    if Path(pattern).exists() or not glob.has_magic(pattern):
        return [pattern]
    found = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207 - absolute ones too
    if not found:
        raise MeshshardError(f"{pattern}: no file matches")
    return found


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr)


def _fail(line: str, code: int = 1) -> int:
    print(f"error: {line}", file=sys.stderr)
    return code


class _warned(warnings.catch_warnings):  # noqa: N801 - reads as a phrase: with _warned()
    """Within it, what deserves a look is told in one line each."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("always", MeshWarning)
        shown: Callable[..., None] = lambda message, *_, **__: _warn(str(message))  # noqa: E731
        warnings.showwarning = shown


if __name__ == "__main__":
    raise SystemExit(main())
