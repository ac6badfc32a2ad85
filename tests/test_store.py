"""A stored mesh is gathered bit for bit, and a rank reads the files of its shards only."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samples import AHMED, assert_bits, assert_same, cloud, cut, surface, volume

import meshshard
from meshshard import io, store
from meshshard.errors import StoreError
from meshshard.graph import Graph
from meshshard.graph.plan import Plan
from meshshard.mesh import Mesh

pytestmark = pytest.mark.slow

MESHES = {"surface": surface, "cloud": cloud, "volume": volume, "hexes": lambda: volume(3, False)}
ON = [("surface", "cells"), ("surface", "points"), ("cloud", "points"), ("volume", "cells"),
      ("volume", "points"), ("hexes", "cells")]  # fmt: skip


def make(tmp_path: Path, mesh: Mesh | None = None, k: int = 3, **options: Any) -> store.Folder:
    made = cut(mesh or surface(), k, **options)
    return store.load(made.save(tmp_path / "x.shards"))


@pytest.mark.parametrize("k", [1, 2, 7])
@pytest.mark.parametrize(("name", "on"), ON)
def test_gather_returns_every_bit(tmp_path: Path, name: str, on: str, k: int) -> None:
    mesh = MESHES[name]()
    folder = make(tmp_path, mesh, k, on=on)
    assert_same(folder.check().gather(), mesh)
    assert folder.gather().name == mesh.name


@pytest.mark.parametrize(("name", "on"), ON)
def test_empty_shards(tmp_path: Path, name: str, on: str) -> None:
    mesh = MESHES[name]()
    n = mesh.n_cells if on == "cells" else mesh.n_points
    labels = np.where(np.arange(n) % 3 == 0, 2, 5)
    folder = make(tmp_path, mesh, 8, on=on, method=labels)
    assert_same(folder.check().gather(), mesh)
    np.testing.assert_array_equal(folder.labels(), labels)
    np.testing.assert_array_equal(folder.sizes, np.bincount(labels, minlength=8))


def test_a_real_surface(tmp_path: Path) -> None:
    mesh = io.read(AHMED)
    made = cut(mesh, 7)
    folder = store.load(made.save(tmp_path / "a.shards", source=AHMED))
    assert_same(folder.check().gather(), mesh)
    assert folder.manifest["source"]["sha256"] == store.sha256(AHMED)
    assert folder.manifest["source"]["bytes"] == AHMED.stat().st_size


@st.composite
def meshes(draw: st.DrawFn) -> tuple[Mesh, list[int], int, str]:
    """Random unconnected polygons or a cloud, and random labels with empty parts."""
    n = draw(st.integers(3, 12))
    cells = draw(st.lists(st.lists(st.integers(0, n - 1), min_size=3, max_size=6), max_size=8))
    on = draw(st.sampled_from(["cells", "points"])) if cells else "points"
    k = draw(st.integers(1, 6))
    rows = len(cells) if on == "cells" else n
    labels = draw(st.lists(st.integers(0, k - 1), min_size=rows, max_size=rows))
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    mesh = Mesh(
        points=rng.normal(size=(n, 3)).astype(dtype),
        connectivity=np.array([i for cell in cells for i in cell], np.int64),
        offsets=np.concatenate([[0], np.cumsum([len(c) for c in cells], dtype=np.int64)]),
        types=np.full(len(cells), 7, np.uint8),
        point_fields={"p": rng.integers(0, 9, n)},
        cell_fields={"c": rng.normal(size=(len(cells), 2))} if cells else {},
    )
    return mesh, labels, k, on


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=meshes(), depth=st.integers(1, 3))
def test_any_mesh_any_labels(tmp_path: Path, case: Any, depth: int) -> None:
    mesh, labels, k, on = case
    made = cut(mesh, k, on=on, method=np.array(labels, np.int64), halo=depth)
    folder = store.load(made.save(tmp_path / "h.shards", force=True))
    assert_same(folder.check().gather(), mesh)
    for p in range(k):
        assert_same_plan(folder.plan(p), made.plan(p))
        first = made.offsets[p]
        np.testing.assert_array_equal(folder.origin(p), made.origin[first : made.offsets[p + 1]])


def assert_same_plan(a: Plan, b: Plan) -> None:
    for name in Plan.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), name)


@pytest.mark.parametrize("order", ["file", "morton", "rcm"])
def test_plans_are_restored(tmp_path: Path, order: str) -> None:
    made = cut(surface(9, 9), 5, halo=2).reordered(order)
    folder = store.load(made.save(tmp_path / "p.shards"))
    for p in range(5):
        assert_same_plan(folder.plan(p), made.plan(p))
        assert folder.plan(p).halo.dtype == np.int64
    assert_same(folder.check().gather(), surface(9, 9))


def test_results_are_gathered_in_source_order(tmp_path: Path) -> None:
    mesh = surface()
    folder = make(tmp_path, mesh, 4)
    truth = {"p": np.arange(mesh.n_cells) * 1.5, "名 前": np.arange(3.0 * mesh.n_cells)}
    truth["名 前"] = truth["名 前"].reshape(-1, 3)
    for p in range(4):
        folder.put(p, {name: a[folder.origin(p)] for name, a in truth.items()}, "my_set-2")
    assert folder.puts() == ["my_set-2"]
    for name, values in folder.gather_put("my_set-2").items():
        assert_bits(values, truth[name])
    assert_same(folder.check().gather(), mesh)


def test_results_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = make(tmp_path, k=2)
    rows = [np.zeros(n) for n in folder.sizes]
    with pytest.raises(StoreError, match=r"'p' has 1 row, but shard 0 owns"):
        folder.put(0, {"p": np.zeros(1)})
    for shard in (-1, 99):
        with pytest.raises(StoreError, match=f"has no shard {shard}; shards are 0 to"):
            folder.put(shard, {"p": rows[0]})
    with pytest.raises(StoreError, match="'p' has masked values; replace"):
        folder.put(0, {"p": np.ma.masked_invalid(rows[0] * np.nan)})
    with pytest.raises(StoreError, match="'p' has 1 row, but shard 0 owns"):
        folder.put(0, {"p": 3.0})
    with pytest.raises(StoreError, match="cannot be named 'shard'"):
        folder.put(0, {"p": rows[0]}, "shard")
    for name in ("../x", "", "a/b", "a b"):
        with pytest.raises(StoreError, match="cannot be part of a file name"):
            folder.put(0, {"p": rows[0]}, name)
    with pytest.raises(StoreError, match="__metadata__"):
        folder.put(0, {"__metadata__": rows[0]})
    with pytest.raises(StoreError, match="complex128"):
        folder.put(0, {"p": rows[0] * 1j})
    folder.put(0, {"p": rows[0]})
    with pytest.raises(StoreError, match="shard 1 has no results 'prediction' yet"):
        folder.gather_put()
    folder.put(1, {"p": rows[1].astype(np.float32)})
    with pytest.raises(StoreError, match="shards 0 and 1 put different fields"):
        folder.gather_put()
    folder.put(1, {"p": rows[1], "q": rows[1]})
    with pytest.raises(StoreError, match="shards 0 and 1 put different fields"):
        folder.gather_put()
    one, other = (tmp_path / "x.shards" / f"prediction_0000{p}.safetensors" for p in (0, 1))
    other.write_bytes(one.read_bytes())
    with pytest.raises(StoreError, match="another folder or shard"):
        folder.gather_put()


def test_a_rank_opens_its_own_file_only(tmp_path: Path) -> None:
    path = make(tmp_path, k=4).path
    opened: list[str] = []
    recording = True

    def record(event: str, args: tuple[Any, ...]) -> None:
        if recording and event == "open" and str(path) in str(args[0]):
            opened.append(Path(args[0]).name)

    sys.addaudithook(record)
    folder = store.load(path)
    assert opened == ["manifest.json"]
    folder.plan(2), folder.piece(2), folder.origin(2)
    recording = False
    assert set(opened) == {"manifest.json", "shard_00002.safetensors"}


def test_a_shard_is_mapped_not_read(tmp_path: Path) -> None:
    points = np.random.default_rng(0).random((400_000, 3))
    big = Mesh(points=points, point_fields={"f": np.zeros((400_000, 20))})
    alone = Graph(np.zeros(len(points) + 1, np.int64), np.zeros(0, np.int64))
    folder = make(tmp_path, big, 1, graph=alone)
    before = resident()
    mesh = folder.piece(0).mesh
    assert mesh.point_fields["f"].nbytes > 60_000_000
    assert resident() - before < 20_000_000
    assert not mesh.points.flags.writeable


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


def test_a_folder_is_replaced_only_with_force(tmp_path: Path) -> None:
    made = cut(surface(), 2)
    folder = made.save(tmp_path / "a.shards")
    before = store.load(folder).manifest["id"]
    with pytest.raises(StoreError, match=r"replace it with force=True \(--force in the shell\)"):
        made.save(folder)
    assert store.load(folder).manifest["id"] == before
    assert store.load(made.save(folder, force=True)).manifest["id"] != before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").write_text("x")
    with pytest.raises(StoreError, match="is not a folder of shards"):
        made.save(tmp_path / "mine", force=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="is not a folder of shards"):
        made.save(tmp_path / "file", force=True)
    with pytest.raises(StoreError, match="file/a"):
        made.save(tmp_path / "file" / "a")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["a.shards", "file", "mine"]


def test_file_modes_follow_the_umask(tmp_path: Path) -> None:
    modes = {f.stat().st_mode for f in make(tmp_path).path.iterdir()}
    assert len(modes) == 1


@pytest.mark.parametrize("name", ["a[1]*.shards", "a**b.shards", "名前 x.shards", "..", "a\nb"])
def test_awkward_folder_names(tmp_path: Path, name: str) -> None:
    made = cut(surface(), 2)
    if name == "..":
        with pytest.raises(StoreError, match="already exists"):
            made.save(tmp_path / name)
        return
    for _ in range(2):
        assert_same(store.load(made.save(tmp_path / name, force=True)).check().gather(), surface())
    assert [f.name for f in tmp_path.iterdir()] == [name]


def test_a_link_to_a_folder_is_replaced_not_followed(tmp_path: Path) -> None:
    made = cut(surface(), 2)
    real = made.save(tmp_path / "real.shards")
    (tmp_path / "link.shards").symlink_to(real)
    made.save(tmp_path / "link.shards", force=True)
    (tmp_path / "dangling.shards").symlink_to(tmp_path / "nowhere")
    made.save(tmp_path / "dangling.shards", force=True)
    names = {"real.shards", "link.shards", "dangling.shards"}
    assert {f.name for f in tmp_path.iterdir()} == names
    for name in names:
        store.load(tmp_path / name).check()


def test_fields_that_cannot_be_stored(tmp_path: Path) -> None:
    for bad in (np.zeros(38, complex), np.zeros(38, "U3"), np.zeros(38, np.longdouble)):
        mesh = Mesh(points=np.random.default_rng(0).random((38, 3)), point_fields={"bad": bad})
        with pytest.raises(StoreError, match=r"'point:bad' of dtype"):
            make(tmp_path, mesh, 2)
    assert not list(tmp_path.iterdir())


def test_the_order_of_bytes_is_not_stored(tmp_path: Path) -> None:
    contents = []
    for order in "<>":
        big = {"big": np.arange(3, dtype=f"{order}f4")}
        mesh = Mesh(points=np.eye(3, dtype=f"{order}f8"), point_fields=big)
        folder = make(tmp_path / f"order{ord(order)}", mesh, 2)
        found = folder.gather()
        np.testing.assert_array_equal(found.points, np.eye(3))
        np.testing.assert_array_equal(found.point_fields["big"], [0, 1, 2])
        contents.append(folder.manifest["content"])
    assert contents[0] == contents[1]


def test_a_bare_graph_cannot_be_stored(tmp_path: Path) -> None:
    graph = meshshard.knn_graph(np.random.default_rng(0).random((20, 3)), 3)
    with pytest.raises(StoreError, match="bare graph"):
        cut(graph, 2).save(tmp_path / "g.shards")


def test_the_method_is_recorded_as_json(tmp_path: Path) -> None:
    labels = tmp_path / "l.part.2"
    labels.write_text("\n".join(str(i % 2) for i in range(surface().n_cells)))
    made = cut(surface(), 2, method=labels)
    assert store.load(made.save(tmp_path / "g.shards")).manifest["method"]["labels"] == str(labels)
    made = cut(surface(), 2, method=meshshard.Metis(timeout=np.inf))
    assert "timeout" not in store.load(made.save(tmp_path / "h.shards")).manifest["method"]
