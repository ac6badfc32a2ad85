"""Batch: from files to folders of shards, one by one, on all cores, or on a Dask cluster."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from meshshard.cli import workers
from meshshard.errors import MeshshardError, MeshWarning, PartitionError, StoreError, n_of
from meshshard.graph import Graph, knn_graph
from meshshard.mesh import Mesh

__all__ = ["Job", "memory_note", "partition_file", "partition_files", "targets_of"]

LARGE = 200_000_000  # bytes of a file from which its memory is predicted aloud
_ONE_AT_A_TIME = threading.Lock()  # Python records warnings for a process, not for a thread


@dataclass(frozen=True)
class Job:
    """What to do with each file; see the options of `meshshard partition`.

    Attributes:
        out: directory of the folders.
        parts: number of shards.
        targets: a share of the load for each shard, none for equal ones.
        on: "cells", "points" or "auto".
        method: "metis", "morton", "rcb", "random", or the path of a file of labels.
        weight: name of a field, or "area".
        objective: "volume" or "cut".
        imbalance: largest load over the mean.
        seed: of METIS or the random labels.
        contiguous: ask METIS for connected parts.
        knn: neighbors of each entity by distance, instead of the mesh's own.
        halo: hops of halo rows.
        order: rows inside a shard: "file", "morton" or "rcm".
        weld: distance up to which points on open edges are one; None exactly, negative never.
        fields: names to keep; all by default.
        time: step of a file that holds several.
        vtk: also write pieces for ParaView; with `ghosts`, their halo too.
        ghosts: see `vtk`.
        force: replace folders that are there.
        if_changed: leave folders alone that hold the same source and request.
        dry_run: cut, but write nothing.
        command: what was typed.
    """

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
        """The options that shape the shards."""
        others = ("out", "vtk", "ghosts", "force", "if_changed", "dry_run", "command")
        return {k: v for k, v in asdict(self).items() if k not in others}


def targets_of(paths: Sequence[str], out: str) -> dict[str, Path]:
    """The folder of every file: its name with the ending .shards.

    Raises:
        StoreError: two files would share a folder.
    """
    folders: dict[str, Path] = {}
    for path in paths:
        name = Path(path).name.removesuffix(".gz")
        folder = Path(out) / f"{Path(name).stem or name}.shards"
        other = next((p for p, f in folders.items() if f == folder), None)
        if other is not None:
            raise StoreError(f"{other} and {path} would both become {folder}; give each its --out")
        folders[path] = folder
    return folders


def partition_file(path: str, folder: str, job: Job) -> dict[str, Any]:
    """Read one file, cut it, write its folder.

    Returns:
        What happened: `input`, `folder`, `status` (written, unchanged, tried or failed), `error`,
        `warnings`, `said`, `quality`, `seconds`. Nothing that is wrong with a file is raised.
    """
    began = time.perf_counter()
    outcome: dict[str, Any] = {"input": path, "folder": folder, "warnings": [], "said": []}
    with _ONE_AT_A_TIME, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            outcome |= _partition_file(path, Path(folder), job, outcome["said"])
        except (MeshshardError, OSError, MemoryError) as error:
            outcome |= {"status": "failed", "error": _one_line(path, error)}
    said = (_named(path, str(w.message)) for w in caught if issubclass(w.category, MeshWarning))
    outcome["warnings"] = list(dict.fromkeys(said))
    return outcome | {"seconds": round(time.perf_counter() - began, 3)}


def partition_files(
    folders: dict[str, Path], job: Job, jobs: int = 1, dask: str | None = None
) -> Iterator[dict[str, Any]]:
    """The outcome of every file, as each is done.

    Args:
        folders: from `targets_of`.
        job: what to do.
        jobs: processes of this machine.
        dask: address of a Dask scheduler whose workers see the same file system. A worker takes
            one file at a time, however many threads it has.

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
    """One line on the memory that a large file will take; None for small ones."""
    file = Path(path)
    size = file.stat().st_size if file.is_file() else 0
    if size < LARGE:
        return None
    with file.open("rb") as opened:
        head = opened.read(4096)
    factor = 13 if b"compressor" in head else 2.2 if b"ascii" in head else 4.8
    note = f"{path}: {size / 1e9:.1f} GB, will take about {factor * size / 1e9:.1f} GB of memory"
    free = _free_memory()
    if free and factor * size > free:
        note += f"; only {free / 1e9:.1f} GB are free"
    return note


def _partition_file(path: str, folder: Path, job: Job, said: list[str]) -> dict[str, Any]:
    from meshshard import io, store
    from meshshard.partitioning.partition import entity_of, partition

    if job.if_changed and _unchanged(folder, path, job):
        if (job.vtk or job.ghosts) and not job.dry_run and _stale(folder):
            said.append(_export(folder, path, job))
        return {"status": "unchanged"}
    before = _stamp(path)
    if folder.exists() and not (job.force or job.if_changed or job.dry_run):
        raise StoreError(f"{folder} is there already; --force replaces it, --if-changed checks it")
    mesh = _with_job(io.read(path, time=job.time), job)
    entity = entity_of(mesh, job.on)
    said.append(f"{path}: {_described(mesh)}; on {entity} ({_reason(mesh, job.on)})")
    made = partition(
        mesh,
        job.targets or job.parts,
        on=entity,
        method=_method(job),
        weights=job.weight,
        halo=job.halo,
        graph=_graph(mesh, entity, job),
    )
    if job.order != "file":
        made = made.reordered(job.order)
    status = "tried" if job.dry_run else "written"
    if _stamp(path) != before:
        raise StoreError(f"{path}: has changed while it was read; partition it again")
    if not job.dry_run:
        replace_it = job.force or job.if_changed
        store.save(
            made, folder, source=path, request=job.request(), command=job.command, force=replace_it
        )
        if job.vtk or job.ghosts:
            said.append(_export(folder, path, job))
    return {"status": status, "quality": made.quality.as_dict(), "table": str(made.quality)}


def _stamp(path: str) -> tuple[int, int, int] | None:
    """What changes when a file is written; None where there is none."""
    try:
        status = Path(path).stat()
    except OSError:
        return None  # the reader says it better
    return status.st_ino, status.st_size, status.st_mtime_ns


def _export(folder: Path, path: str, job: Job) -> str:
    """Write the pieces for ParaView; what to say about them."""
    from meshshard import store
    from meshshard.store import paraview

    whole = paraview.export(store.load(folder), _pieces_of(folder), ghosts=job.ghosts)
    return f"{path}: for ParaView: {whole}"


def _pieces_of(folder: Path) -> Path:
    return folder.with_suffix(".paraview")


def _stale(folder: Path) -> bool:
    """Whether the parallel file, which is written last, is missing or older than the folder."""
    written = [f.stat().st_mtime_ns for f in _pieces_of(folder).glob("*.pvt[pu]")]
    return max(written, default=0) < (folder / "manifest.json").stat().st_mtime_ns


def _with_job(mesh: Mesh, job: Job) -> Mesh:
    """The mesh with the fields and the weld that the job wants."""
    from meshshard.mesh.facets import facets, match
    from meshshard.mesh.inspection import open_points, weld

    if job.fields is not None:
        known = {*mesh.cell_fields, *mesh.point_fields}
        unknown = [f for f in job.fields if f not in known]
        if unknown:
            raise PartitionError(
                f"no field {unknown[0]!r}; there are: {', '.join(sorted(known)) or 'none'}"
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


def _method(job: Job) -> Any:
    from meshshard.partitioning.methods import RCB, Given, Metis, Morton, Random

    if job.method == "metis":
        if job.objective not in ("volume", "cut"):
            raise PartitionError(f"objective {job.objective!r} is unknown: volume or cut")
        return Metis("cut" if job.objective == "cut" else "volume", job.imbalance, job.seed,
                     contiguous=job.contiguous)  # fmt: skip
    simple = {"morton": Morton(), "rcb": RCB(), "random": Random(job.seed)}
    if job.method in simple:
        return simple[job.method]
    if Path(job.method).is_file():
        return Given(job.method)
    raise PartitionError(
        f"method {job.method!r} is unknown: metis, morton, rcb, random, or a file of labels"
    )


def _graph(mesh: Mesh, entity: str, job: Job) -> Graph | None:
    """The graph of nearest neighbors, where it is asked for; 0 of them leaves no edges."""
    if job.knn is not None and job.knn < 0:
        raise PartitionError(f"knn {job.knn}: a number of neighbors, 0 for no edges at all")
    return None if job.knn is None else knn_graph(mesh.positions(entity), job.knn)


def _unchanged(folder: Path, path: str, job: Job) -> bool:
    """Whether a folder holds the same source, cut by the same request."""
    from meshshard import store
    from meshshard.store.folder import plain

    try:
        found = store.load(folder)
        for shard in range(found.k):
            found.arrays(shard)
    except StoreError:
        return False
    manifest = found.manifest
    source = manifest.get("source") or {}
    same = plain(job.request()) == manifest.get("request")
    return bool(
        same
        and source.get("bytes") == Path(path).stat().st_size
        and source.get("sha256") == store.sha256(path)
    )


def _lost(path: str, folder: Path, why: str) -> dict[str, Any]:
    empty = {"warnings": [], "said": [], "seconds": 0.0}
    return {
        "input": path,
        "folder": str(folder),
        "status": "failed",
        "error": f"{path}: {why}",
    } | empty


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
    return "only points have fields" if mesh.point_fields else "there are no fields"


def _one_line(path: str, error: BaseException) -> str:
    """What went wrong with a file, as one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, MemoryError):
        text = f"not enough memory ({text}); use --fields, or a machine with more"
    return _named(path, text)


def _named(path: str, text: str) -> str:
    """A message, with the name of the file where it lacks it."""
    return text if Path(path).name in text else f"{path}: {text}"


def _free_memory() -> int:
    """Bytes that can be had without swapping; 0 where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable")]
    return int(found[0]) * 1024 if found else 0
