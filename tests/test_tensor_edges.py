"""Unusual dtypes, arguments and indices: results equal those of torch, or are refused."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from meshshard.comm import DomainError, init_domain, simulate
from meshshard.comm.domain import count_traffic
from meshshard.errors import MeshshardError
from meshshard.tensor import Sharding, ShardTensor, shard

SIZES = (3, 0, 5)


def draw(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(0))


def with_nan():
    x = draw(8, 3)
    x[6, 1] = torch.nan
    return x


BYTES = torch.tensor([3, 0, 7, 1, 9, 2, 5, 6], dtype=torch.uint8)[:, None]
LEAST = torch.tensor([3, -(2**63), 7, 1, 9, 2, 5, 6])[:, None]
FLAGS = torch.tensor([0, 0, 1, 0, 0, 0, 1, 0], dtype=torch.bool)[:, None]
PICK = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])[:, None, None]
SAME = {
    "argmax with a NaN": (lambda x: x.argmax(), with_nan()),
    "argmin with a NaN": (lambda x: x.argmin(), with_nan()),
    "amin of bytes": (lambda x: x.amin(), BYTES),
    "argmin of bytes": (lambda x: x.argmin(), BYTES),
    "min of bytes": (lambda x: x.min(0), BYTES),
    "max of bytes": (lambda x: x.max(0), BYTES),
    "amin of the least number": (lambda x: x.amin(), LEAST),
    "argmin of the least number": (lambda x: x.argmin(), LEAST),
    "amax of flags": (lambda x: x.amax(), FLAGS),
    "amin of flags": (lambda x: x.amin(0), FLAGS),
    "max of flags": (lambda x: x.max(0), FLAGS),
    "min of flags": (lambda x: x.min(0), FLAGS),
    "norms of negative order": (lambda x: torch.linalg.vector_norm(x, -1, 0), draw(8, 3)),
    "a row by a tensor": (lambda x: x[torch.tensor(-3)], draw(8, 3)),
    "rows by a mask of numpy": (lambda x: x[np.arange(8) % 3 == 0], draw(8, 3)),
    "a row by a number of numpy": (lambda x: x[np.int64(5), np.int32(1)], draw(8, 3)),
    "vdot": (lambda x: torch.vdot(x, x * 1j), draw(8, dtype=torch.complex128)),
    ".real": (lambda x: x.real, draw(8, 3, dtype=torch.complex128)),
    ".imag": (lambda x: x.imag, draw(8, 3, dtype=torch.complex128)),
    "torch.imag": (lambda x: torch.imag(x), draw(8, 3, dtype=torch.complex128)),
    "view_as_real": (lambda x: torch.view_as_real(x), draw(8, 3, dtype=torch.complex128)),
    "view_as_complex": (lambda x: torch.view_as_complex(x), draw(8, 3, 2)),
    "torch.complex": (lambda x: torch.complex(x, x + 1), draw(8, 3)),
    "torch.polar": (lambda x: torch.polar(x, x + 1), draw(8, 3)),
    "one_hot": (lambda x: F.one_hot(x), torch.tensor([2, 1, 0, 0, 1, 0, 4, 1])),
    "var of complex numbers": (lambda x: x.var(0), draw(8, 3, dtype=torch.complex128)),
    "std of complex numbers": (lambda x: x.std(), draw(8, 3, dtype=torch.complex128)),
    "tensor_split from the end": (lambda x: x.tensor_split((-2,)), draw(8, 3)),
    "narrow from the end": (lambda x: x.narrow(0, -2, 2), draw(8, 3)),
    "narrow to no rows": (lambda x: x.narrow(0, 8, 0), draw(8, 3)),
    "take_along_dim repeats": (lambda x, i: x.take_along_dim(i, 1), draw(8, 3, 4), PICK),
    "mse_loss with weights": (lambda x, w: F.mse_loss(x, 0 * x, weight=w), draw(8, 3), draw(8, 3)),
    "view of other features": (lambda x: x.view(torch.float32), draw(8, 3)),
}
REFUSED = {
    "softmax out": lambda x: torch.softmax(x, 1, out=torch.zeros(8, 3).double()),
    "normalize out": lambda x: F.normalize(x, out=torch.zeros(8, 3)),
    "view of other rows": lambda x: x[:, 0].view(torch.float32),
    "embedding that is renormed": lambda x: F.embedding(x.long(), draw(9, 2), max_norm=0.1),
    "a generator": lambda x: x.clone().normal_(generator=torch.Generator()),
    "a bool as index": lambda x: x[True],
    "set by a bool": lambda x: x.clone().__setitem__(True, 1.0),
    "is_nonzero": lambda x: torch.is_nonzero(x[:1, :1]),
    "l1_loss with weights": lambda x: F.l1_loss(x, 0 * x, weight=x),
}
OUTSIDE = {
    "unsqueeze": lambda x: x.unsqueeze(9),
    "stack": lambda x: torch.stack([x, x], 9),
    "narrow": lambda x: x.narrow(0, 20, 1),
    "narrow from the end": lambda x: x.narrow(0, -20, 1),
    "a row": lambda x: x[8],
    "set a row": lambda x: x.__setitem__(8, 1.0),
    "from_local": lambda x: ShardTensor.from_local(x.to_local(), x.sharding, 2),
    "shard": lambda x: shard(x.gather(), x.sharding.domain, (8,), dim=2),
    "argmax of an empty tensor": lambda x: x[:, :0].argmax(),
}


def whole(found):
    found = found if isinstance(found, tuple) else (found,)
    return [a.gather() if type(a) is ShardTensor else a for a in found]


@pytest.mark.parametrize("case", SAME)
def test_results_equal_those_of_torch(case):
    function, *given = SAME[case]
    found = simulate(3, lambda d: whole(function(*(shard(x, d, SIZES) for x in given))))
    for rank in found:
        for got, wanted in zip(rank, whole(function(*given)), strict=True):
            torch.testing.assert_close(got, wanted, equal_nan=True)


@pytest.mark.parametrize("case", REFUSED)
def test_calls_that_would_be_wrong_are_refused(case):
    with pytest.raises(DomainError, match="no exact rule"):
        simulate(3, lambda d: REFUSED[case](shard(draw(8, 3), d, SIZES)))


@pytest.mark.parametrize("case", OUTSIDE)
def test_indices_out_of_range_raise_an_error(case):
    with pytest.raises(IndexError):
        OUTSIDE[case](shard(draw(8, 3), init_domain(), (8,)))


def small_dtypes_job():
    """Ranks without rows send the same dtype as the others."""
    domain = init_domain()
    sizes = (8,) + (0,) * (domain.size - 1)
    for x in (BYTES, FLAGS, LEAST.int()):
        sharded = shard(x, domain, sizes)
        assert sharded.max(0)[0].dtype == x.dtype
        assert sharded.max(0)[0] == x.max(0)[0]
        assert sharded.amin() == x.amin()


def test_small_dtypes_between_processes(ranks):
    ranks[2].run(small_dtypes_job)


def test_comparisons_with_what_is_not_a_tensor():
    x = shard(draw(8), init_domain(), (8,))
    assert (x == None) is False  # noqa: E711
    assert (x != None) is True  # noqa: E711
    assert x not in [None, "a"]
    assert x.__eq__("a") is NotImplemented
    with pytest.raises(TypeError):
        x < "a"  # noqa: B015


def test_uniform_numbers_are_within_their_bounds():
    x = shard(draw(8, 3), init_domain(), (8,))
    assert 3 <= x.uniform_(3.0, to=5.0).min() < x.max() < 5


def test_dropout_of_features_in_place():
    x = shard(draw(8, 3, 4, 4), init_domain(), (8,))
    out = F.dropout2d(x, 0.5, True, True)
    assert out is x
    assert (x == 0).any()


def test_logsumexp_reduces_its_maximum_and_its_sum():
    def job(domain):
        x = shard(draw(8, 3), domain, SIZES)
        with count_traffic(domain) as traffic:
            x.logsumexp(0)
        return traffic.total().calls

    assert simulate(3, job) == [2, 2, 2]


def test_negative_sizes_are_refused():
    with pytest.raises(MeshshardError, match="sizes must be 0 or more"):
        Sharding(init_domain(), (-1,))
