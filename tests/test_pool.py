"""Pools, sampling and grids on shards: equal to PyG or to one rank, with gradients."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import torch_geometric.nn as gnn
from test_attention import far, global_grad, leaf, run, weighted, whole
from torch import nn

from meshshard import nn as mnn
from meshshard.comm import init_domain
from meshshard.comm.domain import count_traffic
from meshshard.errors import MeshshardError
from meshshard.tensor import Sharding, ShardTensor, shard

TOLERANCE = 1e-10
N, WIDTH, SAMPLES = 14, 6, 4
SIZES = {1: [(14,)], 2: [(3, 11), (14, 0)], 3: [(0, 6, 8)], 4: [(5, 0, 7, 2)]}


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def batch():
    """Sample of each row, unsorted; one sample is empty."""
    return torch.tensor([0, 3, 1, 1, 0, 3, 3, 1, 0, 0, 1, 3, 3, 0])


def gated(x, batch=None, size=None):
    torch.manual_seed(5)
    gate, values = nn.Linear(WIDTH, 1).double(), nn.Linear(WIDTH, WIDTH).double()
    if type(x) is not ShardTensor:
        pool = gnn.AttentionalAggregation(gate, values)
        return pool(x, torch.zeros(N, dtype=torch.long) if batch is None else batch, dim_size=size)
    return mnn.AttentionPool(gate, values)(x, batch, size)


def by_columns(x, batch=None, size=None):
    """A softmax for each column."""
    if type(x) is not ShardTensor:
        batch = torch.zeros(N, dtype=torch.long) if batch is None else batch
        return gnn.AttentionalAggregation(nn.Identity())(x, batch, dim_size=size)
    return mnn.attention_pool(x, x, batch, size)


POOLS = {
    "sum": (gnn.global_add_pool, mnn.global_add_pool),
    "mean": (gnn.global_mean_pool, mnn.global_mean_pool),
    "max": (gnn.global_max_pool, mnn.global_max_pool),
    "attention": (gated, gated),
    "attention by columns": (by_columns, by_columns),
}


def pool_job(name, sizes, with_batch, size, ties):
    domain = init_domain()
    theirs, ours = POOLS[name]
    x = draw(N, WIDTH)
    x = (x.round() + 0.25 if ties else x).requires_grad_()
    samples = batch() if with_batch else None
    out = theirs(x, samples, size)
    coefficients = draw(*out.shape, seed=7)
    (wanted,) = torch.autograd.grad((out * coefficients).sum(), x)
    mine = leaf(domain, x, sizes, True, 0)
    divided = samples if samples is None or ties else shard(samples, domain, sizes)
    got = ours(mine, divided, size)
    assert type(got) is torch.Tensor
    (got * coefficients).sum().backward()
    if name != "attention":  # for plain tensors this is PyG's module
        alone = ours(x.detach(), samples, size)
        assert far(alone, out.detach()) <= TOLERANCE
    return far(got.detach(), out.detach()), far(mine.grad.gather(), wanted)


@pytest.mark.parametrize("ranks_", SIZES)
@pytest.mark.parametrize("name", POOLS)
def test_pools_equal_pyg(ranks, name, ranks_):
    for sizes in SIZES[ranks_]:
        for with_batch, size, ties in (
            (False, None, False), (True, None, False), (True, 6, False), (True, None, True)
        ):  # fmt: skip
            for errors in run(ranks, ranks_, pool_job, name, sizes, with_batch, size, ties):
                assert max(errors) <= TOLERANCE, (sizes, with_batch, size, ties)


def twice_job(sizes):
    """Second derivatives of attention pooling."""
    domain = init_domain()
    x = draw(N, WIDTH).requires_grad_()
    mine = leaf(domain, x, sizes, True, 0)

    def penalty(x, samples):
        out = mnn.attention_pool(x, x[:, :2], samples).square().sum()
        (first,) = torch.autograd.grad(out, x, create_graph=True)
        return first.square().sum()

    loss, got = penalty(x, batch()), penalty(mine, shard(batch(), domain, sizes))
    got.backward()
    (wanted,) = torch.autograd.grad(loss, x)
    return far(got.detach(), loss.detach()), far(mine.grad.gather(), wanted)


def test_second_derivatives(ranks):
    for errors in ranks[4].run(twice_job, SIZES[4][0]):
        assert max(errors) <= TOLERANCE


def counts_job():
    domain = init_domain()
    x = leaf(domain, draw(N, WIDTH), (3, 11), True, 0)
    samples = shard(batch(), domain, (3, 11))
    calls = {}
    for name, (_, ours) in POOLS.items():
        with count_traffic(domain) as traffic:
            out = ours(x, samples, SAMPLES)
            forward = traffic.total().calls
        with count_traffic(domain) as traffic:
            out.sum().backward()
            calls[name] = forward, traffic.total().calls
    return calls


def test_communication(ranks):
    wanted = {"sum": (1, 1), "mean": (1, 1), "max": (2, 1), "attention": (2, 1)}
    for calls in ranks[2].run(counts_job):
        assert {k: calls[k] for k in wanted} == wanted


def test_mismatched_batch_or_heads_are_refused():
    with pytest.raises(MeshshardError, match="batch has 3 rows"):
        mnn.global_add_pool(draw(N, WIDTH), torch.zeros(3, dtype=torch.long))
    with pytest.raises(MeshshardError, match="heads must divide the width"):
        mnn.attention_pool(draw(N, WIDTH), draw(N, 4))


# ------------------------------------------------------------------------------------------ points
def farthest(pos, n, start):
    """Farthest-point sampling on one rank."""
    chosen = [start]
    far_from = (pos - pos[start]).square().sum(1)
    for _ in range(n - 1):
        far_from[chosen[-1]] = -1
        chosen.append(int(far_from.argmax()))
        far_from = torch.minimum(far_from, (pos - pos[chosen[-1]]).square().sum(1))
    return torch.tensor(chosen)


def shuffled(domain, x, sizes, seed):
    """Permuted rows, with their rows in the source in the sharding."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    first = sum(sizes[: domain.rank])
    own = order[first : first + sizes[domain.rank]]
    return ShardTensor.from_local(x[own], Sharding(domain, sizes, own)), order


def cloud():
    """A lattice, with many equal distances, and coincident points."""
    axis = torch.arange(3.0)
    lattice = torch.cartesian_prod(axis, axis)
    return torch.cat([lattice, lattice[:3], torch.tensor([[0.3, 0.6], [1.6, 0.7]])])


def farthest_job(sizes):
    domain, pos = init_domain(), cloud()
    mine, order = shuffled(domain, pos, sizes, 3)
    found = []
    for n in (1, 5, 14):
        rows = mnn.farthest_points(mine, n, start=4)
        found.append(order[rows].tolist())
        assert torch.equal(mine[rows], pos[order[rows]])
        kept = mine[mnn.mask_of(rows, mine)]
        assert kept.shape == (n, 2)
        assert torch.equal(kept.gather(), pos[order[rows.sort().values]])
    return found


def test_farthest_points_do_not_depend_on_the_partition(ranks):
    pos = cloud()
    wanted = [farthest(pos, n, 4).tolist() for n in (1, 5, 14)]
    assert [mnn.farthest_points(pos, n, 4).tolist() for n in (1, 5, 14)] == wanted
    for size, every in SIZES.items():
        for sizes in every:
            for found in run(ranks, size, farthest_job, sizes):
                assert found == wanted, sizes
    with pytest.raises(MeshshardError, match="n = 15 from row 0, but there are 14 points"):
        mnn.farthest_points(pos, 15)


def random_job(sizes, n):
    domain, x = init_domain(), torch.arange(14.0)[:, None]
    mine, _ = shuffled(domain, x, sizes, 3)
    kept = mine[mnn.random_points(mine, n, seed=1)]
    assert kept.shape == (n, 1)
    return sorted(kept.gather()[:, 0].tolist())


def test_random_points_do_not_depend_on_the_partition(ranks):
    x = torch.arange(14.0)[:, None]
    for n in (0, 1, 6, 14):
        wanted = x[mnn.random_points(x, n, seed=1)][:, 0].tolist()
        assert len(wanted) == n
        for size, every in SIZES.items():
            for sizes in every:
                assert run(ranks, size, random_job, sizes, n) == [wanted] * size, sizes


def test_random_points_are_uniform():
    x = torch.zeros(1000, 1)
    counts = sum(mnn.random_points(x, 100, seed=s).double() for s in range(200))
    assert counts.sum() == 20000
    assert 3.5 < counts.std() < 5  # binomial: 4.24


# ------------------------------------------------------------------------------------------- grids
BOX = mnn.Box((-1.0, -2.0, 0.0), (1.0, 2.0, 3.0), (3, 4, 2))


def points():
    pos = torch.rand(N, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    pos = pos * torch.tensor([2.0, 4.0, 3.0]) - torch.tensor([1.0, 2.0, 0.0])
    pos[3] += 9  # outside
    pos[5] = torch.tensor([1.0, 2.0, 3.0])  # on the last node
    return pos


def test_points_from_grid_equal_grid_sample():
    grid, pos = draw(3, 4, 2, WIDTH), points()
    unit = (pos - torch.tensor(BOX.low)) / (torch.tensor(BOX.high) - torch.tensor(BOX.low)) * 2 - 1
    wanted = F.grid_sample(
        grid.movedim(-1, 0)[None], unit.flip(-1)[None, None, None], align_corners=True,
        padding_mode="border",
    )  # fmt: skip
    assert far(mnn.points_from_grid(grid, pos, BOX), wanted[0, :, 0, 0].T) <= TOLERANCE


def grid_job(sizes, mean):
    """Points to a grid, a product there, and back to points."""
    domain = init_domain()
    x, pos, kernel = draw(N, WIDTH), points(), draw(3, 4, 2, WIDTH, seed=4)
    every = [t.requires_grad_() for t in (x, pos, kernel)]
    mine = [leaf(domain, t, sizes, i < 2, 0) for i, t in enumerate(every)]

    def there_and_back(x, pos, kernel):
        grid = mnn.grid_from_points(x, pos, BOX, mean)
        return mnn.points_from_grid(torch.sin(grid * kernel), pos, BOX)

    out, got = there_and_back(*every), there_and_back(*mine)
    coefficients = draw(*out.shape, seed=7)
    wanted = torch.autograd.grad((out * coefficients).sum(), every)
    weighted(got, coefficients, domain).backward()
    errors = [far(whole(got), out.detach())]
    return errors + [far(global_grad(domain, a), b) for a, b in zip(mine, wanted, strict=True)]


@pytest.mark.parametrize("ranks_", SIZES)
def test_grids(ranks, ranks_):
    for sizes in SIZES[ranks_]:
        for mean in (True, False):
            for errors in run(ranks, ranks_, grid_job, sizes, mean):
                assert max(errors) <= TOLERANCE, sizes


def test_invalid_boxes_and_grids_are_refused():
    with pytest.raises(MeshshardError, match="two nodes or more"):
        mnn.Box((0.0,), (1.0,), (1,))
    with pytest.raises(MeshshardError, match="low must be below high"):
        mnn.Box((0.0,), (0.0,), (2,))
    with pytest.raises(MeshshardError, match="the grid must be a plain tensor"):
        mnn.points_from_grid(draw(3, 4, WIDTH), points(), BOX)


# -------------------------------------------------------------------------------------- bottleneck
def bottleneck_job(sizes, shape):
    domain = init_domain()
    x = draw(*shape).requires_grad_()
    torch.manual_seed(5)
    models = [mnn.Bottleneck(WIDTH, 2, 5).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    mine = leaf(domain, x, sizes, True, len(shape) - 2)
    out, got = models[0](x), models[1](mine)
    coefficients = draw(*out.shape, seed=7)
    parameters = list(models[0].parameters())
    wanted = torch.autograd.grad((out * coefficients).sum(), [x, *parameters])
    weighted(got, coefficients, domain).backward()
    domain.average_gradients(models[1])
    found = [mine.grad.gather(), *(p.grad for p in models[1].parameters())]
    errors = [far(whole(got), out.detach())]
    return errors + [far(a, b) for a, b in zip(found, wanted, strict=True)]


@pytest.mark.parametrize("ranks_", SIZES)
def test_bottleneck(ranks, ranks_):
    for sizes in SIZES[ranks_]:
        for shape in ((N, WIDTH), (2, N, WIDTH)):
            for errors in run(ranks, ranks_, bottleneck_job, sizes, shape):
                assert max(errors) <= TOLERANCE, sizes


# --------------------------------------------------------- half precision, NaN, infinity, many rows
def test_means_and_sums_of_many_rows_in_bfloat16():
    x = torch.ones(3000, 1, dtype=torch.bfloat16)
    assert float(mnn.global_mean_pool(x)) == 1  # a count in bfloat16 would stop at 256
    assert float(mnn.global_add_pool(x)) == 3008  # the nearest bfloat16
    assert mnn.global_mean_pool(x).dtype == mnn.global_add_pool(x).dtype == torch.bfloat16
    box = mnn.Box((0,), (1,), (2,))
    grid = mnn.grid_from_points(x, torch.zeros(3000, 1), box, mean=False)
    assert grid.dtype == torch.bfloat16
    assert float(grid[0]) == 3008


def test_integer_positions_equal_floating_point_positions():
    box = mnn.Box((0.5, -0.5), (2.5, 3.5), (5, 4))
    grid, pos = draw(5, 4, 2), torch.tensor([[1, 2], [2, 0], [0, 3]])
    assert torch.equal(
        mnn.points_from_grid(grid, pos, box), mnn.points_from_grid(grid, pos.double(), box)
    )
    x = draw(3, 2)
    assert torch.equal(
        mnn.grid_from_points(x, pos, box), mnn.grid_from_points(x, pos.double(), box)
    )


def not_a_number_job():
    """One rank has a NaN; every rank returns or raises an error."""
    pos = draw(N, 2)
    pos[1] = torch.nan
    x = shard(pos, init_domain(), SIZES[2][0])
    grid = mnn.grid_from_points(x, x, mnn.Box((0, 0), (1, 1), (3, 3)))
    assert grid.isnan().any()
    assert grid[-1, -1].isfinite().all()
    mnn.farthest_points(x, 3)


def test_a_nan_on_one_rank_raises_on_every_rank(ranks):
    every = ranks[2].failures(not_a_number_job)
    assert len(set(every)) == 1
    assert "DomainError: farthest_points: rank 0: 1 point not finite: ids [1]" in every[0]


def infinite_job():
    x = draw(N, 3)
    x[4, 0], x[:, 1] = torch.inf, -torch.inf
    mine = shard(x, init_domain(), SIZES[2][0])
    return bool(torch.equal(mnn.global_max_pool(mine), x.amax(0, keepdim=True)))


def test_maxima_of_infinite_numbers(ranks):
    assert ranks[2].run(infinite_job) == [True, True]


def test_means_of_more_rows_than_float32_can_count():
    x = torch.full((1, 1), 3.0).expand(2**24 + 2**22, 1)
    assert abs(float(mnn.global_mean_pool(x)) - 3) < 1e-5
