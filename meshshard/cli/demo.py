"""`meshshard demo`: the whole workflow on a small real surface that is part of the package."""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from meshshard.cli import options
from meshshard.cli.output import add_output_options, say
from meshshard.errors import MeshshardError, StoreError, n_of
from meshshard.mesh import Array, Mesh

__all__ = ["add_demo", "force_coefficients", "run"]

SPEED, AREA = 38.889, 0.112032  # m/s, m2: the same reference values in all runs of AhmedML


def add_demo(commands: Any) -> None:
    """`meshshard demo`."""
    p = commands.add_parser("demo", help="run the whole workflow on a small surface")
    p.set_defaults(run=_run)
    p.add_argument("--out", default="meshshard-demo", metavar="DIR",
                   help="output directory [meshshard-demo]")  # fmt: skip
    p.add_argument("--parts", type=options.positive, default=8, metavar="K",
                   help="number of shards [8]")  # fmt: skip
    add_output_options(p)


def _run(args: argparse.Namespace) -> int:
    for line in run(Path(args.out), args.parts):
        if not args.quiet:
            say(line)
    return 0


def run(out: Path, parts: int) -> Iterator[str]:
    """Partition, check, store, export and gather the surface; yield lines to print.

    Args:
        out: output directory; files of an earlier demo are replaced.
        parts: number of shards.

    Raises:
        StoreError: the folder of an earlier demo holds results of a model.
        MeshshardError: two ranks failed, or gave other results than one process.
    """
    from importlib.resources import as_file, files

    from meshshard import io, store
    from meshshard.partitioning.partition import partition
    from meshshard.store import paraview

    with as_file(files("meshshard") / "data") as data:
        source = data / "boundary_1.vtp"
        reference = _solver_drag(data / "force_mom_1.csv")
        mesh = io.read(source)
        yield f"An Ahmed body at {SPEED} m/s: {mesh.n_cells:,} polygons, fields on cells:"
        yield "  " + ", ".join(mesh.cell_fields)
        _refuse_results(out / "boundary_1.shards")
        made = partition(mesh, parts).check()
        yield ""
        yield str(made.quality)
        folder = made.save(out / "boundary_1.shards", source=source, force=True)
    opened = store.load(folder).check()
    whole = paraview.export(opened, out / "boundary_1.paraview")
    back = opened.gather()
    same = all(np.array_equal(back.cell_fields[f], a) for f, a in mesh.cell_fields.items())
    assert same, "gathered fields differ from the file's"
    total = sum(force_coefficients(opened.piece(p).mesh)[0] for p in range(opened.k))
    yield ""
    shards = n_of(opened.k, "shards")
    yield f"Drag summed over {shards}: Cd {total:.5f}; the solver gives {reference:.5f}."
    yield "The gathered fields equal the fields of the file bit for bit."
    yield f"Shards:       {folder}"
    yield f"For ParaView: {whole}"
    yield ""
    yield "Values and gradients on two ranks, compared with one process:"
    yield from _on_two_ranks(folder)
    yield ""
    yield "Next, with your own file:"
    yield "  meshshard info FILE"
    yield "  meshshard partition FILE --parts 8 --out shards --vtk"
    yield f"  meshshard view {folder} --png cut.png"


def _refuse_results(folder: Path) -> None:
    """Raise StoreError if the folder holds results of a model, because they would be deleted."""
    from meshshard import store

    if (folder / "manifest.json").exists() and store.load(folder).puts():
        raise StoreError(f"{folder} holds results of a model; choose another --out, or remove it")


def _on_two_ranks(folder: Path) -> Iterator[str]:
    """Run `meshshard selftest` on two ranks with the folder, and yield the lines that it prints.

    Raises:
        MeshshardError: the selftest failed.
    """
    words = ["selftest", "--ranks", "2", "--folder", str(folder)]
    command = [sys.executable, "-m", "meshshard", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    yield from done.stdout.splitlines()
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        why = lines[-1] if lines else f"exit code {done.returncode}"
        raise MeshshardError(f"the test on two ranks failed: {why}; try: meshshard selftest")


def force_coefficients(mesh: Mesh) -> Array:
    """(2,) drag and lift coefficients of an Ahmed surface, summed over its cells.

    Signs are those of OpenFOAM: normals point into the body, and the wall shear stress tau is the
    stress of the wall on the fluid, so F = sum(p A - tau |A|). The pressure p and tau are divided
    by the density (m2/s2).
    """
    area = mesh.area_vectors()
    pressure = mesh.cell_fields["pMeanTrim"].astype(np.float64)
    shear = mesh.cell_fields["wallShearStressMeanTrim"].astype(np.float64)
    force = pressure[:, None] * area - shear * np.linalg.norm(area, axis=1, keepdims=True)
    return np.asarray(force.sum(axis=0)[[0, 2]] / (0.5 * SPEED**2 * AREA))


def _solver_drag(path: Path) -> float:
    with path.open(encoding="ascii") as file:
        return float(next(csv.DictReader(file, skipinitialspace=True))["cd"])
