"""EnSight Gold: VTK reads past the end of a variable file, so the files are counted here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from meshshard.errors import ReadError
from meshshard.mesh.checks import warn

__all__ = ["check_case"]

WIDTHS = {"scalar": 1, "vector": 3, "tensor symm": 6, "tensor asym": 9}
PART = 80 + 4 + 80  # bytes of a part in a binary file: the word part, its number, a type of cells
_NUMBER = re.compile(rb"(?m)^[ \t]*[-+]?(?:\.?[0-9]|nan|inf)[^\n]*\n?")


class _Variable(NamedTuple):
    place: str
    name: str
    width: int
    time_set: str
    file: str


def check_case(
    path: Path, time: float | None, rows: Mapping[tuple[str, str], Sequence[int]]
) -> None:
    """Verify that the files of the variables hold enough values.

    Args:
        path: the .case file.
        time: the time step that was read.
        rows: numbers of rows that were read of each part, by ("node" or "element", name).

    Raises:
        ReadError: a file is too short.
    """
    sections = dict(_sections(path.read_text(errors="replace")))
    if "gold" not in sections.get("FORMAT", "").lower():
        return
    sets = _time_sets(sections.get("TIME", ""))
    for variable in _variables(sections.get("VARIABLE", "")):
        steps = sets.get(variable.time_set, {})
        times = [float(word) for word in steps.get("time values", [])]
        if time is not None and len(times) > 1 and time not in times:
            warn(f"{path}: '{variable.name}' has no step at {time!r}; an earlier one is read")
        at = max((i for i, t in enumerate(times) if time is None or t <= time), default=0)
        file = path.parent / _numbered(variable.file, steps, at)
        parts = rows.get((variable.place, variable.name), ())
        expected = sum(parts) * variable.width
        if file.is_file() and (found := _count(file.read_bytes(), len(parts))) < expected:
            raise ReadError(
                f"{path}: {file.name} holds {found} values, '{variable.name}' needs {expected}; "
                "the file is truncated"
            )


def _sections(text: str) -> Iterator[tuple[str, str]]:
    """Name and text of the sections of a case file."""
    words = re.split(r"(?m)^(FORMAT|GEOMETRY|VARIABLE|TIME|FILE|MATERIAL|BLOCK|SCRIPTS)\b.*$", text)
    return zip(words[1::2], words[2::2], strict=True)


def _variables(text: str) -> Iterator[_Variable]:
    """The variables with a file; each line is "kind per place: [time set] [file set] name file"."""
    for kind, place, line in re.findall(r"(?m)^\s*([\w ]+) per (node|element)\s*:(.*)$", text):
        words = line.split()
        if kind in WIDTHS and len(words) > 1:
            time_set = words[0] if len(words) > 2 and words[0].isdigit() else "1"
            yield _Variable(place, words[-2], WIDTHS[kind], time_set, words[-1].strip('"'))


def _time_sets(text: str) -> dict[str, dict[str, list[str]]]:
    """The entries of every time set, by its number; values are lists of words."""
    sets: dict[str, dict[str, list[str]]] = {}
    entries: dict[str, list[str]] = {}
    for key, value in re.findall(r"(?m)^[ \t]*([a-z][a-z ]*):([^:]*)(?=^[ \t]*[a-z]|\Z)", text):
        if key == "time set":
            entries = sets.setdefault(value.split()[0] if value.split() else "1", {})
        entries[key] = value.split()
    return sets


def _numbered(file: str, steps: Mapping[str, list[str]], at: int) -> str:
    """A file name with the number of step `at` in place of its asterisks, as wide as these."""
    if "filename numbers" in steps:
        number = int(steps["filename numbers"][at])
    else:
        first, by = (int(steps.get(f"filename {key}", ["0"])[0])
                     for key in ("start number", "increment"))  # fmt: skip
        number = first + at * by
    return re.sub(r"\*+", lambda stars: f"{number:0{len(stars[0])}d}", file)


def _count(data: bytes, n_parts: int) -> int:
    """Number of values in a variable file; of a binary one at most so many."""
    if b"\n" not in data[:81] or b"\0" in data[:81]:
        return max(0, len(data) - 80 - n_parts * PART) // 4
    lines = [match[0] for match in _NUMBER.finditer(data, data.find(b"\n") + 1)]
    cut = len(lines) > 1 and len(lines[-1]) < len(lines[-2]) - 1  # inside the last number
    return len(lines) - len(re.findall(rb"(?m)^part", data)) - cut
