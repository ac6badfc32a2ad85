"""Faults that were found in rules: values and gradients equal those of one process, or are refused.

Each case runs on one rank and on three simulated ranks, of which some have no rows.
"""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from meshshard.comm import simulate
from meshshard.tensor import ShardTensor, shard


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def splits(n):
    return (n,), (1, 0, n - 1), (0, n, 0)


def as_list(found):
    return list(found) if isinstance(found, (list, tuple)) else [found]


def whole(x):
    return x.gather() if isinstance(x, ShardTensor) else x


def differentiable(x):
    return isinstance(x, torch.Tensor) and x.requires_grad


def run(function, leaves, place):
    """Values and the gradients of leaves; weights of the loss tell all elements apart."""
    found = as_list(function(*(place(x) for x in leaves)))
    loss = 0
    for x in found:
        if differentiable(x):
            weights = torch.cos(torch.arange(x.numel(), dtype=torch.float64)).view(x.shape)
            loss = loss + (x * weights.to(x.dtype)).abs().sum() * 2 + (x * x).abs().sum()
    if differentiable(loss):
        loss.backward()
    values = [whole(x).detach() if isinstance(x, torch.Tensor) else x for x in found]
    return values, [x.grad for x in leaves if differentiable(x)]


def fresh(given):
    """Leaves of one rank; floating-point ones require a gradient."""
    return [
        x.clone().requires_grad_(x.is_floating_point() or x.is_complex())
        if isinstance(x, torch.Tensor)
        else x
        for x, _ in given
    ]


def on_ranks(function, given, sizes):
    """The function of sharded arguments; gives values and gradients of every rank."""

    def job(domain):
        leaves = fresh(given)
        dims = {id(x): dim for x, (_, dim) in zip(leaves, given, strict=True)}

        def place(x):
            if not isinstance(x, torch.Tensor):
                return x
            if dims[id(x)] is None:
                return domain.replicate(x)
            return shard(x, domain, sizes, dim=dims[id(x)])

        return run(function, leaves, place)

    return simulate(len(sizes), job)


def assert_as_serial(function, *given):
    """Compare with one process; each argument has the dim along which it is sharded, or None."""
    values, grads = run(function, fresh(given), lambda x: x)
    rows = next(x.shape[dim] for x, dim in given if dim is not None)
    for sizes in splits(rows):
        for found, found_grads in on_ranks(function, given, sizes):
            torch.testing.assert_close(found, values, equal_nan=True)
            for got, wanted in zip(found_grads, grads, strict=True):
                slack = 1e-5 if wanted.dtype == torch.float32 else 1e-12
                largest = wanted.abs().nan_to_num().amax().item() if wanted.numel() else 0
                torch.testing.assert_close(
                    got, wanted, equal_nan=True, rtol=slack, atol=slack * (1 + largest)
                )


# ------------------------------------------------------------------------------------- attention
def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


STRIDED = {
    "unbind of the last dim": lambda x: x.reshape(x.shape[0], 2, 4, 3).transpose(0, 1).unbind(-1),
    "every third feature": lambda x: [x[None, :, i::3] for i in range(3)],
    "expanded features": lambda x: [x[None, :, i : i + 1].expand(-1, -1, 8) for i in range(3)],
    "expanded rows": lambda x: [x[None], x[None], x.mean(0).expand(x.shape[0], -1)[None]],
    "overlapping windows": lambda x: [x[None, :, i : i + 9 : 2] for i in range(3)],
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", STRIDED)
def test_attention_of_strided_features(case, dtype):
    x = draw(40, 24, dtype=dtype)
    assert_as_serial(lambda x: attend(*STRIDED[case](x)), (x, 0))


def test_gradient_of_attention_that_is_expanded():
    assert_as_serial(lambda x: attend(x, x, x).sum(0).expand(7, -1, -1), (draw(1, 40, 8), 1))


@pytest.mark.parametrize("heads", [1, 4])
def test_attention_broadcasts_its_batch_where_a_rank_has_no_heads(heads):
    q, k, v = draw(4, 3, 8), draw(5, 4, 6, 8, seed=1), draw(5, 4, 6, 8, seed=2)
    plain = q[:heads]
    assert_as_serial(attend, (plain, None), (k, 1), (v, None))
    assert_as_serial(attend, (k, 1), (plain, None), (plain * 2, None))


# ------------------------------------------------------------------------------------ reductions
CONSTANT = draw(5, 3)
CONSTANT[:, 1] = 2.0
CONSTANT[3] = 4.0
SPREAD = {
    "std of rows": lambda x: x.std(0),
    "std of all": lambda x: (0 * x + 3).std(),
    "std of features": lambda x: x.std(1),
    "std_mean": lambda x: torch.std_mean(x, 0),
    "z-scores": lambda x: (x - x.mean(0)) / (x.std(0) + 1e-6),
}


@pytest.mark.parametrize("case", SPREAD)
def test_gradient_of_std_where_values_are_constant(case):
    assert_as_serial(SPREAD[case], (CONSTANT, 0))
    assert_as_serial(SPREAD[case], (CONSTANT, 1))


# ----------------------------------------------------------------------------- views and in place
def changed_under_no_grad(x):
    view = x[:, 1]
    with torch.no_grad():
        x.add_(1.0)
    (view * view).sum().backward()
    return x.grad


def changed_when_detached(x):
    view = x[None]
    x.detach().mul_(2.0)
    view.sum().backward()
    return x.grad


def steps_of_sgd(x):
    view = x[:, :2]
    optimizer = torch.optim.SGD([x], lr=0.1)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = (view * view).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize("job", [changed_under_no_grad, changed_when_detached, steps_of_sgd])
@pytest.mark.parametrize("sizes", splits(5))
def test_views_of_a_leaf_follow_its_changes(job, sizes):
    start = torch.arange(15.0, dtype=torch.float64).view(5, 3)
    wanted = job(start.clone().requires_grad_())
    for local in (False, True):

        def on_rank(domain, local=local):
            x = shard(start.clone(), domain, sizes)
            x = ShardTensor.from_local(x.to_local(), x.sharding) if local else x
            return whole(job(x.requires_grad_()))

        for found in simulate(len(sizes), on_rank):
            torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("sizes", splits(5))
def test_sharded_rows_of_a_plain_leaf_are_not_used_after_its_change(sizes):
    def job(domain):
        rows = draw(5, 3)[: sizes[domain.rank]].requires_grad_()
        x = ShardTensor.from_local(rows, shard(draw(5, 3), domain, sizes).sharding)
        with torch.no_grad():
            rows.add_(1)
        with pytest.raises(RuntimeError, match="modified inplace"):
            x.sum().backward()

    simulate(len(sizes), job)
