"""`meshshard gather`: assemble a folder of shards to one mesh file."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshshard.atomic_write import check_directory
from meshshard.cli.output import add_output_options, fail, print_json, print_warnings, say, warn
from meshshard.errors import StoreError, n_of

if TYPE_CHECKING:
    from meshshard.mesh import Mesh
    from meshshard.store import Folder

__all__ = ["add_gather"]


def add_gather(commands: Any) -> None:
    """`meshshard gather DIR -o FILE`."""
    p = commands.add_parser("gather", help="assemble shards to one mesh, in source order")
    p.set_defaults(run=_run)
    p.add_argument("folder", metavar="DIR", help="folder of shards")
    p.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="FILE",
        help="mesh (.vtp .vtu .vtkhdf .stl .npz), or labels as of METIS (.part)",
    )
    p.add_argument("--source", metavar="IN", help="source file, to add fields that were not stored")
    p.add_argument("--with", dest="sets", action="append", metavar="NAME",
                   help="set of results to add, can be repeated [all]")  # fmt: skip
    add_output_options(p)


def _run(args: argparse.Namespace) -> int:
    from meshshard import store
    from meshshard.io import write

    check_directory(args.output)
    folder = store.load(args.folder)
    if re.search(r"\.part(\.\d+)?$", args.output):
        return _write_labels(folder, args)
    with print_warnings():
        mesh = folder.gather() if args.source is None else _on_source(folder, args.source)
    results: dict[str, Any] = {}
    present = mesh.cell_fields if folder.entity == "cells" else mesh.point_fields
    for name in folder.puts() if args.sets is None else args.sets:
        found = folder.gather_put(name)
        for field in found.keys() & {*present, *results}:
            warn(f"{args.output}: field {field!r} is replaced by that of the results {name!r}")
        results |= found
    with print_warnings():
        write(mesh.with_fields(**{folder.entity.removesuffix("s"): results}), args.output)
    if args.json:
        about = {"output": args.output, "cells": mesh.n_cells, "points": mesh.n_points}
        print_json(about | {"results": list(results)})
    elif not args.quiet:
        extra = f", with {', '.join(results)}" if results else ""
        say(f"{args.output}: {n_of(mesh.n_cells, 'cells')}, {n_of(mesh.n_points, 'points')}{extra}")
    return 0


def _write_labels(folder: Folder, args: argparse.Namespace) -> int:
    """Write the shard of every cell or point, in the order of the source."""
    from meshshard.io.writers import write_labels

    if args.source or args.sets:
        return fail(f"{args.output}: labels have no fields; leave out --source and --with", 2)
    labels = folder.labels()
    write_labels(labels, Path(args.output))
    if args.json:
        print_json({"output": args.output, folder.entity: len(labels)})
    elif not args.quiet:
        say(f"{args.output}: labels of {n_of(len(labels), folder.entity)}")
    return 0


def _on_source(folder: Folder, source: str) -> Mesh:
    """The mesh of the source file with the stored fields.

    Raises:
        StoreError: the folder was made from another file.
    """
    from meshshard import store
    from meshshard.io import read

    recorded = (folder.manifest.get("source") or {}).get("sha256")
    if recorded and store.sha256(source) != recorded:
        raise StoreError(f"{source}: is not the file that {folder.path} was made from")
    time = folder.manifest.get("request", {}).get("time")
    whole, stored = read(source, time=time), folder.gather()
    if (whole.n_cells, whole.n_points) != (stored.n_cells, stored.n_points):
        raise StoreError(f"{source}: has another number of cells or points than {folder.path}")
    return whole.with_fields(cell=stored.cell_fields, point=stored.point_fields)
