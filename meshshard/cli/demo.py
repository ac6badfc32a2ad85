"""Demo: the whole way on a small real surface that comes with the package."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np

from meshshard import io, store
from meshshard.errors import MeshshardError, StoreError, n_of
from meshshard.mesh import Array, Mesh
from meshshard.partitioning.partition import partition
from meshshard.store import paraview

__all__ = ["force_coefficients", "run"]

SPEED, AREA = 38.889, 0.112032  # m/s and m2 of every Ahmed run; the constant area of AhmedML


def run(out: Path, parts: int) -> Iterator[str]:
    """Partition, prove, store, export and gather the surface; a line for every step.

    Args:
        out: directory of what is written; files of an earlier demo are replaced.
        parts: number of shards.
    """
    with as_file(files("meshshard") / "data") as data:
        source = data / "boundary_1.vtp"
        reference = _drag_of_the_solver(data / "force_mom_1.csv")
        mesh = io.read(source)
        yield f"An Ahmed body at {SPEED} m/s: {mesh.n_cells:,} polygons, fields on cells:"
        yield "  " + ", ".join(mesh.cell_fields)
        _spare_results(out / "boundary_1.shards")
        made = partition(mesh, parts).check()
        yield ""
        yield str(made.quality)
        folder = store.save(made, out / "boundary_1.shards", source=source, force=True)
    opened = store.load(folder).check()
    whole = paraview.export(opened, out / "boundary_1.paraview")
    back = opened.gather()
    same = all(np.array_equal(back.cell_fields[f], a) for f, a in mesh.cell_fields.items())
    assert same, "gathered fields differ from the file's"
    total = sum(force_coefficients(opened.piece(p).mesh)[0] for p in range(opened.k))
    yield ""
    shards = n_of(opened.k, "shards")
    yield f"Drag summed over {shards}: Cd {total:.5f}; the solver's own: {reference:.5f}."
    yield "Gathered in the order of the file, every field is the same bit for bit."
    yield f"Shards:       {folder}"
    yield f"For ParaView: {whole}"
    yield ""
    yield "Two ranks of this machine against one process, values and gradients:"
    yield from _on_two_ranks(folder)
    yield ""
    yield "Next, on a file of yours:"
    yield "  meshshard info FILE"
    yield "  meshshard partition FILE --parts 8 --out shards --vtk"
    yield f"  meshshard view {folder} --png cut.png"


def _spare_results(folder: Path) -> None:
    """Stop before results that somebody has put into an earlier demo are lost."""
    if (folder / "manifest.json").exists() and store.load(folder).puts():
        raise StoreError(f"{folder} holds results of a model; give another --out, or remove it")


def _on_two_ranks(folder: Path) -> Iterator[str]:
    """What the selftest says of the folder, a line at a time.

    Raises:
        MeshshardError: the ranks do not equal one process, or could not run.
    """
    words = ["selftest", "--ranks", "2", "--folder", str(folder)]
    command = [sys.executable, "-m", "meshshard", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    yield from done.stdout.splitlines()
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        why = lines[-1] if lines else f"exit code {done.returncode}"
        raise MeshshardError(f"two ranks did not equal one: {why}; try: meshshard selftest")


def force_coefficients(mesh: Mesh) -> Array:
    """Drag and lift coefficient (2,) of the cells of an Ahmed surface, by OpenFOAM's conventions.

    Kinematic pressure and wall shear stress in m2/s2; stored normals point into the body and the
    stress is that of the wall on the fluid, so F = sum(p A - tau abs(A)), rho = 1.
    """
    area = mesh.area_vectors()
    pressure = mesh.cell_fields["pMeanTrim"].astype(np.float64)
    shear = mesh.cell_fields["wallShearStressMeanTrim"].astype(np.float64)
    force = pressure[:, None] * area - shear * np.linalg.norm(area, axis=1, keepdims=True)
    return np.asarray(force.sum(axis=0)[[0, 2]] / (0.5 * SPEED**2 * AREA))


def _drag_of_the_solver(path: Path) -> float:
    with path.open(encoding="ascii") as file:
        return float(next(csv.DictReader(file, skipinitialspace=True))["cd"])
