"""What a folder of shards holds is verified even where all checksums agree; its content hash."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from samples import assert_same, cut, surface

from meshshard import io, store
from meshshard.cli import main, report
from meshshard.errors import MeshError, MeshWarning, StoreError
from meshshard.mesh import Array
from meshshard.store.shard_files import write_arrays

SHARD = "shard_00001.safetensors"
Arrays = dict[str, Array]


def forge(folder: Path, change: Callable[[Arrays], Any]) -> None:
    """Change the arrays of shard 1, and make all checksums agree."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    arrays = load_file(folder / SHARD)
    change(arrays)
    made = write_arrays(folder / SHARD, arrays, {"id": manifest["id"], "shard": "1"})
    manifest["shards"][1] |= {k: v for k, v in made._asdict().items() if k != "content"}
    path.write_text(json.dumps(manifest))


def put(name: str, value: Any, at: Any = 0) -> Callable[[Arrays], Any]:
    return lambda arrays: arrays[name].__setitem__(at, value)


def replaced(name: str, make: Callable[[Array], Array]) -> Callable[[Arrays], Any]:
    return lambda arrays: arrays.__setitem__(name, np.ascontiguousarray(make(arrays[name])))


HEADER = {
    "halo missing": (lambda a: a.pop("plan.halo"), "'plan.halo' is missing"),
    "field removed": (lambda a: a.pop(next(n for n in a if n.startswith("cell:"))), "is missing"),
    "field added": (lambda a: a.update(more=np.zeros(3)), "'more' is unknown"),
    "one point": (replaced("points.xyz", lambda x: x[:1]), "'points.xyz' has shape"),
    "two faces arrays": (lambda a: a.update({"faces.offsets": np.zeros(1, int)}), "is missing"),
    "integer points": (replaced("points.xyz", lambda x: x.astype(int)), "and dtype int64"),
    "other points": (replaced("points.xyz", lambda x: x.astype("f4")), "points are float32"),
    "short counts": (replaced("plan.send_counts", lambda x: x[:2]), "'plan.send_counts'"),
}
VALUES = {
    "type 255": (put("cells.types", 255), "cell type 255"),
    "point -1": (put("cells.connectivity", -1), "refers to point -1"),
    "falling offsets": (put("cells.offsets", 2**30, 1), "offset"),
    "NaN points": (put("points.xyz", np.nan, 3), "not finite"),
    "origin -1": (put("cells.origin", -1), "the origin of a cell is none of"),
    "origin of points": (put("points.origin", 2**30), "the origin of a point is none of"),
    "source 2^30": (put("plan.indices", 2**30), "source of an edge is not a local row"),
    "source -1": (put("plan.indices", -1), "source of an edge is not a local row"),
    "edges": (put("plan.indptr", 2**30, -1), "does not end at the number of edges"),
    "falling indptr": (put("plan.indptr", 2**30, 1), "indptr are not offsets"),
    "halo of its own": (put("plan.halo", -1), "a halo id is not a row of another shard"),
    "halo order": (replaced("plan.halo", lambda x: x[::-1]), "halo ids are not ascending"),
    "send_counts 2^30": (put("plan.send_counts", 2**30), "send_counts are not the rows to send"),
    "send_counts -1": (put("plan.send_counts", [-1, 1], slice(2)), "send_counts are not"),
    "recv_counts": (put("plan.recv_counts", 2**30), "recv_counts are not the halo rows"),
    "send_rows": (put("plan.send_rows", 2**30), "a row to send is not an owned row"),
}


@pytest.mark.parametrize("case", HEADER)
def test_a_wrong_array_is_refused_by_every_reader(folder: Path, case: str) -> None:
    change, said = HEADER[case]
    forge(folder, change)
    found = store.load(folder)
    steps = found.arrays, found.plan, found.piece, found.origin
    for step in (*(lambda step=step: step(1) for step in steps), found.labels, found.gather):
        with pytest.raises(StoreError, match=said):
            step()


@pytest.mark.parametrize("case", VALUES)
def test_a_wrong_value_is_refused_although_checksums_agree(folder: Path, case: str) -> None:
    change, said = VALUES[case]
    forge(folder, change)
    error = report.verdict(folder)["error"]
    assert str(folder) in error
    assert said in error


def test_an_unchanged_forgery_is_right_but_has_another_hash_if_a_value_differs(
    folder: Path,
) -> None:
    forge(folder, lambda arrays: None)
    assert_same(store.load(folder).check().gather(), surface())
    forge(folder, put("points.xyz", 0.25, (0, 2)))
    with pytest.raises(StoreError, match=r"manifest\.json has changed"):
        store.load(folder).check()


@pytest.mark.parametrize(
    ("name", "value"),
    [("n_cells", 2**60), ("sizes", [2**60, 1, 1]), ("shards", [])],
)
def test_counts_that_only_the_manifest_states(folder: Path, name: str, value: Any) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text()) | {name: value}
    if name == "n_cells":  # consistent in the manifest, but not with the shards
        added = value - sum(s["cells"] for s in manifest["shards"][1:])
        manifest["shards"][0] |= {"cells": added, "owned": added}
        manifest["sizes"][0] = added
    path.write_text(json.dumps(manifest))
    for step in ("gather", "labels", "check"):
        with pytest.raises(StoreError):
            getattr(store.load(folder), step)()


def rename_to(name: str) -> Callable[[Path], Any]:
    def _change(folder: Path) -> None:
        path = folder / "manifest.json"
        manifest = json.loads(path.read_text())
        manifest["shards"][1]["file"] = name
        path.write_text(json.dumps(manifest))

    return _change


def becomes(make: Callable[[Path], Any], name: str = SHARD) -> Callable[[Path], Any]:
    def _change(folder: Path) -> None:
        (folder / name).rename(folder.parent / name)
        make(folder / name)

    return _change


ELSEWHERE = {
    "above": rename_to(f"../{SHARD}"),
    "absolute": rename_to("/dev/zero"),
    "null": rename_to("x\0y"),
    "another shard": rename_to("shard_00002.safetensors"),
    "a link": becomes(lambda path: path.symlink_to(f"../{SHARD}")),
    "a pipe": becomes(os.mkfifo),
    "a device": becomes(lambda path: path.symlink_to("/dev/zero")),
    "a folder": becomes(Path.mkdir),
    "manifest: a pipe": becomes(os.mkfifo, "manifest.json"),
    "manifest: a link": becomes(lambda path: path.symlink_to("../manifest.json"), "manifest.json"),
    "manifest: a device": becomes(lambda path: path.symlink_to("/dev/zero"), "manifest.json"),
}


@pytest.mark.parametrize("case", ELSEWHERE)
def test_only_regular_files_in_the_folder_are_opened(folder: Path, case: str) -> None:
    ELSEWHERE[case](folder)
    with pytest.raises(StoreError, match=r"shard_00001|shard 1|manifest\.json"):
        store.load(folder).check()


@pytest.mark.parametrize("what", ["header", "manifest"])
def test_json_larger_than_any_of_ours_is_not_parsed(folder: Path, what: str) -> None:
    text = b"[" + b"[]," * 3_000_000 + b"[]]"
    if what == "manifest":
        (folder / "manifest.json").write_bytes(text)
    else:
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / SHARD).write_bytes(len(text).to_bytes(8, "little") + text)
        manifest["shards"][1]["bytes"] = len(text) + 8
        (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(StoreError, match="is damaged"):
        store.load(folder).arrays(1)


def test_equal_content_has_an_equal_hash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mesh = surface()
    one = store.load(cut(mesh, 3).save(tmp_path / "one.shards"))
    other = store.load(cut(mesh, 3).save(tmp_path / "other.shards"))
    assert one.manifest["id"] != other.manifest["id"]
    assert one.manifest["content"] == other.manifest["content"]
    moved = replace(mesh, points=mesh.points + np.float32(1))
    for changed in (cut(mesh, 4), cut(mesh, 3, halo=2), cut(moved, 3)):
        third = store.load(changed.save(tmp_path / "third.shards", force=True)).check()
        assert third.manifest["content"] != one.manifest["content"]
    assert main(["info", str(one.path)]) == 0
    assert one.manifest["content"] in capsys.readouterr().out


FOREIGN = {
    "another manifest": lambda d: (d / "manifest.json").write_text('{"name": "app", "icons": []}'),
    "no manifest": lambda d: (d / "notes.txt").write_text("mine"),
    "damaged": lambda d: (d / "manifest.json").write_text("{"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_foreign_folder_is_never_replaced(tmp_path: Path, case: str) -> None:
    target = tmp_path / "x.shards"
    target.mkdir()
    FOREIGN[case](target)
    before = [f.read_bytes() for f in target.iterdir()]
    with pytest.raises(StoreError, match="is not a folder of shards; remove it yourself"):
        cut(surface(), 2).save(target, force=True)
    assert [f.read_bytes() for f in target.iterdir()] == before


def test_other_files_and_results_in_a_folder_are_not_removed_silently(folder: Path) -> None:
    found = store.load(folder)
    for p in range(3):
        found.put(p, {"p": np.zeros(found.sizes[p])}, "drag")
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(StoreError, match=r"holds 'notes\.txt', which is not part"):
        cut(surface(), 2).save(folder, force=True)
    (folder / "notes.txt").unlink()
    with pytest.warns(MeshWarning, match="the results drag are removed"):
        cut(surface(), 2).save(folder, force=True)
    assert sorted(f.name for f in folder.iterdir())[1:] == [
        "shard_00000.safetensors", "shard_00001.safetensors",
    ]  # fmt: skip


def test_a_field_name_that_no_file_can_hold(tmp_path: Path) -> None:
    mesh = surface()
    bad = mesh.with_fields(cell={"p\ud800": np.zeros(mesh.n_cells)})
    with pytest.raises(MeshError, match="no Unicode name"):
        io.from_arrays(mesh.points, point_fields={"\ud800": np.zeros(mesh.n_points)})
    with pytest.raises((MeshError, StoreError), match="name"):
        cut(bad, 2).save(tmp_path / "x.shards")
    assert not list(tmp_path.iterdir())
