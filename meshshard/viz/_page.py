"""Page: a scene as one HTML file, with its title and legend written over it."""

from __future__ import annotations

import importlib.util
import re
from html import escape
from pathlib import Path
from typing import Any

from meshshard.errors import RenderError
from meshshard.mesh import Array

__all__ = ["write_page"]

STYLE = """
.content { position: fixed; inset: 0; }
.ms-over { position: fixed; z-index: 10; font: 14px/1.5 system-ui, sans-serif; color: #1a1a1a;
  background: rgba(255, 255, 255, 0.8); padding: 8px 12px; border-radius: 6px; }
.ms-over b { font-size: 17px; }
.ms-title { top: 10px; left: 10px; pointer-events: none; }
.ms-legend { top: 10px; right: 10px; max-height: calc(100vh - 40px); overflow-y: auto; }
.ms-legend div { display: flex; align-items: center; gap: 8px; }
.ms-legend i { width: 18px; height: 14px; border-radius: 3px; display: inline-block; }
"""


def write_page(
    made: Any, path: Path, title: str, notes: list[str], legend: tuple[list[str], Array]
) -> None:
    """Write a plotter's scene as a page that needs no other file and no network.

    Args:
        made: the plotter; it is closed.
        path: of the file.
        title: a line at the top left.
        notes: smaller lines below it.
        legend: texts and their (n, 3) colours.

    Raises:
        RenderError: the packages that write it are missing.
    """
    if importlib.util.find_spec("trame_pyvista") is None:
        made.close()
        raise RenderError("writing HTML needs more packages: pip install 'meshshard[html]'")
    scene = made.trame.export_html(None).read()
    made.close()
    over = _title(title, notes) + _legend(*legend)
    head, tag, tail = scene.rpartition("</body>")
    head = re.sub("<title>.*?</title>", lambda _: f"<title>{escape(title)}</title>", head, count=1)
    page = f'{head}<style>{STYLE}</style><div class="content"></div>{over}{tag}{tail}'
    path.write_text(page, encoding="utf-8")


def _title(title: str, notes: list[str]) -> str:
    lines = "".join(f"<br>{escape(note)}" for note in notes)
    return f'<div class="ms-over ms-title"><b>{escape(title)}</b>{lines}</div>'


def _legend(texts: list[str], colours: Array) -> str:
    rows = "".join(
        f'<div><i style="background: rgb({r}, {g}, {b})"></i>{escape(text)}</div>'
        for text, (r, g, b) in zip(texts, colours.tolist(), strict=True)
    )
    return f'<div class="ms-over ms-legend">{rows}</div>' if texts else ""
