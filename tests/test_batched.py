"""Functions of samples, matrices and lines: exact where others are sharded, else refused."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from op_database import Call, outcome
from torch.utils._pytree import tree_flatten

from meshshard.comm import simulate
from meshshard.tensor import NoShardRule, shard

linalg = torch.linalg
UNEVEN, EMPTY = (3, 0, 2), (0, 5, 0)  # of 5 rows on 3 ranks


def draw(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


def square(*batch):
    """Matrices that can be inverted."""
    return (draw(*batch, 4, 4).detach() / 4 + torch.eye(4, dtype=torch.float64)).requires_grad_()


def symmetric(x):
    return x @ x.mT + torch.eye(x.shape[-1], dtype=x.dtype)


EXACT = {  # a function, its arguments, and which dims of which are sharded
    "det": (torch.det, (square(5),), {0: 0}),
    "cholesky": (lambda x: linalg.cholesky(symmetric(x)), (square(5),), {0: 0}),
    "eigh": (lambda x: linalg.eigh(symmetric(x)).eigenvalues, (square(5),), {0: 0}),
    "svd": (lambda x: linalg.svd(x, full_matrices=False).S, (draw(2, 5, 4, 3),), {0: 1}),
    "qr": (linalg.qr, (square(5),), {0: 0}),
    "solve": (linalg.solve, (square(5), draw(5, 4, 2)), {0: 0, 1: 0}),
    "solve, plain right side": (linalg.solve, (square(5), draw(5, 4, 2)), {0: 0}),
    "solve, one right side": (linalg.solve, (square(5), draw(1, 4, 2)), {0: 0}),
    "solve, plain matrix": (linalg.solve, (square(), draw(5, 4, 2)), {1: 0}),
    "solve, columns": (linalg.solve, (square(), draw(4, 5)), {1: 1}),
    "solve, vectors": (linalg.solve, (square(5), draw(5, 4)), {0: 0, 1: 0}),
    "solve, 3 matrices of 4 on a rank": (linalg.solve, (square(5), draw(4, 4)), {0: 0}),
    "solve, left": (lambda a, b: linalg.solve(a, b, left=False), (square(), draw(5, 4)), {1: 0}),
    "lstsq": (lambda a, b: linalg.lstsq(a, b)[0], (draw(5, 4, 2), draw(5, 4, 1)), {0: 0}),
    "nuclear norm": (lambda x: linalg.matrix_norm(x, "nuc"), (draw(5, 4, 3),), {0: 0}),
    "largest column": (lambda x: linalg.matrix_norm(x, 1), (draw(5, 4),), {0: 0}),
    "trace": (torch.trace, (draw(5, 4),), {0: 0}),
    "triu of columns": (lambda x: torch.triu(x, 1), (draw(4, 5),), {0: 1}),
    "kron": (torch.kron, (draw(5, 4), draw(2, 3)), {0: 0}),
    "renorm in place": (lambda x: x.clone().renorm_(2, 0, 1.0), (draw(5, 4),), {0: 0}),
    "rfft": (torch.fft.rfft, (draw(5, 4),), {0: 0}),
    "fftn": (lambda x: torch.fft.fftn(x, dim=(0, 2)).abs(), (draw(3, 5, 4),), {0: 1}),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), (draw(5, 2, 4, 4),), {0: 0}),
    "max_pool2d, channels": (lambda x: F.max_pool2d(x, 2), (draw(2, 5, 4, 4),), {0: 1}),
    "windows along rows": (
        lambda x: F.max_pool2d(x, (1, 2)) + F.avg_pool2d(x, (1, 2)),
        (draw(2, 3, 5, 4),),
        {0: 2},
    ),
    "mean of a grid": (lambda x: F.adaptive_avg_pool1d(x, 1), (draw(2, 3, 5),), {0: 2}),
    "ctc_loss": (
        lambda x: F.ctc_loss(
            x.log_softmax(-1), torch.ones(5, 2, dtype=torch.int64), (6,) * 5, (2, 1, 2, 0, 2)
        ),
        (draw(6, 5, 3),),
        {0: 1},
    ),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2), (draw(5, 2, 4),), {0: 0}),
    "grid_sample": (
        partial(F.grid_sample, align_corners=False),
        (draw(2, 3, 4, 4), draw(2, 5, 3, 2)),
        {1: 1},
    ),
    "affine_grid": (lambda x: F.affine_grid(x, (5, 1, 3, 3), True), (draw(5, 2, 3),), {0: 0}),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), (draw(1, 4, 5, 2),), {0: 2}),
    "conv1d, results": (F.conv1d, (draw(2, 3, 6), draw(5, 3, 3), draw(5)), {1: 0}),
    "conv1d, inputs": (F.conv1d, (draw(2, 5, 6), draw(3, 5, 3), draw(3)), {0: 1}),
    "conv_transpose1d": (F.conv_transpose1d, (draw(5, 2, 4), draw(2, 3, 3), draw(3)), {0: 0}),
    "bilinear, inputs": (F.bilinear, (draw(2, 5), draw(2, 3), draw(4, 5, 3), draw(4)), {0: 1}),
    "group_norm, weight": (lambda x, w: F.group_norm(x, 1, w), (draw(2, 5, 3), draw(5)), {1: 0}),
    "embedding": (lambda w: F.embedding(torch.tensor([0, 3, 4]), w, 3), (draw(5, 2),), {0: 0}),
    "glu": (lambda x: F.glu(x, 0), (draw(4, 2),), {0: 0}),
    "cross_entropy": (
        lambda x, w: F.cross_entropy(x, torch.tensor([0, 4, -100]), w, label_smoothing=0.1),
        (draw(3, 5), draw(5).detach().exp()),
        {0: 1},
    ),
}  # fmt: skip
REFUSED = {
    "matrix": (linalg.det, (draw(5, 5),), {0: 0}),
    "tall matrix": (linalg.qr, (draw(5, 2),), {0: 0}),
    "line": (torch.fft.fft, (draw(5),), {0: 0}),
    "windows of several ranks": (lambda x: F.avg_pool1d(x, 2), (draw(2, 3, 5),), {0: 2}),
    "grid": (lambda x: F.avg_pool1d(x, 2, 1), (draw(2, 3, 5),), {0: 2}),
    "other dims": (linalg.solve, (square(5), draw(5, 4, 5)), {0: 0, 1: 2}),
    "other rows": (linalg.solve, (square(5), draw(3, 4, 2)), {0: 0}),
}


def judged(case, sizes):
    function, arguments, dims = case
    rows = [arguments[i].shape[d] for i, d in dims.items()]
    sizes = (1, 0, 3) if rows[0] == 4 and sizes == UNEVEN else (0, 4, 0) if rows[0] == 4 else sizes
    leaves, spec = tree_flatten((arguments[0], arguments[1:], {}))
    return outcome(Call(function, leaves, spec, dims, "", True, sizes))


@pytest.mark.parametrize("sizes", [UNEVEN, EMPTY])
@pytest.mark.parametrize("case", EXACT)
def test_exact(case, sizes):
    found = judged(EXACT[case], sizes)
    assert found.kind == "exact", found


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    function, arguments, dims = REFUSED[case]

    def job(domain):
        given = [
            shard(a.detach(), domain, UNEVEN, dim=dims[i]) if i in dims else a
            for i, a in enumerate(arguments)
        ]
        with pytest.raises(
            NoShardRule, match=r"couples the sharded dim|do not line up|expected|multiples"
        ):
            function(*given)

    simulate(3, job)


def test_singular_matrix():
    """A matrix that one rank owns cannot be inverted: all ranks raise."""
    matrices = torch.eye(2).repeat(5, 1, 1)
    matrices[4] = 0

    def job(domain):
        with pytest.raises(linalg.LinAlgError, match="rank 2"):
            linalg.inv(shard(matrices, domain, UNEVEN))

    simulate(3, job)


def test_types_of_results():
    """Results of several tensors keep their type; those that torch leaves empty are plain."""
    matrices = square(5).detach()

    def job(domain):
        x = shard(matrices, domain, UNEVEN)
        assert isinstance(linalg.eigh(x), torch.return_types.linalg_eigh)
        assert linalg.qr(x, "r").Q.shape == (0,)
        sign, logarithm = linalg.slogdet(x)
        assert sign.shape == logarithm.shape == (5,)

    simulate(3, job)
