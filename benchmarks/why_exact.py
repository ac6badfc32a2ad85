"""Why exact: what cutting a mesh into independent blocks does to a prediction, and what shards do.

    python benchmarks/why_exact.py                          surfaces of datasets/, a million points
    python benchmarks/why_exact.py --only volumes --data DIR   run_N/volume_N.vtu, boundary_N.vtp

A small Transolver learns fields round Ahmed bodies (or round a sphere, on points). Its
prediction of a body that it has not seen, whole in one go, is compared with what others do when a
mesh is too large: each block on its own (spatial blocks of METIS; random blocks), with the same
weights, and with weights that were trained on such blocks. And with shards of the same METIS cut
on several ranks, which exchange tokens. One thread a rank; figures do not depend on the speed.
"""

import argparse
import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from groups import on_ranks
from measure import Record, show, store
from torch import Tensor

import meshshard as ms
from meshshard.cli.demo import SPEED, force_coefficients
from meshshard.mesh import Mesh

HERE = Path(__file__).parent
CUTS = (2, 8, 32)
MOST_RANKS = 4  # 8 and 32 shards run on so many
DYNAMIC = 0.5 * SPEED**2  # m2/s2
Tables = Iterator[tuple[str, list[Record]]]
Labels = np.ndarray


class Sample(NamedTuple):
    """One body: features and targets of every point."""

    name: str
    x: Tensor  # (n, n_features) float32
    y: Tensor  # (n, n_fields) float32
    graph: Any  # what METIS cuts
    mesh: Mesh | None = None  # a surface, whose drag is integrated


class Case(NamedTuple):
    """Training bodies, one test body, and the number of training steps."""

    learn: list[Sample]
    judge: Sample
    steps: int
    points: int  # drawn anew for every step, as is usual


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=CASES, default=["surfaces", "points"])
    parser.add_argument("--data", type=Path, default=HERE.parent / "datasets" / "ahmed")
    parser.add_argument("--json", type=Path, default=HERE / "results" / "why_exact.json")
    given = parser.parse_args()
    for name in given.only:
        title, rows = table(name, CASES[name](given.data))
        show(title, rows)
        store(given.json, {name: {title: rows}})


def table(name: str, case: Case) -> tuple[str, list[Record]]:
    """The headline table of one case."""
    whole = trained(case, whole_points)
    alone = {k: trained(case, functools.partial(block_points, k=k)) for k in CUTS}
    judge = case.judge
    title = f"{name}: {judge.name}, {len(judge.x):,} points, not seen in training"
    right = predict(whole, judge.x)
    rows = [said("whole mesh at once", 1, right, right, judge)]
    for k in CUTS:
        spatial, random = labels_of(judge, k), random_labels(len(judge.x), k)
        rows += [
            said("spatial blocks, each alone", k, in_blocks(whole, judge.x, spatial), right, judge),
            said("random blocks, each alone", k, in_blocks(whole, judge.x, random), right, judge),
            said("trained on spatial blocks, in blocks", k,
                 in_blocks(alone[k], judge.x, spatial), predict(alone[k], judge.x), judge),
            said("shards (exact)", k, in_shards(whole, judge.x, spatial), right, judge),
        ]  # fmt: skip
    return title, rows


def said(how: str, k: int, got: Tensor, right: Tensor, judge: Sample) -> Record:
    """A row: how far from the same model on the whole mesh, from the truth, and drag in counts."""
    row: Record = {
        "prediction": how,
        "cut into": k,
        "from whole mesh %": 100 * relative(got, right),
        "from truth %": 100 * relative(got, judge.y),
    }
    if judge.mesh is not None:
        row["drag from whole mesh, counts"] = 1e4 * (drag(judge, got) - drag(judge, right))
        row["drag from truth, counts"] = 1e4 * (drag(judge, got) - drag(judge, judge.y))
    return row


def relative(got: Tensor, wanted: Tensor) -> float:
    """L2 of the difference over L2."""
    return float((got - wanted).double().norm() / wanted.double().norm())


def drag(sample: Sample, y: Tensor) -> float:
    """Drag coefficient of pressure and wall shear, integrated over the surface."""
    assert sample.mesh is not None
    fields = {"pMeanTrim": y[:, 0].numpy(), "wallShearStressMeanTrim": y[:, 1:4].numpy() / 100}
    fields = {name: a.astype(np.float64) * DYNAMIC for name, a in fields.items()}
    return float(force_coefficients(sample.mesh.with_fields(cell=fields))[0])


# -------------------------------------------------------------------------------------- predictions
@torch.no_grad()
def predict(model: torch.nn.Module, x: Tensor) -> Tensor:
    """All points at once."""
    answer: Tensor = model(x)
    return answer


def in_blocks(model: torch.nn.Module, x: Tensor, labels: Labels) -> Tensor:
    """Every block as if it were the whole."""
    out: Tensor | None = None
    for label in np.unique(labels):
        rows = torch.from_numpy(np.flatnonzero(labels == label))
        answer = predict(model, x[rows])
        out = x.new_empty(len(x), answer.shape[1]) if out is None else out
        out[rows] = answer
    assert out is not None
    return out


def in_shards(model: torch.nn.Module, x: Tensor, labels: Labels) -> Tensor:
    """The blocks as shards on ranks."""
    order = torch.from_numpy(np.argsort(labels, kind="stable"))
    sizes = np.bincount(labels)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "sample.pt")
        torch.save({"x": x[order], "sizes": sizes.tolist(), "model": model}, place)
        parts = on_ranks(min(len(sizes), MOST_RANKS), _shard_job, str(place))
    out = torch.empty(len(x), parts[0].shape[1])
    out[order] = torch.from_numpy(np.concatenate(parts))
    return out


def _shard_job(place: str) -> np.ndarray:
    from meshshard.comm import init_domain
    from meshshard.graph.plan import runs
    from meshshard.tensor import Sharding, ShardTensor

    domain = init_domain()
    given = torch.load(place, weights_only=False)
    cuts = runs(np.array(given["sizes"]), domain.size)
    sharding = Sharding(domain, np.add.reduceat(given["sizes"], cuts[:-1]).tolist())
    own = given["x"][sharding.first : sharding.first + sharding.own]
    with torch.no_grad():
        answer = given["model"](ShardTensor.from_local(own, sharding))
    return np.asarray(answer.to_local().numpy())


# ----------------------------------------------------------------------------------------- training
def trained(case: Case, choose: Callable[[Case, Sample, torch.Generator], Tensor]) -> Any:
    """A Transolver after AdamW with a cosine schedule, on the points that `choose` gives."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    first = case.learn[0]
    widths = first.x.shape[1], first.y.shape[1]
    model = ms.models.Transolver(*widths, hidden=64, layers=4, heads=4, slices=32)
    optimizer = torch.optim.AdamW(model.parameters(), 4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=case.steps)
    for _, sample in zip(range(case.steps), itertools.cycle(case.learn), strict=False):
        rows = choose(case, sample, generator)
        loss = (model(sample.x[rows]) - sample.y[rows]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


def whole_points(case: Case, sample: Sample, generator: torch.Generator) -> Tensor:
    """A random subset of the whole body."""
    return torch.randperm(len(sample.x), generator=generator)[: case.points]


def block_points(case: Case, sample: Sample, generator: torch.Generator, *, k: int) -> Tensor:
    """A random subset of one block of METIS."""
    label = int(torch.randint(k, (), generator=generator))
    rows = torch.from_numpy(np.flatnonzero(labels_of(sample, k) == label))
    return rows[torch.randperm(len(rows), generator=generator)[: case.points]]


@functools.cache
def _labels(name: str, k: int, graph: Any) -> Labels:
    return np.asarray(ms.partition(graph, k).labels)


def labels_of(sample: Sample, k: int) -> Labels:
    """Labels by METIS, made once."""
    return _labels(sample.name, k, sample.graph)


def random_labels(n: int, k: int) -> Labels:
    """Equal blocks of points drawn at random."""
    return np.random.default_rng(0).permutation(np.arange(n) % k)


# ------------------------------------------------------------------------------------------ samples
def surfaces(data: Path) -> Case:
    """Pressure and wall shear on the surfaces of Ahmed bodies."""
    files = sorted(data.glob("run_*/boundary_*.vtp"))
    samples = [surface(file) for file in files]
    judge = next(s for s in samples if s.name == "boundary_5")
    return Case([s for s in samples if s is not judge], judge, steps=1000, points=2048)


def surface(file: Path) -> Sample:
    """Cells of one body: center, normal and area; pressure coefficient, 100 x friction."""
    mesh = ms.read(file)
    shear = mesh.cell_fields["wallShearStressMeanTrim"]
    y = np.column_stack([mesh.cell_fields["pMeanTrim"], 100 * shear]) / DYNAMIC
    x = np.column_stack([mesh.centers(), mesh.normals()])
    return Sample(file.stem, _floats(x), _floats(y), ms.cell_graph(mesh), mesh)


def volumes(data: Path) -> Case:
    """Pressure and velocity in the volumes round Ahmed bodies."""
    files = sorted(data.glob("run_*/volume_*.vtu"))
    if len(files) < 2:
        raise SystemExit(f"{data} has {len(files)} volumes; --data needs run_N/volume_N.vtu of 2")
    samples = [volume(file) for file in files]
    judge = next(s for s in samples if s.name == "volume_8")
    return Case([s for s in samples if s is not judge], judge, steps=1000, points=2048)


def volume(file: Path) -> Sample:
    """Cells of one volume: center, way to the nearest cell of the body; pressure, velocity."""
    from scipy.spatial import cKDTree

    mesh, name = ms.read(file), file.stem.split("_")[1]
    body = ms.read(file.with_name(f"boundary_{name}.vtp"))
    centers, skin = mesh.centers() + mesh.offset, body.centers() + body.offset
    away, nearest = cKDTree(skin).query(centers)
    x = np.column_stack([centers, centers - skin[nearest], np.log(away + 1e-3)])
    fields = mesh.cell_fields
    y = np.column_stack([fields["pMeanTrim"] / DYNAMIC, fields["UMeanTrim"] / SPEED])
    return Sample(file.stem, _floats(x), _floats(y), ms.cell_graph(mesh))


def points(data: Path) -> Case:
    """A stream past a sphere, a million points; trained on small clouds."""
    del data
    learn = [stream(seed, 20_000) for seed in range(16)]
    return Case(learn, stream(99, 1_000_000), steps=1500, points=2048)


def stream(seed: int, n: int) -> Sample:
    """Potential flow past a sphere of some radius somewhere: what it adds to stream and pressure.

    Features of a point are its position and the vector to the nearest point of the sphere. The size
    of the sphere follows only from the whole cloud.
    """
    rng = np.random.default_rng(seed)
    center, radius = rng.uniform(-0.4, 0.4, 3), rng.uniform(0.15, 0.45)
    at = rng.uniform(-1, 1, (2 * n, 3))
    far = np.linalg.norm(at - center, axis=1, keepdims=True)
    at, far = at[far[:, 0] > radius][:n], far[far > radius][:n, None]
    way, along = at - center, np.array([1.0, 0, 0])
    speed = radius**3 / 2 * (along / far**3 - 3 * way[:, :1] * way / far**5)
    pressure = 1 - ((along + speed) ** 2).sum(axis=1, keepdims=True)
    x = np.column_stack([at, way * (1 - radius / far), np.log(far - radius + 1e-3)])
    y = 4 * np.column_stack([pressure, speed])
    return Sample(f"sphere {seed}", _floats(x), _floats(y), ms.knn_graph(at, 6).symmetrized())


def _floats(a: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(a, np.float32))


CASES = {"surfaces": surfaces, "volumes": volumes, "points": points}

if __name__ == "__main__":
    main()
