"""Explorer: controls in a notebook that cut a mesh again and draw it."""

from __future__ import annotations

import tempfile
from base64 import b64encode
from functools import lru_cache
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any

from meshshard.errors import MeshshardError, RenderError
from meshshard.graph import Graph
from meshshard.mesh import Mesh
from meshshard.partitioning.methods import METHODS
from meshshard.partitioning.partition import Partition, partition
from meshshard.viz import Style, plot_shards, view

__all__ = ["explore"]

ALL = "all shards"


def explore(mesh: Mesh | Graph, parts: int = 8, *, size: tuple[int, int] = (900, 570)) -> Any:
    """Controls for parts, method, gap and halo above a picture of the shards, in a notebook.

    "turn" replaces the picture by a scene that can be turned, with the same title, legend and
    numbers; it needs the extra `html`.

    Args:
        mesh: anything that `partition` cuts.
        parts: number of shards at first.
        size: width and height of the picture in pixels.

    Returns:
        A widget, which the notebook shows.

    Raises:
        RenderError: the package ipywidgets is missing.
    """
    try:
        import ipywidgets as widgets
    except ImportError:
        raise RenderError(
            "explore needs the package ipywidgets: pip install 'meshshard[jupyter]'"
        ) from None

    @lru_cache(maxsize=8)
    def cut(parts: int, method: str) -> Partition:
        return partition(mesh, parts, method=method)

    late = {"continuous_update": False}
    controls = {
        "parts": widgets.BoundedIntText(parts, min=1, max=100_000, description="parts", **late),
        "method": widgets.Dropdown(options=list(METHODS), description="method"),
        "gap": widgets.FloatSlider(0.0, min=0.0, max=1.5, step=0.1, description="gap", **late),
        "halo": widgets.Dropdown(options=[ALL, *range(parts)], description="halo of"),
        "turn": widgets.Checkbox(False, description="turn", indent=False),
    }
    shown, said = widgets.HTML(), widgets.HTML()

    def draw(change: Any = None) -> None:
        asked = {name: control.value for name, control in controls.items()}
        if change is not None and change["owner"] is controls["parts"]:
            controls["halo"].options = [ALL, *range(asked["parts"])]
            asked["halo"] = ALL
        try:
            made = cut(asked["parts"], asked["method"])
            shown.value = _drawn(made, asked, size)
            said.value = "" if asked["turn"] else made.quality._repr_html_()
        except MeshshardError as error:
            said.value = f"<b>{escape(str(error))}</b>"

    for control in controls.values():
        control.observe(draw, "value")
    draw()
    return widgets.VBox([widgets.HBox(list(controls.values())), shown, said])


def _drawn(parts: Partition, asked: dict[str, Any], size: tuple[int, int]) -> str:
    """HTML of a picture, or of a page in a frame."""
    style = Style(size=size, off_screen=True)
    if asked["turn"]:
        with tempfile.TemporaryDirectory() as folder:
            (page,) = view(parts, html=Path(folder, "shards.html"), explode=asked["gap"])
            text = escape(page.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{text}" width="{size[0]}" height="{size[1]}"></iframe>'
    halo = None if asked["halo"] == ALL else asked["halo"]
    made = plot_shards(parts, explode=asked["gap"], halo=halo, style=style)
    file = BytesIO()
    made.screenshot(file)
    made.close()
    return f'<img src="data:image/png;base64,{b64encode(file.getvalue()).decode()}">'
