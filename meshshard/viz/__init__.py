"""Pictures of partitions: shards on the mesh, halos, the rank graph, bars.

PyVista and VTK load when something is drawn. A machine that cannot draw gets a `RenderError`.
"""

from meshshard.viz._canvas import show
from meshshard.viz._charts import Svg, plot_bars, plot_rank_graph
from meshshard.viz._shards import Style, plot_shards, view
from meshshard.viz._subject import Subject

__all__ = ["Style", "Subject", "Svg", "plot_bars", "plot_rank_graph", "plot_shards", "show", "view"]
