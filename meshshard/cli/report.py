"""`meshshard info` and `validate`: what a file or folder holds, and whether it is valid."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from meshshard.cli.output import add_output_options, fail, print_json, print_warnings, say, warn
from meshshard.errors import MeshshardError, MeshWarning, StoreError, n_of, printable
from meshshard.mesh import Array, Mesh
from meshshard.mesh.facets import Matches
from meshshard.mesh.mesh import cell_counts

__all__ = ["about", "add_info", "add_validate", "lines", "verdict"]


def add_info(commands: Any) -> None:
    """`meshshard info FILE|DIR`."""
    p = commands.add_parser("info", help="print what a file or a folder of shards holds")
    p.set_defaults(run=_info)
    p.add_argument("path", metavar="FILE|DIR", help="mesh, cloud or folder of shards")
    p.add_argument("--time", type=float, metavar="T", help="time step, if the file has several")
    add_output_options(p)


def add_validate(commands: Any) -> None:
    """`meshshard validate FILE|DIR …`."""
    p = commands.add_parser("validate", help="check files, or every byte of folders of shards")
    p.set_defaults(run=_validate)
    p.add_argument("paths", nargs="+", metavar="FILE|DIR", help="meshes, folders of shards")
    p.add_argument("--strict", action="store_true", help="treat warnings as errors")
    add_output_options(p)


def _info(args: argparse.Namespace) -> int:
    with print_warnings():
        found = about(args.path, args.time)
    if args.json:
        print_json(found)
    elif not args.quiet:
        say("\n".join(lines(found)))
    return 0


def _validate(args: argparse.Namespace) -> int:
    verdicts = []
    for path in args.paths:
        found = verdict(path)
        verdicts.append(found)
        for line in found["warnings"]:
            warn(line)
        if found["error"]:
            fail(found["error"])
        elif not args.json and not args.quiet:
            say(f"{path}: {found['proved']}")
    if args.json:
        print_json(verdicts)
    bad = [v for v in verdicts if v["error"] or (args.strict and v["warnings"])]
    return 1 if bad else 0


def about(path: str | Path, time: float | None = None) -> dict[str, Any]:
    """What a mesh file or a folder of shards holds.

    Raises:
        MeshshardError: it cannot be read.
    """
    if (Path(path) / "manifest.json").exists() or Path(path).name.endswith(".shards"):
        if time is not None:
            raise StoreError(f"{path}: a folder of shards has one time step; leave out --time")
        return _about_folder(path)
    from meshshard import io

    return about_mesh(io.read(path, time=time))


def about_mesh(mesh: Mesh) -> dict[str, Any]:
    """Counts, bounds, fields, components and findings of a mesh."""
    bounds = [mesh.points.min(axis=0), mesh.points.max(axis=0)] if mesh.n_points else []
    found: dict[str, Any] = {
        "name": mesh.name,
        "kind": mesh.kind,
        "points": mesh.n_points,
        "cells": mesh.n_cells,
        "cell_types": cell_counts(mesh),
        "bounds": [[float(x) for x in b] for b in bounds],
        "points_dtype": str(mesh.points.dtype),
        "offset": [float(x) for x in mesh.offset],
        "blocks": list(mesh.blocks),
        "fields": [*_fields(mesh.cell_fields, "cells"), *_fields(mesh.point_fields, "points")],
    }
    return found | _inspected(mesh)


def _inspected(mesh: Mesh) -> dict[str, Any]:
    """Findings, open facets and components, with points at the same place merged as for a cut."""
    from meshshard.mesh.inspection import inspect, weld_and_match

    if not mesh.n_cells:
        return {"findings": inspect(mesh).findings(mesh)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MeshWarning)  # the findings below say the same
        mesh, matches = weld_and_match(mesh)
    inspection = inspect(mesh, matches)
    return {
        "findings": inspection.findings(mesh),
        "welded": inspection.welded,
        "open_facets": inspection.open,
        "shared_facets": inspection.shared,
        "components": _components(mesh, matches),
    }


def lines(about: Mapping[str, Any]) -> list[str]:
    """The dict of `about` as lines of text."""
    if "sizes" in about:
        from meshshard.store.shard_files import report_damage

        with report_damage(Path(about["path"])):
            return _folder_lines(about)
    cells = ", ".join(f"{n:,} {name}" for name, n in about["cell_types"].items())
    out = [f"{printable(about['name'])}: {about['kind']}", f"  points      {about['points']:,}"]
    if cells:
        facet = {"volume": "faces", "surface": "edges"}.get(about["kind"], "ends")
        out += [
            f"  cells       {about['cells']:,} ({cells})",
            f"  components  {about['components']} by shared {facet}",
            f"  open {facet}  {about['open_facets']:,}; in three or more cells: "
            f"{about['shared_facets']:,}",
        ]
        if about["welded"]:
            out[1] += f" ({about['welded']:,} at the place of another, merged for adjacency)"
    if about["bounds"]:
        low, high = about["bounds"]
        box = " x ".join(f"[{a:.6g}, {b:.6g}]" for a, b in zip(low, high, strict=True))
        out.append(f"  bounds      {box} ({about['points_dtype']})")
    if any(about["offset"]):
        out.append(f"  offset      {about['offset']}: points are stored relative to it")
    if about["blocks"]:
        out.append(f"  blocks      {printable(', '.join(about['blocks']))}")
    out += [_field_line(f) for f in about["fields"]] or ["  no fields"]
    return out + [f"  note: {line}" for line in about["findings"]]


def verdict(path: str | Path) -> dict[str, Any]:
    """Whether a file can be partitioned, or a folder of shards is complete.

    Returns:
        `path`, `error` (None if there is none), `warnings`, and `proved`: what was checked.
    """
    error, proved = None, ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            proved = _prove(path)
        except (MeshshardError, OSError, MemoryError) as raised:
            text = " ".join(str(raised).split())
            error = text if Path(path).name in text else f"{path}: {text}"
    said = [str(w.message) for w in caught if issubclass(w.category, MeshWarning)]
    return {"path": str(path), "error": error, "warnings": said, "proved": proved}


def _prove(path: str | Path) -> str:
    if Path(path).is_dir():
        from meshshard import store

        folder = store.load(path).check()
        return f"{n_of(folder.k, 'shards')}: checksums, arrays and the exchange plan are correct"
    from meshshard import io
    from meshshard.mesh.inspection import inspect, weld_and_match

    mesh = io.read(path)
    if mesh.n_cells:
        weld_and_match(mesh)
    else:
        for line in inspect(mesh).findings(mesh):
            warnings.warn(line, MeshWarning, stacklevel=2)
    return f"a {mesh.kind} that can be partitioned"


def _about_folder(path: str | Path) -> dict[str, Any]:
    from meshshard import store

    folder = store.load(path)
    return {**folder.manifest, "path": str(folder.path), "results": folder.puts()}


def _folder_lines(about: Mapping[str, Any]) -> list[str]:
    from meshshard.partitioning.quality import Quality

    source, method = about["source"] or {}, about["method"]
    options = ", ".join(f"{k}={v}" for k, v in method.items() if k != "name" and v is not None)
    fields = ", ".join(f"{printable(f['name'])} ({f['on']})" for f in about["fields"])
    out = [
        f"{printable(about['path'])}: {about['kind']} {printable(about['name'])}, "
        f"{n_of(about['n_cells'], 'cells')}, {n_of(about['n_points'], 'points')}",
        f"  source   {printable(str(source.get('path', 'none')))}",
        f"  method   {method['name']}({options}), halo depth {about['halo_depth']}",
        f"  fields   {fields or 'none'}",
        f"  content  {about['content']} (SHA-256)",
    ]
    if about["results"]:
        out.append(f"  results  {', '.join(about['results'])}")
    return [*out, str(Quality(**about["quality"]))]


def _fields(fields: Mapping[str, Array], on: str) -> Iterator[dict[str, Any]]:
    for name, values in fields.items():
        found: dict[str, Any] = {"name": name, "on": on, "dtype": str(values.dtype)}
        found["width"] = int(np.prod(values.shape[1:], dtype=int))
        if len(values) and values.dtype.kind in "fiub":
            good = values[np.isfinite(values)] if values.dtype.kind == "f" else values
            found["not_finite"] = int(values.size - good.size)
            found["range"] = [good.min().item(), good.max().item()] if good.size else None
        yield found


def _field_line(field: Mapping[str, Any]) -> str:
    where = f"{field['on']:6} {field['dtype']:8} x{field['width']}"
    span = field.get("range")
    text = f"  {where:22} {printable(field['name'])}"
    if span is not None:
        text += f"  [{span[0]:.6g}, {span[1]:.6g}]"
    if field.get("not_finite"):
        text += f", {n_of(field['not_finite'], 'values')} NaN or infinite"
    return text


def _components(mesh: Mesh, matches: Matches) -> int:
    """Number of connected components of the cells, linked by shared facets."""
    from scipy.sparse.csgraph import connected_components

    from meshshard.graph.graph import cell_graph, scipy_rows

    graph = cell_graph(mesh, matches)
    links = scipy_rows(graph.indptr, graph.indices)
    return int(connected_components(links, directed=True, connection="strong")[0])
