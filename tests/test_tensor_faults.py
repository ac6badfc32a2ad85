"""Faults that were found in rules: values and gradients equal those of one process, or are refused.

Each case runs on one rank and on three simulated ranks, of which some have no rows.
"""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from meshshard.comm import simulate
from meshshard.tensor import NoShardRule, ShardTensor, shard

SLACK = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # relative to the largest gradient


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


def assert_same_gradient(got, wanted):
    """Compare within rounding; instead of no gradient there may be zeros."""
    if wanted is None:
        assert got is None or not got.any()
        return
    slack = SLACK.get(wanted.dtype, 1e-12)
    atol = slack * (1 + wanted.abs().nan_to_num().max().item())
    torch.testing.assert_close(got, wanted, equal_nan=True, rtol=slack, atol=atol)


def assert_as_serial(function, *given):
    """Compare with one process; each argument has the dim along which it is sharded, or None."""
    values, grads = run(function, fresh(given), lambda x: x)
    rows = next(x.shape[dim] for x, dim in given if dim is not None)
    for sizes in splits(rows):
        for found, found_grads in on_ranks(function, given, sizes):
            torch.testing.assert_close(found, values, equal_nan=True)
            for got, wanted in zip(found_grads, grads, strict=True):
                assert_same_gradient(got, wanted)


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


WRITES = {
    "flatten": lambda x: x[:, :2].flatten().mul_(10),
    "flatten of all": lambda x: x.flatten().mul_(10),
    "reshape": lambda x: x[:, :2].reshape(-1).zero_(),
    "contiguous": lambda x: x[:, :2].contiguous().add_(100),
    "contiguous of all": lambda x: x.contiguous().add_(100),
}


@pytest.mark.parametrize("case", WRITES)
def test_writes_to_views_and_copies_reach_the_same_tensors_on_every_rank(case):
    def write(x):
        y = x.clone()
        WRITES[case](y)
        return y

    assert_as_serial(write, (draw(5, 3), 0))


# ------------------------------------------------------------------------------------------ out=
OUTS = {
    "softmax of rows": lambda x, o: torch.softmax(x, 0, out=o),
    "softmax of features": lambda x, o: torch.softmax(x, 1, out=o),
    "log_softmax": lambda x, o: torch.log_softmax(x, 1, out=o),
    "cumsum": lambda x, o: torch.cumsum(x, 0, out=o),
    "add": lambda x, o: torch.add(x, 2, out=o),
    "cat": lambda x, o: torch.cat([x[:, :1], x[:, 1:]], 1, out=o),
    "concat": lambda x, o: torch.concat([x[:, :1], x[:, 1:]], 1, out=o),
    "stack": lambda x, o: torch.stack([x[:, 0], x[:, 2], x[:, 1]], 1, out=o),
    "matmul": lambda x, o: torch.matmul(x, draw(3, 3), out=o),
    "clamp": lambda x, o: torch.clamp(x, min=0, out=o),
}


@pytest.mark.parametrize("case", OUTS)
def test_out_is_written(case):
    def call(x):
        out = torch.full_like(x, -7)
        assert OUTS[case](x.detach(), out) is out
        return out

    assert_as_serial(call, (draw(5, 3), 0))


def test_out_of_reductions_is_written():
    def total(x):
        out = torch.zeros(3, dtype=x.dtype)
        assert torch.sum(x.detach(), 0, out=out) is out
        return out

    def largest(x):
        values, indices = torch.zeros(3, dtype=x.dtype), torch.zeros(3, dtype=torch.int64)
        assert torch.max(x.detach(), 0, out=(values, indices))[0] is values
        return values, indices

    for call in (total, largest):
        assert_as_serial(call, (draw(5, 3), 0))


@pytest.mark.parametrize("sizes", splits(5))
def test_out_that_does_not_fit_is_refused(sizes):
    def job(domain):
        x = shard(draw(5, 3), domain, sizes)
        for out in (torch.zeros(5, 3).double(), x.clone()[:, :2], x.clone()[:4]):
            with pytest.raises(NoShardRule, match="out= has another dtype, shape"):
                torch.softmax(x, 1, out=out)
        with pytest.raises(NoShardRule, match="another dtype"):
            torch.add(x, 1, out=torch.zeros_like(x, dtype=torch.int64))
        with pytest.raises(RuntimeError, match="automatic differentiation"):
            torch.add(x.requires_grad_(), 1, out=torch.zeros_like(x))

    simulate(len(sizes), job)


# ------------------------------------------------------------------- operands that broadcast, types
MASK = draw(5, 5, seed=3) > 0
POINTS, DIRECTIONS = draw(5, 1, 3), draw(1, 4, 3, seed=1)
LABELS = (draw(5, 3, seed=4) > 0).double()
BFLOAT = draw(5, 3).bfloat16()
CLASSES = torch.tensor([0, 2, 1, 1, 0])
WEIGHTS = draw(5, 3, seed=5).abs()
INTEGERS = torch.tensor([5, -(2**63), 3, 1, -(2**63) + 9])
IMAGE = draw(1, 2, 5, 6)
NANS = torch.full((5, 2), torch.nan, dtype=torch.float64)
BROADCAST = {
    "masked_select of columns": (torch.masked_select, (draw(5, 5), 0), (MASK[0], None)),
    "masked_select of rows": (torch.masked_select, (draw(5, 5), 0), (MASK[:, :1], 0)),
    "masked_select by a plain mask": (torch.masked_select, (draw(5, 5), 0), (MASK, None)),
    "prelu of sharded channels": (F.prelu, (draw(4, 5, 3), 1), (draw(5), None)),
    "prelu with sharded slopes": (F.prelu, (draw(4, 5), 1), (draw(5), 0)),
    "prelu of a plain tensor": (F.prelu, (draw(4, 5), None), (draw(5), 0)),
    "masked_select of a plain tensor": (torch.masked_select, (draw(5), None), (MASK, 0)),
    "cosine of directions": (
        lambda x, y: F.cosine_similarity(x, y, dim=-1), (POINTS, 0), (DIRECTIONS, None),
    ),
    "cosine along a broadcast dim": (F.cosine_similarity, (POINTS, 0), (DIRECTIONS, None)),
    "cosine to one vector": (F.cosine_similarity, (draw(5, 3), 0), (draw(3, seed=1), None)),
    "cosine to one row": (F.cosine_similarity, (draw(5, 3), 0), (draw(1, 3, seed=1), None)),
    "cosine to a column": (F.cosine_similarity, (draw(5, 3), 0), (draw(5, 1, seed=1), 0)),
    "conv2d (3, 2), same": (
        lambda x, w: F.conv2d(x, w, padding="same"), (IMAGE, 2), (draw(2, 2, 3, 2), None),
    ),
    "conv2d (1, 4), same": (
        lambda x, w: F.conv2d(x, w, padding="same"), (IMAGE, 2), (draw(2, 2, 1, 4), None),
    ),
    "conv3d (3, 2, 4), same": (
        lambda x, w: F.conv3d(x, w, padding="same"),
        (draw(1, 2, 5, 6, 4), 2), (draw(2, 2, 3, 2, 4), None),
    ),
    **{
        f"multilabel weights, {how}": (
            lambda x, y, w, how=how: F.multilabel_soft_margin_loss(x, y, w, reduction=how),
            (draw(5, 3), 0), (LABELS, 0), (weight, None),
        )
        for how in ("mean", "none")
        for weight in (WEIGHTS, WEIGHTS[0], WEIGHTS[:1])
    },
    "gaussian_nll_loss, one variance a row": (
        F.gaussian_nll_loss, (draw(5, 5), 0), (draw(5, 5, seed=1), 0), (WEIGHTS[:, 0] + 1, None),
    ),
    "cross_entropy of bfloat16": (F.cross_entropy, (BFLOAT, 0), (CLASSES, 0)),
    "nll_loss of bfloat16": (F.nll_loss, (BFLOAT, 0), (CLASSES, None)),
    "mse_loss of bfloat16": (lambda x: F.mse_loss(x, x * 2), (BFLOAT, 0)),
    "chunk of no rows": (lambda x: x[:0].chunk(2), (draw(5, 3), 0)),
    "logsumexp of integers": (lambda x: x.logsumexp(0), (INTEGERS, 0)),
    "addmm with beta=0": (
        lambda x, a, b: torch.addmm(x, a, b, beta=0),
        (NANS, 0), (draw(5, 3), 0), (draw(3, 2, seed=1), None),
    ),
    "addmm with beta=0 of plain rows": (
        lambda x, a, b: torch.addmm(x, a, b, beta=0),
        (NANS, None), (draw(5, 3), 0), (draw(3, 2, seed=1), None),
    ),
    "baddbmm with beta=0": (
        lambda x, a, b: torch.baddbmm(x, a, b, beta=0),
        (NANS[:, None], 0), (draw(5, 1, 3), 0), (draw(5, 3, 2, seed=1), 0),
    ),
    "addmv of integers": (
        lambda x, a: torch.addmv(x, a, torch.ones(3, dtype=torch.int64), beta=1.5, alpha=2.5),
        (CLASSES, 0), (torch.arange(15).view(5, 3), 0),
    ),
    "new_full": (lambda x: x.new_full((2,), 3.0), (draw(5, 3), 0)),
    "new_full of all rows": (lambda x: x.new_full((5, 2), 3.0), (draw(5, 3), 0)),
    "new_full by names": (
        lambda x: x.new_full(size=(5, 2), fill_value=3.0), (draw(5, 3), 0),
    ),
    "a mask of another dim": (lambda x: x[torch.tensor([True, False, True])], (draw(3, 5), 1)),
    "number of features that are not 0": (
        lambda x: torch.linalg.vector_norm(x, 0, 1), (draw(5, 3), 0),
    ),
    "cat of an empty vector": (
        lambda x: torch.cat([torch.zeros(0, dtype=x.dtype), x]), (draw(5, 3), 0),
    ),
    "normalize of complex": (
        lambda x: F.normalize(x, dim=0).abs(), (torch.complex(draw(5, 3), draw(5, 3, seed=1)), 0),
    ),
    **{
        f"pad in mode {mode}": (lambda x, mode=mode: F.pad(x, (1, 1), mode=mode), (draw(5, 4), 0))
        for mode in ("replicate", "circular", "reflect")
    },
    "ReplicationPad2d": (torch.nn.ReplicationPad2d(1), (draw(5, 4, 4), 0)),
    "diff with plain rows before": (
        lambda x, y: torch.diff(x, dim=1, prepend=y), (draw(5, 4), 0), (draw(5, 1, seed=1), None),
    ),
    "diff with sharded rows after": (
        lambda x, y: torch.diff(x, 1, 1, None, y), (draw(5, 4), 0), (draw(5, 1, seed=1), 0),
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
@pytest.mark.parametrize("case", BROADCAST)
def test_operands_that_broadcast_and_unusual_arguments(case):
    assert_as_serial(*BROADCAST[case])


# ------------------------------------------------------------------ errors identically on all ranks
def set_column(x):
    x[:, 0] = torch.zeros(4, dtype=x.dtype)


REFUSED = {
    "masked_select of two dims": lambda x: torch.masked_select(x, (x > 0).T),
    "masked_select that does not fit": lambda x: torch.masked_select(x, torch.ones(3) > 0),
    "cross_entropy whose dims do not line up": lambda x: F.cross_entropy(
        x.T[None, :, :, None].expand(2, 5, 5, 4), torch.ones_like(x[None].expand(2, 5, 5)).long()
    ),
    "cross_entropy of other rows": lambda x: F.cross_entropy(x, torch.zeros(4).long()),
    "multilabel weight of other rows": lambda x: F.multilabel_soft_margin_loss(
        x, x, torch.ones(4, 5)
    ),
    "prelu of sharded slopes": lambda x: F.prelu(x, x[:, 0]),
    "cat of other dims": lambda x: torch.cat([x, x[:, 0]]),
    "cat of other widths": lambda x: torch.cat([x, x[:, :2]]),
    "layer_norm of a sharded weight": lambda x: F.layer_norm(x, (5,), x[:, 0]),
    "rms_norm of a sharded weight": lambda x: F.rms_norm(x, (5,), x[:, 0]),
    "a column of another size": set_column,
    "diff with one number": lambda x: torch.diff(x, dim=1, prepend=torch.ones(1, 1).double()),
    "conv with strides": lambda x: F.conv2d(
        x[None, None], torch.ones(1, 1, 1, 2).double(), stride=(1, 2), padding="same"
    ),
}


@pytest.mark.parametrize("sizes", splits(5))
@pytest.mark.parametrize("case", REFUSED)
def test_errors_are_raised_on_every_rank(case, sizes):
    def job(domain):
        x = shard(draw(5, 5), domain, sizes)
        with pytest.raises((NoShardRule, RuntimeError)) as found:
            REFUSED[case](x)
        return type(found.value)

    assert len(set(simulate(len(sizes), job))) == 1
