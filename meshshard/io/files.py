"""Read and write mesh files."""

from __future__ import annotations

import contextlib
import gzip
import os
import sys
import zlib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO

from meshshard.errors import MeshshardError, ReadError
from meshshard.io.child import read_in_child
from meshshard.io.dataset import Dataset, to_mesh
from meshshard.io.formats import recognize
from meshshard.io.times import time_step
from meshshard.mesh import Mesh

__all__ = ["WRITERS", "read", "read_gzip", "write"]

WRITERS = {  # "module:function" in `meshshard.io` by suffix, imported when a file is written
    ".vtp": "writers:write_vtk",
    ".vtu": "writers:write_vtk",
    ".vtkhdf": "vtk_writers:write_hdf",
    ".stl": "vtk_writers:write_stl",
    ".npz": "writers:write_npz",
}

MAX_RATIO, LARGE = 100, 10**8  # of decompressed to compressed size, beyond the second in bytes


def read(path: str | Path, *, time: float | None = None) -> Mesh:
    """Read a mesh or a point cloud from a file.

    Args:
        path: the file; if its content and its suffix disagree, the content decides.
        time: the time step to read from a file with several.

    Returns:
        A checked mesh with the cells of the highest dimension in the file.

    Raises:
        ReadError: the file is missing, damaged, empty or of an unknown format.
        MeshError: the mesh in it is inconsistent.

    Examples:
        >>> mesh = read("datasets/ahmed/run_8/boundary_8.vtp")
        >>> mesh.kind, mesh.n_cells
        ('surface', 4778)
        >>> mesh.cell_fields["pMeanTrim"].shape
        (4778,)
    """
    path = Path(path)
    try:
        return to_mesh(_datasets(path, time), str(path))
    except MemoryError:
        raise ReadError(f"{path}: too large for the memory of this machine") from None
    except OSError as error:
        raise ReadError(f"{path}: cannot be read: {error.strerror or error}") from None


def _datasets(path: Path, time: float | None) -> list[Dataset]:
    file_format = recognize(path)
    if not file_format.has_steps:
        time_step(path, (), time)
    if file_format.in_child:
        return read_in_child(path, time)
    datasets: list[Dataset] = file_format.read(path, time)
    return datasets


def read_gzip(path: Path, time: float | None) -> list[Dataset]:
    """Decompress a file of any other format to a temporary file, and read it.

    Raises:
        ReadError: the compressed data are damaged, cut short or far too many, or the disk is full.
    """
    name = path.stem if path.suffix.lower() == ".gz" else path.name
    with _nameless_file(name) as (file, plain):
        try:
            with gzip.open(path) as packed:
                _copy(packed, file, path, plain)
        except (OSError, EOFError, zlib.error) as error:
            raise ReadError(f"{path}: cannot be decompressed (gz): {error}; try gunzip") from None
        except MeshshardError as error:
            raise type(error)(str(error).replace(str(plain), str(path))) from None
        try:
            return _datasets(plain, time)
        except MeshshardError as error:
            raise type(error)(str(error).replace(str(plain), str(path))) from None


def _copy(packed: gzip.GzipFile, file: IO[bytes], path: Path, plain: Path) -> None:
    """Decompress; what starts as no known file, or is far too large, is refused at once."""
    most = MAX_RATIO * path.stat().st_size + LARGE
    while block := packed.read(1 << 20):
        first = file.tell() == 0
        file.write(block)
        file.flush()
        if first and recognize(plain).name == "gzip":
            raise ReadError(f"{path}: compressed twice; decompress it once with gunzip")
        if file.tell() > most:
            raise ReadError(f"{path}: more than {MAX_RATIO} times its size; try gunzip")


@contextlib.contextmanager
def _nameless_file(name: str) -> Iterator[tuple[IO[bytes], Path]]:
    """Context manager: a temporary file, and a path with the given name by which it can be read.

    On Linux it has no name of its own, and so needs no disk if this process is killed.
    """
    with TemporaryDirectory(prefix="meshshard-") as folder:
        path = Path(folder) / name
        if sys.platform == "linux":
            with TemporaryFile() as file:
                path.symlink_to(f"/proc/{os.getpid()}/fd/{file.fileno()}")
                yield file, path
        else:
            with path.open("wb") as file:
                yield file, path


def write(mesh: Mesh, path: str | Path) -> None:
    """Write a mesh as .vtp (cells up to dimension 2), .vtu, .vtkhdf, .npz or .stl, atomically.

    Reading the file gives the same points, cells and fields bit for bit, except that VTK files
    store bool as uint8 and float16 as float32. Array names are escaped; characters that XML cannot
    represent become "_". An .npz holds a point cloud; an .stl holds the triangles of a surface in
    float32, without fields.

    Raises:
        MeshshardError: the suffix is another one, the mesh does not fit the format, or the file
            cannot be written.
    """
    path = Path(path)
    found = WRITERS.get(path.suffix.lower())
    if found is None:
        *known, last = WRITERS
        raise MeshshardError(
            f"{path}: meshes are written as {', '.join(known)} or {last}, not '{path.suffix}'"
        )
    module, function = found.split(":")
    getattr(import_module(f"meshshard.io.{module}"), function)(mesh, path)
