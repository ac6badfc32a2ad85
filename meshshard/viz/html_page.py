"""HTML page: a scene that can be rotated in a browser, with its title and legend, in one file."""

from __future__ import annotations

import io
import json
import re
import zipfile
from html import escape
from pathlib import Path
from typing import Any, TypeAlias

from meshshard.atomic_write import atomic_file, report_write_errors
from meshshard.errors import RenderError
from meshshard.mesh import Array
from meshshard.viz.colors import INK
from meshshard.viz.scales import Scale

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
.legend .rows { display: grid; grid-template-rows: repeat(24, auto); grid-auto-flow: column;
  column-gap: 14px; }
.legend label { display: flex; align-items: center; gap: 6px; }
.legend i { width: 18px; height: 14px; border-radius: 3px; display: inline-block; }
.bar { position: relative; width: 20px; height: 45vh; margin: 14px 80px 8px 4px; }
.bar span { position: absolute; left: 30px; transform: translateY(50%); }
.reset { bottom: 10px; left: 10px; border: 1px solid silver; cursor: pointer; }
@media (max-width: 700px) {
  .legend { top: auto; bottom: 50px; max-height: 25vh; font-size: 12px; }
  .bar { height: 18vh; }
}
""".replace("INK", INK)


SCRIPT = """
const scene = () => window.global.renderWindow;  // vtk.js puts it there
const view = () =>
  scene() && scene().getRenderers().find((r) => r.getActors().length >= shards.length);
const drawn = () => view().getActors();
const waiting = setInterval(() => {
  if (!view()) return;
  clearInterval(waiting);
  const camera = view().getActiveCamera();
  const start = structuredClone(camera.get("position", "focalPoint", "viewUp", "parallelScale"));
  document.querySelector(".reset").onclick = () => {
    camera.set(structuredClone(start));
    view().resetCameraClippingRange();
    scene().render();
  };
  document.querySelectorAll("[data-shard]").forEach((box) => {
    box.onchange = () => {
      shards.forEach((p, i) => {
        if (p == box.dataset.shard) drawn()[i].setVisibility(box.checked);
      });
      scene().render();
    };
  });
}, 100);
"""
Legend: TypeAlias = tuple[str, list[str], Array]  # heading, entries, colors


def write_page(made: Any, path: Path, lines: list[str], legend: Legend | Scale) -> None:
    """Write a plotter's scene as a page that needs no other file and no network.

    Boxes in the legend hide and show the actors whose names start with "shard" and a number.

    Args:
        made: the plotter; it is closed.
        path: HTML file to write.
        lines: the title, then the notes.
        legend: a heading, the entries and their (n, 3) uint8 colors; or the scale of a field.

    Raises:
        RenderError: the package that writes the page is missing.
    """
    names = [re.match(r"shard (\d+)", name) for name in made.renderer.actors]
    shards = [int(name[1]) if name else -1 for name in names]
    viewer = _viewer(made)
    made.close()
    title = escape(lines[0])
    notes = "".join(f"<br>{escape(note)}" for note in lines[1:])
    shown = _bar(legend) if isinstance(legend, Scale) else _legend(*legend)
    text = f'<div class="text title"><b>{title}</b>{notes}</div>{shown}'
    text += '<button class="text reset">Reset view</button>'
    script = f"<script>const shards = {shards};{SCRIPT}</script>"
    head, tag, tail = viewer.rpartition("</body>")
    head = head.replace(ICONS, "data:,").replace("<head>", f"<head>{OFFLINE}", 1)
    head = re.sub("<title>.*?</title>", lambda _: f"<title>{title}</title>", head, count=1)
    page = f'{head}<style>{STYLE}</style><div class="content"></div>{text}{script}{tag}{tail}'
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


def _legend(heading: str, entries: list[str], colors: Array) -> str:
    """A list of shards; a box hides or shows the shard."""
    if not entries:
        return ""
    rows = "".join(
        f'<label><input type="checkbox" checked data-shard="{p}">'
        f'<i style="background: rgb({r}, {g}, {b})"></i>{escape(text)}</label>'
        for p, (text, (r, g, b)) in enumerate(zip(entries, colors.tolist(), strict=False))
    )
    return f'<div class="text legend">{escape(heading)}<div class="rows">{rows}</div></div>'


def _bar(scale: Scale) -> str:
    """The colors of a scale with round values beside them."""
    colors = ", ".join("rgb({}, {}, {})".format(*c[:3]) for c in scale.table().values[::8].tolist())
    ticks = "".join(
        f'<span style="bottom: {100 * at:.2f}%">{escape(text)}</span>'
        for at, text in scale.ticks().items()
    )
    gradient = f'<div class="bar" style="background: linear-gradient(to top, {colors})">'
    return f'<div class="text legend">{escape(scale.title)}{gradient}{ticks}</div></div>'
