"""Points of a mesh whose cells are sharded: fields, and means to and from cells."""

from functools import partial

import numpy as np
import pytest
import torch
from samples import cut, surface, volume

from meshshard.comm import init_domain, simulate
from meshshard.errors import MeshshardError
from meshshard.nn import aggregate
from meshshard.ranks.shard import load


def meshes():
    for make, n in ((surface, 5), (volume, 4)):
        mesh = make()
        values = np.random.default_rng(0).normal(size=(mesh.n_points, 2))
        yield mesh.with_fields(point={"value": values}, cell={"load": mesh.centers()}), n


@pytest.fixture(scope="module", params=[0, 1], ids=["surface", "volume"])
def case(request, tmp_path_factory):
    mesh, n = list(meshes())[request.param]
    path = tmp_path_factory.mktemp("points") / "mesh.shards"
    return mesh, cut(mesh, n, on="cells").save(path)


def means(mesh):
    """Cell means of the points and point means of the cells, in the order of the file."""
    cells = np.repeat(np.arange(mesh.n_cells), np.diff(mesh.offsets))
    pairs = torch.from_numpy(np.stack([mesh.connectivity, cells]).astype(np.int64))
    value = torch.from_numpy(mesh.point_fields["value"])
    load = torch.from_numpy(np.asarray(mesh.cell_fields["load"], np.float64))
    return value, mean(value, *pairs, mesh.n_cells), mean(load, *pairs.flip(0), mesh.n_points)


def mean(x, source, to, n):
    """Mean over the rows at each of n places; zero without any."""
    total = torch.zeros(n, x.shape[1], dtype=torch.float64).index_add(0, to, x[source])
    return total / torch.bincount(to, minlength=n).clamp(min=1)[:, None]


def job(domain, path, mesh):
    shard = load(path, domain)
    points, graph = shard.points, shard.graph
    assert graph.domain is domain
    value, cells, nodes = means(mesh)
    at, of = points.sharding.origin, shard.sharding.origin
    x = points["value"].detach().requires_grad_()
    load_ = shard["load"].double().detach().requires_grad_()
    to_cells, to_points = (
        aggregate(x, points.to_cells, "mean"), aggregate(load_, points.from_cells, "mean"),
    )  # fmt: skip
    assert torch.equal(points["value"].to_local(), value[at])
    assert torch.allclose(to_cells.detach().to_local(), cells[of], rtol=1e-12, atol=1e-14)
    assert torch.allclose(to_points.detach().to_local(), nodes[at], rtol=1e-12, atol=1e-14)
    places = np.asarray(mesh.points, np.float64) - shard.folder.manifest["offset"]
    center = points["center"].to_local().double()  # from the same origin as those of the cells
    assert torch.allclose(center, torch.from_numpy(places)[at], atol=1e-6)
    (to_cells.square().sum() + to_points.square().sum()).backward()
    assert "value" in points
    assert [*points] == points.keys()
    with pytest.raises(KeyError, match=r"no point field .*; there are: .*value, center"):
        points["load"]
    order = domain.all_gather(at, points.sharding.sizes)
    return order, x.grad.gather(), load_.grad.gather(), domain.all_gather(of, shard.sizes.tolist())


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_fields_and_means_are_those_of_one_process(case, size):
    mesh, path = case
    found = simulate(size, partial(job, path=path, mesh=mesh))
    (order, grad, load_grad, cell_order), *_ = found
    assert sorted(order.tolist()) == list(range(mesh.n_points))
    (one_order, one, one_load, one_cells), *_ = simulate(1, partial(job, path=path, mesh=mesh))
    assert torch.equal(order, one_order)  # as the rows of cells: the number of ranks is no matter
    assert torch.allclose(grad, one, rtol=1e-12, atol=1e-14)
    assert torch.equal(cell_order, one_cells)
    assert torch.allclose(load_grad, one_load, rtol=1e-12, atol=1e-14)


def with_domain(path, mesh):
    return job(init_domain(), path, mesh) is not None


def test_points_on_processes(ranks, case):
    mesh, path = case
    assert all(ranks[2].run(with_domain, path, mesh))


def test_points_of_sharded_points_are_refused(tmp_path):
    path = cut(surface(), 3, on="points").save(tmp_path / "points.shards")
    with pytest.raises(MeshshardError, match="the points are the rows of the shard"):
        load(path).points  # noqa: B018 - the property raises
