"""`meshshard partition`: from files to folders of shards, in processes or on a Dask cluster."""

from __future__ import annotations

import argparse
import contextlib
import glob
import json
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from meshshard.cli import options, workers
from meshshard.cli.output import add_output_options, fail, print_json, say, warn
from meshshard.errors import (
    MeshshardError,
    MeshWarning,
    PartitionError,
    StoreError,
    n_of,
    printable,
)
from meshshard.partitioning.methods import MAX_PARTS, METHODS, partitioner_of, too_many
from meshshard.processes import available_memory

if TYPE_CHECKING:
    from meshshard.graph import Graph
    from meshshard.mesh import Mesh

__all__ = [
    "Job",
    "add_partition",
    "memory_note",
    "partition_file",
    "partition_files",
    "targets_of",
]

LARGE = 200_000_000  # bytes of a file from which its memory is predicted
LONG = 5.0  # seconds of a step from which its time is printed
_ONE_AT_A_TIME = threading.Lock()  # Python records warnings per process, not per thread


def add_partition(commands: Any) -> None:
    """`meshshard partition IN … --parts K`."""
    p = commands.add_parser("partition", help="cut meshes into shards, write a folder for each")
    p.set_defaults(run=_run)
    p.add_argument("inputs", nargs="+", metavar="IN", help="mesh or cloud; patterns are expanded")
    p.add_argument("--parts", type=options.positive, metavar="K", help="number of shards")
    p.add_argument("--out", default=".", metavar="DIR", help="directory of NAME.shards [.]")
    _add_cut(p.add_argument_group("how to cut"))
    _add_data(p.add_argument_group("what is read and written"))
    many = p.add_argument_group("many files")
    many.add_argument("--jobs", type=options.positive, default=1, metavar="N", help="processes [1]")
    many.add_argument("--dask", metavar="ADDRESS", help="run on the Dask cluster of this scheduler")
    add_output_options(p)


def _add_cut(group: Any) -> None:
    add = group.add_argument
    add("--on", choices=("auto", "cells", "points"), default="auto",
        help="what is sharded [auto: points if only points have fields]")  # fmt: skip
    methods = "; ".join(f"{name} ({row.help})" for name, row in METHODS.items())
    add("--method", default="metis", metavar="NAME|FILE",
        help=f"{methods}; or a file of labels, one per line [metis]")  # fmt: skip
    add("--objective", choices=("volume", "cut"), default="volume",
        help=f"{_takers('objective')}: rows sent, or edges cut [volume]")  # fmt: skip
    add("--imbalance", type=float, default=1.005, metavar="B",
        help=f"{_takers('imbalance')}: largest load over the mean [1.005]")  # fmt: skip
    add("--seed", type=int, default=0, help=f"{_takers('seed')}: random seed [0]")
    add("--contiguous", action="store_true", help=f"{_takers('contiguous')}: connected parts")
    add("--weight", metavar="NAME", help="a field, or area, as the load")
    add("--targets", type=options.numbers, default=(), metavar="2,1,1",
        help="share of the load of each part")  # fmt: skip
    add("--knn", type=int, metavar="N", help="cut the graph of N nearest neighbors")
    add("--halo", type=options.positive, default=1, metavar="L", help="hops of halo rows [1]")
    add("--order", choices=("file", "morton", "rcm"), default="file",
        help="order of the rows in a shard [file]")  # fmt: skip


def _takers(option: str) -> str:
    """The methods that have an option."""
    return " and ".join(name for name, row in METHODS.items() if option in row.options)


def _add_data(group: Any) -> None:
    add = group.add_argument
    add("--fields", type=options.words, metavar="A,B", help="keep only these fields")
    add("--weld", type=options.weld, metavar="TOL|no", help="merge points of open edges within TOL")
    add("--time", type=float, metavar="T", help="time step, if a file has several")
    add("--vtk", action="store_true", help="also write files for ParaView")
    add("--with-ghosts", dest="ghosts", action="store_true",
        help="also write files for ParaView, with ghost cells")  # fmt: skip
    add("--force", action="store_true", help="replace existing folders")
    add("--if-changed", action="store_true", help="skip folders that are up to date")
    add("--dry-run", action="store_true", help="cut and measure, write nothing")


def _run(args: argparse.Namespace) -> int:
    args.command = " ".join(["meshshard", *sys.argv[1:]])
    args.parts = args.parts or len(args.targets)
    if not args.parts:
        return fail("give the number of shards: --parts K", 2)
    if args.targets and len(args.targets) != args.parts:
        return fail(f"--targets has {len(args.targets)} shares for --parts {args.parts}", 2)
    if args.parts > MAX_PARTS:
        return fail(too_many(args.parts), 2)
    inputs = list(dict.fromkeys(path for pattern in args.inputs for path in _expand(pattern)))
    job = Job(**{f.name: getattr(args, f.name) for f in fields(Job)})
    folders = targets_of(inputs, args.out)
    for path in folders:
        note = memory_note(path)
        if note and not args.quiet:
            say(note, to_stderr=True)
    results = partition_files(folders, job, args.jobs, args.dask)
    done = [_report(outcome, args, len(folders)) for outcome in _progress(results, args, folders)]
    if args.json:
        print_json(done if len(done) > 1 else done[0])
    failed = sum(outcome["status"] == "failed" for outcome in done)
    if len(done) > 1 and not args.quiet:
        say(f"{len(done) - failed} of {len(done)} files done", to_stderr=True)
    return 1 if failed else 0


def _expand(pattern: str) -> list[str]:
    """Files that match a pattern; the pattern itself if it is the name of a file."""
    if Path(pattern).exists() or not glob.has_magic(pattern):
        return [pattern]
    found = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207 - absolute ones too
    if not found:
        raise MeshshardError(f"{pattern}: no file matches")
    return found


def _progress(
    results: Iterator[dict[str, Any]], args: argparse.Namespace, folders: dict[str, Path]
) -> Iterator[dict[str, Any]]:
    """The results, with a progress bar for several files on a terminal."""
    if len(folders) == 1 or args.quiet or args.json or not sys.stderr.isatty():
        yield from results
        return
    from tqdm import tqdm

    yield from tqdm(results, total=len(folders), unit="file")


def _report(outcome: dict[str, Any], args: argparse.Namespace, count: int) -> dict[str, Any]:
    """Print the outcome of one file."""
    for line in outcome["warnings"]:
        warn(line)
    if outcome["status"] == "failed":
        fail(outcome["error"])
    table = outcome.pop("table", "")
    if args.json or args.quiet:
        return outcome
    for line in outcome["said"]:
        say(printable(line))
    if table:
        say(table if count == 1 or args.verbose else table.splitlines()[-3])
    ends = {"written": f"written: {outcome['folder']}", "unchanged": "up to date",
            "tried": "nothing written (--dry-run)"}  # fmt: skip
    if outcome["status"] in ends:
        steps = {k: s for k, s in outcome["steps"].items() if args.verbose or s >= LONG}
        seconds = f" in {outcome['seconds']:.2f} s" if args.verbose else ""
        seconds += f" ({', '.join(f'{k} {s:.1f} s' for k, s in steps.items())})" if steps else ""
        say(f"{outcome['input']}: {ends[outcome['status']]}{seconds}")
    return outcome


@dataclass(frozen=True)
class Job:
    """The options of `meshshard partition` that apply to each file, under their names there."""

    out: str = "."
    parts: int = 2
    targets: tuple[float, ...] = ()
    on: str = "auto"
    method: str = "metis"
    weight: str | None = None
    objective: str = "volume"
    imbalance: float = 1.005
    seed: int = 0
    contiguous: bool = False
    knn: int | None = None
    halo: int = 1
    order: str = "file"
    weld: float | None = None
    fields: tuple[str, ...] | None = None
    time: float | None = None
    vtk: bool = False
    ghosts: bool = False
    force: bool = False
    if_changed: bool = False
    dry_run: bool = False
    command: str = ""

    def request(self) -> dict[str, Any]:
        """The options that determine the shards, as recorded in the manifest."""
        others = ("out", "vtk", "ghosts", "force", "if_changed", "dry_run", "command")
        return {k: v for k, v in asdict(self).items() if k not in others}


def targets_of(paths: Sequence[str], out: str) -> dict[str, Path]:
    """The folder of every file: its name with the suffix .shards.

    Raises:
        StoreError: two files would get the same folder.
    """
    folders: dict[str, Path] = {}
    for path in paths:
        name = Path(path).name.removesuffix(".gz")
        folder = Path(out) / f"{Path(name).stem or name}.shards"
        other = next((p for p, f in folders.items() if f == folder), None)
        if other is not None:
            raise StoreError(f"{other} and {path} would both become {folder}; use different --out")
        folders[path] = folder
    return folders


def partition_file(path: str, folder: str, job: Job) -> dict[str, Any]:
    """Read one file, partition it and write its folder; errors are returned, not raised.

    Returns:
        The outcome: `input`, `folder`, `status` (written, unchanged, tried or failed), `error`,
        `warnings`, `said` (lines to print), `quality`, `seconds`, and the seconds of the `steps`.
    """
    began = time.perf_counter()
    outcome: dict[str, Any] = {"input": path, "folder": folder, "warnings": [], "said": []}
    outcome["steps"] = {}
    with _ONE_AT_A_TIME, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            outcome |= _partition_file(path, Path(folder), job, outcome)
        except (MeshshardError, OSError, MemoryError) as error:
            outcome |= {"status": "failed", "error": _one_line(path, error)}
    said = (_named(path, str(w.message)) for w in caught if issubclass(w.category, MeshWarning))
    outcome["warnings"] = list(dict.fromkeys(said))
    return outcome | {"seconds": round(time.perf_counter() - began, 3)}


def partition_files(
    folders: dict[str, Path], job: Job, jobs: int = 1, dask: str | None = None
) -> Iterator[dict[str, Any]]:
    """The outcome of every file, in the order in which they are done.

    Args:
        folders: the folder of each file, from `targets_of`.
        job: the options.
        jobs: processes of this machine.
        dask: address of a Dask scheduler whose workers see the same file system. A worker takes
            one file at a time, whatever its number of threads.

    Raises:
        StoreError: Dask is not installed, or its cluster does not answer.
    """
    if dask is not None:
        labels = Path(job.method)
        elsewhere = replace(job, method=str(labels.absolute())) if labels.is_file() else job
        results = workers.on_dask(partition_file, folders, elsewhere, dask)
    elif jobs > 1 and len(folders) > 1:
        results = workers.on_processes(partition_file, folders, job, jobs)
    else:
        results = ((path, partition_file(path, str(f), job)) for path, f in folders.items())
    for path, result in results:
        if isinstance(result, str):
            yield _lost(path, folders[path], result)
        else:
            yield result | {"input": path}


def memory_note(path: str) -> str | None:
    """A line on the memory that a large file will need; None for small files."""
    file = Path(path)
    size = file.stat().st_size if file.is_file() else 0
    if size < LARGE:
        return None
    with file.open("rb") as opened:
        head = opened.read(4096)
    factor = 13 if b"compressor" in head else 2.2 if b"ascii" in head else 4.8
    note = f"{path}: {size / 1e9:.1f} GB, needs about {factor * size / 1e9:.1f} GB of memory"
    free = available_memory()
    if free is not None and factor * size > free:
        note += f"; only {free / 1e9:.1f} GB are available"
    return note


def _partition_file(
    path: str, folder: Path, job: Job, outcome: Mapping[str, Any]
) -> dict[str, Any]:
    """Read, partition and write; lines and times are added to `said` and `steps` of the outcome."""
    from meshshard import io
    from meshshard.partitioning.partition import entity_of, partition

    if job.if_changed and _is_up_to_date(folder, path, job):
        if (job.vtk or job.ghosts) and not job.dry_run and _export_is_stale(folder):
            outcome["said"].append(_export(folder, path, job))
        return {"status": "unchanged"}
    said, timed = outcome["said"], partial(_timed, outcome["steps"])
    before = _stamp(path)
    if folder.exists() and not (job.force or job.if_changed or job.dry_run):
        raise StoreError(f"{folder} already exists; use --force to replace it, or --if-changed")
    with timed("read"):
        mesh = _with_options(io.read(path, time=job.time), job)
    entity = entity_of(mesh, job.on)
    said.append(f"{path}: {_described(mesh)}; on {entity} ({_reason(mesh, job.on)})")
    with timed("partition"):
        made = partition(
            mesh,
            job.targets or job.parts,
            on=entity,
            method=partitioner_of(job.method, asdict(job)),
            weights=job.weight,
            halo=job.halo,
            graph=_graph(mesh, entity, job),
        )
        made = made if job.order == "file" else made.reordered(job.order)
        found = {"quality": made.quality.as_dict(), "table": str(made.quality)}
    if _stamp(path) != before:
        raise StoreError(f"{path}: has changed while it was read; partition it again")
    if job.dry_run:
        return {"status": "tried"} | found
    replace_it = job.force or job.if_changed
    with timed("write"):
        made.save(folder, source=path, request=job.request(), command=job.command, force=replace_it)
    if job.vtk or job.ghosts:
        with timed("export"):
            said.append(_export(folder, path, job))
    return {"status": "written"} | found


@contextlib.contextmanager
def _timed(steps: dict[str, float], name: str) -> Iterator[None]:
    """Context manager: note the seconds of a step."""
    began = time.perf_counter()
    yield
    steps[name] = round(time.perf_counter() - began, 3)


def _stamp(path: str) -> tuple[int, int, int] | None:
    """Inode, size and time of a file, which change when it is written; None if it is missing."""
    try:
        status = Path(path).stat()
    except OSError:
        return None  # reading the file reports the error
    return status.st_ino, status.st_size, status.st_mtime_ns


def _export(folder: Path, path: str, job: Job) -> str:
    """Write the files for ParaView; returns a line to print."""
    from meshshard import store
    from meshshard.store import paraview

    whole = paraview.export(store.load(folder), _export_of(folder), ghosts=job.ghosts)
    return f"{path}: for ParaView: {whole}"


def _export_of(folder: Path) -> Path:
    return folder.with_suffix(".paraview")


def _export_is_stale(folder: Path) -> bool:
    """Whether the .pvtp or .pvtu file, written last, is missing or older than the folder."""
    written = [f.stat().st_mtime_ns for f in _export_of(folder).glob("*.pvt[pu]")]
    return max(written, default=0) < (folder / "manifest.json").stat().st_mtime_ns


def _with_options(mesh: Mesh, job: Job) -> Mesh:
    """The mesh with the options `fields` and `weld` applied."""
    from meshshard.mesh.facets import facets, match
    from meshshard.mesh.inspection import open_points, weld

    if job.fields is not None:
        known = {*mesh.cell_fields, *mesh.point_fields}
        unknown = [f for f in job.fields if f not in known]
        if unknown:
            raise PartitionError(
                f"no field {unknown[0]!r}; fields: {', '.join(sorted(known)) or 'none'}"
            )
        mesh = replace(
            mesh,
            cell_fields={f: a for f, a in mesh.cell_fields.items() if f in job.fields},
            point_fields={f: a for f, a in mesh.point_fields.items() if f in job.fields},
        )
    if job.weld is None or not mesh.n_cells:
        return mesh
    if job.weld < 0:
        return replace(mesh, weld=np.arange(mesh.n_points))
    merged = weld(mesh, job.weld, open_points(mesh, match(facets(mesh), mesh.n_points)))
    if merged.weld is not None:
        warnings.warn(
            f"{mesh.name}: {n_of(merged.n_welded, 'points')} on open edges merged within "
            f"{job.weld:g}",
            MeshWarning,
            stacklevel=2,
        )
    return merged


def _graph(mesh: Mesh, entity: str, job: Job) -> Graph | None:
    """The graph of nearest neighbors, if requested; with 0 neighbors it has no edges."""
    from meshshard.graph import knn_graph

    if job.knn is None:
        return None
    if job.knn < 0:
        raise PartitionError(f"knn {job.knn} must be 0 or more neighbors")
    return knn_graph(mesh.positions(entity), job.knn)


def _is_up_to_date(folder: Path, path: str, job: Job) -> bool:
    """Whether a folder is complete and was made from the same source with the same options."""
    from meshshard import store

    try:
        found = store.load(folder)
        for shard in range(found.k):
            found.arrays(shard)
    except StoreError:
        return False
    source = found.manifest.get("source") or {}
    request = json.loads(json.dumps(job.request()))  # tuples are lists in the manifest
    return bool(
        request == found.manifest.get("request")
        and source.get("bytes") == Path(path).stat().st_size
        and source.get("sha256") == store.sha256(path)
    )


def _lost(path: str, folder: Path, why: str) -> dict[str, Any]:
    """The outcome of a file whose worker ended."""
    outcome = {"input": path, "folder": str(folder), "status": "failed", "error": f"{path}: {why}"}
    return outcome | {"warnings": [], "said": [], "steps": {}, "seconds": 0.0}


def _described(mesh: Mesh) -> str:
    cells = f"{n_of(mesh.n_cells, 'cells')}, " if mesh.n_cells else ""
    return f"{mesh.kind}, {cells}{n_of(mesh.n_points, 'points')}"


def _reason(mesh: Mesh, on: str) -> str:
    if on != "auto":
        return "as asked"
    if not mesh.n_cells:
        return "it has no cells"
    if mesh.cell_fields and mesh.point_fields:
        return "cells and points have fields"
    if mesh.cell_fields:
        return "cells have fields"
    return "only points have fields" if mesh.point_fields else "no fields"


def _one_line(path: str, error: BaseException) -> str:
    """An error as one line that names the file."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, MemoryError):
        text = f"out of memory ({text}); use --fields, or a machine with more"
    return _named(path, text)


def _named(path: str, text: str) -> str:
    """A message that names the file."""
    return text if Path(path).name in text else f"{path}: {text}"
