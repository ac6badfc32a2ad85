"""Rules of functions that treat every row alone: the result is sharded as the arguments are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn import Parameter

from meshshard.tensor.align import align_broadcast
from meshshard.tensor.shard_tensor import Rule, ShardTensor, native, refuse, wrap

__all__ = ["RULES", "broadcasting", "everywhere", "keeping", "pointwise"]

UNARY = [
    "abs",
    "absolute",
    "acos",
    "acosh",
    "angle",
    "arccos",
    "arccosh",
    "arcsin",
    "arcsinh",
    "arctan",
    "arctanh",
    "asin",
    "asinh",
    "atan",
    "atanh",
    "bernoulli",
    "bitwise_not",
    "ceil",
    "cos",
    "cosh",
    "deg2rad",
    "digamma",
    "erf",
    "erfc",
    "erfinv",
    "exp",
    "exp2",
    "expm1",
    "fix",
    "floor",
    "frac",
    "i0",
    "isfinite",
    "isinf",
    "isnan",
    "isneginf",
    "isposinf",
    "isreal",
    "lgamma",
    "log",
    "log10",
    "log1p",
    "log2",
    "logical_not",
    "logit",
    "mvlgamma",
    "nan_to_num",
    "neg",
    "negative",
    "polygamma",
    "positive",
    "rad2deg",
    "real",
    "reciprocal",
    "round",
    "rsqrt",
    "sgn",
    "sigmoid",
    "sign",
    "signbit",
    "sin",
    "sinc",
    "sinh",
    "sqrt",
    "square",
    "tan",
    "tanh",
    "trunc",
    "conj",
    "conj_physical",
    "resolve_conj",
    "resolve_neg",
    "relu",
    "selu",
    "celu",
    "elu",
    "gelu",
    "silu",
    "mish",
    "softplus",
    "softsign",
    "leaky_relu",
    "relu6",
    "hardtanh",
    "hardswish",
    "hardsigmoid",
    "hardshrink",
    "softshrink",
    "tanhshrink",
    "logsigmoid",
    "threshold",
    "rrelu",
    "expit",
    "entr",
    "ndtr",
    "ndtri",
    "log_ndtr",
    "erfcx",
    "i0e",
    "i1",
    "i1e",
    "psi",
    "gammaln",
    "bessel_j0",
    "bessel_j1",
    "digamma",
    "xlog1py",
]
BINARY = [
    "add",
    "sub",
    "subtract",
    "mul",
    "multiply",
    "div",
    "divide",
    "true_divide",
    "floor_divide",
    "remainder",
    "fmod",
    "pow",
    "float_power",
    "maximum",
    "minimum",
    "fmax",
    "fmin",
    "atan2",
    "arctan2",
    "hypot",
    "logaddexp",
    "logaddexp2",
    "copysign",
    "nextafter",
    "xlogy",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "bitwise_left_shift",
    "bitwise_right_shift",
    "logical_and",
    "logical_or",
    "logical_xor",
    "masked_fill",
    "copy",
    "fill",
    "eq",
    "ne",
    "not_equal",
    "gt",
    "greater",
    "ge",
    "greater_equal",
    "lt",
    "less",
    "le",
    "less_equal",
    "rsub",
    "ldexp",
    "heaviside",
    "isclose",
    "lerp",
    "addcmul",
    "addcdiv",
    "clamp",
    "clip",
    "clamp_min",
    "clamp_max",
    "where",
    "zeta",
    "gcd",
    "lcm",
    "__and__",
    "__or__",
    "__xor__",
    "__iand__",
    "__ior__",
    "__ixor__",
    "__lshift__",
    "__rshift__",
    "__radd__",
    "__rsub__",
    "__rmul__",
    "__rdiv__",
    "__rtruediv__",
    "__rfloordiv__",
    "__rpow__",
    "__rmod__",
    "__rand__",
    "__ror__",
    "__rxor__",
    "__floordiv__",
    "__add__",
    "__sub__",
    "__mul__",
    "__truediv__",
    "__div__",
    "__pow__",
    "__mod__",
    "__iadd__",
    "__isub__",
    "__imul__",
    "__itruediv__",
    "__idiv__",
    "__ifloordiv__",
    "__imod__",
    "__ipow__",
    "__eq__",
    "__ne__",
    "__lt__",
    "__le__",
    "__gt__",
    "__ge__",
    "__neg__",
    "__abs__",
    "__invert__",
    "__pos__",
]
KEEPING = [
    "clone",
    "contiguous",
    "detach",
    "detach_",
    "to",
    "type",
    "type_as",
    "float",
    "double",
    "half",
    "bfloat16",
    "int",
    "long",
    "short",
    "bool",
    "char",
    "byte",
    "cpu",
    "cuda",
    "zero_",
    "nan_to_num",
]
RANDOM = ("bernoulli", "bernoulli_", "rrelu", "rrelu_")  # random: see random.py
HOMES = (torch, torch.Tensor, F, torch.special, torch._C._nn)


def pointwise(func: Callable[..., Any]) -> Rule:
    """The rule of a function of one sharded tensor: the same on its own rows."""

    def _rule(x: Any, *args: Any, **kwargs: Any) -> Any:
        if type(x) is not ShardTensor or any(isinstance(a, Tensor) for a in args) or kwargs:
            return general(x, *args, **kwargs)
        with native():
            out = func(x, *args)
        return out if out is x else wrap(out, x._sharding, x._dim)

    general = broadcasting(func)
    return _rule


def broadcasting(func: Callable[..., Any]) -> Rule:
    """The rule of a function of several tensors that broadcast."""

    def _rule(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 2 and not kwargs and type(args[0]) is ShardTensor:
            x, y = args
            with native():
                if simple := _simple(x, y):
                    out = func(x, y)
                    dim = out.ndim - x.ndim + x._dim
            if simple:
                return out if out is x else wrap(out, x._sharding, dim)
        return _broadcast(func, args, kwargs)

    return _rule


def _simple(x: ShardTensor, y: Any) -> bool:
    """Whether a second argument needs no alignment: a number, the same sharding, a plain row."""
    kind = type(y)
    if kind is ShardTensor:
        return y._sharding is x._sharding and y.ndim - y._dim == x.ndim - x._dim
    if kind is Tensor or kind is Parameter:
        return bool(y.ndim < x.ndim - x._dim)
    return kind is float or kind is int


def _broadcast(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    into = kwargs.get("out")
    if into is not None and type(into) is not ShardTensor:
        raise refuse(func, args, kwargs, "out= is plain; assign the result")
    names = [n for n, v in kwargs.items() if isinstance(v, Tensor)]
    lined, first, back = align_broadcast(func, [*args, *(kwargs[n] for n in names)])
    kwargs |= dict(zip(names, lined[len(args) :], strict=True))
    if type(args[0]) is not ShardTensor and _in_place(func):
        raise refuse(func, args, kwargs, "a plain tensor cannot take sharded rows in place")
    with native():
        out = func(*lined[: len(args)], **kwargs)
        if out is into or any(out is a for a in args):
            return out
        dim = out.ndim - back
    return wrap(out, first._sharding, dim)


def _in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    dunder = name.startswith("__")
    return (name.endswith("_") and not dunder) or (
        dunder and name[2] == "i" and name != "__invert__"
    )


def everywhere(names: Sequence[str]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every torch function of some names, in-place twins included."""
    seen = set()
    for name, home, twin in product(names, HOMES, ("", "_")):
        func = getattr(home, name + twin, None)
        if callable(func) and func not in seen:
            seen.add(func)
            yield name + twin, func


def keeping(func: Callable[..., Any]) -> Rule:
    """The rule of a function that changes how a tensor is stored, not what it is."""

    def _rule(x: Any, *args: Any, **kwargs: Any) -> Any:
        if type(x) is not ShardTensor:  # plain.type_as(sharded) and the like
            with native():
                return func(x, *args, **kwargs)
        with native():
            out = func(x, *args, **kwargs)
        if not isinstance(out, Tensor) or out is x:
            return out
        return wrap(out, x._sharding, x._dim)

    return _rule


def prelu(x: Any, weight: Tensor) -> ShardTensor:
    """One slope for all, or one for each channel of dim 1."""
    if type(x) is not ShardTensor or (x._dim == 1 and weight.numel() != 1):
        raise refuse(torch.prelu, (x, weight), None, "channels, or slopes, are sharded")
    with native():
        out = torch.prelu(x, weight)
    return wrap(out, x._sharding, x._dim)


def where(*args: Any, **kwargs: Any) -> Any:
    """A choice between two; of a condition alone it would number the rows."""
    if len(args) == 1 and not kwargs:
        raise refuse(torch.where, args, None, "it numbers rows: x[condition] picks them")
    return broadcasting(torch.where)(*args, **kwargs)


RULES: dict[Any, Rule] = {
    **dict.fromkeys((torch.prelu, F.prelu, Tensor.prelu), prelu),
    **{func: broadcasting(func) for _, func in everywhere(BINARY)},
    **{func: pointwise(func) for name, func in everywhere(UNARY) if name not in RANDOM},
    **{func: keeping(func) for _, func in everywhere(KEEPING)},
    torch.where: where,
}
