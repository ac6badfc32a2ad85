"""Read and write mesh files."""

from __future__ import annotations

import gzip
import shutil
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory

from meshshard.errors import MeshshardError, ReadError
from meshshard.io.child import read_in_child
from meshshard.io.dataset import Dataset, to_mesh
from meshshard.io.formats import recognize
from meshshard.io.writers import write_npz, write_vtk
from meshshard.mesh import Mesh

__all__ = ["read", "read_gzip", "write"]


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
    if file_format.in_child:
        return read_in_child(path, time)
    datasets: list[Dataset] = file_format.read(path, time)
    return datasets


def read_gzip(path: Path, time: float | None) -> list[Dataset]:
    """Decompress a file of any other format to a temporary folder, and read it.

    Raises:
        ReadError: the compressed data are damaged or cut short, or the disk is full.
    """
    with TemporaryDirectory(prefix="meshshard-") as folder:
        plain = Path(folder) / (path.stem if path.suffix.lower() == ".gz" else path.name)
        try:
            with gzip.open(path) as packed, plain.open("wb") as out:
                shutil.copyfileobj(packed, out, 1 << 20)
        except (OSError, EOFError, zlib.error) as error:
            raise ReadError(f"{path}: cannot be decompressed (gz): {error}; try gunzip") from None
        try:
            if recognize(plain).name == "gzip":
                raise ReadError(f"{path}: compressed twice; decompress it once with gunzip")
            return _datasets(plain, time)
        except MeshshardError as error:
            raise type(error)(str(error).replace(str(plain), str(path))) from None


def write(mesh: Mesh, path: str | Path) -> None:
    """Write a mesh as .vtp (cells up to dimension 2), .vtu, or .npz (point clouds), atomically.

    Reading the file gives the same points, cells and fields bit for bit, except that VTK files
    store bool as uint8 and float16 as float32. Array names are escaped; characters that XML cannot
    represent become "_".

    Raises:
        MeshshardError: the suffix is another one, the mesh does not fit the format, or the file
            cannot be written.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix in (".vtp", ".vtu"):
        write_vtk(mesh, path)
    elif suffix == ".npz":
        write_npz(mesh, path)
    else:
        raise MeshshardError(f"{path}: meshes are written as .vtp, .vtu or .npz, not '{suffix}'")
