"""The command line: every command and option, in a separate process or through main(argv)."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from samples import AHMED, ROOT, assert_bits, assert_same, meshshard, surface, volume

from meshshard import io, store
from meshshard.cli import build_parser, main
from meshshard.mesh import Mesh
from meshshard.partitioning.methods import METHODS

pytestmark = pytest.mark.slow


@pytest.fixture
def body(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A real surface in the current directory."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(AHMED, tmp_path / "body.vtp")
    return "body.vtp"


def call(capsys: pytest.CaptureFixture[str], *words: Any, code: int = 0) -> tuple[str, str]:
    """Standard output and error of a command that runs in this process."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == code
    captured = capsys.readouterr()
    return captured.out, captured.err


def listed(directory: Path = Path()) -> list[str]:
    return sorted(str(f.relative_to(directory)) for f in directory.iterdir())


def test_partition_info_validate_gather(body: str) -> None:
    out, err = meshshard("partition", body, "--parts", 3, "--out", "o")
    assert "surface, 9,794 cells, 9,825 points; on cells (cells have fields)" in out
    assert "9,794 cells in 3 shards, imbalance 1.00" in out
    assert "body.vtp: written: o/body.shards" in out
    assert err == ""
    out, _ = meshshard("info", "o/body.shards")
    assert "source   body.vtp" in out
    assert "Metis(objective=volume" in out
    out, _ = meshshard("validate", "o/body.shards", body)
    assert out.splitlines() == [
        "o/body.shards: 3 shards: checksums, arrays and the exchange plan are correct",
        "body.vtp: a surface that can be partitioned",
    ]
    out, _ = meshshard("gather", "o/body.shards", "-o", "back.vtp")
    assert out == "back.vtp: 9,794 cells, 9,825 points\n"
    assert_same(io.read("back.vtp"), io.read(body))


@pytest.mark.slow
def test_many_files(body: str, capsys: pytest.CaptureFixture[str]) -> None:
    io.write(volume(3, False), "v.vtu")
    for i in range(3):
        shutil.copy(body, f"run_{i}.vtp")
    words = ("partition", "run_?.vtp", body, "v.vtu", "v.vtu", "--parts", 2, "--method", "morton")
    out, err = call(capsys, *words, "--out", "one")
    assert out.count("written: ") == 5
    assert err.splitlines()[-1] == "5 of 5 files done"
    out, err = meshshard(*words, "--out", "two", "--jobs", 2)
    assert out.count("written: ") == 5
    assert listed(Path("one")) == listed(Path("two"))
    for name in listed(Path("one")):
        one, two = store.load(Path("one") / name), store.load(Path("two") / name)
        assert_same(one.check().gather(), two.check().gather())
        np.testing.assert_array_equal(one.labels(), two.labels())


@pytest.mark.slow
def test_one_bad_file_of_many(body: str) -> None:
    Path("bad.vtp").write_text("<html>")
    for jobs in (1, 2):
        out, err = meshshard("partition", "bad.vtp", body, "no.vtp", "--parts", 2, "--out",
                             f"o{jobs}", "--jobs", jobs, code=1)  # fmt: skip
        assert "body.vtp: written" in out
        *errors, end = err.splitlines()
        assert sorted(line.split(":")[1] for line in errors) == [" bad.vtp", " no.vtp"]
        assert end == "1 of 3 files done"
        assert listed(Path(f"o{jobs}")) == ["body.shards"]


def test_json_quiet_and_dry_run(body: str, capsys: pytest.CaptureFixture[str]) -> None:
    cut = ("partition", body, "--parts", 4)
    out, err = call(capsys, *cut, "--dry-run", "--json", "--vtk")
    answer = json.loads(out)
    assert (answer["status"], answer["input"], err) == ("tried", body, "")
    assert sum(answer["quality"]["owned"]) == 9794
    assert "table" not in answer
    out, _ = call(capsys, *cut, "--dry-run")
    assert "nothing written (--dry-run)" in out
    assert listed() == ["body.vtp"]
    assert call(capsys, *cut, "-q") == ("", "")
    assert listed() == ["body.shards", "body.vtp"]
    shutil.copy(body, "other.vtp")
    out, _ = call(capsys, "partition", body, "other.vtp", "--parts", 4, "--json", "--force")
    assert [answer["status"] for answer in json.loads(out)] == ["written", "written"]
    out, _ = call(capsys, "info", "body.shards", "--json")
    assert json.loads(out)["sizes"] == store.load("body.shards").sizes.tolist()
    out, _ = call(capsys, "info", body, "--json")
    assert json.loads(out)["cells"] == 9794
    out, _ = call(capsys, "validate", body, "body.shards", "nothing", "--json", code=1)
    assert [bool(v["error"]) for v in json.loads(out)] == [False, False, True]
    out, _ = call(capsys, "gather", "body.shards", "-o", "x.vtp", "--json")
    assert json.loads(out) == {"output": "x.vtp", "cells": 9794, "points": 9825, "results": []}
    out, _ = call(capsys, *cut, "--force", "-v")
    assert "written: body.shards in" in out


def test_force_and_if_changed(body: str, capsys: pytest.CaptureFixture[str]) -> None:
    cut = ("partition", body, "--parts", 2, "--method", "rcb")
    identities = []

    def again(*words: Any) -> str:
        out, _ = call(capsys, *cut, *words)
        identities.append(store.load("body.shards").manifest["id"])
        return out.splitlines()[-1]

    assert "written" in again()
    _, err = call(capsys, *cut, code=1)
    assert err.startswith("error: body.vtp: body.shards already exists; use --force")
    assert again("--if-changed") == "body.vtp: up to date"
    assert identities[0] == identities[1]
    assert "written" in again("--if-changed", "--halo", 2)
    assert again("--if-changed", "--halo", 2) == "body.vtp: up to date"
    mesh = io.read(body)
    io.write(mesh.with_fields(cell={"new": np.zeros(mesh.n_cells)}), body)
    assert "written" in again("--if-changed", "--halo", 2)
    assert "written" in again("--force", "--halo", 2)
    assert len(set(identities)) == 4
    (Path("body.shards") / "shard_00001.safetensors").write_bytes(b"")
    assert "written" in again("--if-changed", "--halo", 2)
    store.load("body.shards").check()
    assert (
        "for ParaView: body.paraview" in call(capsys, *cut, "--if-changed", "--halo", 2, "--vtk")[0]
    )
    out, _ = call(capsys, *cut, "--if-changed", "--halo", 2, "--vtk")
    assert out == "body.vtp: up to date\n"


def test_targets_and_weights(body: str, capsys: pytest.CaptureFixture[str]) -> None:
    call(capsys, "partition", body, "--targets", "2,1,1", "--out", "t")
    sizes = store.load("t/body.shards").sizes
    assert abs(sizes[0] / sizes.sum() - 0.5) < 0.01
    mesh = io.read(body)
    field = mesh.with_fields(cell={"load": np.where(np.arange(mesh.n_cells) < 2000, 5.0, 1.0)})
    io.write(field, "load.vtp")
    for name, loads in (("area", mesh.areas()), ("load", field.cell_fields["load"])):
        call(capsys, "partition", "load.vtp", "--parts", 4, "--weight", name, "--out", name)
        load = np.bincount(store.load(f"{name}/load.shards").labels(), loads)
        assert load.max() / load.mean() < 1.05
    for words, said in (
        (("--weight", "no"), "no field 'no' on cells; fields: "),
        (("--weight", "wallShearStressMeanTrim"), "weights have shape (9794, 3)"),
        (("--weight", "pMeanTrim"), "must be finite and not negative"),
        (("--weight", "pMeanTrim", "--method", "rcb"), "must be finite and not negative"),
        (("--fields", "no"), "no field 'no'; fields: "),
    ):
        _, err = call(capsys, "partition", body, "--parts", 2, *words, code=1)
        assert err.startswith("error: body.vtp: ")
        assert said in err
        assert err.count("\n") == 1


@pytest.mark.parametrize("method", [*METHODS, "labels.part.5"])
def test_methods(body: str, capsys: pytest.CaptureFixture[str], method: str) -> None:
    labels = np.arange(9794) % 5
    np.savetxt("labels.part.5", labels, fmt="%d")
    call(capsys, "partition", body, "--parts", 5, "--method", method, "--seed", 3)
    folder = store.load("body.shards").check()
    assert len(folder.sizes) == 5
    assert folder.sizes.max() <= 1.006 * 9794 / 5
    if method.startswith("labels"):
        np.testing.assert_array_equal(folder.labels(), labels)


@pytest.mark.slow
def test_options_of_the_cut(body: str, capsys: pytest.CaptureFixture[str]) -> None:
    cut = ("partition", body, "--parts", 3, "--force", "-q")
    call(capsys, *cut, "--halo", 2)
    assert set(store.load("body.shards").plan(0).hops) == {1, 2}
    call(capsys, *cut, "--knn", 6)
    folder = store.load("body.shards").check()
    assert set(np.diff(folder.plan(0).indptr)[: folder.sizes[0]]) == {6}
    call(capsys, *cut, "--on", "points")
    assert store.load("body.shards").sizes.sum() == 9825
    call(capsys, *cut, "--fields", "pMeanTrim", "--objective", "cut", "--imbalance", "1.02")
    assert list(store.load("body.shards").gather().cell_fields) == ["pMeanTrim"]
    for order in ("morton", "rcm", "file"):
        call(capsys, *cut, "--order", order)
        assert_same(store.load("body.shards").check().gather(), io.read(body))
    ascending = store.load("body.shards").origin(1)
    assert (np.diff(ascending) > 0).all()


def test_welding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = np.array([[x, y, 0] for x in (0, 1, 1.001, 2) for y in (0, 1)], np.float64)
    quads = np.array([0, 2, 3, 1, 4, 6, 7, 5])
    gap = Mesh(points, quads, np.array([0, 4, 8]), np.full(2, 9, np.uint8))
    io.write(gap, tmp_path / "gap.vtp")
    cut = ("partition", tmp_path / "gap.vtp", "--parts", 2, "--force", "-q", "--out", tmp_path)
    for words, merged, cut_edges in (
        ((), 0, 0),
        (("--weld", "no"), 0, 0),
        (("--weld", 0.01), 2, 1),
    ):
        _, err = call(capsys, *cut, *words)
        manifest = store.load(tmp_path / "gap.shards").manifest
        assert manifest["welded_points"] == merged
        assert manifest["quality"]["edge_cut"] == cut_edges
        assert ("2 points on open edges merged within 0.01" in err) == bool(merged)
        back = store.load(tmp_path / "gap.shards").check().gather()
        assert_same(back, io.read(tmp_path / "gap.vtp"))


def test_a_cloud_and_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "c.npz", points=rng.random((500, 3)), p=rng.random(500))
    out, _ = call(capsys, "partition", tmp_path / "c.npz", "--parts", 4, "--out", tmp_path)
    assert "point cloud, 500 points; on points (it has no cells)" in out
    call(capsys, "gather", tmp_path / "c.shards", "-o", tmp_path / "back.npz")
    with np.load(tmp_path / "c.npz") as one, np.load(tmp_path / "back.npz") as two:
        for name in ("points", "p"):
            assert_bits(one[name], two[name])
    _, err = call(capsys, "gather", tmp_path / "c.shards", "-o", tmp_path / "c.xyz", code=1)
    assert "are written as .vtp, .vtu, .vtkhdf, .stl or .npz" in err


@pytest.mark.parametrize("name", ["x.part", "x.part.3"])
def test_gather_labels(body: str, capsys: pytest.CaptureFixture[str], name: str) -> None:
    call(capsys, "partition", body, "--parts", 3)
    out, _ = call(capsys, "gather", "body.shards", "-o", name)
    assert out == f"{name}: labels of 9,794 cells\n"
    call(capsys, "partition", body, "--parts", 3, "--method", name, "--out", "again")
    assert_bits(store.load("again/body.shards").labels(), store.load("body.shards").labels())
    for more in (["--source", body], ["--with", "prediction"]):
        assert main(["gather", "body.shards", "-o", name, *more]) == 2
        assert "labels have no fields; leave out" in capsys.readouterr().err


def test_options_that_do_not_apply_are_refused(
    body: str, capsys: pytest.CaptureFixture[str]
) -> None:
    call(capsys, "partition", body, "--parts", 3)
    for words, said in (
        (["info", "body.shards", "--time", "3"], "has one time step; leave out --time"),
        (["gather", "body.shards", "-o", "x.vtp", "--source", "."], "Is a directory; name a file"),
    ):
        assert main(words) == 1
        assert said in capsys.readouterr().err


def test_gather_with_results_and_source(body: str, capsys: pytest.CaptureFixture[str]) -> None:
    call(capsys, "partition", body, "--parts", 3, "--fields", "pMeanTrim")
    folder, mesh = store.load("body.shards"), io.read(body)
    truth = np.random.default_rng(0).random((mesh.n_cells, 3))
    for p in range(3):
        folder.put(p, {"predicted": truth[folder.origin(p)]})
        folder.put(p, {"pMeanTrim": truth[folder.origin(p), 0]}, "other")
    out, _ = call(capsys, "info", "body.shards")
    assert "results  other, prediction" in out
    gather = ("gather", "body.shards", "-o", "x.vtp")
    out, err = call(capsys, *gather, "--with", "prediction")
    assert (out, err) == ("x.vtp: 9,794 cells, 9,825 points, with predicted\n", "")
    assert_bits(io.read("x.vtp").cell_fields["predicted"], truth)
    _, err = call(capsys, *gather)
    assert err == "warning: x.vtp: field 'pMeanTrim' is replaced by that of the results 'other'\n"
    call(capsys, *gather, "--source", body, "--with", "prediction")
    back = io.read("x.vtp")
    assert list(back.cell_fields) == [*mesh.cell_fields, "predicted"]
    for name, values in mesh.cell_fields.items():
        assert_bits(back.cell_fields[name], values)
    io.write(surface(), "other.vtp")
    _, err = call(capsys, *gather, "--source", "other.vtp", code=1)
    assert err == "error: other.vtp: is not the file that body.shards was made from\n"
    _, err = call(capsys, *gather, "--with", "nothing", code=1)
    assert "shard 0 has no results 'nothing' yet" in err
    _, err = call(capsys, "gather", "body.shards", "-o", "no/x.vtp", code=1)
    assert "no/x.vtp: cannot be written" in err


def test_validate_finds_damage(body: str, capsys: pytest.CaptureFixture[str]) -> None:
    call(capsys, "partition", body, "--parts", 3)
    path = Path("body.shards/shard_00001.safetensors")
    whole = path.read_bytes()
    path.write_bytes(whole[:-5] + b"\0" + whole[-4:])
    for command in (("validate", "body.shards"), ("gather", "body.shards", "-o", "x.vtp")):
        _, err = call(capsys, *command, code=1)
        assert err == f"error: {path}: its bytes have changed; write the folder again\n"
    assert not Path("x.vtp").exists()
    Path("cut.vtp").write_bytes(Path(body).read_bytes()[:5000])
    _, err = call(capsys, "validate", "cut.vtp", body, "no", code=1)
    assert [line.split(":")[1] for line in err.splitlines()] == [" cut.vtp", " no"]
    points = np.random.default_rng(0).random((20, 3))
    nan = Mesh(points=points, point_fields={"p": np.where(np.arange(20) == 3, np.nan, 1.0)})
    io.write(nan, "nan.vtp")
    _, err = call(capsys, "validate", "nan.vtp")
    assert "'p' has 1 NaN" in err
    call(capsys, "validate", "nan.vtp", "--strict", code=1)


@pytest.mark.parametrize(
    "words",
    [
        ("view", "none.shards", "--png", "no/x.png"),
        ("view", "none.shards", "--html", "no/x.png"),
        ("view", "none.shards", "--png", "no/x.png", "--field", "p", "--against", "q"),
        ("gather", "none.shards", "-o", "no/x.vtp"),
    ],
)
def test_a_missing_directory_is_found_before_the_work(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    """The folder of shards does not exist either: it has not been opened."""
    _, err = call(capsys, *words, code=1)
    assert re.fullmatch(r"error: no/x\.\w+: .* directory /.*/no does not exist; create it\n", err)


def test_the_time_of_each_step(body: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = call(capsys, "partition", body, "--parts", 2, "--vtk", "--json")
    assert list(json.loads(out)["steps"]) == ["read", "partition", "write", "export"]
    out, _ = call(capsys, "partition", body, "--parts", 2, "--force", "-v")
    assert re.search(r"in [0-9.]+ s \(read [0-9.]+ s, partition [0-9.]+ s, write [0-9.]+ s\)", out)


def test_info_of_a_file(body: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = call(capsys, "info", body)
    for said in (
        "9,794 (9,737 quad, 57 polygon)",
        "components  1 by",
        "open edges",
        "pMeanTrim",
        "bounds",
    ):
        assert said in out.replace("cells       ", "").replace("  ", "  ")
    assert call(capsys, "info", body, "-q") == ("", "")
    _, err = call(capsys, "info", "nowhere.vtp", code=1)
    assert "nowhere.vtp" in err
    _, err = call(capsys, "info", "nowhere.shards", code=1)
    assert "nowhere.shards: does not exist" in err


def test_vtk_beside_the_shards(body: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = call(capsys, "partition", body, "--parts", 3, "--vtk", "--out", "o")
    assert "for ParaView: o/body.paraview/body.pvtp" in out
    assert len(listed(Path("o/body.paraview"))) == 3 + 2
    call(capsys, "partition", body, "--parts", 3, "--with-ghosts", "--out", "o", "--force")
    text = Path("o/body.paraview/body.pvtp").read_text()
    assert 'Name="vtkGhostType"' in text


@pytest.mark.slow
def test_demo(tmp_path: Path) -> None:
    out, err = meshshard("demo", "--parts", 4, cwd=tmp_path)
    assert "9,794 cells in 4 shards" in out
    assert "bit for bit" in out
    assert err == ""
    out, _ = meshshard("demo", "-q", "--out", "again", cwd=tmp_path)
    assert out == ""
    for name, k in (("meshshard-demo", 4), ("again", 8)):
        assert store.load(tmp_path / name / "boundary_1.shards").check().k == k
        assert (tmp_path / name / "boundary_1.paraview" / "boundary_1.pvtp").exists()


def test_version_and_help() -> None:
    out, _ = meshshard("--version")
    assert out.startswith("meshshard ")
    out, _ = meshshard("--help")
    assert "exit codes: 0 success" in out
    for command in (
        "partition",
        "info",
        "validate",
        "gather",
        "view",
        "demo",
        "launch",
        "selftest",
    ):
        assert command in out
        assert meshshard(command, "--help")[0]


def test_every_command_and_option_has_a_help_text() -> None:
    parser = build_parser()
    (commands,) = (a.choices for a in parser._actions if isinstance(a.choices, dict))
    for name, command in commands.items():
        assert command.description, name
        assert all(action.help for action in command._actions), name


@pytest.mark.slow
@pytest.mark.parametrize("run", [1, 2, 4, 5, 6, 8, 10, 11])
def test_every_surface_comes_back(run: int, tmp_path: Path, capsys: Any) -> None:
    path = ROOT / "datasets" / "ahmed" / f"run_{run}" / f"boundary_{run}.vtp"
    call(capsys, "partition", path, "--parts", 7, "--out", tmp_path, "-q")
    call(capsys, "gather", tmp_path / f"boundary_{run}.shards", "-o", tmp_path / "x.vtp")
    assert_same(io.read(tmp_path / "x.vtp"), io.read(path))


def test_help_lists_the_table_of_methods() -> None:
    out, _ = meshshard("partition", "--help")
    text = " ".join(out.split())
    for name, row in METHODS.items():
        assert f"{name} ({row.help})" in text
    assert "metis and random: random seed" in text
