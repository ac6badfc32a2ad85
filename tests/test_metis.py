"""METIS in its child process: every failure is a one-line error, nothing is left behind."""

import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from metis_dual import mesh_to_dual
from samples import ROOT, environment, surface

from meshshard.errors import PartitionError
from meshshard.graph import Graph, cell_graph
from meshshard.mesh import Mesh
from meshshard.partitioning import metis_child
from meshshard.partitioning.methods import Metis, label

pytestmark = pytest.mark.slow

SLOW = 700  # side of a grid that takes METIS a second or more


def grid(n: int) -> Graph:
    """n x n nodes, each linked with its four neighbors."""
    at = np.arange(n * n).reshape(n, n)
    pairs = [(at[1:], at[:-1]), (at[:, 1:], at[:, :-1])]
    a = np.concatenate([p.ravel() for p, _ in pairs])
    b = np.concatenate([q.ravel() for _, q in pairs])
    to, source = np.concatenate([a, b]), np.concatenate([b, a])
    order = np.lexsort((source, to))
    indptr = np.concatenate([[0], np.cumsum(np.bincount(to, minlength=n * n))])
    return Graph(indptr, source[order])


def k_way(graph: Graph, parts: int = 2, **options: Any) -> np.ndarray:
    return metis_child.k_way(graph.indptr, graph.indices, parts, metis_child.Options(), **options)


def unlinked_files() -> set[str]:
    """Unlinked files that this process still holds open."""
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return {name for link in links if "(deleted)" in (name := str(link.readlink()))}


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    scratch = tmp_path_factory.mktemp("scratch")
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setattr(metis_child, "MEMORY", scratch)
    before, ours = unlinked_files(), set(children())
    yield
    assert unlinked_files() <= before
    assert not list(scratch.iterdir())
    assert set(children()) <= ours


def wait_for_child(of: int | None = None) -> psutil.Process:
    for _ in range(20_000):
        found = [
            c
            for c in psutil.Process(of).children()
            if "meshshard.partitioning.metis_child" in str(c.cmdline())
        ]
        if found:
            return found[0]
        time.sleep(0.005)
    raise AssertionError("METIS did not start")


def one_line(error: pytest.ExceptionInfo[PartitionError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("number", "name"),
    [(signal.SIGKILL, "SIGKILL (out of memory?)"), (signal.SIGSEGV, "SIGSEGV"), (41, "signal 41")],
)
def test_a_child_killed_by_a_signal(number: int, name: str) -> None:
    graph = grid(SLOW)
    killer = threading.Thread(target=lambda: wait_for_child().send_signal(number))
    killer.start()
    with pytest.raises(PartitionError) as caught:
        k_way(graph)
    killer.join()
    said = f"METIS was killed by {name} on {SLOW**2} nodes into 2 parts; try "
    assert one_line(caught).startswith(said)


def test_a_timeout() -> None:
    graph = grid(SLOW)
    with pytest.raises(PartitionError) as caught:
        label(graph, 2, Metis(timeout=0.05))
    assert "did not finish" in one_line(caught)
    assert "in 0.05 s" in one_line(caught)
    assert "timeout=…" in one_line(caught)
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(PartitionError, match="number of seconds above 0"):
            label(grid(9), 2, Metis(timeout=wrong))
    for long in (1e15, float("inf")):
        assert set(label(grid(9), 2, Metis(timeout=long))) == {0, 1}


def test_an_error_of_metis() -> None:
    pairs = Graph(np.arange(101), np.arange(100) ^ 1)
    with pytest.raises(PartitionError) as caught:
        metis_child.k_way(pairs.indptr, pairs.indices, 2, metis_child.Options(contiguous=True))
    assert one_line(caught).startswith("METIS failed: ")
    assert "on 100 nodes into 2 parts; try" in one_line(caught)


@pytest.mark.parametrize("far", [10**14, -(10**14)])
def test_an_absurd_graph(far: int) -> None:
    graph = grid(30)
    indices = graph.indices.copy()
    indices[::7] = far
    with pytest.raises(PartitionError) as caught:
        metis_child.k_way(graph.indptr, indices, 4, metis_child.Options(), timeout=20)
    assert "on 900 nodes into 4 parts" in one_line(caught)


def test_without_files_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metis_child, "MEMORY", tmp_path / "nowhere")
    assert set(k_way(grid(20), 3)) == {0, 1, 2}


def test_no_room_for_the_arrays(tmp_path: Path) -> None:
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_metis import grid, k_way\n"
        "k_way(grid(60))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=False
    )
    last = done.stderr.splitlines()[-1]
    assert "PartitionError: METIS needs a temporary file of 0 MB" in last
    assert "set TMPDIR" in last


def test_the_child_dies_with_its_parent() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_metis import SLOW, grid, k_way\n"
        "k_way(grid(SLOW))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment())
    child = wait_for_child(parent.pid)
    maps = Path(f"/proc/{child.pid}/maps")
    while "(deleted)" not in maps.read_text():  # by then it has called die_with_parent
        time.sleep(0.005)
    parent.kill()
    parent.wait()
    child.wait(timeout=120)  # only so that a failure does not hang


def test_a_file_named_like_a_module_is_not_imported(tmp_path: Path) -> None:
    for name in ("json", "numpy", "random", "signal"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not this one')")
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from test_metis import grid, k_way\n"
        "print(len(set(k_way(grid(9), 3))))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "3\n"


@pytest.mark.slow
def test_the_same_seed_gives_the_same_labels_also_from_threads() -> None:
    graph = grid(100)
    alone = [k_way(graph, parts) for parts in (3, 8)]
    with ThreadPoolExecutor(4) as pool:
        several = list(pool.map(lambda parts: k_way(graph, parts), [3, 8] * 3))
    for i, labels in enumerate(several):
        np.testing.assert_array_equal(labels, alone[i % 2])
    other = label(graph, 8, Metis(seed=7))
    assert not np.array_equal(other, alone[1])
    np.testing.assert_array_equal(other, label(graph, 8, Metis(seed=7)))


@pytest.mark.parametrize("seed", [-1, 2**31, 10**30])
def test_seeds_out_of_range_are_refused(seed: int) -> None:
    with pytest.raises(PartitionError, match=f"seed {seed}"):
        label(grid(9), 2, Metis(seed=seed))


def triangles() -> Mesh:
    mesh = surface(20, 20, orphans=0)
    quads = mesh.connectivity[mesh.offsets[:-1][mesh.types == 9][:, None] + np.arange(4)]
    cells = np.concatenate([quads[:, [0, 1, 2]], quads[:, [0, 2, 3]]])
    return simplices(mesh.points, cells, 5)


def tets() -> Mesh:
    """Cubes cut into six tetrahedra each about a diagonal."""
    n = 6
    at = np.arange((n + 1) ** 3).reshape(n + 1, n + 1, n + 1)
    cells = []
    for walk in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)):
        corner = np.zeros(3, int)
        ids = [at[:n, :n, :n].ravel()]
        for axis in walk:
            corner[axis] = 1
            i, j, k = corner
            ids.append(at[i : i + n, j : j + n, k : k + n].ravel())
        cells.append(np.stack(ids, -1))
    return simplices(np.argwhere(at >= 0).astype(float), np.concatenate(cells), 10)


def simplices(points: np.ndarray, cells: np.ndarray, kind: int) -> Mesh:
    n, width = cells.shape
    types = np.full(n, kind, np.uint8)
    return Mesh(points, cells.ravel(), np.arange(0, n * width + 1, width), types)


@pytest.mark.parametrize(("make", "common"), [(triangles, 2), (tets, 3)])
def test_cell_graph_equals_the_dual_graph_of_metis(make: Any, common: int) -> None:
    mesh = make()
    indptr, indices = mesh_to_dual(mesh, common)
    graph = cell_graph(mesh)
    np.testing.assert_array_equal(indptr, graph.indptr)
    for row in range(mesh.n_cells):
        mine = slice(indptr[row], indptr[row + 1])
        np.testing.assert_array_equal(np.sort(indices[mine]), np.sort(graph.indices[mine]))
