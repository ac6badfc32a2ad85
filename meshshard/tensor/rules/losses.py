"""Rules of losses: terms row by row, then the global sum or the sum over the global count."""

from __future__ import annotations

import sys
from collections.abc import Callable
from inspect import signature
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from meshshard.tensor.align import (
    align_broadcast,
    native_ndim,
    own_rows,
    require_same_sharding,
    shape_of,
)
from meshshard.tensor.shard_tensor import Rule, ShardTensor, native, refuse, wrap

__all__ = ["RULES"]

_legacy: Any = F._Reduction  # type: ignore[attr-defined]


def _elementwise(func: Callable[..., Any]) -> Rule:
    """Losses whose terms broadcast: mse, l1, huber, binary cross entropy, …."""
    names = list(signature(func).parameters)

    def _rule(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        how = _reduction(given)
        tensors = [n for n, v in given.items() if isinstance(v, Tensor)]
        parts, first, back = align_broadcast(func, [given[n] for n in tensors])
        with native():
            terms = func(**(given | dict(zip(tensors, parts, strict=True)) | {"reduction": "none"}))
        terms = wrap(terms, first._sharding, terms.ndim - back)
        if how == "batchmean":
            return terms.sum() / shape_of(first)[0]
        if how == "mean" and func is F.mse_loss and given.get("weight") is not None:
            return terms.sum() / given["weight"].sum()
        return _reduced(terms, how)

    return _rule


def _reduction(given: dict[str, Any]) -> str:
    """How terms are reduced, deprecated words included."""
    size_average, reduce = given.pop("size_average", None), given.pop("reduce", None)
    how = given.pop("reduction", "mean")
    if size_average is not None or reduce is not None:
        how = _legacy.legacy_get_string(size_average, reduce)
    if how not in ("none", "mean", "sum", "batchmean"):
        raise ValueError(f"{how} is not a valid value for reduction")
    return str(how)


def _reduced(terms: ShardTensor, how: str) -> Any:
    return terms if how == "none" else terms.sum() if how == "sum" else terms.mean()


def _rowwise(func: Callable[..., Any]) -> Rule:
    """Losses of vectors: a term for each row, classes or features in the last or second dim."""
    names = list(signature(func).parameters)

    def _rule(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        how = _reduction(given)
        first = require_same_sharding(func, list(given.values()))
        if first._dim != 0 or native_ndim(first) < 2:
            raise refuse(func, list(given.values()), None, "rows must be the first dim")
        parts = {
            n: own_rows(v, first._sharding, 0)
            if isinstance(v, Tensor) and type(v) is not ShardTensor and n != "weight"
            else v
            for n, v in given.items()
        }
        with native():
            terms = func(**parts, reduction="none")
        return _reduced(wrap(terms, first._sharding, 0), how)

    return _rule


_distance = _elementwise(F.l1_loss)


def l1_loss(*args: Any, **kwargs: Any) -> Any:
    """The mean of distances; refused with a weight, which torch leaves behind on the way here."""
    frame: FrameType | None = sys._getframe(1)
    while frame and frame.f_code is not F.l1_loss.__code__:
        frame = frame.f_back
    if frame and frame.f_locals.get("weight") is not None:
        why = "torch drops its weight: write ((x - y).abs() * weight).sum() / weight.sum()"
        raise refuse(F.l1_loss, args, None, why)
    return _distance(*args, **kwargs)


def cross_entropy(*args: Any, **kwargs: Any) -> Any:
    """Cross entropy and negative log likelihood: a mean over the weights of the classes hit."""
    return _classes(F.cross_entropy, *args, **kwargs)


def nll_loss(*args: Any, **kwargs: Any) -> Any:
    """Negative log likelihood."""
    return _classes(F.nll_loss, *args, **kwargs)


def _classes(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    given = dict(zip(signature(func).parameters, args, strict=False)) | kwargs
    how = _reduction(given)
    x, target = given.pop("input"), given.pop("target")
    first = require_same_sharding(func, (x, target))
    dim = first._dim
    if native_ndim(x) < 2 or (type(x) is ShardTensor and dim == 1):
        raise refuse(func, (x, target), None, "classes are sharded")
    by_number = not target.is_floating_point()
    at = dim if type(x) is ShardTensor else (0 if dim == 0 else dim + 1)
    x = x if type(x) is ShardTensor else own_rows(x, first._sharding, at)
    row = at - (at > 1 and by_number)
    target = target if type(target) is ShardTensor else own_rows(target, first._sharding, row)
    with native():
        terms = func(x, target, **given, reduction="none")
        count = _weights(target, given) if by_number else None
    terms = wrap(terms, first._sharding, at - (at > 1))
    if how != "mean":
        return _reduced(terms, how)
    if count is None:
        return terms.mean()
    return terms.sum() / first._sharding.domain.all_reduce(count.sum())


def _weights(target: Tensor, given: dict[str, Any]) -> Tensor:
    """Weight of the class of every target, zero where it is ignored."""
    there = target != given.get("ignore_index", -100)
    weight = given.get("weight")
    if weight is None:
        ones: Tensor = there.to(torch.get_default_dtype())
        return ones
    picked: Tensor = weight[torch.where(there, target, 0)] * there
    return picked


ELEMENTWISE = [
    "mse_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "kl_div",
    "poisson_nll_loss",
    "gaussian_nll_loss",
    "soft_margin_loss",
    "hinge_embedding_loss",
    "margin_ranking_loss",
]
ROWWISE = [
    "cosine_embedding_loss",
    "multilabel_soft_margin_loss",
    "multilabel_margin_loss",
    "multi_margin_loss",
    "triplet_margin_loss",
]
RULES: dict[Any, Rule] = {
    **{f: _elementwise(f) for n in ELEMENTWISE if (f := getattr(F, n, None))},
    **{f: _rowwise(f) for n in ROWWISE if (f := getattr(F, n, None))},
    F.l1_loss: l1_loss,
    F.cross_entropy: cross_entropy,
    F.nll_loss: nll_loss,
}
