"""Objects of other packages that `partition` takes; none of these packages is imported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshshard.errors import PartitionError
from meshshard.graph import Graph
from meshshard.io.readers.arrays import tensor_values
from meshshard.mesh import Array, Mesh
from meshshard.mesh.ragged import offsets_of

__all__ = ["KINDS", "source_of"]


class Kind(NamedTuple):
    """One kind of object: its name in messages, what recognizes it, and what converts it."""

    name: str
    matches: Callable[[Any], bool]
    convert: Callable[[Any], tuple[Mesh | None, Graph | None]]


def source_of(item: Any) -> tuple[Mesh | None, Graph | None]:
    """The mesh or cloud, and the graph, of an object; one of them may be None.

    Args:
        item: an object of a kind in `KINDS`.

    Raises:
        PartitionError: it is of another kind, or its arrays do not make a mesh or a graph.
        ReadError, MeshError: its file cannot be read, or the mesh is inconsistent.
    """
    for kind in KINDS:
        if kind.matches(item):
            return kind.convert(item)
    *names, last = (kind.name for kind in KINDS)
    raise PartitionError(
        f"partition: cannot cut a {type(item).__name__}; pass {', '.join(names)} or {last}, "
        "or make a mesh with from_arrays(points, cells)"
    )


def _made_by(package: str, *attributes: str) -> Callable[[Any], bool]:
    """Whether the class of an object, or a base of it, is of a package and has all attributes."""

    def matches(item: Any) -> bool:
        modules = {base.__module__.partition(".")[0] for base in type(item).__mro__}
        return package in modules and all(hasattr(item, name) for name in attributes)

    return matches


def _read(item: str | Path) -> tuple[Mesh, None]:
    from meshshard.io import read

    return read(item), None


def _of_vtk(item: Any) -> tuple[Mesh, None]:
    from meshshard.io import from_pyvista

    return from_pyvista(item), None


def _of_meshio(item: Any) -> tuple[Mesh, None]:
    from meshshard.io.vtk_objects import from_pyvista, grid_of_meshio

    return from_pyvista(grid_of_meshio(item)), None


def _of_points(item: Any) -> tuple[Mesh, None]:
    return _mesh(_array(item)), None


def _of_trimesh(item: Any) -> tuple[Mesh, None]:
    fields = {
        f"{kind}_fields": {str(k): v for k, v in values.items() if len(v) == n}
        for kind, values, n in (
            ("point", item.vertex_attributes, len(item.vertices)),
            ("cell", item.face_attributes, len(item.faces)),
        )
    }
    return _mesh(np.asarray(item.vertices), np.asarray(item.faces), **fields), None


def _of_scipy(item: Any) -> tuple[None, Graph]:
    """A graph: the entries of row i are the sources of the edges into node i."""
    if item.ndim != 2 or item.shape[0] != item.shape[1]:
        raise PartitionError(f"partition: the matrix of a graph must be square, not {item.shape}")
    rows = item.tocsr()
    return None, Graph(rows.indptr.astype(np.int64), rows.indices)


def _of_pyg(item: Any) -> tuple[Mesh | None, Graph | None]:
    """Points with fields and their edges, a surface if it has faces and no edges, or a graph."""
    pos, edges, faces = (item.get(name) for name in ("pos", "edge_index", "face"))
    n = int(item.num_nodes)
    graph = None if edges is None else _graph_of_pairs(_array(edges), n)
    if pos is None:
        if graph is None:
            raise PartitionError("partition: a PyG Data needs pos, edge_index or both")
        return None, graph
    fields = {
        str(key): _array(value)
        for key, value in item.to_dict().items()
        if key not in ("pos", "edge_index", "face") and item.is_node_attr(key)
    }
    cells = None if faces is None or graph is not None else np.ascontiguousarray(_array(faces).T)
    return _mesh(_array(pos), cells, point_fields=fields), graph


def _graph_of_pairs(pairs: Array, n: int) -> Graph:
    """A graph from PyG's edge_index (2, n_edges): sources, destinations."""
    if (
        pairs.dtype.kind not in "iu"
        or pairs.ndim != 2
        or len(pairs) != 2
        or ((pairs < 0) | (pairs >= n)).any()
    ):
        raise PartitionError(
            f"partition: edge_index must be (2, m) integers, numbers of nodes below {n}"
        )
    sources, destinations = pairs
    order = np.argsort(destinations, kind="stable")
    return Graph(offsets_of(np.bincount(destinations, minlength=n)), sources[order])


def _array(values: Any) -> Array:
    """A NumPy array from an array or a tensor on any device.

    Raises:
        PartitionError: a sparse, nested or meta tensor, or a masked array.
    """
    if np.ma.is_masked(values):
        raise PartitionError("partition: values of a masked array are missing; fill or remove them")
    if not hasattr(values, "detach"):
        return np.asarray(values)
    try:
        return tensor_values(values, "the tensor")
    except TypeError as error:
        raise PartitionError(f"partition: {error}") from None


def _mesh(points: Array, cells: Array | None = None, **fields: Any) -> Mesh:
    from meshshard.io import from_arrays

    if points.dtype.kind not in "fiu" or points.ndim != 2 or points.shape[1] not in (2, 3):
        raise PartitionError(
            f"partition: points must be (n, 3) or (n, 2) numbers, not {points.shape} of "
            f"{points.dtype}"
        )
    return from_arrays(points, cells, **fields)


KINDS = (
    Kind("a Mesh", lambda item: isinstance(item, Mesh), lambda item: (item, None)),
    Kind("a Graph", lambda item: isinstance(item, Graph), lambda item: (None, item)),
    Kind("the path of a file", lambda item: isinstance(item, (str, Path)), _read),
    Kind("a PyVista dataset", lambda item: hasattr(item, "IsA"), _of_vtk),
    Kind("points (n, 3) as an array", lambda item: isinstance(item, np.ndarray), _of_points),
    Kind("a tensor", _made_by("torch", "detach"), _of_points),
    Kind("a Trimesh", _made_by("trimesh", "vertices", "faces"), _of_trimesh),
    Kind("a meshio.Mesh", _made_by("meshio", "points", "cells"), _of_meshio),
    Kind("a scipy sparse matrix", _made_by("scipy", "tocsr", "shape"), _of_scipy),
    Kind("a PyG Data", _made_by("torch_geometric", "edge_index", "num_nodes"), _of_pyg),
)
