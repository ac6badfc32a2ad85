"""Rules of differences, integrals, covariances and products, as compositions."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshshard.tensor._torch_private import native
from meshshard.tensor.layout import as_layout, reshard
from meshshard.tensor.rules.compositions import one_sharded
from meshshard.tensor.rules.matmul import added
from meshshard.tensor.rules.table import functions_named, in_place, int_list, named, rowwise
from meshshard.tensor.shard_tensor import Rule, Sharded, ShardTensor, sharded_in, wrap


# ------------------------------------------------------------------------------- neighbors in a dim
def _pairs(x: Sharded, dim: int) -> tuple[Any, Any]:
    """All rows but the last, all but the first, in the same layout."""
    n = max(x.shape[dim] - 1, 0)
    lower, upper = torch.narrow(x, dim, 0, n), torch.narrow(x, dim, x.shape[dim] - n, n)
    return lower, _fit(upper, lower)


def diff(x: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Any:
    """torch.diff.

    Communication: along the sharded dim one all-to-all of the rows at the ends of ranks.
    """
    if n and (prepend is not None or append is not None):
        x = torch.cat([a for a in (prepend, x, append) if a is not None], dim)
    for _ in range(min(n, x.shape[dim])):
        if not x.shape[dim]:
            break
        lower, upper = _pairs(x, dim)
        x = upper ^ lower if x.dtype == torch.bool else upper - lower
    return x.clone() if not n else x


def _trapezoids(y: Any, x: Any, dx: Any, dim: int) -> Any:
    """Twice the areas of the trapezoids between neighbors."""
    lower, upper = _pairs(y, dim)
    if x is None:
        return (lower + upper) * dx
    if x.ndim == 1 and y.ndim > 1:
        x = x.reshape([-1 if d == dim % y.ndim else 1 for d in range(y.ndim)])
    left, right = _pairs(x, dim - y.ndim if dim >= 0 else dim)
    return (lower + upper) * (right - left)


def trapezoid(y: Any, x: Any = None, *, dx: Any = 1, dim: int = -1) -> Any:
    """torch.trapezoid."""
    if not y.shape[dim]:
        return y.sum(dim, dtype=y.dtype)
    return _trapezoids(y, x, dx, dim).sum(dim) / 2


def cumulative_trapezoid(y: Any, x: Any = None, *, dx: Any = 1, dim: int = -1) -> Any:
    """torch.cumulative_trapezoid."""
    return _trapezoids(y, x, dx, dim).cumsum(dim) / 2


def gradient(x: Any, *, spacing: Any = None, dim: Any = None, edge_order: int = 1) -> list[Any]:
    """torch.gradient: central differences, one-sided at the two ends of a dim.

    Communication: along the sharded dim one all-to-all for each neighbor, and one for each row at
    the ends.
    """
    torch.gradient(torch.empty(x.shape, device="meta"), dim=dim, edge_order=edge_order)  # raises
    dims = range(x.ndim) if dim is None else int_list(dim)
    spacing = 1 if spacing is None else spacing
    steps = spacing if isinstance(spacing, (list, tuple)) else [spacing] * len(dims)
    if len(steps) != len(dims):
        raise RuntimeError(f"gradient: expected a spacing for each of {len(dims)} dims")
    return [_gradient(x, h, d % x.ndim, edge_order) for d, h in zip(dims, steps, strict=True)]


def _gradient(x: Any, spacing: Any, dim: int, edge_order: int) -> Any:
    n = x.shape[dim]
    low, middle, high = (torch.narrow(x, dim, start, n - 2) for start in range(3))
    low, high = _fit(low, middle), _fit(high, middle)
    steps = None
    if isinstance(spacing, Tensor) and spacing.ndim:
        along_rows = type(x) is ShardTensor and x._dim == dim
        if type(spacing) is ShardTensor and not along_rows:
            spacing = spacing.gather()
        steps = torch.diff(spacing).reshape([-1 if d == dim else 1 for d in range(x.ndim)])
        h1, h2 = (_fit(torch.narrow(steps, dim, start, n - 2), middle) for start in range(2))
        center = _weighted(_three_points(h1, h2, 0), (low, middle, high))
    else:
        center = (high - low) / (2 * spacing)
    ends = []
    for edge in (-1, 1):
        points = [_row_at(x, dim, i if edge < 0 else n - 1 - i) for i in range(edge_order + 1)]
        if steps is None:
            h = [spacing] * 2
        else:
            h = [_row_at(steps, dim, i if edge < 0 else n - 2 - i) for i in range(edge_order)]
        if edge_order == 1:
            ends.append((points[0] - points[1]) * edge / h[0])
        else:
            ends.append(_weighted(_three_points(h[0], h[1], 1), points) * edge)
    return torch.cat([ends[0], center, ends[1]], dim)


def _fit(x: Any, like: Any) -> Any:
    """A sharded tensor in the layout of another; a plain one as it is."""
    return as_layout(x, like) if type(x) is type(like) is ShardTensor else x


def _row_at(x: Any, dim: int, row: int) -> Tensor:
    """One row, replicated, with its dim."""
    one = torch.narrow(x, dim, row, 1)
    return one.gather() if type(one) is ShardTensor and one._dim == dim else one


def _three_points(h1: Any, h2: Any, at: int) -> tuple[Any, Any, Any]:
    """Weights of the derivative at the middle (0) or, outward, at the first (1) of three points."""
    both = h1 + h2
    if at == 0:
        return -h2 / (h1 * both), (h2 - h1) / (h1 * h2), h1 / (h2 * both)
    return (2 * h1 + h2) / (h1 * both), -both / (h1 * h2), h1 / (h2 * both)


def _weighted(weights: Sequence[Any], points: Sequence[Any]) -> Any:
    a, b, c = (w * x for w, x in zip(weights, points, strict=True))
    return a + b + c


# ----------------------------------------------------------------------------------- products, sums
def inner(a: Any, b: Any) -> Any:
    """torch.inner."""
    if a.ndim == b.ndim == 1:
        return torch.dot(a, b)
    return a * b if not a.ndim or not b.ndim else torch.tensordot(a, b, ([-1], [-1]))


def tensordot(a: Any, b: Any, dims: Any = 2, **_: Any) -> Any:
    """torch.tensordot, as an einsum."""
    if isinstance(dims, Tensor):
        dims = dims.tolist()
    if isinstance(dims, int):
        dims = (range(a.ndim - dims, a.ndim), range(dims))
    left, right = (
        [d % x.ndim for d in int_list(given)] for x, given in zip((a, b), dims, strict=True)
    )
    labels_a = [chr(ord("a") + d) for d in range(a.ndim)]
    labels_b = [chr(ord("A") + d) for d in range(b.ndim)]
    for i, j in zip(left, right, strict=True):
        if a.shape[i] != b.shape[j] and 1 not in (a.shape[i], b.shape[j]):
            raise RuntimeError(f"contracted dimensions need to match: {a.shape} and {b.shape}")
        if a.shape[i] != b.shape[j]:  # a size of 1 counts as broadcast
            a = a.sum(i, keepdim=True) if b.shape[j] == 1 else a
            b = b.sum(j, keepdim=True) if a.shape[i] == 1 else b
        labels_b[j] = labels_a[i]
    out = [c for d, c in enumerate(labels_a) if d not in left]
    out += [c for d, c in enumerate(labels_b) if d not in right]
    return torch.einsum(f"{''.join(labels_a)},{''.join(labels_b)}->{''.join(out)}", a, b)


def _sum_of_products(a: Any, b: Any) -> Any:
    """The sum of the products of a batch; a sum of integers would be int64."""
    products = torch.bmm(a, b)
    return products.sum(0, dtype=products.dtype)


def vecdot(a: Any, b: Any, *, dim: int = -1) -> Any:
    """torch.linalg.vecdot."""
    return (a.conj() * b).sum(dim)


def kron(a: Any, b: Any) -> Any:
    """torch.kron; if both are sharded, the second is gathered, as the result repeats it."""
    a, b = one_sharded((a, b))
    ndim = max(a.ndim, b.ndim)
    a, b = (x.reshape([1] * (ndim - x.ndim) + list(x.shape)) for x in (a, b))
    shape = [n * m for n, m in zip(a.shape, b.shape, strict=True)]
    for d in range(ndim):
        a, b = a.unsqueeze(2 * d + 1), b.unsqueeze(2 * d)
    return (a * b).reshape(shape)


def cov(x: Sharded, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Any:
    """torch.cov; sharded variables are first sharded along the observations.

    Communication: two or three all-reduces; that of `reshard` for sharded variables.
    """
    x = x.reshape(1, -1) if x.ndim < 2 else x
    if type(x) is ShardTensor and x._dim == 0:
        x = reshard(x, 1)
    n = x.shape[1]
    if fweights is None and aweights is None:
        average, factor, weighted = x.mean(1, keepdim=True), max(n - correction, 0), None
    else:
        for name, a in (("fweights", fweights), ("aweights", aweights)):
            if a is not None:
                _check_weights(name, a, n)
        fweights, aweights = (
            None if a is None else _fit(a, torch.select(x, 0, 0)) for a in (fweights, aweights)
        )
        w = fweights if aweights is None else aweights if fweights is None else fweights * aweights
        sums = w.sum()
        average = (x * w).sum(1, keepdim=True) / sums
        squares = (w * aweights).sum() / sums if aweights is not None and correction else 1
        factor = (sums - correction * squares).clamp(min=0)
        weighted = w
    x = x - average
    other = x if weighted is None else x * weighted
    return (torch.mm(x, other.t().conj()) / factor).squeeze()


def _check_weights(name: str, weights: Any, n: int) -> None:
    """Raise as torch does if these are not weights of n observations."""
    kind = "integral" if name == "fweights" else "floating point"
    if weights.ndim > 1:
        raise RuntimeError(f"cov(): expected {name} to have one or fewer dimensions")
    if weights.is_floating_point() != (name == "aweights"):
        raise RuntimeError(f"cov(): expected {name} to have {kind} dtype, got {weights.dtype}")
    if weights.numel() != n:
        raise RuntimeError(f"cov(): expected {n} {name}, one an observation, got {weights.numel()}")
    if bool((weights < 0).any()):
        raise RuntimeError(f"cov(): {name} cannot be negative")


def corrcoef(x: Sharded) -> Any:
    """torch.corrcoef."""
    c = torch.cov(x)
    if not c.ndim:
        return c / c
    d = c.diagonal().sqrt()
    c = c / d[:, None] / d[None]
    if not c.is_complex():
        return c.clip(-1, 1)
    return torch.complex(c.real.clip(-1, 1), c.imag.clip(-1, 1))


# -------------------------------------------------------------------------------------- comparisons
def allclose(
    x: Any, y: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> bool:
    """torch.allclose."""
    return bool(torch.isclose(x, y, rtol, atol, equal_nan).all())


def equal(a: Any, b: Any) -> bool:
    """torch.equal: the same bool on every rank."""
    if a.shape != b.shape:
        return False
    first = sharded_in((a, b))[0]
    return bool((as_layout(a, first) == as_layout(b, first)).all())


def isin(
    elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False
) -> Any:
    """torch.isin; blocks of sharded test elements are shifted around the ring of ranks.

    Communication: for sharded test elements one shift for each rank, or one all-reduce.
    """
    with native():
        if type(test_elements) is not ShardTensor:
            found = torch.isin(elements, test_elements)
        else:
            found = _in_sharded(elements, test_elements)
    if type(elements) is ShardTensor:
        found = wrap(found, elements._sharding, elements._dim)
    return ~found if invert else found


def _in_sharded(elements: Any, tests: ShardTensor) -> Tensor:
    domain, sizes = tests._sharding.domain, tests._sharding.sizes
    rows = tests.movedim(tests._dim, 0)
    if type(elements) is not ShardTensor:
        elements = torch.as_tensor(elements, device=rows.device)
        return domain.all_reduce(torch.isin(elements, rows), "max")
    every = [torch.isin(elements, domain.shift(rows, sizes, step)) for step in range(domain.size)]
    return functools.reduce(torch.logical_or, every)


def _to(dtype: torch.dtype) -> Rule:
    return lambda x, **options: x.to(dtype, **options)


ADDED = "addmm_ addmv_ baddbmm_ addr_ addbmm_"
RULES: dict[Any, Rule] = {
    **named({
        "diff": diff, "gradient": gradient, "trapezoid trapz": trapezoid,
        "cumulative_trapezoid": cumulative_trapezoid,
        "vecdot": vecdot, "inner": inner, "tensordot": tensordot, "kron": kron,
        "cov": cov, "corrcoef": corrcoef,
        "addr": added(torch.outer), "addbmm": added(_sum_of_products),
        "equal": equal, "allclose": allclose, "isin": isin, "frexp": rowwise(torch.frexp),
        "unravel_index": rowwise(torch.unravel_index),
        "cdouble": _to(torch.complex128), "cfloat": _to(torch.complex64),
        "chalf": _to(torch.complex32),
    }),
    **{f: in_place(getattr(torch, f.__name__[:-1])) for f in functions_named(ADDED)},
}  # fmt: skip
