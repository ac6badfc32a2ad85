"""The classes of PyG: hops and fast path of every convolution, and what is refused, and why.

One row a class; to support another class, add a row. PyG itself is not imported: classes are found
by name among modules whose class is defined in `torch_geometric`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from meshshard.nn.conv import _fast_paths as fast
from meshshard.nn.conv._fast_paths import FastPath

__all__ = ["CLASSES", "PyGClass", "hops_of", "is_norm_over_nodes", "is_pyg", "pyg_class", "refusal"]


@dataclass(frozen=True, kw_only=True)
class PyGClass:
    """What is known of one class.

    Attributes:
        kind: "convolution", "aggregation", "norm", "pooling" or "model".
        hops: of a convolution, how many hops make it exact: 1 if it uses edges in messages and
            their aggregation only, 2 if it uses degrees of neighbors.
        one_hop_without: an attribute of the convolution without which one hop is enough.
        max_over_ranks: a convolution's `tensor.max()` is over the edges, or the integers of nodes,
            of all ranks.
        fast_path: function that computes a convolution as a sparse product, if there is one.
        refused: why it cannot be exact on shards.
        refused_in_conv: why an aggregation cannot be exact inside a convolution.
        refused_as_readout: why an aggregation cannot be exact as a readout of all nodes.
    """

    kind: str = "convolution"
    hops: int = 2
    one_hop_without: str = ""
    max_over_ranks: bool = False
    fast_path: FastPath | None = None
    refused: str = ""
    refused_in_conv: str = ""
    refused_as_readout: str = ""


def _aggregation(in_conv: str = "", as_readout: str = "") -> PyGClass:
    return PyGClass(kind="aggregation", refused_in_conv=in_conv, refused_as_readout=as_readout)


def _refused(kind: str, why: str) -> PyGClass:
    return PyGClass(kind=kind, refused=why)


_ONE_HOP = PyGClass(hops=1)
_TWO_HOPS = PyGClass(hops=2)
_NORM = PyGClass(kind="norm")
_CHOICE = "it selects among all nodes and changes the graph; coarsen with nn.coarsen"
_SEARCH = "it searches neighbors itself; use EdgeConv on nn.knn_graph"
_DENSE = "it turns the nodes of a graph into one dense matrix"
_KINDS = "it has several kinds of nodes"
_HYPEREDGES = "its edges join nodes and hyperedges; use two bipartite layers"
_EDGE_ORDER = "it depends on the order of the edges; use mean, max, softmax, std or median"
_MAX_DEGREE = "it depends on the largest in-degree of all nodes; use mean, max or softmax"
_FOUR_EDGES = "it reads the four in-edges of a node by their place in the list of all edges"
_ROW_PARAMETERS = "it has a parameter row for every node, which would have to be sharded"
_ROW_ORDER = "it orders the rows of all ranks"

CLASSES: dict[str, PyGClass] = {
    "AGNNConv": _ONE_HOP,
    "APPNP": _TWO_HOPS,
    "ARMAConv": _TWO_HOPS,
    "AntiSymmetricConv": _TWO_HOPS,
    "CGConv": _ONE_HOP,
    "ChebConv": PyGClass(hops=2, max_over_ranks=True),
    "ClusterGCNConv": _ONE_HOP,
    "DynamicEdgeConv": _refused("convolution", _SEARCH),
    "EGConv": _TWO_HOPS,
    "EdgeConv": _ONE_HOP,
    "FeaStConv": _ONE_HOP,
    "FiLMConv": _ONE_HOP,
    "GATConv": _ONE_HOP,
    "GATv2Conv": _ONE_HOP,
    "GCNConv": PyGClass(hops=2, one_hop_without="normalize", fast_path=fast.gcn),
    "GENConv": _ONE_HOP,
    "GINConv": PyGClass(hops=1, fast_path=fast.gin),
    "GINEConv": _ONE_HOP,
    "GMMConv": _ONE_HOP,
    "GPSConv": _refused("convolution", _DENSE),
    "GatedGraphConv": _ONE_HOP,
    "GeneralConv": _ONE_HOP,
    "GraphConv": PyGClass(hops=1, fast_path=fast.graph),
    "GravNetConv": _refused("convolution", _SEARCH),
    "HANConv": _refused("convolution", _KINDS),
    "HEATConv": _refused("convolution", _KINDS),
    "HGTConv": _refused("convolution", _KINDS),
    "HeteroConv": _refused("convolution", _KINDS),
    "HypergraphConv": _refused("convolution", _HYPEREDGES),
    "LEConv": _ONE_HOP,
    "LGConv": _TWO_HOPS,
    "LabelPropagation": PyGClass(hops=2, max_over_ranks=True),  # its classes are the largest label
    "MFConv": _ONE_HOP,
    "MeshCNNConv": _refused("convolution", _FOUR_EDGES),
    "MixHopConv": _TWO_HOPS,
    "NNConv": _ONE_HOP,
    "PDNConv": _TWO_HOPS,
    "PNAConv": _ONE_HOP,
    "PPFConv": _ONE_HOP,
    "PointGNNConv": _ONE_HOP,
    "PointNetConv": _ONE_HOP,
    "PointTransformerConv": _ONE_HOP,
    "RGATConv": _ONE_HOP,
    "RGCNConv": _ONE_HOP,
    "ResGatedGraphConv": _ONE_HOP,
    "SAGEConv": PyGClass(hops=1, fast_path=fast.sage),
    "SGConv": PyGClass(hops=2, fast_path=fast.sg),
    "SSGConv": _TWO_HOPS,
    "SimpleConv": _ONE_HOP,
    "SplineConv": _ONE_HOP,
    "SuperGATConv": _TWO_HOPS,
    "TAGConv": _TWO_HOPS,
    "TransformerConv": _ONE_HOP,
    "XConv": _refused("convolution", _SEARCH),
    # aggregations, in a convolution and as a readout of all nodes
    "EquilibriumAggregation": _aggregation(
        "it minimizes an energy of all nodes at once",
        "it differentiates its energy by a tensor that is replicated on every rank",
    ),
    "GRUAggregation": _aggregation(_EDGE_ORDER, _DENSE),
    "GraphMultisetTransformer": _aggregation(as_readout=_DENSE),
    "LCMAggregation": _aggregation(_MAX_DEGREE, _DENSE),
    "LSTMAggregation": _aggregation(_EDGE_ORDER, _DENSE),
    "MLPAggregation": _aggregation(_EDGE_ORDER, _DENSE),
    "MedianAggregation": _aggregation(as_readout=_ROW_ORDER),
    "PatchTransformerAggregation": _aggregation(_MAX_DEGREE, _DENSE),
    "QuantileAggregation": _aggregation(as_readout=_ROW_ORDER),
    "SetTransformerAggregation": _aggregation(as_readout=_DENSE),
    "SortAggregation": _aggregation(as_readout=_DENSE),
    # norms over all nodes; LayerNorm in mode "graph"
    "DiffGroupNorm": _NORM,
    "GraphNorm": _NORM,
    "GraphSizeNorm": _NORM,
    "InstanceNorm": _NORM,
    "LayerNorm": _NORM,
    "MeanSubtractionNorm": _NORM,
    "PairNorm": _NORM,
    # models
    "LINKX": _refused("model", _ROW_PARAMETERS),
    # pooling
    "ASAPooling": _refused("pooling", _CHOICE),
    "ClusterPooling": _refused("pooling", _CHOICE),
    "EdgePooling": _refused("pooling", _CHOICE),
    "MemPooling": _refused("pooling", _DENSE),
    "PANPooling": _refused("pooling", _CHOICE),
    "SAGPooling": _refused("pooling", _CHOICE),
    "SelectTopK": _refused("pooling", _CHOICE),
    "TopKPooling": _refused("pooling", _CHOICE),
}


def is_pyg(module: nn.Module) -> bool:
    """Whether the class of a module is defined in PyG."""
    return type(module).__module__.startswith("torch_geometric.")


def pyg_class(module: nn.Module) -> PyGClass | None:
    """The row of a module's class; None for PyG classes that have no row, and for others."""
    return CLASSES.get(type(module).__name__) if is_pyg(module) else None


def hops_of(conv: nn.Module, hops: int | None) -> int:
    """How many hops a convolution needs; without a row in the table `hops`, 2 by default."""
    row = pyg_class(conv)
    if row is None:
        return hops or 2
    return 1 if row.one_hop_without and not getattr(conv, row.one_hop_without) else row.hops


def refusal(module: nn.Module, in_conv: bool) -> str:
    """Why a module cannot be exact on shards, inside a convolution or outside; "" if it can."""
    row = pyg_class(module)
    if row is None:
        return ""
    return row.refused or (row.refused_in_conv if in_conv else row.refused_as_readout)


def is_norm_over_nodes(module: nn.Module) -> bool:
    """Whether a module is a norm of PyG over all nodes."""
    row = pyg_class(module)
    return row is not None and row.kind == "norm" and getattr(module, "mode", "graph") == "graph"
