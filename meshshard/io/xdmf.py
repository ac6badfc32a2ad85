"""XDMF: one time step as a document without references, which VTK's reader can read.

VTK's reader ends the process at the includes that DOLFINx writes, and reads memory past the end of
a list of numbers that is too short.
"""

from __future__ import annotations

import re
from copy import deepcopy
from math import prod
from pathlib import Path
from xml.etree import ElementTree

from meshshard.errors import ReadError
from meshshard.io.times import time_step

__all__ = ["one_step"]

Element = ElementTree.Element


def one_step(path: Path, time: float | None) -> str:
    """The XML of one time step; heavy data are named by absolute paths.

    Args:
        path: the .xdmf file.
        time: the requested time.

    Raises:
        ReadError: the XML is damaged, a list of numbers is too short, a file is missing, or
            the time does not exist.
    """
    try:
        root = ElementTree.parse(path).getroot()
    except (ElementTree.ParseError, ValueError) as error:
        raise ReadError(f"{path}: not well-formed XML: {error}") from None
    domain = root.find("Domain")
    if root.tag != "Xdmf" or domain is None:
        raise ReadError(f"{path}: XML, but not an XDMF file: it has no <Xdmf> with a <Domain>")
    _include(root, path)
    _select(domain, path, time)
    _merge(domain)
    for item in root.iter("DataItem"):
        _check(item, path)
    return ElementTree.tostring(root, encoding="unicode")


def _include(root: Element, path: Path) -> None:
    """Replace each include by the elements that its XPointer selects."""
    for parent in list(root.iter()):
        for at, child in reversed(list(enumerate(parent))):
            if not child.tag.endswith("}include"):
                continue
            pointer = child.get("xpointer", "").removeprefix("xpointer(").removesuffix(")")
            grid, _, names = pointer.partition("/*")
            grid = grid.replace("/Xdmf/", "./") if grid.startswith("/Xdmf/") else f".{grid}"
            try:
                found = root.find(grid)
            except (SyntaxError, KeyError):
                found = None
            wanted = re.findall(r"self::(\w+)", names)
            copies = [deepcopy(e) for e in found if e.tag in wanted] if found is not None else []
            if not copies:
                raise ReadError(f"{path}: its include '{pointer[:100]}' selects nothing")
            parent[at : at + 1] = copies


def _select(domain: Element, path: Path, time: float | None) -> None:
    """Replace each temporal collection by its grid at the requested time."""
    series = {
        (parent, grid): _times(grid)
        for parent in domain.iter()
        for grid in parent
        if grid.get("CollectionType") == "Temporal"
    }
    step = time_step(path, [t for times in series.values() for t in times], time)
    for (parent, grid), times in series.items():
        chosen = [child for t, child in zip(times, grid.findall("Grid"), strict=True) if t == step]
        at = list(parent).index(grid)
        parent[at : at + 1] = chosen[:1]


def _times(collection: Element) -> list[float]:
    """The time of each grid in a temporal collection: its own, one of a list, or its number."""
    grids = collection.findall("Grid")
    listed = collection.find("Time")
    words = "" if listed is None else listed.findtext("DataItem", "") or ""
    numbers = [float(word) for word in words.split()]
    if listed is not None and listed.get("TimeType") == "HyperSlab" and len(numbers) == 3:
        numbers = [numbers[0] + i * numbers[1] for i in range(int(numbers[2]))]
    if len(numbers) != len(grids):
        numbers = [float(i) for i in range(len(grids))]
    own = [grid.find("Time") for grid in grids]
    return [
        n if time is None else float(time.get("Value", n))
        for n, time in zip(numbers, own, strict=True)
    ]


def _merge(domain: Element) -> None:
    """Merge grids of the domain with the same points and cells to one with all their fields."""
    seen: dict[str, Element] = {}
    for grid in domain.findall("Grid"):
        parts = [grid.find(tag) for tag in ("Topology", "Geometry")]
        shape = "".join(ElementTree.tostring(e, "unicode").strip() for e in parts if e is not None)
        first = seen.setdefault(shape, grid)
        if shape and first is not grid:
            first.extend(grid.findall("Attribute"))
            domain.remove(grid)


def _check(item: Element, path: Path) -> None:
    """Verify the number of values of a DataItem, and make the name of its file absolute."""
    text = (item.text or "").strip()
    if item.get("ItemType", "Uniform") != "Uniform" or not text:
        return
    if item.get("Format", "XML") == "XML":
        expected, found = prod(map(int, item.get("Dimensions", "0").split())), len(text.split())
        if found != expected:
            raise ReadError(f"{path}: a list of {found} numbers, declared as {expected}: truncated")
        return
    name, mark, dataset = text.rpartition(":") if item.get("Format") == "HDF" else (text, "", "")
    file = path.absolute().parent / name
    if not file.is_file():
        raise ReadError(f"{path}: refers to '{name}', which does not exist; copy it there")
    item.text = f"{file}{mark}{dataset}"
