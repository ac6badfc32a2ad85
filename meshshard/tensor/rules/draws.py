"""Rules of random numbers of a distribution, made of uniform ones; see `rules.random`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from meshshard.tensor._torch_private import native
from meshshard.tensor.align import align_broadcast
from meshshard.tensor.rules.random import (
    channel_numbers,
    default_only,
    dropout,
    made,
    normal_numbers,
    randn_like,
    replicated_numbers,
    uniform_numbers,
)
from meshshard.tensor.rules.table import functions_named
from meshshard.tensor.shard_tensor import Rule, Sharded, ShardTensor, sharded_in, wrap

broadcast_tensors: Any = torch.broadcast_tensors
ALPHA = 1.7580993408473766  # of SELU, which alpha dropout keeps normalized


# ---------------------------------------------------------------------------------- filled in place
def _filled(func: Callable[..., Any], numbers: Callable[..., Any]) -> Rule:
    """The rule of a function that fills a tensor: numbers(x, parameters)."""

    def _rule(x: Sharded, *args: Any, generator: Any = None, **kwargs: Any) -> Sharded:
        default_only(func, x, {"generator": generator})
        with native(), torch.no_grad():
            if not any(isinstance(a, Tensor) for a in (*args, *kwargs.values())):
                func(x.new_empty(0), *args, **kwargs)  # raises as in torch, and draws no number
            named = {name.replace("from", "low"): value for name, value in kwargs.items()}
            x.copy_(numbers(x, *args, **named))
        return x

    return _rule


def _uniform(x: Sharded, low: float = 0.0, to: float = 1.0) -> Tensor:
    return uniform_numbers(x) * (to - low) + low


def _normal(x: Sharded, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return normal_numbers(x) * std + mean


def _log_normal(x: Sharded, mean: float = 1.0, std: float = 2.0) -> Tensor:
    return (normal_numbers(x) * std + mean).exp()


def _cauchy(x: Sharded, median: float = 0.0, sigma: float = 1.0) -> Tensor:
    return median + sigma * torch.tan(math.pi * (uniform_numbers(x) - 0.5))


def _exponential(x: Sharded, lambd: float = 1.0) -> Tensor:
    return -torch.log1p(-uniform_numbers(x)) / lambd


def _geometric(x: Sharded, p: float) -> Tensor:
    return torch.floor(torch.log1p(-uniform_numbers(x)) / math.log1p(-p)) + 1


def _bernoulli(x: Sharded, p: Any = 0.5) -> Any:
    if isinstance(p, Tensor):
        (_, p), _, _ = align_broadcast(Tensor.bernoulli_, (x, p))
    return uniform_numbers(x) < p


def _random(x: Sharded, low: int = 0, to: int | None = None) -> Any:
    """Whole numbers from low to to - 1; a single number is `to`."""
    if to is None and low:
        low, to = 0, low
    if to is None:
        exact = {torch.float64: 2**53, torch.float32: 2**24, torch.bool: 2}
        to = exact.get(x.dtype) or _largest(x.dtype)
    return torch.floor(uniform_numbers(x) * (to - low)) + low


def _largest(dtype: torch.dtype) -> int:
    if dtype.is_floating_point:
        return int(2 / torch.finfo(dtype).eps)
    return torch.iinfo(dtype).max


# -------------------------------------------------------------------------------------- new tensors
def randint_like(x: Sharded, low: int, high: int | None = None, **kwargs: Any) -> ShardTensor:
    """Whole numbers from low, by default 0, to high - 1."""
    default_only(torch.randint_like, x, kwargs)
    low, high = (0, low) if high is None else (low, high)
    with native():
        numbers = _random(x, low, high).to(kwargs.get("dtype") or x.dtype)
    return made(numbers, x, kwargs)


def normal(mean: Any, std: Any = 1.0, **kwargs: Any) -> Any:
    """torch.normal of a mean and a deviation, of which one is sharded."""
    with torch.no_grad():
        default_only(torch.normal, sharded_in((mean, std))[0], kwargs)
        if bool(torch.as_tensor(std < 0).any()):
            raise RuntimeError("normal expects all elements of std >= 0.0")
        tensors = [a for a in (mean, std) if isinstance(a, Tensor)]
        like = sharded_in(broadcast_tensors(*tensors))[0]
        return randn_like(like, dtype=tensors[0].dtype) * std + mean


def multinomial(x: Any, num_samples: int, replacement: bool = False, **kwargs: Any) -> Any:
    """torch.multinomial; of sharded categories a replicated tensor.

    Communication: for sharded categories that of torch.topk, or one all-to-all and two all-reduces.
    """
    default_only(torch.multinomial, x, kwargs)
    with torch.no_grad():
        if not x.is_floating_point():
            raise RuntimeError(f"multinomial only supports floating-point dtypes, got {x.dtype}")
        if num_samples <= 0:
            raise RuntimeError("cannot sample n_sample <= 0 samples")
        if not replacement and num_samples > x.shape[-1]:
            raise RuntimeError("cannot sample n_sample > prob_dist.size(-1) samples")
        if not bool((torch.isfinite(x) & (x >= 0)).all()):
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        if bool((x.sum(-1) == 0).any()):
            raise RuntimeError("invalid multinomial distribution (sum of probabilities <= 0)")
        if not replacement:  # the largest of weights over exponential numbers
            exponential = wrap(-torch.log1p(-uniform_numbers(x)), x._sharding, x._dim)
            return torch.topk(x / exponential, num_samples, -1).indices
        ends = torch.cumsum(x, -1)
        if x._dim < x.ndim - 1:
            like = x.new_empty(*x.shape[:-1], num_samples)
            with native():
                numbers = uniform_numbers(like).to(x.dtype) * ends[..., -1:]
                chosen = torch.searchsorted(ends.contiguous(), numbers, right=True)
            return wrap(chosen, x._sharding, x._dim)
        domain, total = x._sharding.domain, x.sum(-1, keepdim=True)
        numbers = replicated_numbers(x, [*x.shape[:-1], num_samples])
        with native():
            wanted = (numbers * total).to(x.dtype)
            chosen = torch.searchsorted(ends.contiguous(), wanted, right=True)
        return domain.all_reduce(chosen).clamp(max=x.shape[-1] - 1)


# ----------------------------------------------------------------------------- activations, dropout
def rrelu(
    x: Sharded, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False,
    inplace: bool = False, **_: Any,
) -> Any:  # fmt: skip
    """F.rrelu: negative numbers times a random slope, in training."""
    if lower > upper:
        raise RuntimeError("Lower bound should be less than or equal to the upper bound")
    if training:
        with native():
            slopes = (uniform_numbers(x) * (upper - lower) + lower).to(x.dtype)
            factors = torch.where(x > 0, torch.ones_like(slopes), slopes)
            out: Sharded = wrap(x * factors, x._sharding, x._dim)
        return x.copy_(out) if inplace else out
    return F.leaky_relu(x, (lower + upper) / 2, inplace)


def _alpha(keep_of: Callable[..., Tensor]) -> Rule:
    """The rule of alpha dropout: what is dropped becomes the negative limit of SELU."""

    def _rule(x: Sharded, p: float = 0.5, training: bool = False, inplace: bool = False) -> Any:
        if not 0 <= p <= 1:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
        if not training or p == 0:
            return x
        keep = keep_of(x) >= p
        with native():
            kept = keep.to(x.dtype)
            a = 1 / math.sqrt((ALPHA**2 * p + 1) * (1 - p)) if p < 1 else 0.0
            local = x * (kept * a) + ((kept - 1) * (ALPHA * a) + ALPHA * a * p)
            if inplace:
                return x.copy_(local)
        return wrap(local, x._sharding, x._dim)

    return _rule


def _with_inplace(rule: Rule) -> Rule:
    """The rule of torch.dropout_ and the like, from that of the one that has `inplace`."""
    return lambda x, p, train: rule(x, p, train, True)


FILLED: dict[str, Callable[..., Any]] = {
    "uniform_": _uniform, "normal_": _normal, "log_normal_": _log_normal, "cauchy_": _cauchy,
    "exponential_": _exponential, "geometric_": _geometric, "bernoulli_": _bernoulli,
    "random_": _random,
}  # fmt: skip
alpha_dropout, feature_alpha_dropout = _alpha(uniform_numbers), _alpha(channel_numbers)
RULES: dict[Any, Rule] = {
    **{f: _filled(f, FILLED[f.__name__]) for f in functions_named(" ".join(FILLED))},
    **dict.fromkeys(functions_named("multinomial"), multinomial),
    torch.randint_like: randint_like,
    torch.normal: normal,
    **dict.fromkeys((F.rrelu, torch.rrelu), rrelu),
    torch.rrelu_: lambda x, lower=1 / 8, upper=1 / 3, training=False: rrelu(
        x, lower, upper, training, True
    ),
    torch.dropout_: _with_inplace(dropout),
    **dict.fromkeys((F.alpha_dropout, torch.alpha_dropout), alpha_dropout),
    **dict.fromkeys((F.feature_alpha_dropout, torch.feature_alpha_dropout), feature_alpha_dropout),
    torch.alpha_dropout_: _with_inplace(alpha_dropout),
    torch.feature_alpha_dropout_: _with_inplace(feature_alpha_dropout),
}
