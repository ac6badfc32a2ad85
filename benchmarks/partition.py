"""From a mesh file to shards: time, memory and halo, against METIS, PyG, scipy and pyvista.

    python benchmarks/partition.py                          everything, as in the documentation
    python benchmarks/partition.py --size 100000            quicker
    python benchmarks/partition.py --only halo plan         some sections

Prints ratios that were measured in one run and writes them as JSON. Seconds are CPU seconds except
where the command line is measured. METIS' default call is pymetis.part_graph(k, recursive=False)
with METIS' own options.
"""

import functools
import importlib.util
import math
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from measure import Record, Stages, alternately, arguments, compared, in_child, limited, run, spent
from meshes import GENERATORS

from meshshard.errors import MeshWarning
from meshshard.graph import Graph, cell_graph, knn_graph
from meshshard.graph.plan import halo_of, plan_of, send_lists
from meshshard.io import read, write
from meshshard.mesh import Array
from meshshard.partitioning.methods import Metis
from meshshard.partitioning.partition import Partition, partition

LARGE, MEDIUM = 8_828_095, 1_000_000  # polygons of DrivAerML's first run; the size to compare at
PARTS = 8
OURS = {"objtype": 1, "ufactor": 5, "seed": 0}  # what partitioners.Metis tells METIS
Tables = Iterator[tuple[str, list[Record]]]

warnings.simplefilter("ignore", MeshWarning)


def main() -> None:
    parser = arguments(__doc__, SECTIONS, "partition.json")
    parser.add_argument("--size", type=int, default=LARGE, help="cells of the largest mesh")
    given = parser.parse_args()
    run(SECTIONS, given, given.size)


# ----------------------------------------------------------------------------------------- pipeline
TIME_TARGETS = {"polygons": 2.5, "hexahedra": 3.0, "tetrahedra": 3.0}


def pipeline(size: int) -> Tables:
    """File to shards on disk: CPU by stage, the whole over METIS alone, growth with size."""
    ratios, growth = [], []
    sizes = sorted({n for n in (10_000, 100_000, MEDIUM) if n < size} | {size})
    medium = min(size, MEDIUM)
    meshes = [("polygons", n) for n in sizes] + [("hexahedra", medium), ("tetrahedra", medium)]
    for kind, n in meshes:
        with tempfile.TemporaryDirectory() as folder:
            one = _one_pipeline(kind, n, Path(folder))
        yield f"{kind}, {one['cells']:,} cells to {PARTS} shards: CPU seconds by stage", one["rows"]
        ratios += _pipeline_ratios(one)
        if kind == "polygons":
            growth.append(one)
    yield "whole pipeline over one METIS call: CPU seconds", ratios
    yield "growth of the pipeline, polygons", _growth(growth)


def _one_pipeline(kind: str, n: int, folder: Path) -> Record:
    file = folder / f"mesh.{'vtp' if kind == 'polygons' else 'vtu'}"
    cells, _ = in_child(_write_mesh, kind, n, file)
    runs = []
    for _ in range(3 if n <= MEDIUM else 1):  # the least disturbed counts
        (stages, output), peak = in_child(_file_to_shards, file, folder / "out.shards")
        call, default = (in_child(_metis_alone, file, options)[0] for options in (OURS, {}))
        runs.append((sum(s.total for s in stages.values()), stages, peak, call, default))
    total, stages, peak, _, _ = min(runs)
    rows = [
        {
            "stage": name,
            "user": cpu.user,
            "system": cpu.system,
            "METIS' child": cpu.children,
            "share %": 100 * cpu.total / total,
        }
        for name, cpu in stages.items()
    ]
    call, default = (min(run[i] for run in runs) for i in (3, 4))
    return {
        "kind": kind, "cells": cells, "rows": rows, "total": total, "peak": peak,
        "call": call, "default": default, "output": output, "input": stages["read"].total,
    }  # fmt: skip


def _write_mesh(kind: str, n: int, file: Path) -> int:
    mesh = GENERATORS[kind](n)
    write(mesh, file)
    return mesh.n_cells


def _file_to_shards(file: Path, out: Path) -> tuple[dict[str, Any], float]:
    """CPU of every stage from the file to the folder, and MB written."""
    stages = Stages()
    watched = (("weld_and_match", "facets"), ("cell_graph", "graph"), ("label", "METIS"))
    for function, name in watched:
        stages.watch(sys.modules["meshshard.partitioning.partition"], function, name)
    with stages("read"):
        mesh = read(file)
    with stages("order and plan"):
        made = partition(mesh, PARTS)
    with stages("quality"):
        assert made.quality.imbalance <= 1.005 or mesh.n_cells < 1000 * PARTS
    with stages("write"):
        made.save(out, source=file, force=True)
    written = sum(f.stat().st_size for f in out.iterdir()) / 1e6
    return dict(stages.spent), written


def _metis_alone(file: Path, options: dict[str, int]) -> float:
    """CPU of one METIS call in a process of its own, on the graph of a file."""
    return _metis_call(cell_graph(read(file)), PARTS, options)[0]


def _metis_call(graph: Graph, parts: int, options: dict[str, int]) -> tuple[float, Array]:
    """CPU and labels of one call, without a child and checks; no options for METIS' own."""
    import pymetis

    adjacency = pymetis.CSRAdjacency(graph.indptr, graph.indices.astype(np.int64))
    given = {"options": pymetis.Options(**options)} if options else {}
    call = functools.partial(pymetis.part_graph, parts, adjacency, recursive=False, **given)
    seconds, (_, labels) = spent(call)
    return seconds, np.asarray(labels)


def _pipeline_ratios(one: Record) -> list[Record]:
    what = f"{one['kind']}, {one['cells']:,}"
    large = one["cells"] >= (LARGE if one["kind"] == "polygons" else 0.99 * MEDIUM)
    target = TIME_TARGETS.get(one["kind"]) if large else None
    rows = [
        compared(f"{what}: whole / METIS call", one["total"], one["call"], target),
        compared(f"{what}: whole / METIS' default call", one["total"], one["default"], None),
    ]
    if large and one["kind"] == "polygons":
        rows.append(limited(f"{what}: peak memory", one["peak"] / 1024, 3.2, "GiB"))
    return rows


def _growth(runs: list[Record]) -> list[Record]:
    """Exponents of time and memory between sizes: 1 is linear."""
    rows: list[Record] = []
    for last, one in zip([None, *runs[:-1]], runs, strict=True):
        row = {
            "cells": one["cells"],
            "CPU s": one["total"],
            "CPU us a cell": 1e6 * one["total"] / one["cells"],
            "peak MiB": one["peak"],
            "MB written": one["output"],
        }
        if last is not None:
            times = math.log(one["cells"] / last["cells"])
            row["exponent of CPU"] = math.log(one["total"] / last["total"]) / times
            row["exponent of memory"] = math.log(one["peak"] / last["peak"]) / times
        rows.append(row)
    return rows


# --------------------------------------------------------------------------------------------- halo
HALO_TARGETS = {
    ("polygons", 8): 0.84, ("hexahedra", 8): 0.93, ("hexahedra", 64): 0.85,
    ("tetrahedra", 8): 0.94, ("triangles", 8): 0.97,
}  # fmt: skip


def halo(size: int) -> Tables:
    """Halo rows against METIS' default call, merged shards, balance."""
    n = min(size, MEDIUM)
    found = [in_child(_halo_of_kind, kind, n)[0] for kind in GENERATORS]
    for number, title in enumerate(
        (
            f"halo rows, {n:,} cells: ours against METIS' default call",
            f"halo rows, {n:,} cells: 64 shards merged against a direct cut",
            f"balance, {n:,} cells: largest shard over the mean",
        )
    ):
        yield title, [row for tables in found for row in tables[number]]
    yield "empty shards where k <= n", in_child(_empty_shards)[0]


def _halo_of_kind(kind: str, n: int) -> tuple[list[Record], list[Record], list[Record]]:
    graph = cell_graph(GENERATORS[kind](n))
    cuts = {k: partition(graph, k) for k in (2, 4, 8, 64, 512)}
    against = []
    for k in (8, 64):
        _, labels = _metis_call(graph, k, {})
        peer = partition(graph, k, method=labels)
        target = HALO_TARGETS.get((kind, k))
        against.append(compared(f"{kind}, k = {k}", _rows(cuts[k]), _rows(peer), target))
    merged = [
        compared(f"{kind}, 64 on {r} ranks", _rows(cuts[64].merge(r)), _rows(cuts[r]), 1.07)
        for r in (2, 4, 8)
    ]
    balance = [
        limited(f"{kind}, k = {k}", float(cut.sizes.max() * k / n_nodes), 1.005)
        for k, cut in cuts.items()
        if (n_nodes := graph.n_nodes) / k >= 1000
    ]
    return against, merged, balance


def _rows(made: Partition) -> int:
    return len(made.halo.ids)


def _empty_shards() -> list[Record]:
    rows = []
    for kind, make in GENERATORS.items():
        graph = cell_graph(make(1000))
        for k in (25, 100, 500, graph.n_nodes):
            empty = int((partition(graph, k).sizes == 0).sum())
            rows.append(limited(f"{kind}, {graph.n_nodes} cells, k = {k}", empty, 0))
    return rows


# --------------------------------------------------------------------------------------------- plan
def plan(size: int) -> Tables:
    """The plan of all shards against one k-hop subgraph of PyG for each."""
    n = min(size, MEDIUM)
    rows = [row for kind in ("polygons", "hexahedra") for row in in_child(_plans, kind, n)[0]]
    yield f"plan of all shards, {n:,} cells: CPU seconds, against PyG's k_hop_subgraph", rows


def _plans(kind: str, n: int) -> list[Record]:
    graph = cell_graph(GENERATORS[kind](n))
    rows = []
    for k, target in ((8, 1 / 10), (64, 1 / 30)):
        labels = Metis()(graph, k)
        ours = functools.partial(_all_plans, graph, labels, k)
        peer = functools.partial(_k_hop, graph, labels, k)
        rows.append(_faster(f"{kind}, k = {k}", ours, peer, target))
    return rows


def _faster(
    what: str,
    ours: Callable[[], tuple[float, int]],
    peer: Callable[[], tuple[float, int]],
    most: float,
) -> Record:
    """A comparison of two calls that return their seconds and halo rows, which must agree."""
    assert ours()[1] == peer()[1]
    seconds = alternately(2, lambda: ours()[0], lambda: peer()[0])
    return compared(what, *seconds, most) | {"times faster": seconds[1] / seconds[0]}


def _all_plans(graph: Graph, labels: Array, k: int) -> tuple[float, int]:
    """CPU from labels to the plan of every shard, and halo rows."""

    def make() -> int:
        origin = np.argsort(labels.astype(np.uint16), kind="stable")
        sizes = np.bincount(labels, minlength=k)
        ordered = graph.permuted(origin)
        halos = halo_of(ordered, sizes, 1)
        sends = send_lists(halos, sizes)
        return sum(len(plan_of(ordered, sizes, halos, sends, p).halo) for p in range(k))

    return spent(make)


def _k_hop(graph: Graph, labels: Array, k: int) -> tuple[float, int]:
    """The same, one subgraph for each part."""
    import torch
    from torch_geometric.utils import k_hop_subgraph

    torch.set_num_threads(1)
    edges = np.stack([graph.indices.astype(np.int64), graph.destinations().astype(np.int64)])
    edge_index = torch.from_numpy(edges)

    def make() -> int:
        rows = 0
        for p in range(k):
            inner = torch.from_numpy(np.flatnonzero(labels == p))
            local, _, _, _ = k_hop_subgraph(
                inner, 1, edge_index, num_nodes=graph.n_nodes, relabel_nodes=True
            )
            rows += len(local) - len(inner)
        return rows

    return spent(make)


# ------------------------------------------------------------------------------------------ command
def command(size: int) -> Tables:
    """The program on a small file against what only reads it."""
    if importlib.util.find_spec("meshshard.cli") is None:
        print("\nthe command line is not part of this checkout: skipped")
        return
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder, "small.vtp"), Path(folder, "small.shards")
        in_child(_write_mesh, "polygons", 10_000, file)
        words = f"-m meshshard partition {file} --parts {PARTS} --out {out} --force".split()
        reads = ["-c", f"import pyvista; pyvista.read({str(file)!r})"]
        ours, peer = alternately(7, lambda: _wall(words), lambda: _wall(reads))
    what = "meshshard partition, 10,000 polygons, against pyvista.read"
    yield "command line: wall seconds, medians", [compared(what, ours, peer, 3.0)]


def _wall(words: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    return time.perf_counter() - start


# ---------------------------------------------------------------------------------------------- kNN
def knn(size: int) -> Tables:
    """Neighbors of a cloud with ties in order, against scipy's tree called plainly."""
    n = min(size, MEDIUM)
    rows = [in_child(_neighbors, kind, n)[0] for kind in ("polygons", "hexahedra")]
    yield f"16 nearest of {n:,} centers: CPU seconds, against scipy's cKDTree", rows


def _neighbors(kind: str, n: int) -> Record:
    from scipy.spatial import cKDTree

    points = GENERATORS[kind](n).centers()
    ours, peer = alternately(
        2,
        lambda: spent(lambda: knn_graph(points, 16))[0],
        lambda: spent(lambda: cKDTree(points).query(points, 17))[0],
    )
    return compared(f"centers of {kind}", ours, peer, None)


SECTIONS: dict[str, Callable[[int], Tables]] = {
    "pipeline": pipeline,
    "halo": halo,
    "plan": plan,
    "command": command,
    "knn": knn,
}


if __name__ == "__main__":
    main()
