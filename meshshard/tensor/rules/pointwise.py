"""Rules of pointwise functions, whose arguments broadcast, and of conversions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn import Parameter

from meshshard.tensor._torch_private import native
from meshshard.tensor.align import align_broadcast, ndim_of
from meshshard.tensor.rules.batched import batched_rules, labels_of
from meshshard.tensor.rules.table import HOMES, functions_named, is_in_place, rowwise
from meshshard.tensor.shard_tensor import (
    Rule,
    Sharded,
    ShardTensor,
    apply_local,
    normalize_dim,
    refuse,
    wrap,
)

UNTAGGED = """
absolute arccos arccosh arcsin arcsinh arctan arctan2 arctanh complex conj copy divide expit fill
fix floor_divide gammainc gammaincc gammaln greater greater_equal hardswish isclose isreal less
less_equal logsigmoid multigammaln multiply ndtr negative not_equal polar psi real resolve_conj
resolve_neg softsign subtract tanhshrink
"""  # aliases and compositions, which torch does not tag as pointwise
OTHER_RULES = "bernoulli clone max min rrelu where"  # tagged, but also reductions, random, …
NOT_TENSORS = "equal frexp"  # tagged, but the result is a bool, a tuple
ARITHMETIC = "add sub mul div truediv floordiv mod pow and or xor lshift rshift"
COMPARISONS = "eq ne lt le gt ge neg abs invert pos"
CONVERSIONS = """
clone detach_ to type type_as float double half bfloat16 int long short bool char byte
cpu cuda zero_
"""


def tagged() -> set[str]:
    """Names of the functions that torch tags as pointwise, without those for other rules."""
    names = {n for home in HOMES for n in dir(home) if not n.startswith("_") and n[-1] != "_"}
    special = {n for n in dir(torch.special) if _is_tagged(f"special_{n}")}
    return special.union(filter(_is_tagged, names)).difference(
        OTHER_RULES.split(), NOT_TENSORS.split()
    )


def _is_tagged(name: str) -> bool:
    op: Any = getattr(torch.ops.aten, name, None)
    return hasattr(op, "overloads") and any(
        torch.Tag.pointwise in getattr(op, overload).tags for overload in op.overloads()
    )


def _pointwise_functions() -> list[Callable[..., Any]]:
    """All pointwise functions, with the in-place ones and the methods of operators."""
    names = sorted({*tagged(), *UNTAGGED.split()})
    operators = [f"__{p}{n}__" for n in ARITHMETIC.split() for p in ("", "r", "i")]
    operators += [f"__{n}__" for n in COMPARISONS.split()]
    return functions_named(" ".join([*names, *(f"{n}_" for n in names), *operators]))


def pointwise(func: Callable[..., Any]) -> Rule:
    """The rule of a function of tensors that broadcast."""

    def _rule(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else None
        if type(x) is not ShardTensor or kwargs or len(args) > 2:
            return _broadcast(func, args, kwargs)
        with native():
            aligned = len(args) == 1 or _is_aligned(x, args[1])
            if aligned:
                out = func(*args)
                dim = out.ndim - x.ndim + x._dim
        if not aligned:
            return _broadcast(func, args, kwargs)
        return out if out is x else wrap(out, x._sharding, dim)

    return _rule


def _is_aligned(x: ShardTensor, y: Any) -> bool:
    """Whether `y` broadcasts with local rows of `x`: a number, the same sharding, a plain row."""
    kind = type(y)
    if kind is ShardTensor:
        return y._sharding is x._sharding and y.ndim - y._dim == x.ndim - x._dim
    if kind is Tensor or kind is Parameter:
        return bool(y.ndim < x.ndim - x._dim)
    return kind is float or kind is int


def _broadcast(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    names = [n for n, v in kwargs.items() if isinstance(v, Tensor)]
    aligned, first, back = align_broadcast(func, [*args, *(kwargs[n] for n in names)])
    kwargs |= dict(zip(names, aligned[len(args) :], strict=True))
    if args and type(args[0]) is not ShardTensor and is_in_place(func):
        why = "a plain tensor cannot be changed in place by a sharded one"
        raise refuse(func, args, kwargs, why)
    with native():
        out = func(*aligned[: len(args)], **kwargs)
        if out is NotImplemented or any(out is a for a in args):
            return out  # NotImplemented: Python then compares by identity, as in x == None
        dim = out.ndim - back
    return wrap(out, first._sharding, dim)


def _prelu_letters(input: Tensor, weight: Tensor) -> str:  # noqa: A002 - torch's name
    """The signature of prelu: one slope for all, or one for each channel of dim 1."""
    letters = labels_of(ndim_of(input), ())
    slopes = letters[1:2]
    if not slopes and type(weight) is ShardTensor:
        raise refuse(torch.prelu, (input, weight), None, "gather the slope: weight.gather()")
    return f"input {letters}, weight {slopes} -> {letters}"


def glu(x: Sharded, dim: int = -1) -> Any:
    """F.glu; along the sharded dim, the second half of the rows moves to the sizes of the first.

    Communication: along the sharded dim one all-to-all, forward and backward.
    """
    dim = normalize_dim(dim, ndim_of(x))
    if dim != x._dim:
        return apply_local(F.glu, x, (dim,))
    n = x._sharding.total
    if n % 2:
        raise RuntimeError(f"Halving dimension must be even, but dimension {dim} is size {n}")
    first, second = x.narrow(dim, 0, n // 2), x.narrow(dim, n // 2, n // 2)
    return first * torch.sigmoid(second)  # of the sizes of the first


_where = pointwise(torch.where)


def where(*args: Any, **kwargs: Any) -> Any:
    """torch.where of three arguments; with a condition alone, its nonzero."""
    if len(args) == 1 and not kwargs:
        return torch.nonzero(args[0], as_tuple=True)
    return _where(*args, **kwargs)


def real_part(x: ShardTensor) -> ShardTensor:
    """x.real, a view."""
    return apply_local(torch.real, x)


def imaginary_part(x: ShardTensor) -> ShardTensor:
    """x.imag, a view."""
    return apply_local(torch.imag, x)


def view_as_real(x: ShardTensor) -> ShardTensor:
    """Real and imaginary parts on a new last dim, a view.

    torch cannot differentiate the view of an empty tensor by a gradient that is expanded.
    """
    if not x._sharding.own:
        return apply_local(lambda a: torch.stack([a.real, a.imag], -1), x)
    return apply_local(torch.view_as_real, x)


def view_as_complex(x: ShardTensor) -> ShardTensor:
    """Pairs on the last dim as complex numbers, a view."""
    with native():
        last = x.ndim - 1
    if x._dim == last:
        raise refuse(torch.view_as_complex, (x,), None, "the dim of the pairs is sharded")
    return apply_local(torch.view_as_complex, x)


RULES: dict[Any, Rule] = {
    Tensor.real.__get__: real_part,  # type: ignore[attr-defined]
    Tensor.imag.__get__: imaginary_part,  # type: ignore[attr-defined]
    torch.imag: imaginary_part,
    torch.view_as_real: view_as_real,
    torch.view_as_complex: view_as_complex,
    **{f: pointwise(f) for f in _pointwise_functions()},
    **{f: rowwise(f) for f in functions_named(CONVERSIONS)},
    **batched_rules({"prelu": _prelu_letters}),
    F.glu: glu,
    torch.where: where,
    Tensor.where: pointwise(Tensor.where),
}
