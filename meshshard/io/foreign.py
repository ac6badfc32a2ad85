"""Readers that use VTK, PyVista or meshio; they run in the child process of `child.py`."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from meshshard.errors import MeshshardError, ReadError
from meshshard.io.child import serve
from meshshard.io.dataset import Dataset
from meshshard.io.ensight import check_case
from meshshard.io.formats import HDF5, last_bytes, recognize
from meshshard.io.openfoam import is_decomposed
from meshshard.io.times import time_step
from meshshard.io.vtk_objects import datasets_of, grid_of_meshio, vtk_leaves
from meshshard.io.xdmf import one_step
from meshshard.mesh.checks import warn

__all__ = [
    "read_ensight",
    "read_fluent",
    "read_hdf",
    "read_meshio",
    "read_openfoam",
    "read_vtk",
    "read_xdmf",
    "serve_foreign",
]

# a message of VTK: its kind, and its text without the file, class and address that printed it
_PRINTED = re.compile(r"(ERROR|Warning|Generic Warning): In [^\n]*\n(?:\w* ?\(\w+\): )?([^\n]*)")


def serve_foreign(path: str, out: str, time: str) -> None:
    """Entry point of the child process: write the data sets of a file to the descriptor `out`."""
    serve(lambda: _datasets(Path(path), json.loads(time)), int(out))


def _datasets(path: Path, time: float | None) -> list[Dataset]:
    """The data sets of a file; errors that VTK only prints raise ReadError, its warnings warn."""
    file_format = recognize(path)
    window = _output_window()
    try:
        item = file_format.read(path, time)
    except (MeshshardError, MemoryError):
        raise
    except ImportError as error:
        raise ReadError(f"{path}: its reader needs {error.name}; install it with pip") from None
    except (Exception, SystemExit) as error:  # of any type; meshio calls sys.exit
        line = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:200]
        raise ReadError(
            f"{path}: cannot be read ({line}); it is damaged, truncated or in another format, or "
            "holds what the reader does not know"
        ) from None
    finally:
        output: Any = window.GetOutput()  # bytes where VTK quotes what is not UTF-8
        output = output.decode(errors="replace") if isinstance(output, bytes) else output
        printed = [(kind, text[:200]) for kind, text in _PRINTED.findall(output)]
    if errors := [text for kind, text in printed if kind == "ERROR"]:
        raise ReadError(f"{path}: VTK cannot read it: {errors[0]}")
    for text in dict.fromkeys(text for _, text in printed):
        warn(f"{path}: VTK warns: {text}")
    datasets = list(datasets_of(item, str(path)))
    # VTK returns an empty mesh if it fails. Of these formats only VTKHDF may hold a point cloud.
    if file_format.magic != HDF5 and not any(len(dataset.types) for dataset in datasets):
        raise ReadError(
            f"{path}: empty: no cells in it; it is truncated, or files of its case are missing"
        )
    return datasets


def _output_window() -> Any:
    """VTK's output window, which collects messages; set after PyVista's import sets another."""
    import pyvista  # noqa: F401
    from vtkmodules.vtkCommonCore import vtkLogger, vtkOutputWindow, vtkStringOutputWindow

    vtkLogger.SetStderrVerbosity(vtkLogger.VERBOSITY_OFF)  # the window has the same messages
    window = vtkStringOutputWindow()
    vtkOutputWindow.SetInstance(window)
    return window


def read_meshio(path: Path) -> Any:
    """Read a file with meshio.

    Raises:
        ReadError: meshio is not installed.
    """
    try:
        import meshio  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError:
        raise ReadError(f"{path}: needs meshio; pip install 'meshshard[meshio]'") from None
    is_gmsh = path.suffix.lower() == ".msh"
    if is_gmsh:
        _complete_groups(path)
    mesh = meshio.read(path)
    if not is_gmsh and (sets := [*mesh.cell_sets, *mesh.point_sets]):
        warn(f"{path}: sets of cells or points left out: {', '.join(sets)}")
    return grid_of_meshio(mesh)  # without sets: those of Gmsh duplicate the arrays of tags


def _complete_groups(path: Path) -> None:
    """Let meshio read Gmsh entities in no physical group (they get 0) or in several (the first)."""
    from meshio.gmsh import (  # type: ignore[import-untyped,import-not-found,unused-ignore]
        _gmsh40,
        _gmsh41,
    )

    def complete(read: Any) -> Any:
        def entities(*args: Any) -> Any:
            found = read(*args)
            tags = found[0] if isinstance(found[0], tuple) else found
            if any(groups for of_dim in tags for groups in of_dim.values()):
                for of_dim in tags:
                    several = [list(map(int, g)) for g in of_dim.values() if len(g) > 1]
                    if several:
                        warn(f"{path}: an entity is in the physical groups {several[0]}; "
                             "only the first is kept")  # fmt: skip
                    of_dim.update({tag: [0] for tag, groups in of_dim.items() if not groups})
            return found

        return entities

    for module in (_gmsh40, _gmsh41):
        module._read_entities = complete(module._read_entities)


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
    """Read a file with the VTK reader for its suffix, all fields that it lists.

    Raises:
        ReadError: the file has several time steps and `time` is None, or it has no step at `time`;
            or a file of its case is truncated.
    """
    import pyvista

    get_reader: Any = pyvista.get_reader
    return _updated(get_reader(path).reader, path, time)


def read_hdf(path: Path, time: float | None = None) -> Any:
    """Read VTKHDF.

    Raises:
        ReadError: as `read_vtk`; also if only some blocks have time steps.
    """
    from vtkmodules.vtkIOHDF import vtkHDFReader

    reader: Any = vtkHDFReader()
    reader.SetFileName(str(path))
    reader.UpdateInformation()
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        if not _times(reader) and data.find(b"NSteps") >= 0:
            raise ReadError(
                f"{path}: some blocks have time steps and some have none, which VTK does not read; "
                "save the time step that you need on its own"
            )
    return _updated(reader, path, time)


def read_xdmf(path: Path, time: float | None = None) -> Any:
    """Read one time step of an XDMF file.

    Raises:
        ReadError: as `read_vtk`; also if its numbers are too few or a file is missing.
    """
    from vtkmodules.vtkIOXdmf2 import vtkXdmfReader

    reader: Any = vtkXdmfReader()
    reader.ReadFromInputStringOn()
    reader.SetInputString(one_step(path, time))
    return _updated(reader, path, None)


def read_ensight(path: Path, time: float | None = None) -> Any:
    """Read an EnSight case, and verify that its files are long enough.

    Raises:
        ReadError: as `read_vtk`; also if a file of the case is truncated.
    """
    item, rows = read_vtk(path, time), defaultdict[tuple[str, str], list[int]](list)
    for dataset, _ in vtk_leaves(item, str(path)):
        for place, data in (("element", dataset.GetCellData()), ("node", dataset.GetPointData())):
            for i in range(data.GetNumberOfArrays()):
                n = data.GetAbstractArray(i).GetNumberOfTuples()
                rows[place, data.GetArrayName(i)].append(n)
    check_case(path, time, rows)
    return item


def read_openfoam(path: Path, time: float | None = None) -> Any:
    """Read an OpenFOAM case, or its pieces per processor if only these have the results.

    Raises:
        ReadError: as `read_vtk`.
    """
    from vtkmodules.vtkIOParallel import vtkPOpenFOAMReader

    reader: Any = vtkPOpenFOAMReader()
    reader.SetFileName(str(path))
    reader.SetSkipZeroTime(time != 0)  # the initial conditions, unless they are wanted
    reader.CreateCellToPointOff()  # no interpolation of cell fields to points
    if hasattr(reader, "DecomposePolyhedraOff"):  # removed in VTK 9.7
        reader.DecomposePolyhedraOff()
    if is_decomposed(path, time):
        reader.SetCaseType(reader.DECOMPOSED_CASE)
        warn(f"{path}: read from its processor folders, which hold times that the case does not")
    reader.UpdateInformation()
    reader.EnableAllPatchArrays()
    return _updated(reader, path, time)


def _updated(reader: Any, path: Path, time: float | None) -> Any:
    """The output of a VTK reader at a time step, with a warning about fields that it lacks."""
    reader.UpdateInformation()
    step = time_step(path, times := list(_times(reader)), time)
    if step is not None and hasattr(reader, "SetStep"):  # of VTKHDF, whose blocks ignore the time
        reader.SetStep(times.index(step))
    reader.Update() if step is None else reader.UpdateTimeStep(step)
    item = reader.GetOutputDataObject(0)
    for kind in ("Cell", "Point"):
        _warn_missing(reader, item, kind, path)
    return item


def _times(reader: Any) -> Sequence[float]:
    """Times that a VTK reader found in all files and time sets."""
    from vtkmodules.vtkCommonExecutionModel import vtkStreamingDemandDrivenPipeline

    key = vtkStreamingDemandDrivenPipeline.TIME_STEPS()
    return reader.GetOutputInformation(0).Get(key) or ()


def _warn_missing(reader: Any, item: Any, kind: str, path: Path) -> None:
    """Warn about fields that the reader lists and that no data set has."""
    if not hasattr(reader, f"GetNumberOf{kind}Arrays"):
        return
    listed = range(getattr(reader, f"GetNumberOf{kind}Arrays")())
    missing = {str(getattr(reader, f"Get{kind}ArrayName")(i)) for i in listed}
    for dataset, _ in vtk_leaves(item, str(path)):
        attributes = getattr(dataset, f"Get{kind}Data")()
        missing -= {attributes.GetArrayName(i) for i in range(attributes.GetNumberOfArrays())}
    if missing:
        names = ", ".join(sorted(missing))
        warn(f"{path}: {kind.lower()} fields that VTK lists but cannot read are left out: {names}")
