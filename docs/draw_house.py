"""Draws docs/_static/house.svg: the folders of the package, and which imports which.

Run `python docs/draw_house.py` after a change of imports; tests/test_docs.py compares the file.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from html import escape
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "meshshard"
PICTURE = ROOT / "docs" / "_static" / "house.svg"

# From the top floor down, as the layers of import-linter in pyproject.toml; what each is about.
FLOORS = {
    "cli": "the command line",
    "models": "Transolver, MeshGraphNet, DGCNN, …",
    "nn": "layers, and convert() for PyG models",
    "ranks": "start ranks; load(folder) on each",
    "tensor": "ShardTensor and its rules",
    "comm": "collectives, halo exchange",
    "partitioning": "METIS and others; Partition",
    "viz": "pictures",
    "store": "the folder of shards",
    "graph": "neighbors, halo, exchange plan",
    "io": "files to Mesh, and back",
    "mesh": "Mesh: points, cells, fields",
    "root": "errors, processes, atomic writes",
}
TORCH = "comm"  # the lowest floor that imports torch
ROW, WIDTH, LEFT, REACH = 40, 390, 24, 12


def folder_of(module: str) -> str | None:
    """Floor of a module of the package by its dotted name."""
    parts = module.split(".")
    if parts[0] != "meshshard" or len(parts) == 1:
        return None
    return parts[1] if parts[1] in FLOORS else "root"


def imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "meshshard":
            yield from (f"meshshard.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def arrows() -> Counter[tuple[str, str]]:
    """How many files of one floor import another; all import errors.py, which is not drawn."""
    found: Counter[tuple[str, str]] = Counter()
    for file in sorted(PACKAGE.rglob("*.py")):
        place = file.relative_to(PACKAGE).parts
        if len(place) == 1 and place[0] in ("__init__.py", "__main__.py"):
            continue  # the lazy face of the package
        source = place[0] if len(place) > 1 else "root"
        targets = {folder_of(name) for name in imported(file)} - {source, "root", None}
        found.update((source, str(target)) for target in targets)
    return found


def arc(low: int, high: int, count: int, color: str) -> str:
    """An arrow from one floor down to another, to the right of the boxes."""
    x, top, bottom = LEFT + WIDTH, ROW * low + 60, ROW * high + 48
    bend = 12 + REACH * (high - low) ** 1.15
    return (
        f'<path d="M{x} {top} C{x + bend:.0f} {top} {x + bend:.0f} {bottom} {x + 1} {bottom}" '
        f'fill="none" stroke="{color}" stroke-width="{0.7 + min(count, 15) * 0.12:.2f}" '
        f'marker-end="url(#{color[1:]})"/>'
    )


def marker(color: str) -> str:
    return (
        f'<marker id="{color[1:]}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="5" '
        f'markerHeight="5" markerUnits="userSpaceOnUse" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{color}"/></marker>'
    )


def box(row: int, name: str, about: str) -> str:
    y = ROW * row + 40
    shown = "errors.py, …" if name == "root" else f"{name}/"
    torch = 0 < row <= list(FLOORS).index(TORCH)
    fill = "#e8f0fb" if torch else "#f0f4ea"
    return (
        f'<rect x="{LEFT}" y="{y}" width="{WIDTH}" height="28" rx="4" fill="{fill}" '
        f'stroke="#7a8794"/>'
        f'<text x="{LEFT + 12}" y="{y + 19}" font-weight="bold">{escape(shown)}</text>'
        f'<text x="{LEFT + 128}" y="{y + 19}" fill="#444">{escape(about)}</text>'
    )


def draw() -> str:
    """The picture as SVG text."""
    rows = {name: row for row, name in enumerate(FLOORS)}
    colors = ["#3b6ea5", "#c2571a", "#4f8f3a", "#8a5aa8", "#b0892b", "#3c8f8a"]
    lines = [
        arc(rows[a], rows[b], count, colors[rows[a] % len(colors)])
        for (a, b), count in sorted(arrows().items())
    ]
    torch = ROW * (rows[TORCH] + 1) + 32
    height = ROW * len(FLOORS) + 52
    text = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13">',
        f'<rect width="640" height="{height}" fill="white"/>',
        f"<defs>{''.join(map(marker, colors))}</defs>",
        f'<text x="{LEFT}" y="24" fill="#222">meshshard: an arrow leads from a folder to one '
        "that it imports; arrows only go down</text>",
        *lines,
        *(box(row, name, about) for row, (name, about) in enumerate(FLOORS.items())),
        f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{torch}" y2="{torch}" stroke="#888" '
        'stroke-dasharray="5 4"/>',
        f'<text x="{LEFT}" y="{height - 8}" font-size="11" fill="#666">blue: needs PyTorch; '
        "green: NumPy only (cli imports PyTorch for some commands). Thicker: more files.</text>",
        "</svg>",
    ]
    return "\n".join(text) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
