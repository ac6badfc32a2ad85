"""Rules of linear algebra: functions of matrices, exact for each matrix of a sharded batch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshshard.tensor.align import ndim_of
from meshshard.tensor.rules.batched import Signature, batched, batched_rules
from meshshard.tensor.rules.table import functions_named, in_place, named
from meshshard.tensor.shard_tensor import Rule, normalize_dim, refuse

SQUARE = "A nn -> nn"  # signatures: see rules/batched.py
NEVER_FAIL = {
    "det logdet": "A nn ->",
    "slogdet": "A nn -> ,",
    "matrix_exp matrix_power": SQUARE,
    "qr": "A mn -> mk, kn",
    "geqrf": "A mn -> mn, k",
    "lu_unpack": "LU_data mn, LU_pivots k -> mm, mk, kn",
    "ldl_solve": "LD nn, pivots n, B nK -> nK",
    "cholesky_solve": "input nK, input2 nn -> nK",
    "cholesky_inverse": SQUARE,
}
MAY_FAIL = {
    "inv inverse cholesky": SQUARE,
    "pinv pinverse": "input mn, atol, rtol -> nm",
    "cholesky_ex inv_ex": "A nn -> nn,",
    "matrix_rank": "A mn, atol, rtol, tol ->",
    "eig eigh": "A nn -> n, nn",
    "eigvals eigvalsh": "A nn -> n",
    "svd": "A mn -> mm, k, nn",
    "svdvals": "A mn -> k",
    "lu_factor": "A mn -> mn, k",
    "lu_factor_ex": "A mn -> mn, k,",
    "ldl_factor": "A nn -> nn, n",
    "ldl_factor_ex": "A nn -> nn, n,",
    "triangular_solve": "b nK, A nn -> nK, nn",
}


def _at_side(left_signature: str, at: int | None = None) -> Callable[..., str]:
    """The signature of a solver whose unknown is on the left or, with `left=False`, on the right.

    Args:
        left_signature: that with the unknown on the left.
        at: position of the argument `left`; None if it is given by name only.
    """

    def _signature(*args: Any, **kwargs: Any) -> str:
        left = args[at] if at is not None and len(args) > at else kwargs.get("left", True)
        return left_signature if left else left_signature.replace("nK", "Kn").replace("mK", "Km")

    return _signature


SIDED: dict[str, Signature] = {
    "solve_triangular": _at_side("A nn, B nK -> nK"),
}
PADDED: dict[str, Signature] = {  # torch's gradients for an empty batch are wrong
    "householder_product orgqr": "input mn, tau k -> mn",
    "ormqr": _at_side("input mk, input2 k, input3 mK -> mK", 3),
}


def _with_matrix(rule: Rule) -> Rule:
    """The rule of a solver whose right side may be a vector, given that of a matrix.

    Which of them it is depends on the global shapes, so that local ones cannot mislead torch.
    """

    def _rule(A: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N803
        B, *args = args or [kwargs.pop("b" if "b" in kwargs else "B")]  # type: ignore[assignment]
        ndim = ndim_of(A)
        vector = ndim_of(B) == 1 or (ndim_of(B) == ndim - 1 and B.shape == A.shape[:-1])
        if vector and not kwargs.get("left", True):
            raise RuntimeError("linalg.solve: a vector is on the left only (left=True)")
        B = B.unsqueeze(-1) if vector else _with_ndim(B, ndim)
        out = rule(A, B, *args, **kwargs)
        if not vector:
            return out
        if isinstance(out, Tensor):
            return out.squeeze(-1)
        return type(out)((out[0].squeeze(-1), *out[1:]))

    return _rule


def _with_ndim(x: Any, ndim: int) -> Any:
    """The tensor with batch dims of size one in front, if it has fewer dims."""
    while ndim_of(x) < ndim:
        x = x.unsqueeze(0)
    return x


def _lstsq_signature(A: Any, B: Any, *_: Any, driver: Any = None, **__: Any) -> str:  # noqa: N803
    """Residuals and ranks that a driver does not compute are empty tensors."""
    over = A.shape[-2] > A.shape[-1]
    if over and driver in ("gelss", "gelsd"):
        why = "whether there are residuals depends on all matrices: use driver='gelsy' or 'gels'"
        raise refuse(torch.linalg.lstsq, (A, B), None, why)
    gels = driver == "gels" or (driver is None and A.is_cuda)
    residuals, ranks = "K" if over and gels else "plain", "plain" if gels else ""
    return f"A mn, B mK -> nK, {residuals}, {ranks}, k"


def _vander(func: Callable[..., Any]) -> Rule:
    """The rule of vander, which has as many powers as elements by default."""
    rule = batched(func, "x K -> Kn")

    def _rule(x: Any, N: int | None = None, *args: Any, **kwargs: Any) -> Any:  # noqa: N803
        return rule(x, *args, N=x.shape[-1] if N is None else N, **kwargs)

    return _rule


# -------------------------------------------------------------- compositions of exact functions
def dist(x: Any, other: Any, p: float = 2) -> Any:
    """torch.dist: the norm of the difference."""
    return torch.linalg.vector_norm(x - other, p)


def multi_dot(tensors: Sequence[Any]) -> Any:
    """linalg.multi_dot, from the end with fewer rows or columns."""
    first, *_, last = tensors
    columns = last.shape[-1] if ndim_of(last) > 1 else 1
    rows = first.shape[0] if ndim_of(first) > 1 else 1
    if rows <= columns:
        return functools.reduce(torch.matmul, tensors)
    return functools.reduce(lambda done, x: torch.matmul(x, done), reversed(tensors))


def renorm(x: Any, p: float, dim: int, maxnorm: float) -> Any:
    """torch.renorm: rows of a larger norm are scaled."""
    dim = normalize_dim(dim, ndim_of(x))
    others = [d for d in range(ndim_of(x)) if d != dim]
    norms = torch.linalg.vector_norm(x, p, others, keepdim=True)
    return x * torch.where(norms > maxnorm, maxnorm / (norms + 1e-7), torch.ones_like(norms))


def matrix_norm(
    x: Any, ord: Any = "fro", dim: Any = (-2, -1), keepdim: bool = False, *,  # noqa: A002
    dtype: Any = None,
) -> Any:  # fmt: skip
    """linalg.matrix_norm; those of singular values are not exact if the matrix is sharded."""
    x = x if dtype is None else x.to(dtype)
    rows, columns = (normalize_dim(d, ndim_of(x)) for d in dim)
    if ord == "fro":
        return torch.linalg.vector_norm(x, 2, (rows, columns), keepdim)
    if ord in ("nuc", 2, -2):
        values = torch.linalg.svdvals(x.movedim((rows, columns), (-2, -1)))
        out = values.sum(-1) if ord == "nuc" else _extreme(values, ord, -1, keepdim=False)
        for d in sorted((rows, columns)) if keepdim else ():
            out = out.unsqueeze(d)
        return out
    added, kept = (rows, columns) if abs(ord) == 1 else (columns, rows)
    sums = x.abs().sum(added, keepdim=True)
    out = _extreme(sums, ord, kept, keepdim=True)
    return out if keepdim else out.squeeze((rows, columns))


def _extreme(x: Any, ord: float, dim: int, keepdim: bool) -> Any:  # noqa: A002
    """The largest number, zero if there is none; the smallest if `ord` is negative."""
    if ord < 0:
        return x.amin(dim, keepdim)
    return x.amax(dim, keepdim) if x.shape[dim] else x.sum(dim, keepdim)


def cond(A: Any, p: Any = None) -> Any:  # noqa: N803
    """linalg.cond; infinite if the matrix is singular."""
    if p in (None, 2, -2):
        values = torch.linalg.svdvals(A)
        largest, smallest = values.select(-1, 0), values.select(-1, -1)
        return smallest / largest if p == -2 else largest / smallest
    inverse, info = torch.linalg.inv_ex(A)
    out = torch.linalg.matrix_norm(A, p) * torch.linalg.matrix_norm(inverse, p)
    return out.masked_fill(info > 0, math.inf)


def norm(
    x: Any, ord: Any = None, dim: Any = None, keepdim: bool = False, *,  # noqa: A002
    dtype: Any = None,
) -> Any:  # fmt: skip
    """linalg.norm: of a vector or of a matrix, depending on its arguments."""
    several = isinstance(dim, (tuple, list))
    if several and len(dim) == 1:
        dim, several = dim[0], False
    if ord is not None and (several or (dim is None and ndim_of(x) == 2)):
        return matrix_norm(x, ord, (0, 1) if dim is None else dim, keepdim, dtype=dtype)
    order = 2 if ord is None else ord
    return torch.linalg.vector_norm(x, order, dim, keepdim, dtype=dtype)


RULES: dict[Any, Rule] = {
    **batched_rules(NEVER_FAIL),
    **batched_rules(MAY_FAIL, may_fail=True),
    **batched_rules(PADDED, pad=True),
    **batched_rules(SIDED),
    **{
        f: _with_matrix(batched(f, _at_side(f"A nn, B nK -> nK{more}"), may_fail=True))
        for f, more in ((torch.linalg.solve, ""), (torch.linalg.solve_ex, ","))
    },
    torch.linalg.lstsq: _with_matrix(
        batched(torch.linalg.lstsq, _lstsq_signature, pad=True, may_fail=True)
    ),
    torch.linalg.lu: batched(torch.linalg.lu, "A mn -> mm, mk, kn"),
    torch.linalg.lu_solve: batched(
        torch.linalg.lu_solve, _at_side("LU nn, pivots n, B nK -> nK")
    ),
    **{
        f: batched(f, "input nK, LU_data nn, LU_pivots n -> nK")
        for f in (torch.lu_solve, Tensor.lu_solve)
    },
    **{f: batched(f, "A mn -> mn, k,", may_fail=True) for f in (torch.functional.lu, Tensor.lu)},
    **{f: _vander(f) for f in functions_named("vander")},
    **named({
        "dist": dist, "multi_dot": multi_dot, "renorm": renorm, "renorm_": in_place(renorm),
        "matrix_norm": matrix_norm, "cond": cond,
    }),
    torch.linalg.norm: norm,
}  # fmt: skip
