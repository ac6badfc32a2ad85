"""HTML page: a scene that can be rotated in a browser, with its title and legend, in one file."""

from __future__ import annotations

import io
import json
import re
import zipfile
from html import escape
from pathlib import Path
from typing import Any

from meshshard.atomic_write import atomic_file, report_write_errors
from meshshard.errors import RenderError
from meshshard.mesh import Array
from meshshard.viz.colors import INK

__all__ = ["write_page"]

# vtk.js asks for icons at kitware.github.io; the policy forbids every request to a server.
ICONS = "https://kitware.github.io/vtk-js/icon/"
OFFLINE = (
    '<meta http-equiv="Content-Security-Policy" '
    "content=\"default-src 'unsafe-inline' 'unsafe-eval' data: blob:\">"
)
STYLE = """
.content { position: fixed; inset: 0; }
.text { position: fixed; z-index: 10; font: 14px/1.5 system-ui, sans-serif; color: INK;
  background: rgba(255, 255, 255, 0.8); padding: 8px 12px; border-radius: 6px; }
.text b { font-size: 17px; }
.title { top: 10px; left: 10px; pointer-events: none; }
.legend { top: 10px; right: 10px; max-height: calc(100vh - 40px); overflow-y: auto;
  white-space: pre; }
.legend div { display: flex; align-items: center; gap: 8px; }
.legend i { width: 18px; height: 14px; border-radius: 3px; display: inline-block; }
""".replace("INK", INK)


def write_page(made: Any, path: Path, lines: list[str], legend: list[str], colors: Array) -> None:
    """Write a plotter's scene as a page that needs no other file and no network.

    Args:
        made: the plotter; it is closed.
        path: HTML file to write.
        lines: the title, then the notes.
        legend: a heading, then an entry for each color; a heading alone is not written.
        colors: (n, 3) uint8.

    Raises:
        RenderError: the package that writes the page is missing.
    """
    viewer = _viewer(made)
    made.close()
    title = escape(lines[0])
    notes = "".join(f"<br>{escape(note)}" for note in lines[1:])
    text = f'<div class="text title"><b>{title}</b>{notes}</div>{_legend(legend, colors)}'
    head, tag, tail = viewer.rpartition("</body>")
    head = head.replace(ICONS, "data:,").replace("<head>", f"<head>{OFFLINE}", 1)
    head = re.sub("<title>.*?</title>", lambda _: f"<title>{title}</title>", head, count=1)
    page = f'{head}<style>{STYLE}</style><div class="content"></div>{text}{tag}{tail}'
    with report_write_errors(path), atomic_file(path) as part:
        part.write_text(page, encoding="utf-8")


def _viewer(made: Any) -> str:
    """A page with the scene and vtk.js, which draws it.

    PyVista's `export_html` writes the same page through a web server: it needs nine more packages
    and opens a port that stays open. Titles, labels and legends are missing in both.
    """
    try:
        from trame_vtk.modules.vtk import serializers
        from trame_vtk.tools.vtksz2html import write_html
    except ImportError:
        made.close()
        raise RenderError(
            "writing HTML needs the package trame-vtk: pip install 'meshshard[html]'"
        ) from None
    made.render()
    window = made.render_window
    serializers.initialize_serializers()
    context = serializers.SynchronizationContext()
    context.set_ignore_last_dependencies(True)
    scene = serializers.serialize(None, window, serializers.reference_id(window), context, 1)
    scene["extra"] = {
        "vtkRefId": serializers.reference_id(window),
        "centerOfRotation": made.camera.focal_point,
        "camera": serializers.reference_id(made.camera),
    }
    arrays = {
        entry["hash"]: {**entry, "content": context.get_cached_data_array(entry["hash"], False)}
        for entry in serializers.extract_array_hash(scene)
    }
    packed, page = io.BytesIO(), io.StringIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("index.json", json.dumps({"hashes": arrays, "scene": scene}))
    write_html(packed.getvalue(), page)
    return page.getvalue()


def _legend(texts: list[str], colors: Array) -> str:
    rows = "".join(
        f'<div><i style="background: rgb({r}, {g}, {b})"></i>{escape(text)}</div>'
        for text, (r, g, b) in zip(texts[1:], colors.tolist(), strict=False)
    )
    return f'<div class="text legend">{escape(texts[0])}{rows}</div>' if rows else ""
