"""Small files that would grow in memory, on the disk or in time are refused first."""

import gzip
import lzma
import os
import resource
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from test_io import POINTS, array, vtp

from meshshard import io
from meshshard.errors import MeshError, ReadError

pytestmark = pytest.mark.slow

BIG = 1 << 30
MEASURE = """
import re, sys, warnings
from pathlib import Path
from meshshard import io
from meshshard.errors import MeshshardError
warnings.simplefilter("ignore")
try:
    io.read(sys.argv[1])
    print("read")
except MeshshardError as error:
    print(error)
status = Path("/proc/self/status").read_text()  # ru_maxrss is at least that of the parent
print(int(re.search("VmHWM:\\s+(\\d+)", status)[1]) * 1024)
"""


def peak(path: Path) -> tuple[str, int]:
    """What `read` says in a process of its own, and the largest memory of that process."""
    command = [sys.executable, "-c", MEASURE, str(path)]
    limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (12 * BIG, 12 * BIG))  # noqa: E731
    done = subprocess.run(command, capture_output=True, text=True, check=True, preexec_fn=limit)
    *said, memory = done.stdout.splitlines()
    return said[0], int(memory)


def compressed(name: str, size: int = BIG) -> bytes:
    """A .vtp with one array that declares another size than the header of the file."""
    step = 1 << 20
    stream = zlib.compressobj() if "ZLib" in name else lzma.LZMACompressor()
    data = b"".join(stream.compress(bytes(step)) for _ in range(size // step)) + stream.flush()
    head = struct.pack("<4Q", 1, size, 0, len(data))
    bomb = '<DataArray type="Float32" Name="bomb" format="appended" offset="0"/>'
    text = vtp(cell=bomb).replace("<VTKFile", f'<VTKFile header_type="UInt64" compressor="{name}"')
    tail = b'<AppendedData encoding="raw">_' + head + data + b"</AppendedData></VTKFile>"
    return text.removesuffix("</VTKFile>").encode() + tail


def vtk_xml(name: str) -> Callable[[Path], Path]:
    def _make(place: Path) -> Path:
        path = place / "bomb.vtp"
        path.write_bytes(compressed(name))
        return path

    return _make


def archive_of(path: Path, arrays: dict[str, tuple[tuple[int, ...], int]]) -> Path:
    """A compressed .npz of zeros: the shape that each array declares, and the bytes that it has."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, (shape, n_bytes) in arrays.items():
            head = {"descr": "<f8", "fortran_order": False, "shape": shape}
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array_header_1_0(file, head)
                zeros = bytes(min(n_bytes, 1 << 20))
                file.writelines(zeros for _ in range(n_bytes // len(zeros)))
    return path


def npz(place: Path) -> Path:
    return archive_of(place / "bomb.npz", {"points": ((3, 3), 72), "f": ((3, BIG), BIG)})


def npy(place: Path) -> Path:
    path = place / "bomb.npy"
    with path.open("wb") as file:
        head = {"descr": "<f8", "fortran_order": False, "shape": (BIG, 3)}
        np.lib.format.write_array_header_1_0(file, head)
    return path


def gz(place: Path) -> Path:
    path = place / "bomb.vtp.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(BIG >> 20):
            file.write(bytes(1 << 20))
    return path


def gz_of_blanks(place: Path) -> Path:
    path = place / "bomb.vtp.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(vtp().removesuffix("</VTKFile>").encode())
        for _ in range(BIG >> 20):
            file.write(b" " * (1 << 20))
    return path


def expanded(place: Path) -> Path:
    path = place / "bomb.pt"
    torch.save({"points": torch.eye(3), "f": torch.zeros(1).expand(3, 10**10)}, path)
    return path


def deflated(place: Path) -> Path:
    path, packed = place / "whole.pt", place / "bomb.pt"
    torch.save({"points": torch.zeros(3, BIG >> 6)}, path)
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for member in old.namelist():
            new.writestr(member, old.read(member))
    path.unlink()
    return packed


BOMBS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "zlib": (vtk_xml("vtkZLibDataCompressor"), "'bomb' is damaged: it declares 268435456 values"),
    "lzma": (vtk_xml("vtkLZMADataCompressor"), "'bomb' is damaged: it declares 268435456 values"),
    "npz": (npz, "an array declares"),
    "npy": (npy, "an array declares"),
    "gz": (gz, "not a .vtp file"),
    "gz of blanks": (gz_of_blanks, "more than 100 times its size"),
    "expanded": (expanded, "'f' (3, 10000000000) is expanded"),
    "deflated": (deflated, "compressed, torch.save never compresses"),
}
GOOD = {".vtp": "a.vtp", ".npz": "a.npz", ".npy": "a.npy", ".gz": "a.vtp", ".pt": "a.pt"}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_takes_no_more_memory_than_a_good_file(tmp_path: Path, name: str) -> None:
    make, words = BOMBS[name]
    bomb = make(tmp_path)
    good = tmp_path / GOOD[bomb.suffix]
    if good.suffix == ".vtp":
        good.write_text(vtp())
    elif good.suffix == ".pt":
        torch.save({"points": torch.eye(3)}, good)
    else:
        np.savez(good, points=np.eye(3)) if good.suffix == ".npz" else np.save(good, np.eye(3))
    said, memory = peak(good)
    assert said == "read"
    error, most = peak(bomb)
    assert words in error
    assert error.startswith(str(bomb))
    assert most <= memory + 2 * bomb.stat().st_size + 100e6


def test_an_array_that_is_no_field_is_not_decompressed(tmp_path: Path) -> None:
    arrays = {"points": ((3, 3), 72), "other": ((BIG >> 3,), BIG)}
    path = archive_of(tmp_path / "a.npz", arrays)
    said, memory = peak(path)
    assert said == "read"
    assert memory < 500e6


def pieces(place: Path, name: str, files: list[str]) -> Path:
    listed = "".join(f'<Piece Source="{f}"/>' for f in files)
    path = place / name
    path.write_text(f'<VTKFile type="PPolyData"><PPolyData>{listed}</PPolyData></VTKFile>')
    return path


def many_paths(place: Path) -> Path:
    for i in range(15):
        pieces(place, f"{i}.pvtp", [f"{i + 1}.pvtp"] * 4)
    return pieces(place, "a.pvtp", ["0.pvtp"] * 4)


def deep_blocks(place: Path) -> Path:
    path = place / "a.vtm"
    blocks = "<Block>" * 5000 + "</Block>" * 5000
    kind = "vtkMultiBlockDataSet"
    path.write_text(f'<VTKFile type="{kind}"><{kind}>{blocks}</{kind}></VTKFile>')
    return path


def outside(place: Path) -> Path:
    (place / "secret.vtp").write_text(vtp())
    (place / "in").mkdir()
    return pieces(place / "in", "a.pvtp", ["../secret.vtp"])


def absolute(place: Path) -> Path:
    (place / "secret.vtp").write_text(vtp())
    (place / "in").mkdir()
    return pieces(place / "in", "a.pvtp", [f"{place}/secret.vtp"])


def linked(place: Path) -> Path:
    (place / "secret.vtp").write_text(vtp())
    (place / "in").mkdir()
    (place / "in" / "link.vtp").symlink_to("../secret.vtp")
    return pieces(place / "in", "a.pvtp", ["link.vtp"])


def pipe(place: Path) -> Path:
    os.mkfifo(place / "pipe.vtp")
    return pieces(place, "a.pvtp", ["pipe.vtp"])


def only_a_pipe(place: Path) -> Path:
    os.mkfifo(place / "pipe.vtp")
    return place / "pipe.vtp"


def text(content: str, name: str = "a.vtp") -> Callable[[Path], Path]:
    def _make(place: Path) -> Path:
        path = place / name
        path.write_text(content)
        return path

    return _make


def poly(body: str) -> str:
    return f'<VTKFile type="PolyData"><PolyData>{body}</PolyData></VTKFile>'


ENTITIES = "".join(f'<!ENTITY e{i} "{f"&e{i - 1};" * 10}">' for i in range(1, 10))
XML = '<?xml version="1.0"?><!DOCTYPE x [{}]>'
LAUGHS = XML.format(f'<!ENTITY e0 "aaaaaaaaaa">{ENTITIES}') + poly("<Piece>&e9;</Piece>")
FILE = XML.format('<!ENTITY a SYSTEM "b.vtp">') + poly("<Piece>&a;</Piece>")
GRID = '<VTKFile type="ImageData"><ImageData><Piece Extent="{}"/></ImageData></VTKFile>'
REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "entities": (text(LAUGHS), "not well-formed XML"),
    "a file as entity": (text(FILE), "not well-formed XML"),
    "a count of 5000 digits": (
        text(poly(f'<Piece NumberOfPoints="{"9" * 5000}"/>')),
        "is not a count",
    ),
    "an offset of 5000 digits": (
        text(poly(f'<Piece><DataArray offset="{"9" * 5000}"/></Piece>')),
        "empty",
    ),
    "points without arrays": (text(GRID.format("0 16000000 0 0 0 0"), "a.vti"), "without any"),
    "pieces without anything": (text(poly("<Piece/>" * 300_000)), "empty"),
    "itself": (lambda place: pieces(place, "a.pvtp", ["a.pvtp"]), "has been read before"),
    "twice": (lambda place: pieces(place, "a.pvtp", ["b.vtp", "b.vtp"]), "has been read before"),
    "many paths": (many_paths, "refers to"),
    "deep blocks": (deep_blocks, "more than 16 blocks in each other"),
    "outside": (outside, "outside its folder"),
    "absolute": (absolute, "outside its folder"),
    "linked": (linked, "outside its folder"),
    "pipe": (pipe, "which is not a file"),
    "only a pipe": (only_a_pipe, "a device or a pipe"),
    "device": (lambda place: Path("/dev/zero"), "a device or a pipe"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_lead_elsewhere_or_nowhere(tmp_path: Path, name: str) -> None:
    (tmp_path / "b.vtp").write_text(vtp())
    make, words = REFUSED[name]
    with pytest.raises(ReadError, match=words):
        io.read(make(tmp_path))


def test_a_folder_of_links_may_be_read(tmp_path: Path) -> None:
    for place in ("run", "links"):
        (tmp_path / place).mkdir()
    (tmp_path / "run" / "b.vtp").write_text(vtp(cell=array("Float32", "p", [1, 2])))
    pieces(tmp_path / "run", "a.pvtp", ["b.vtp"])
    for name in ("a.pvtp", "b.vtp"):
        (tmp_path / "links" / name).symlink_to(tmp_path / "run" / name)
    assert io.read(tmp_path / "links" / "a.pvtp").n_points == len(POINTS)


def test_nothing_is_left_when_a_reader_is_killed(tmp_path: Path) -> None:
    """Decompressed data have no name; what stays is a link that leads nowhere."""
    path = tmp_path / "a.vtp.gz"
    with gzip.open(path, "wb", compresslevel=0) as file:
        file.write(vtp().encode() + b" " * 10**7)
    code = (
        "import os, signal, sys\nfrom meshshard.io import files\n"
        "files._datasets = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "files.read_gzip(__import__('pathlib').Path(sys.argv[1]), None)"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    (tmp_path / "temporary").mkdir()
    done = subprocess.run([sys.executable, "-c", code, str(path)], env=environment, check=False)
    assert done.returncode == -9
    left = [f for f in (tmp_path / "temporary").rglob("*") if f.is_file()]
    assert not left


def test_a_name_with_a_lone_surrogate(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"points": torch.eye(3), "p\ud800": torch.zeros(3)}, path)
    with pytest.raises((ReadError, MeshError), match="name"):
        io.read(path)
