"""Pictures of partitions: shards on the mesh, their halos, and charts of their rows.

`shards` draws a mesh (`scene` says what a picture contains, `annotations` writes on it, `colors`
chooses the colors, `scales` those of values), `panels` compares fields, `charts` draws graphs and
bars. PyVista and VTK are imported by the first picture.
"""

from meshshard.viz.charts import Svg, plot_agreement, plot_bars, plot_rank_graph
from meshshard.viz.panels import Panel, plot_panels, plot_prediction
from meshshard.viz.rendering import show
from meshshard.viz.scales import Scale, scale_of
from meshshard.viz.shards import Style, plot_shards, view
from meshshard.viz.subject import Subject

__all__ = [
    "Panel",
    "Scale",
    "Style",
    "Subject",
    "Svg",
    "plot_agreement",
    "plot_bars",
    "plot_panels",
    "plot_prediction",
    "plot_rank_graph",
    "plot_shards",
    "scale_of",
    "show",
    "view",
]
