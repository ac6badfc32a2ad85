"""Functions of shapes, rows by number, scans and compositions: as of the whole tensor."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from meshshard.comm import Domain, simulate
from meshshard.nn.conv.deep_halo import _PartOfRows
from meshshard.tensor import NoShardRule, ShardTensor, shard

RANKS = 3
SIZES = ((4, 0, 3), (0, 2, 5), (7, 0, 0))  # of seven rows
TABLE = torch.randn(7, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
MASK = TABLE > 0.2
ROWS = {  # functions of a (7, 4) tensor; also of its transpose, with dims exchanged
    "flip": lambda x, d: x.flip(d),
    "roll": lambda x, d: x.roll(-9, d),
    "roll all": lambda x, d: torch.roll(x, 3),
    "rot90": lambda x, d: torch.rot90(x, 3),
    "repeat": lambda x, d: x.repeat(2, 3, 2),
    "tile": lambda x, d: torch.tile(x, (2,)),
    "repeat_interleave": lambda x, d: x.repeat_interleave(torch.arange(x.shape[d]), d),
    "repeat_interleave all": lambda x, d: x.repeat_interleave(2),
    "pad": lambda x, d: F.pad(x, (1, 2, 3, -1), value=2.0),
    "pad reflect": lambda x, d: F.pad(x[None, None], (1, 2, 3, 1), "reflect"),
    "pad circular": lambda x, d: F.pad(x[None, None], (2, -1, 0, 3), "circular"),
    "pad replicate": lambda x, d: F.pad(x[None, None], (2, 2, 2, -2), "replicate"),
    "reshape": lambda x, d: x.reshape(2, -1, 7),
    "unflatten": lambda x, d: x.narrow(d, 0, 6).unflatten(d, (3, 2)),
    "reshape to one row": lambda x, d: x.reshape(1, 28, 1),
    "flatten": lambda x, d: x.flatten(),
    "tril": lambda x, d: x.tril(-1) + torch.triu(x, 2),
    "diagonal": lambda x, d: x.diagonal(-1),
    "diag": lambda x, d: torch.diag(x[:, 1], 2) if x.shape[0] == 7 else x.diag(1),
    "diag_embed": lambda x, d: torch.diag_embed(x, -1, 0, 2),
    "diagonal_scatter": lambda x, d: torch.diagonal_scatter(x, 2 * x.diagonal()),
    "select_scatter": lambda x, d: torch.select_scatter(x, x.select(d, 1) * 2, d, -2),
    "slice_scatter": lambda x, d: torch.slice_scatter(x, x.narrow(d, 0, 3) ** 2, d, 1, 7, 2),
    "trace": lambda x, d: x.trace(),
    "unfold": lambda x, d: x.unfold(d, 3, 2),
    "unfold rows of one": lambda x, d: x.unfold(d, 1, 3),
    "diff": lambda x, d: torch.diff(x, 2, d, prepend=x.narrow(d, 1, 1)),
    "gradient": lambda x, d: torch.cat(torch.gradient(x, spacing=0.5, edge_order=2)),
    "gradient on points": lambda x, d: torch.gradient(
        x, spacing=(torch.arange(x.shape[d]).double() ** 2,), dim=d
    )[0],
    "trapezoid": lambda x, d: torch.trapezoid(x, x.cumsum(d), dim=d),
    "cumulative_trapezoid": lambda x, d: torch.cumulative_trapezoid(x, dx=0.5, dim=d),
    "cumsum": lambda x, d: x.cumsum(d),
    "cumprod": lambda x, d: torch.where(x > 1.2, 0.0, x).cumprod(d),
    "cummax": lambda x, d: x.cummax(d).values,
    "cummin": lambda x, d: torch.cummin(x, d)[0] * x.cummin(d).indices,
    "logcumsumexp": lambda x, d: x.logcumsumexp(d),
    "prod": lambda x, d: x.prod(d) + x.prod(),
    "prod with a zero": lambda x, d: torch.where(x > 1.2, 0.0, x).prod(d, keepdim=True),
    "cov": lambda x, d: torch.cov(x, correction=0) + x.corrcoef(),
    "addmm_ of a plain tensor": lambda x, d: (
        torch.ones(4, 4).double().addmm_(x.movedim(d, 0).T, x.movedim(d, 0))
    ),
    "vstack": lambda x, d: torch.vstack([x, x * x]),
    "dstack": lambda x, d: torch.dstack([x, x * x]),
    "column_stack": lambda x, d: torch.column_stack([x, x[:, 1]]),
    "cat of other dims": lambda x, d: torch.cat([x[:4, :4], x[:4, :4].T], 1),
    "block_diag": lambda x, d: torch.block_diag(x, torch.ones(1, 2).double(), x),
    "meshgrid": lambda x, d: torch.stack(
        torch.meshgrid(torch.arange(2.0).double(), x.select(1 - d, 1), indexing="xy")
    ),
    "cartesian_prod": lambda x, d: torch.cartesian_prod(x[1], x[:, 0]),
    "kron": lambda x, d: torch.kron(torch.ones(2, 2).double(), x),
    "kron with itself": lambda x, d: torch.kron(x, x),
    "tensordot": lambda x, d: torch.tensordot(x, x, ([d], [d])),
    "inner": lambda x, d: torch.inner(x.select(1 - d, 0), x.select(1 - d, 2)),
    "masked_scatter": lambda x, d: x.masked_scatter(MASK if d == 0 else MASK.T, x.flatten() * 2),
    "pixel_shuffle": lambda x, d: F.pixel_shuffle(torch.stack([x, x + 1, x, x * x]), 2),
    "select_copy": lambda x, d: torch.select_copy(x, 1 - d, 2),
    "squeeze": lambda x, d: x.narrow(d, 2, 1).squeeze(),
    "sum_to_size": lambda x, d: x.sum_to_size([1 if i == d else n for i, n in enumerate(x.shape)]),
    "vander": lambda x, d: torch.linalg.vander(x, N=3),
}


def wanted(function, x, dim):
    leaf = x.clone().requires_grad_()
    out = function(leaf, dim)
    seed = torch.cos(torch.arange(out.numel()).double()).reshape(out.shape)
    out.backward(seed)
    return out.detach(), seed, leaf.grad


def found(domain, function, x, dim, sizes, seed):
    leaf = shard(x, domain, sizes, dim=dim).requires_grad_()
    out = function(leaf, dim)
    assert out.shape == seed.shape
    if type(out) is ShardTensor:
        seed = shard(seed, domain, out.sharding, dim=out.sharded_dim)
    (out * seed).sum().backward()
    whole = out.detach().gather() if type(out) is ShardTensor else out.detach()
    return whole, leaf.grad.gather()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", ROWS)
def test_values_and_gradients_are_those_of_the_whole_tensor(name, dim, sizes):
    x = (TABLE if dim == 0 else TABLE.T).contiguous()
    out, seed, grad = wanted(ROWS[name], x, dim)
    got = simulate(RANKS, lambda domain: found(domain, ROWS[name], x, dim, sizes, seed))
    for whole, leaf_grad in got:
        torch.testing.assert_close(whole, out, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(leaf_grad, grad, rtol=1e-11, atol=1e-11)


MOVED = {  # of a (7, 4) tensor sharded along dim 0, in place
    "transpose_": lambda x: x.transpose_(0, 1),
    "t_": lambda x: x.t_(),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "squeeze_": lambda x: x.unsqueeze_(-1).squeeze_(),
    "tril_": lambda x: x.tril_(-2),
    "cumsum_": lambda x: x.cumsum_(0),
    "addmm_": lambda x: x.addmm_(x, torch.ones(4, 4).double(), alpha=2),
    "diagonal": lambda x: x.diagonal(1).fill_(9),
    "unflatten": lambda x: x.unflatten(1, (2, 2)).mul_(3),
    "squeeze": lambda x: x[5:6].squeeze().fill_(2),
}


@pytest.mark.parametrize("name", MOVED)
def test_in_place_functions_and_views_change_the_tensor(name):
    out = TABLE.clone()
    MOVED[name](out)

    def job(domain):
        x = shard(TABLE, domain, (2, 0, 5)) * 1
        MOVED[name](x)
        assert x.shape == out.shape
        return x.gather()

    for whole in simulate(RANKS, job):
        torch.testing.assert_close(whole, out)


EMPTY = {
    "reshape": lambda x: x.reshape(2, 2, 0),
    "flatten": lambda x: x.T.flatten(),
    "roll": lambda x: x.roll(1, 0),
    "pad": lambda x: F.pad(x, (1, 1, 2, 1), value=3.0),
    "cummax": lambda x: x.cummax(0).indices,
    "prod": lambda x: x.prod(0),
    "diff": lambda x: x.diff(dim=0),
    "unfold": lambda x: x.unfold(0, 0, 1),
    "cumulative_trapezoid": lambda x: torch.cumulative_trapezoid(x, dim=0),
    "kron": lambda x: torch.kron(x, x),
    "diag_embed": lambda x: torch.diag_embed(x.T),
    "sum_to_size": lambda x: x.sum_to_size(1, 4),
}


@pytest.mark.parametrize("name", EMPTY)
def test_a_tensor_without_rows(name):
    def job(domain):
        out = EMPTY[name](shard(TABLE[:0], domain, (0, 0, 0)))
        return out.gather() if type(out) is ShardTensor else out

    for whole in simulate(RANKS, job):
        torch.testing.assert_close(whole, EMPTY[name](TABLE[:0]))


DRAWN = {  # with the mean of a large sample
    "cauchy_": (lambda x: (x.cauchy_(1, 2) > 1).double(), 0.5),
    "exponential_": (lambda x: x.exponential_(4), 0.25),
    "geometric_": (lambda x: x.geometric_(0.25), 4),
    "log_normal_": (lambda x: x.log_normal_(0, 0.5).log(), 0),
    "bernoulli_": (lambda x: x.bernoulli_(0.75), 0.75),
    "random_": (lambda x: x.random_(2, 5), 3),
    "randint_like": (lambda x: torch.randint_like(x, 3), 1),
    "normal": (lambda x: torch.normal(x * 0 + 2, 0.5), 2),
    "rrelu": (lambda x: F.rrelu(x * 0 - 1, 0.25, 0.75, training=True), -0.5),
    "alpha_dropout": (lambda x: F.alpha_dropout(x * 0, 0.5, training=True), 0),
    "feature_alpha_dropout": (
        lambda x: F.feature_alpha_dropout(x.reshape(-1, 5, 4) * 0, 0.5, training=True), 0,
    ),
    "dropout2d": (lambda x: F.dropout2d(x.reshape(1, -1, 2) * 0 + 1, 0.5), 1),
    "multinomial": (lambda x: torch.multinomial(x * 0 + 1, 9, True).double(), 9.5),
    "multinomial of rows": (
        lambda x: torch.multinomial(x[:, 0] * 0 + 1, 4000, True) / (x.shape[0] - 1), 0.5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DRAWN)
def test_random_numbers_do_not_depend_on_the_partition(name):
    draw, mean = DRAWN[name]
    x = torch.zeros(1000, 20, dtype=torch.float64)

    def numbers(domain, sizes):
        out = draw(shard(x, domain, sizes) * 1)
        return out.gather() if type(out) is ShardTensor else out

    torch.manual_seed(5)
    serial = numbers(Domain(), (1000,))
    assert abs(serial.mean() - mean) < 0.05 * max(abs(mean), 1)
    assert len(serial.unique()) > 1
    torch.manual_seed(5)
    for drawn in simulate(RANKS, lambda domain: numbers(domain, (600, 0, 400))):
        torch.testing.assert_close(drawn, serial)


KEPT = []


def _columns(x):
    KEPT.append(x.T)
    return KEPT[-1]


REFUSED = {
    "flatten": (lambda x: _columns(x).flatten().add_(1), "change a clone"),
    "reshape": (lambda x: _columns(x).reshape(2, 14).__setitem__(0, 1), "change a clone"),
    "view": (lambda x: x.T.view(28), "use reshape"),
    "view_as": (lambda x: x.T.view_as(torch.ones(28)), "use reshape"),
    "squeeze_": (lambda x: x[1:2].squeeze_(), r"use squeeze\(0\)"),
    "plain in place": (
        lambda x: torch.zeros(7, 4).double().addmm_(x, torch.eye(4).double()),
        "a plain tensor cannot",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_a_view_is_refused_on_every_rank(name):
    function, why = REFUSED[name]

    def job(domain):
        with pytest.raises(NoShardRule, match=why):
            function(shard(TABLE, domain, (2, 0, 5)))

    simulate(RANKS, job)


def test_a_moved_reshape_can_be_changed_once_its_source_is_gone():
    def job(domain):
        return shard(TABLE, domain, (2, 0, 5)).clone().T.flatten().mul_(2).gather()

    for whole in simulate(RANKS, job):
        torch.testing.assert_close(whole, 2 * TABLE.T.flatten())


COUPLED = {
    "flip": lambda x: x.flip(0),
    "unfold": lambda x: x.unfold(0, 2, 1),
    "tril": lambda x: x.tril(),
    "diagonal": lambda x: x.diagonal(),
    "cumsum": lambda x: x.cumsum(0),
    "prod": lambda x: x.prod(),
    "flatten": lambda x: x.T.flatten(),
}


@pytest.mark.parametrize("name", COUPLED)
def test_a_part_of_the_rows_cannot_be_reordered(name):
    domain = _PartOfRows()
    with pytest.raises(NoShardRule):
        COUPLED[name](shard(TABLE, domain, (7,)))


NAMES = {
    "axis": lambda x: x.cumsum(axis=0),
    "keepdims": lambda x: torch.sum(x, axis=-2, keepdims=True),
    "input": lambda x: torch.flip(input=x, dims=(0,)),
    "other": lambda x: torch.add(x, x2=x),
    "one int": lambda x: torch.roll(x, shifts=2, dims=0),
    "sections": lambda x: torch.tensor_split(x, sections=3)[1],
    "second matrix": lambda x: torch.mm(input=x, mat2=torch.ones(4, 4).double()),
    "where": lambda x: torch.where(condition=x > 0, input=x, other=0.0),
    "repeats": lambda x: x.repeat(repeats=(2, 1)),
}


@pytest.mark.parametrize("name", NAMES)
def test_arguments_may_have_all_names_that_torch_knows(name):
    wanted = NAMES[name](TABLE)

    def job(domain):
        out = NAMES[name](shard(TABLE, domain, (3, 0, 4)))
        return out.gather() if type(out) is ShardTensor else out

    for whole in simulate(RANKS, job):
        torch.testing.assert_close(whole, wanted)


WRONG = {
    "geometric_": lambda x: x.clone().geometric_(1.5),
    "exponential_": lambda x: x.clone().exponential_(-1),
    "uniform_": lambda x: x.clone().uniform_(2, 1),
    "normal": lambda x: torch.normal(x, -x * x),
    "multinomial": lambda x: torch.multinomial(x, 2, True),
    "negative repeats": lambda x: x.repeat_interleave((x[:, 0] > 5).long() - 1, 0),
    "reshape without elements": lambda x: x[:0].reshape(0, -1),
    "reshape": lambda x: x.reshape(5, 5),
    "expand": lambda x: x.expand(6, 4),
    "roll": lambda x: x.roll((1, 2), 0),
    "diag": lambda x: torch.diag(x[None]),
    "pad": lambda x: F.pad(x[None], (0, 0, 7, 0), "reflect"),
    "gradient": lambda x: torch.gradient(x[:1], dim=0),
    "slice_scatter": lambda x: torch.slice_scatter(x, x[:2], 0, 1),
    "masked_scatter": lambda x: x.masked_scatter(x == x, torch.zeros(3).double()),
    "repeat_interleave": lambda x: x.repeat_interleave(torch.tensor([1, 2]), 0),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_shape_raises_the_same_error_on_every_rank(name):
    with pytest.raises(RuntimeError):
        WRONG[name](TABLE)

    def job(domain):
        with pytest.raises(RuntimeError):
            WRONG[name](shard(TABLE, domain, (3, 0, 4)))

    simulate(RANKS, job)
