"""Readers that use VTK, PyVista or meshio; they run in the child process of `child.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from meshshard.errors import MeshshardError, ReadError
from meshshard.io.child import serve
from meshshard.io.dataset import Dataset
from meshshard.io.formats import HDF5, last_bytes, recognize
from meshshard.io.vtk_objects import datasets_of
from meshshard.mesh.checks import warn

__all__ = ["read_fluent", "read_meshio", "read_vtk", "serve_foreign"]


def serve_foreign(path: str, out: str, time: str) -> None:
    """Entry point of the child process: write the data sets of a file to the descriptor `out`."""
    serve(lambda: _datasets(Path(path), json.loads(time)), int(out))


def _datasets(path: Path, time: float | None) -> list[Dataset]:
    """The data sets of a file; errors that VTK only prints raise ReadError."""
    from vtkmodules.vtkCommonCore import vtkOutputWindow, vtkStringOutputWindow

    file_format = recognize(path)
    window = vtkStringOutputWindow()
    vtkOutputWindow.SetInstance(window)
    try:
        item = file_format.read(path, time)
    except MeshshardError:
        raise
    except (Exception, SystemExit) as error:  # of any type; meshio calls sys.exit
        line = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:200]
        raise ReadError(
            f"{path}: cannot be read; damaged, truncated or in another format ({line})"
        ) from None
    errors = [line for line in window.GetOutput().splitlines() if "ERR" in line or "rror:" in line]
    if errors:
        raise ReadError(f"{path}: VTK cannot read it: {errors[0].strip()[:200]}")
    datasets = list(datasets_of(item, str(path)))
    # VTK returns an empty mesh if it fails. Of these formats only VTKHDF may hold a point cloud.
    if file_format.magic != HDF5 and not any(len(dataset.types) for dataset in datasets):
        raise ReadError(
            f"{path}: empty: no cells in it; it is truncated, or files of its case are missing"
        )
    return datasets


def read_meshio(path: Path) -> Any:
    """Read a file with meshio.

    Raises:
        ReadError: meshio is not installed.
    """
    try:
        import meshio  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError:
        raise ReadError(f"{path}: needs meshio; pip install 'meshshard[meshio]'") from None
    import pyvista

    mesh = meshio.read(path)
    mesh.cell_sets, mesh.point_sets = {}, {}  # duplicates of the arrays of tags
    return pyvista.from_meshio(mesh)


def read_fluent(path: Path) -> Any:
    """Read the cell zones of a Fluent case.

    Face zones are left out with a warning; VTK builds the volume cells without them.

    Raises:
        ReadError: the file is truncated.
    """
    import pyvista

    if not last_bytes(path, 512).rstrip(b"\0 \t\r\n").endswith(b")"):
        raise ReadError(
            f"{path}: truncated, or not a Fluent case: it must end with a closing parenthesis"
        )
    blocks: Any = pyvista.FluentReader(path).read()
    cells = [key for key in blocks if key.endswith((":fluid", ":solid"))]
    faces = [key for key in blocks if key not in cells]
    if cells and faces:
        warn(f"{path}: mixed dimensions: {len(faces)} face zones left out: {', '.join(faces)}")
    return pyvista.MultiBlock({key: blocks[key] for key in cells}) if cells else blocks


def read_vtk(path: Path, time: float | None = None) -> Any:
    """Read a file with the VTK reader for its suffix.

    Raises:
        ReadError: the file has several time steps and `time` is None, or it has no step at `time`.
    """
    import pyvista

    get_reader: Any = pyvista.get_reader
    reader = get_reader(path)
    times = list(getattr(reader, "time_values", None) or [])
    listed = ", ".join(f"{t:g}" for t in times[:20] + times[20:][-1:])
    if time is None and len(times) > 1:
        raise ReadError(f"{path}: {len(times)} time steps ({listed}); choose one with --time T")
    if time is not None and times:
        if time not in times:
            raise ReadError(f"{path}: has no time step {time:g}; choose one of {listed}")
        reader.set_active_time_value(time)
    if hasattr(reader, "cell_to_point_creation"):  # of OpenFOAM
        reader.cell_to_point_creation = False  # no interpolation of cell fields to points
        if hasattr(reader.reader, "SetDecomposePolyhedra"):  # removed in VTK 9.7
            reader.decompose_polyhedra = False
    return reader.read()
