"""Real surfaces and a real volume: partitions, stored shards, and forces summed by shard."""

import csv
from pathlib import Path

import numpy as np
import pytest

from meshshard import io, store
from meshshard.cli.demo import force_coefficients
from meshshard.partitioning.partition import partition

pytestmark = pytest.mark.slow

AHMED = Path(__file__).parent.parent / "datasets" / "ahmed"
RUNS = (1, 2, 4, 5, 6, 8, 10, 11)
PARTS = (1, 2, 7, 8, 64)


def solver(run):
    with (AHMED / f"run_{run}/force_mom_{run}.csv").open() as file:
        row = next(csv.DictReader(file, skipinitialspace=True))
    return float(row["cd"]), float(row["cl"])


def assert_same(mesh, other):
    """Bit for bit, in the same order."""
    assert mesh.points.dtype == other.points.dtype
    for a, b in (
        (mesh.points, other.points),
        (mesh.connectivity, other.connectivity),
        (mesh.offsets, other.offsets),
        (mesh.types, other.types),
        *zip(mesh.faces or (), other.faces or (), strict=True),
    ):
        assert np.array_equal(a, b)
    for mine, theirs in (
        (mesh.cell_fields, other.cell_fields),
        (mesh.point_fields, other.point_fields),
    ):
        assert list(mine) == list(theirs)
        for name in mine:
            assert mine[name].dtype == theirs[name].dtype
            assert mine[name].tobytes() == theirs[name].tobytes()


@pytest.mark.parametrize("run", RUNS)
def test_forces_summed_over_shards_are_the_solvers(run, tmp_path):
    mesh = io.read(AHMED / f"run_{run}/boundary_{run}.vtp")
    for k in PARTS:
        folder = store.load(partition(mesh, k).check().save(tmp_path / f"{k}.shards"))
        cd, cl = sum(force_coefficients(folder.piece(p).mesh) for p in range(k))
        assert abs(cd - solver(run)[0]) < 1e-4
        assert abs(cl - solver(run)[1]) < 2e-4


@pytest.mark.parametrize("on", ["cells", "points"])
@pytest.mark.parametrize("name", ["run_6/boundary_6.vtp", "run_8/volume_8.vtu"])
def test_read_shard_gather_write_returns_the_file(name, on, tmp_path):
    mesh = io.read(AHMED / name)
    for k in PARTS:
        made = partition(mesh, k, on=on, halo=1 + (k == 7))
        back = store.load(made.save(tmp_path / f"{k}.shards")).check().gather()
        assert_same(mesh, back)
        io.write(back, tmp_path / Path(name).name)
        assert_same(mesh, io.read(tmp_path / Path(name).name))


@pytest.mark.filterwarnings("ignore:64 shards on:meshshard.errors.MeshWarning")
@pytest.mark.parametrize("name", ["run_1/boundary_1.vtp", "run_8/volume_8.vtu"])
def test_64_shards_on_any_number_of_ranks(name):
    made = partition(io.read(AHMED / name), 64)
    direct = {r: partition(io.read(AHMED / name), r).quality.volume for r in (2, 8)}
    for ranks in (1, 2, 3, 8, 63, 64):
        merged = made.merge(ranks).check()
        assert np.array_equal(merged.origin, made.origin)
        if ranks in direct:
            assert merged.quality.volume < 1.7 * direct[ranks]  # 153 cells a shard are few


def test_the_polyhedral_volume_has_no_loose_cell():
    quality = partition(io.read(AHMED / "run_8/volume_8.vtu"), 8).quality
    assert quality.imbalance < 1.006
    assert sum(quality.pieces) < 16
