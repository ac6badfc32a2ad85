"""Loading k shards on R ranks: graph, exchange, fields, results, and errors on every rank."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from meshshard import io, store
from meshshard.comm import DomainError, init_domain
from meshshard.graph import cell_graph
from meshshard.partitioning.partition import partition
from meshshard.ranks.shard import load

pytestmark = pytest.mark.slow

AHMED = Path(__file__).parent.parent / "datasets" / "ahmed"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of a surface by cells (two hops), by points, and of a cloud."""
    place = tmp_path_factory.mktemp("folders")
    mesh = io.read(AHMED / "run_8/boundary_8.vtp")
    out = {}
    for name, on, k, halo in (("cells", "cells", 7, 1), ("deep", "cells", 6, 2),
                              ("points", "points", 5, 1)):  # fmt: skip
        made = partition(mesh, k, on=on, halo=halo)
        out[name] = made.save(place / f"{name}.shards")
        np.savez(place / f"{name}.npz", indptr=made.graph.indptr, indices=made.graph.indices)
    return out


def graph_of(folder):
    with np.load(Path(folder).with_suffix(".npz")) as file:
        return file["indptr"], file["indices"]


def aggregate(edge_index, x, n):
    return torch.zeros(n, *x.shape[1:], dtype=x.dtype).index_add(0, edge_index[1], x[edge_index[0]])


def layer_job(folder):
    """A sum over in-edges and its gradient, on local rows and on the whole graph."""
    domain = init_domain()
    shard = load(folder, domain)
    indptr, indices = graph_of(folder)
    n = len(indptr) - 1
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, dtype=torch.float64, generator=generator)
    v = torch.randn(n, 3, dtype=torch.float64, generator=generator)
    edges = torch.from_numpy(
        np.stack([indices, np.repeat(np.arange(n), np.diff(indptr))]).astype(np.int64)
    )
    whole = x.clone().requires_grad_()
    want = aggregate(edges, whole.sin(), n)
    (want_grad,) = torch.autograd.grad(want, whole, v)
    first = domain.offset(shard.sizes.tolist())
    own = slice(first, first + shard.plan.n_owned)
    mine = x[own].clone().requires_grad_()
    rows = domain.exchange(mine.sin(), shard.exchange)
    got = aggregate(shard.edge_index, rows, shard.plan.n_local)[: shard.plan.n_owned]
    (grad,) = torch.autograd.grad(got, mine, v[own])
    assert torch.equal(got, want[own])
    assert torch.allclose(grad, want_grad[own], rtol=1e-12, atol=1e-13)
    return domain.size


@pytest.mark.parametrize("name", ["cells", "deep", "points"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_layer_on_shards_is_the_serial_layer(ranks, folders, name, size):
    if size == 1:
        layer_job(folders[name])
    else:
        assert ranks[size].run(layer_job, folders[name]) == [size] * size


def deep_job(folder):
    """Two layers after one exchange of a 2-hop halo."""
    domain = init_domain()
    shard = load(folder, domain)
    indptr, indices = graph_of(folder)
    n = len(indptr) - 1
    x = torch.cos(torch.arange(n, dtype=torch.float64))[:, None]
    edges = torch.from_numpy(
        np.stack([indices, np.repeat(np.arange(n), np.diff(indptr))]).astype(np.int64)
    )
    want = aggregate(edges, aggregate(edges, x, n), n)
    first = domain.offset(shard.sizes.tolist())
    own = slice(first, first + shard.plan.n_owned)
    rows = domain.exchange(x[own], shard.exchange)
    for _ in range(2):
        rows = aggregate(shard.edge_index, rows, shard.plan.n_local)
    return torch.equal(rows[: shard.plan.n_owned], want[own])


@pytest.mark.parametrize("size", [2, 3])
def test_a_two_hop_halo_serves_two_layers(ranks, folders, size):
    assert all(ranks[size].run(deep_job, folders["deep"]))


def fields_job(folder):
    """Fields, geometry and results, compared with the file in its order."""
    domain = init_domain()
    shard = load(folder, domain)
    mesh = io.read(AHMED / "run_8/boundary_8.vtp")
    origin = shard.sharding.origin.numpy()
    pressure = shard["pMeanTrim"]
    assert pressure.shape == (mesh.n_cells,)
    assert np.array_equal(pressure.to_local().numpy(), mesh.cell_fields["pMeanTrim"][origin])
    assert np.allclose(shard["center"].to_local(), mesh.centers()[origin], atol=1e-6)
    force = (shard["pMeanTrim"][:, None] * shard["area_vector"]).sum(0)
    want = (mesh.cell_fields["pMeanTrim"][:, None].astype(float) * mesh.area_vectors()).sum(0)
    assert np.allclose(force, want, rtol=1e-3)
    whole = shard.gather({"twice": pressure * 2})
    shard.put({"twice": pressure * 2}, "result")
    domain.share(None)
    put = store.load(folder).gather_put("result")["twice"]
    assert np.array_equal(put, 2 * mesh.cell_fields["pMeanTrim"])
    with pytest.raises(KeyError, match="there are: CpMeanTrim"):
        shard["pressure"]
    return None if whole is None else whole.cell_fields["twice"]


@pytest.mark.parametrize("size", [2, 4])
def test_fields_and_results(ranks, folders, size):
    first, *others = ranks[size].run(fields_job, folders["cells"])
    mesh = io.read(AHMED / "run_8/boundary_8.vtp")
    assert np.array_equal(first, 2 * mesh.cell_fields["pMeanTrim"])
    assert others == [None] * (size - 1)


def pyg_job(folder):
    """Sums over in-edges of PyG's Data on the owned rows, gathered by origin."""
    shard = load(folder, init_domain())
    data = shard.to_pyg()
    sums = aggregate(data.edge_index, data["pMeanTrim"].double(), data.num_nodes)[: data.n_owned]
    return data.keys(), shard.sharding.origin.numpy(), sums.numpy()


@pytest.mark.parametrize("size", [2, 4])
def test_local_rows_as_data_of_pyg(ranks, folders, size):
    mesh = io.read(AHMED / "run_8/boundary_8.vtp")
    found, pressure = np.zeros(mesh.n_cells), mesh.cell_fields["pMeanTrim"].astype(float)
    for keys, origin, sums in ranks[size].run(pyg_job, folders["cells"]):
        found[origin] = sums
        assert {"pos", "edge_index", "area", "normal", "CpMeanTrim"} <= set(keys)
    graph = cell_graph(mesh)
    edges = torch.from_numpy(np.stack([graph.indices, graph.destinations()]).astype(np.int64))
    assert np.allclose(found, aggregate(edges, torch.from_numpy(pressure), mesh.n_cells))


OPENED = []
sys.addaudithook(lambda event, args: OPENED.append(str(args[0])) if event == "open" else None)


def opened_job(folder):
    """Names of the shard files that this rank has opened, and of those of its shards."""
    OPENED.clear()
    shard = load(folder, init_domain())
    shard["pMeanTrim"], shard["center"], shard.edge_index
    names = {Path(o).name for o in OPENED if o.endswith(".safetensors")}
    return names, {f"shard_{p:05d}.safetensors" for p in shard.shards}


def test_a_rank_opens_only_files_of_its_shards(ranks, folders):
    for opened, own in ranks[3].run(opened_job, folders["cells"]):
        assert opened == own


def other_folder_job(folder, other):
    domain = init_domain()
    load(other if domain.rank == 1 else folder, domain)


def too_many_job(folder):
    load(folder, init_domain())


def test_different_folders_are_an_error_on_every_rank(ranks, folders):
    for line in ranks[3].failures(other_folder_job, folders["cells"], folders["points"]):
        assert "ranks disagree on the version of" in line
    for line in ranks[3].failures(other_folder_job, folders["cells"], "nowhere.shards"):
        assert "rank 1: nowhere.shards: does not exist" in line


def test_error_of_load_names_the_path_once():
    with pytest.raises(DomainError, match=r"^load: nowhere.shards: does not exist; write it with"):
        load("nowhere.shards")


def test_more_ranks_than_shards_is_an_error_on_every_rank(ranks, tmp_path):
    mesh = io.read(AHMED / "run_8/boundary_8.vtp")
    folder = partition(mesh, 3).save(tmp_path / "three.shards")
    for line in ranks[4].failures(too_many_job, folder):
        assert "has 3 shards for 4 ranks; partition again with --parts 4" in line


def test_one_rank_without_a_process_group(folders):
    shard = load(folders["cells"])
    assert len(shard.plan.halo) == 0
    with pytest.raises(DomainError, match="owns 4,778 rows"):
        shard.domain.exchange(torch.zeros(3, 1), shard.exchange)
