"""Draws the pictures of the documentation that show meshes: docs/_static/*.png, rank_graph.svg.

python docs/draw_pictures.py                 shards, exploded, field, rank_graph
python docs/draw_pictures.py why_exact       trains the model of notebook 03 first; minutes
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

import meshshard as ms
from meshshard import viz

ROOT = Path(__file__).parent.parent
STATIC = ROOT / "docs" / "_static"
SURFACE = ROOT / "meshshard" / "data" / "boundary_1.vtp"
STYLE: dict[str, Any] = {"size": (1000, 560), "off_screen": True}


def main(names: list[str]) -> None:
    drawings = {"shards": shards, "why_exact": why_exact}
    for name in names or ["shards"]:
        drawings[name]()


def save(made: Any, name: str) -> None:
    made.screenshot(str(STATIC / f"{name}.png"))
    made.close()


def shards() -> None:
    parts = ms.partition(ms.read(SURFACE), 8)
    save(viz.plot_shards(parts, style=viz.Style(**STYLE)), "shards")
    save(viz.plot_shards(parts, explode=0.5, style=viz.Style(**STYLE)), "exploded")
    plain = viz.Style(numbers=False, unit="-", **STYLE)
    save(viz.plot_shards(parts, field="CpMeanTrim", style=plain), "field")
    viz.plot_rank_graph(parts).save(STATIC / "rank_graph.svg")


def why_exact() -> None:
    sys.path.append(str(ROOT / "benchmarks"))
    import why_exact as why

    case = why.surfaces(ROOT / "datasets" / "ahmed")._replace(steps=300)
    judge, model = case.judge, why.trained(case, why.whole_points)
    blocks = why.labels_of(judge, 8)
    whole = why.predict(model, judge.x)
    found = {
        "8 spatial blocks, each alone": why.in_blocks(model, judge.x, blocks),
        "8 random blocks, each alone": why.in_blocks(
            model, judge.x, why.random_labels(len(judge.x), 8)
        ),
        "8 shards, sums over all": why.in_shards(model, judge.x, blocks),
    }
    save(why_figure(judge, blocks, whole, found, why), "why_exact")


def why_figure(judge: Any, blocks: Any, whole: Any, found: dict[str, Any], why: Any) -> Any:
    """The prediction of each way of cutting, and its difference from the whole mesh below."""
    values = {name: got[:, 0].numpy() for name, got in found.items()}
    right = whole[:, 0].numpy()
    every = np.concatenate([right, *values.values()])
    pressure = viz.scale_of(every, "pressure coefficient")
    error = viz.scale_of(right, "difference from the whole mesh", clim=(-0.3, 0.3), cmap="PuOr_r")
    drag = why.drag(judge, whole)
    first, second = [viz.Panel("whole mesh at once", right, pressure, lines=False)], []
    for name, got in found.items():
        lines = "random" not in name
        first.append(viz.Panel(name, values[name], pressure, lines))
        counts = 1e4 * (why.drag(judge, got) - drag)
        drag_said = f"{counts:+,.0f}" if abs(counts) >= 1 else f"{counts:+.1g}"
        said = f"{100 * why.relative(got, whole):.2g} % off, drag {drag_said} counts"
        second.append(viz.Panel(said, values[name] - right, error, lines))
    parts = ms.partition(judge.mesh, 8, method=blocks)
    blank = viz.Panel("the reference", 0 * right, error, lines=False)
    style = viz.Style(size=(1800, 860), off_screen=True)
    title = (
        "One model, one body that it has not seen; only the way in which the mesh is cut differs"
    )
    return viz.plot_panels(parts, [first, [blank, *second]], title=title, style=style)


if __name__ == "__main__":
    main(sys.argv[1:])
