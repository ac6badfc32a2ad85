"""What the first bytes of a file say, before any reader sees it.

Files arrive cut short, empty, as Git LFS pointers, as HTML pages of a server that said no, gzipped,
or under another format's name. The content decides; the name only where the content cannot.
"""

from __future__ import annotations

import gzip
import shutil
import zlib
from pathlib import Path

from meshshard.errors import ReadError

__all__ = ["SUFFIXES", "gunzip", "recognize"]

XML = ("vtp", "vtu", "vts", "vtr", "vti", "vtm", "vtmb", "vtpc", "vtpd", "pvd")
SUFFIXES: dict[str, str] = {
    **dict.fromkeys(XML, "xml"),
    **dict.fromkeys(("pvtp", "pvtu", "pvts", "pvtr", "pvti"), "xml"),
    "vtk": "legacy",
    "vtkhdf": "vtkhdf",
    "hdf": "vtkhdf",
    "stl": "stl",
    "ply": "ply",
    "obj": "obj",
    "npz": "npz",
    "npy": "npy",
    "csv": "csv",
    "pt": "pt",
    "pth": "pt",
    "msh": "fluent",
    "su2": "meshio",
    "inp": "vtk",
    "cgns": "vtk",
    "case": "vtk",
    "encas": "vtk",
    "cas": "fluent",
    "foam": "vtk",
    "openfoam": "vtk",
}
MAGIC = (
    (b"\x1f\x8b", "gz"),
    (b"# vtk DataFile", "legacy"),
    (b"\x89HDF\r\n", "vtkhdf"),
    (b"ply\n", "ply"),
    (b"ply\r\n", "ply"),
    (b"\x93NUMPY", "npy"),
)
MARKERS = ("foam", "openfoam")  # names of empty files that stand for a case
BY_NAME = (
    "stl",
    "obj",
    "csv",
    "pt",
    "npz",
    "meshio",
    "fluent",
    "vtk",
)  # no magic bytes of their own


def recognize(path: Path) -> str:
    """The kind of a file: a value of `SUFFIXES`, or "gz".

    Raises:
        ReadError: it does not exist, is empty, is not a mesh, or is of no known format.
    """
    suffix = path.suffix.lower().lstrip(".")
    if path.is_dir():
        raise ReadError(f"{path}: is a folder; name the file in it (for OpenFOAM an empty x.foam)")
    if not path.exists():
        raise ReadError(f"{path}: no such file")
    if suffix in MARKERS:
        return "vtk"
    try:
        with path.open("rb") as file:
            head = file.read(512)
    except OSError as error:
        raise ReadError(f"{path}: cannot be opened: {error.strerror}") from None
    _refuse_impostors(path, head)
    return _kind(path, suffix, head)


def _refuse_impostors(path: Path, head: bytes) -> None:
    """Things that download in place of a mesh."""
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if not head:
        raise ReadError(f"{path}: empty file (0 bytes); copy or download it again")
    if head.startswith(b"version https://git-lfs"):
        raise ReadError(
            f"{path}: a Git LFS pointer, not the file itself; fetch it with `git lfs pull`"
        )
    if text.startswith((b"<!doctype html", b"<html")):
        raise ReadError(f"{path}: an HTML page, not a mesh; the download was refused, repeat it")


def _kind(path: Path, suffix: str, head: bytes) -> str:
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if text.startswith((b"<?xml", b"<VTKFile", b"<!--")):
        return "xml"
    for magic, kind in MAGIC:
        if head.startswith(magic):
            # Fluent and CGNS files may be HDF5 inside: there the name decides
            return SUFFIXES[suffix] if kind == "vtkhdf" and suffix in ("cas", "cgns") else kind
    if (suffix, text[:1]) in (("msh", b"$"), ("inp", b"*")):
        return "meshio"  # Gmsh and Abaqus; otherwise Fluent and AVS
    kind = SUFFIXES.get(suffix, "")
    if kind == "fluent" and not _tail(path).rstrip(b"\0 \t\r\n").endswith(b")"):
        raise ReadError(f"{path}: truncated: a Fluent file ends with a closing parenthesis")
    if kind in BY_NAME:
        return kind
    if not kind:
        known = " ".join(f".{name}" for name in SUFFIXES)
        raise ReadError(f"{path}: unknown format '.{suffix}'; these can be read: {known}")
    start = head[:24].decode("ascii", "replace").splitlines()[0]
    raise ReadError(
        f"{path}: not a .{suffix} file: it starts with {start!r}; check where it is from"
    )


def _tail(path: Path) -> bytes:
    """The last bytes of a file."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 512))
        return file.read()


def gunzip(path: Path, folder: Path) -> Path:
    """Inflate a .gz into a folder; the file there has the name without .gz.

    Raises:
        ReadError: the compressed data are damaged or cut short, or the disk is full.
    """
    name = path.stem if path.suffix.lower() == ".gz" else path.name
    out = folder / name
    try:
        with gzip.open(path) as packed, out.open("wb") as plain:
            shutil.copyfileobj(packed, plain, 1 << 20)
    except (OSError, EOFError, zlib.error) as error:
        raise ReadError(f"{path}: cannot be decompressed (gz): {error}; try gunzip") from None
    return out
