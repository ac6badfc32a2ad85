"""Files and pyvista objects to meshes, and back.

The only file that imports VTK or pyvista, and only where a format needs them: VTK's XML and legacy
files, STL, PLY, OBJ and point clouds are read with numpy alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from meshshard._clouds import read_csv, read_npy, read_npz, read_pt
from meshshard._datasets import Dataset, assemble
from meshshard._guards import gunzip, recognise
from meshshard._legacy import read_legacy
from meshshard._pieces import read_xml
from meshshard._surfaces import read_obj, read_ply, read_stl
from meshshard._xml import INFLATE
from meshshard.errors import MeshshardError, ReadError
from meshshard.mesh import Mesh

__all__ = ["read"]


def _inflate_lz4(block: bytes, size: int) -> bytes:
    from vtkmodules.util.numpy_support import vtk_to_numpy
    from vtkmodules.vtkIOCore import vtkLZ4DataCompressor

    out = vtkLZ4DataCompressor().Uncompress(block, len(block), size)
    return b"" if out is None else vtk_to_numpy(out).tobytes()


_READERS: dict[str, Callable[[Path], list[Dataset]]] = {
    "legacy": read_legacy,
    "stl": read_stl,
    "ply": read_ply,
    "obj": read_obj,
    "npz": read_npz,
    "npy": read_npy,
    "csv": read_csv,
    "pt": read_pt,
}
_XML_INFLATE = {**INFLATE, "vtkLZ4DataCompressor": _inflate_lz4}


def read(path: str | Path, *, time: float | None = None) -> Mesh:
    """Read a mesh or a point cloud from a file.

    Args:
        path: the file; its content decides where it contradicts the name.
        time: which step to take where the file holds several.

    Returns:
        A checked mesh, with the cells of the highest dimension in the file.

    Raises:
        ReadError: the file is missing, damaged, empty or of no known format.
        MeshError: the mesh in it contradicts itself.
    """
    path = Path(path)
    try:
        leaves = _leaves(path, time)
        return assemble(leaves, str(path))
    except MemoryError:
        raise ReadError(f"{path}: too large for the memory of this machine") from None
    except OSError as error:
        raise ReadError(f"{path}: cannot be read: {error.strerror or error}") from None


def _leaves(path: Path, time: float | None) -> list[Dataset]:
    """The data sets of a file, by the reader for its kind."""
    kind = recognise(path)
    if kind == "gz":
        with TemporaryDirectory(prefix="meshshard-") as folder:
            plain = gunzip(path, Path(folder))
            try:
                return _leaves(plain, time)
            except MeshshardError as error:
                raise type(error)(str(error).replace(str(plain), str(path))) from None
    if kind == "xml":
        return read_xml(path, _XML_INFLATE, time)
    if kind in _READERS:
        return _READERS[kind](path)
    raise ReadError(f"{path}: later")
