"""The questions that the benchmarks answer: for each, the table that is shown and its answer.

The page "Measurements" is made from this list and from benchmarks/results/*.json. Columns that are
not listed stay in the JSON file. Numbers in an answer are computed from the rows.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Rows = Sequence[dict[str, Any]]


class Question(NamedTuple):
    """One table of the page.

    Attributes:
        results: file in benchmarks/results, without its suffix.
        section: key in that file.
        title: beginning of the key of the table in the section.
        text: the question, up to its question mark, and then what was measured.
        columns: column in the file -> heading on the page.
        answer: sentence made from the rows.
        rows: what the column `what` of a shown row contains; all rows if empty.
    """

    results: str
    section: str
    title: str
    text: str
    columns: dict[str, str]
    answer: Callable[[Rows], str]
    rows: str = ""


def span(rows: Rows, column: str = "ratio") -> str:
    """Smallest and largest number of a column."""
    values = [row[column] for row in rows]
    low, high = f"{min(values):.2g}", f"{max(values):.2g}"
    return low if low == high else f"{low} to {high}"


def percent(rows: Rows, column: str = "ratio") -> str:
    values = [100 * row[column] for row in rows]
    low, high = f"{min(values):.0f}", f"{max(values):.0f}"
    return f"{low} %" if low == high else f"{low} to {high} %"


def largest(rows: Rows, column: str = "ours") -> float:
    return max(row[column] for row in rows)


def versus(peer: str, unit: str = "", ours: str = "meshshard") -> dict[str, str]:
    """Columns of a comparison."""
    tail = f", {unit}" if unit else ""
    return {"what": "case", "ours": ours + tail, "peer": peer + tail, "ratio": "ratio"}


def of_kind(rows: Rows, kind: str, column: str = "prediction") -> Rows:
    return [row for row in rows if kind in row[column]]


# Words in the JSON files that are written out on the page.
WORDS = {
    "us a row": "µs per row",
    "kB a row": "kB per row",
    ", ours": ", tiled",
    ": whole / METIS call": "",
    "each alone": "separately",
    "pictures": "images",
}
BLOCKS = {
    "prediction": "prediction",
    "cut into": "blocks",
    "from whole mesh %": "difference from the whole mesh, %",
    "drag from whole mesh, counts": "difference in drag, counts",
}
VOLUME_BLOCKS = {k: v for k, v in BLOCKS.items() if "drag" not in k}
TWO_RANKS = {
    "what": "case",
    "one rank ms": "one rank, ms",
    "two ranks ms": "two ranks, ms",
    "speed-up": "speed-up",
    "speed-up of two independent": "speed-up of two independent processes",
}


def blocks_answer(rows: Rows) -> str:
    spatial = span(of_kind(rows, "spatial blocks, each"), "from whole mesh %")
    random = span(of_kind(rows, "random blocks"), "from whole mesh %")
    exact = largest(of_kind(rows, "shards"), "from whole mesh %")
    return (
        f"Spatial blocks change the prediction by {spatial} %, random blocks by {random} %, "
        f"shards by at most {exact:.1g} %, which is rounding in float32."
    )


def slices_answer(rows: Rows) -> str:
    times = [r for r in rows if "us a row" in r["what"]]
    memory = [r for r in rows if "kB a row" in r["what"]]
    return f"It takes {percent(times)} of the time and {percent(memory)} of the memory."


ATTENTION = ("attention", "slice attention of 256", versus("published form"), slices_answer)
INFERENCE = ("inference", "inference", versus("published form"), slices_answer)


def slice_questions(results: str, vectors: str) -> list[Question]:
    """The same two questions for two widths of vectors."""
    section, title, columns, answer = ATTENTION
    text = f"Is slice attention in tiles faster than the published form? CPU with {vectors}."
    attention = Question(results, section, title, text, columns, answer)
    section, title, columns, answer = INFERENCE
    text = f"Is `Transolver.predict` faster than the plain model? 8 layers, CPU with {vectors}."
    return [attention, Question(results, section, title, text, columns, answer)]


EXACT = [
    Question(
        "why_exact", "surfaces", "", "What happens if a model runs on blocks of a surface "
        "separately?", BLOCKS, blocks_answer,
    ),
    Question(
        "why_exact", "volumes", "", "What happens on blocks of a volume?", VOLUME_BLOCKS,
        blocks_answer,
    ),
    Question(
        "attention", "trajectory", "", "Does training on two ranks follow training on one?",
        {"what": "case", "first loss": "first loss", "last loss": "last loss",
         "ours": "largest relative difference"},
        lambda rows: "The losses of 30 steps differ by rounding only: at most "
        f"{largest(of_kind(rows, '64', 'what')):.0e} in float64.",
    ),
]  # fmt: skip
PARTITIONING = [
    Question(
        "partition", "pipeline", "growth", "How do time and memory grow with the mesh? "
        "Polygons, read to written folder of 8 shards.",
        {"cells": "cells", "CPU s": "CPU time, s", "CPU us a cell": "per cell, µs",
         "peak MiB": "peak memory, MiB", "MB written": "written, MB"},
        lambda rows: f"{rows[-1]['cells']:,} polygons take {rows[-1]['CPU s']:.0f} CPU seconds "
        f"and {rows[-1]['peak MiB'] / 1024:.1f} GiB; from a million cells on, time grows linearly.",
    ),
    Question(
        "partition", "pipeline", "whole pipeline", "How much of that is METIS?",
        versus("METIS alone", "CPU s", "whole pipeline"),
        lambda rows: f"On the largest meshes the whole pipeline takes {span(rows[-3:])} times "
        "METIS' own call; on small ones the start of the child process dominates.",
        "/ METIS call",
    ),
    Question(
        "partition", "halo", "halo rows, 1,000,000 cells: ours", "Does the objective `volume` "
        "give a smaller halo than METIS' default? 1,000,000 cells.",
        versus("METIS' default", "halo rows"),
        lambda rows: f"Yes: {percent(rows)} of the rows.",
    ),
    Question(
        "partition", "halo", "halo rows, 1,000,000 cells: 64", "What does it cost to merge 64 "
        "shards onto few ranks?", versus("direct partition", "halo rows", "merged"),
        lambda rows: f"The merged halo has {percent(rows)} of the rows of a direct partition.",
    ),
    Question(
        "partition", "plan", "plan", "How long does the exchange plan of all shards take? "
        "1,000,000 cells.", versus("PyG's k_hop_subgraph", "CPU s"),
        lambda rows: f"It takes {percent(rows)} of the time of k_hop_subgraph.",
    ),
    Question(
        "partition", "command", "", "How long does the command take on a small file? Wall time, "
        "median.", versus("importing pyvista and reading", "s"),
        lambda rows: f"`meshshard partition` takes {span(rows)} times as long as reading the file "
        "with PyVista, imports included.",
    ),
    Question(
        "partition", "knn", "", "And the kNN graph that a point cloud is partitioned by? "
        "1,000,000 points, k = 16.", versus("cKDTree", "CPU s"),
        lambda rows: f"{span(rows)} times the CPU time of SciPy's search, symmetric graph "
        "included.",
    ),
]  # fmt: skip
EXCHANGE = [
    Question(
        "exchange", "crossover", "training", "From how many rows do two ranks pay? Training "
        "step of an MLP of width 64.",
        {"rows": "rows", "one rank ms": "one rank, ms", "two ranks ms": "two ranks, ms",
         "ratio": "ratio"},
        lambda rows: "From about "
        f"{next(r['rows'] for r in rows if r['ratio'] < 1) // 2:,} rows per rank.",
    ),
    Question(
        "exchange", "memory", "peak", "Is memory divided by the number of ranks? Training step "
        "on 250,000 polygons.",
        {"what": "rank", "owned rows": "owned rows", "halo rows": "halo rows",
         "ours": "peak, MiB", "peer": "share of the serial peak, MiB", "ratio": "ratio"},
        lambda rows: "Yes: a rank needs its share of the serial peak and at most "
        f"{100 * largest(rows, 'ratio') - 100:.0f} % more.",
    ),
    Question(
        "exchange", "growth", "weak scaling", "Do memory and communication of a rank depend on "
        "the number of ranks? 100,000 rows per rank.", versus("one or two ranks", ours="measured"),
        lambda rows: f"No: the ratio to fewer ranks is {span(rows)}.",
    ),
    Question(
        "exchange", "exchange", "exchange", "Is the exchange slower than the bare collective? "
        "1,000,000 polygons in 8 shards on 4 ranks, 128 channels.",
        versus("index_select and all_to_all_single", "ms"),
        lambda rows: f"No: the ratio is {span(rows)}.",
    ),
    Question(
        "exchange", "speedup", "", "How much faster is a model without any exchange? Forward and "
        "backward of an MLP, 400,000 rows.", TWO_RANKS,
        lambda rows: f"{span(rows, 'speed-up')} times; two processes that do not communicate "
        f"gain {span(rows, 'speed-up of two independent')} times on this machine.",
    ),
    Question(
        "scaling", "strong", "", "How much faster are models on two ranks?",
        {"what": "model", "1 rank: ms": "one rank, ms", "2 ranks: ms": "two ranks, ms",
         "gain": "speed-up", "bytes a rank": "bytes sent per rank"},
        lambda rows: f"They are {span(rows, 'gain')} times as fast on two cores.",
    ),
    Question(
        "scaling", "projection", "PROJECTION, not measured: Transolver", "How would a Transolver "
        "scale further? Projected, not measured: 1,000,000 polygons, one core per rank, "
        "12.5 GB/s and 10 µs per message.",
        {"ranks": "ranks", "rows of the largest": "rows of the largest rank",
         "step: ms, projected": "step, ms (projected)", "of it network": "network, ms (projected)",
         "efficiency": "efficiency",
         "efficiency, ranks 100 times as fast": "efficiency with ranks 100 times as fast"},
        lambda rows: f"On {rows[-1]['ranks']} ranks the projected efficiency is "
        f"{100 * rows[-1]['efficiency']:.0f} %, and "
        f"{100 * rows[-1]['efficiency, ranks 100 times as fast']:.0f} % if ranks compute 100 times "
        "as fast.",
    ),
]  # fmt: skip
TENSORS = [
    Question(
        "tensor", "operations", "one operation, 64 x 128 rows a rank, against DTensor",
        "How long does one operation on a small sharded tensor take? 64 x 128 rows per rank.",
        {"operation": "operation", "on the local tensor": "plain tensor, µs",
         "ours": "ShardTensor, µs", "peer": "DTensor, µs", "ratio": "ratio"},
        lambda rows: f"It takes {percent(rows)} of the CPU time of DTensor.",
    ),
    Question(
        "tensor", "operations", "one operation, 64 x 128 rows a rank, against PhysicsNeMo",
        "And how long with PhysicsNeMo's ShardTensor?",
        {"operation": "operation", "ours": "meshshard, µs", "peer": "PhysicsNeMo, µs",
         "ratio": "ratio"},
        lambda rows: f"meshshard takes {percent(rows)} of its time.",
    ),
    Question(
        "tensor", "size", "overhead", "How large is the overhead over a plain tensor of the same "
        "rows? 128 channels.",
        {"what": "operation", "ours": "overhead, %", "local us": "plain tensor, µs"},
        lambda rows: "At 100,000 rows per rank it is at most "
        f"{max(r['ours'] for r in rows if '100,000' in r['what'] and 'view' not in r['what']):.1f}"
        " %, apart from views, which do no work.",
    ),
    Question(
        "tensor", "traffic", "", "How many collectives does a training step need? Four layers, "
        "DDP.", {"what": "model", "ours": "collectives", "kinds": "of the domain, by kind",
                 "gradient buckets": "gradient buckets of DDP"},
        lambda rows: f"{rows[0]['ours']} for a network of graph convolutions: one exchange a layer "
        "forward and one backward, and those of the loss and of DDP.",
    ),
    Question(
        "tensor", "imports", "", "How long does the import take? CPU time.",
        versus("import torch", "s"),
        lambda rows: f"{span(rows)} times that of torch itself.",
    ),
]  # fmt: skip
LAYERS = [
    Question(
        "graphs", "products", "1,000,000 nodes", "Are the fast paths of graph convolutions faster "
        "than PyG? 1,000,000 nodes, 6 edges per node, 128 channels, one thread.",
        versus("PyG", "ms"),
        lambda rows: f"They take {percent(rows)} of the time.",
    ),
    Question(
        "graphs", "products", "250,000 nodes", "And if glibc keeps freed memory? 250,000 "
        "nodes, otherwise as above.",
        versus("PyG", "ms"),
        lambda rows: f"They take {percent(rows)} of the time: a part of the gain above is that "
        "large temporary arrays are not allocated.",
    ),
    Question(
        "graphs", "blocks", "", "Is MeshGraphNet's block faster than its published form? 90,000 "
        "nodes, 128 channels, one thread.", versus("PyG modules", "ms"),
        lambda rows: f"It takes {percent(of_kind(rows, 'MeshGraphNet', 'what'))} of the time; a "
        "converted EdgeConv, which runs PyG's code, about the same time forward.",
    ),
    Question(
        "graphs", "speedup", "three layers", "How much faster are graph layers on two ranks?",
        TWO_RANKS,
        lambda rows: f"They are {span(rows, 'speed-up')} times as fast; two processes "
        "that do not communicate gain "
        f"{span(rows, 'speed-up of two independent')} times on this machine.",
    ),
    Question(
        "neighbors", "serial", "", "Is the exact kNN search faster than SciPy's cKDTree? 1,000,000 "
        "points, k = 16, two threads.", versus("cKDTree"),
        lambda rows: f"It takes {percent(rows)} of the time.",
    ),
    Question(
        "neighbors", "candidates", "", "How much does it send? 200,000 points, k = 16.",
        {"what": "case", "candidates": "candidates sent", "halo": "rows of the halo",
         "ours": "ratio"},
        lambda rows: f"{span(rows, 'ours')} candidates for each row of the halo of its result.",
    ),
    Question(
        "neighbors", "speedup", "", "How much faster is the kNN search on two ranks?",
        {"what": "case", "one rank": "one rank, s", "two ranks": "two ranks, s",
         "gain": "speed-up", "gain alone": "speed-up of two independent searches"},
        lambda rows: f"It is {span(rows, 'gain')} times as fast.",
    ),
    *slice_questions("slices", "512-bit vectors"),
    *slice_questions("slices-avx2", "256-bit vectors"),
    Question(
        "slices", "step", "", "What does a training step on two ranks cost beyond its arithmetic? "
        "Transolver of 4 layers.",
        {"what": "case", "ours": "meshshard, ms", "peer": "one all-reduce per layer by hand, ms",
         "ratio": "ratio"},
        lambda rows: f"{span(rows)} times a model in which every layer's all-reduce is written by "
        "hand.",
    ),
    Question(
        "slices", "training", "", "Is training cheaper in tiles? 8 layers, 20,000 rows.",
        versus("published form"), slices_answer,
    ),
    Question(
        "slices", "million", "", "How much memory does inference need for a million rows?",
        {"what": "case", "ours": "peak, MiB"},
        lambda rows: f"It needs {rows[0]['ours']:,.0f} MiB for 8 layers of width 256.",
    ),
    Question(
        "attention", "speed", "", "Does attention over a ring divide the work? "
        "`nn.MultiheadAttention`, forward and backward.",
        {"tokens": "tokens", "one rank ms": "one rank, ms", "two ranks ms": "two ranks, ms",
         "speed-up": "speed-up", "independent's speed-up": "speed-up of two independent processes"},
        lambda rows: f"Yes, from 4,096 tokens on: two ranks are "
        f"{span(rows[1:], 'speed-up')} times as fast.",
    ),
    Question(
        "attention", "memory", "", "How is the memory of this attention divided?",
        {"what": "case", "one rank MiB": "one rank, MiB", "of two ranks MiB": "each of two, MiB",
         "ours": "ratio"},
        lambda rows: f"At {rows[-1]['what']} a rank of two needs {100 * rows[-1]['ours']:.0f} % of "
        "the memory of one.",
    ),
]  # fmt: skip
CHAPTERS: dict[str, list[Question]] = {
    "Exactness": EXACT,
    "Partitioning": PARTITIONING,
    "Exchange and scaling": EXCHANGE,
    "Sharded tensors": TENSORS,
    "Layers": LAYERS,
}
