"""The table of file formats, and recognition of the format of a file by its first bytes.

To add a format, write its reader in `readers/` and add a row to `FORMATS`.

The content of a file decides, its name only where the content cannot. Empty files, Git LFS pointers
and HTML pages are refused here, before a reader opens them.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from meshshard.errors import ReadError

__all__ = ["FORMATS", "Format", "last_bytes", "recognize"]

BLANKS = b"\xef\xbb\xbf \t\r\n"  # white space, and the byte order mark of UTF-8


class Format(NamedTuple):
    """One file format.

    Attributes:
        name: name in messages and in the documentation.
        suffixes: file name suffixes, lower case, without the dot.
        reader: "module:function" in `meshshard.io`, imported when a file is read. The function
            takes the path, and the time if `has_steps`, and returns a list of `Dataset` (in the
            module `foreign`, a VTK object).
        magic: what a file may start with; empty if the suffix alone identifies the format.
        has_steps: whether a file may hold several time steps.
        is_marker: whether the file is only a marker, often empty, for the folder around it.
        note: a remark for the documentation.
    """

    name: str
    suffixes: tuple[str, ...]
    reader: str
    magic: tuple[bytes, ...] = ()
    has_steps: bool = False
    is_marker: bool = False
    note: str = ""

    @property
    def in_child(self) -> bool:
        """Whether the file is read in a child process: its reader may crash on damaged files."""
        return self.reader.startswith("foreign:")

    def read(self, path: Path, time: float | None) -> Any:
        """Import and call the reader."""
        module, function = self.reader.split(":")
        reader = getattr(import_module(f"meshshard.io.{module}"), function)
        return reader(path, time) if self.has_steps else reader(path)


XML = (b"<?xml", b"<VTKFile", b"<!--")
HDF5 = (b"\x89HDF\r\n",)
FORMATS = (
    Format("VTK XML",
           ("vtp", "vtu", "vts", "vtr", "vti", "pvtp", "pvtu", "pvts", "pvtr", "pvti",
            "vtm", "vtmb", "vtpc", "vtpd", "pvd"),
           "readers.vtk_xml_pieces:read_xml", XML, has_steps=True,
           note="ascii, base64 and raw; zlib, lzma, lz4; polyhedra; pieces and blocks of several "
                "files are concatenated, the cell field `block` numbers the blocks"),
    Format("VTK legacy", ("vtk",), "readers.vtk_legacy:read_legacy", (b"# vtk DataFile",),
           note="versions 1 to 5.1, ASCII and binary"),
    Format("VTKHDF", ("vtkhdf", "hdf"), "foreign:read_hdf", HDF5, has_steps=True),
    Format("STL", ("stl",), "readers.stl:read_stl",
           note="stores no shared points: equal points are merged"),
    Format("PLY", ("ply",), "readers.ply:read_ply", (b"ply\n", b"ply\r\n"),
           note="every scalar property becomes a field"),
    Format("OBJ", ("obj",), "readers.obj:read_obj", note="geometry only"),
    Format("NumPy archive", ("npz",), "readers.arrays:read_npz", note="point clouds"),
    Format("NumPy array", ("npy",), "readers.arrays:read_npz", (b"\x93NUMPY",),
           note="point clouds"),
    Format("CSV", ("csv",), "readers.arrays:read_csv", note="point clouds"),
    Format("PyTorch", ("pt", "pth"), "readers.arrays:read_pt",
           note="point clouds; read with `weights_only`, so nothing in the file is executed"),
    Format("Gmsh", ("msh",), "foreign:read_meshio", (b"$",), note="needs the extra `meshio`"),
    Format("SU2", ("su2",), "foreign:read_meshio", note="needs the extra `meshio`"),
    Format("Abaqus", ("inp",), "foreign:read_meshio", (b"*",), note="needs the extra `meshio`"),
    Format("AVS UCD", ("inp",), "foreign:read_vtk"),
    Format("Fluent", ("msh", "cas"), "foreign:read_fluent"),
    Format("Fluent, HDF5", ("h5",), "foreign:read_vtk", HDF5),
    Format("EnSight", ("case", "encas"), "foreign:read_ensight", has_steps=True),
    Format("OpenFOAM", ("foam", "openfoam"), "foreign:read_openfoam", has_steps=True,
           is_marker=True, note="an empty file in the folder of the case; the folders `processor*` "
                                "are read if only they have the results"),
    Format("CGNS", ("cgns",), "foreign:read_vtk", has_steps=True),
    Format("XDMF", ("xdmf", "xmf"), "foreign:read_xdmf", (b"<?xml", b"<Xdmf", b"<!--"),
           has_steps=True, note="as DOLFINx and meshio write it; HDF5, binary or inline"),
    Format("gzip", ("gz",), "files:read_gzip", (b"\x1f\x8b",), has_steps=True,
           note="of any of these files"),
)  # fmt: skip


def recognize(path: Path) -> Format:
    """The format of a file.

    Raises:
        ReadError: the file does not exist, is empty, is not a mesh, or its format is unknown.
    """
    if path.is_dir():
        raise ReadError(f"{path}: is a folder; name the file in it (for OpenFOAM an empty x.foam)")
    if not path.exists():
        raise ReadError(f"{path}: no such file")
    if not path.is_file():
        raise ReadError(f"{path}: a device or a pipe; copy its content to a file")
    suffix = path.suffix.lower().lstrip(".")
    named = [row for row in FORMATS if suffix in row.suffixes]
    if named and named[0].is_marker:
        return named[0]
    head = _first_bytes(path)
    start = head.lstrip(BLANKS)
    _refuse_other_files(path, head, start.lower())
    matching = [row for row in FORMATS if start.startswith(row.magic)]
    found = [
        *(row for row in matching if row in named),
        *(row for row in matching if not row.in_child),  # VTK and meshio go by the suffix
        *(row for row in named if not row.magic),
    ]
    if found:
        return found[0]
    if not named:
        known = " ".join(dict.fromkeys(f".{s}" for row in FORMATS for s in row.suffixes))
        raise ReadError(f"{path}: unknown format '.{suffix}'; these can be read: {known}")
    line = head[:24].decode("ascii", "replace").splitlines()[0]
    raise ReadError(
        f"{path}: not a .{suffix} file, it starts with {line!r}; check where it comes from"
    )


def _refuse_other_files(path: Path, head: bytes, start: bytes) -> None:
    """Refuse what is often downloaded in place of a mesh."""
    if not head:
        raise ReadError(f"{path}: empty file (0 bytes); copy or download it again")
    if start.startswith(b"version https://git-lfs"):
        raise ReadError(f"{path}: a Git LFS pointer, not the file; fetch it with `git lfs pull`")
    if start.startswith((b"<!doctype html", b"<html")):
        raise ReadError(
            f"{path}: an HTML page, not a mesh; the server refused the download, repeat it"
        )


def _first_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(512)
    except OSError as error:
        raise ReadError(f"{path}: cannot be opened: {error.strerror}") from None


def last_bytes(path: Path, n: int) -> bytes:
    """The last `n` bytes of a file."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - n))
        return file.read()
