"""Rules of losses: local terms, then their global sum or mean."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from meshshard.tensor._torch_private import l1_loss_weight, legacy_reduction, native
from meshshard.tensor.align import (
    align_broadcast,
    global_shape,
    narrow_to_owned,
    ndim_of,
    require_same_sharding,
)
from meshshard.tensor.shard_tensor import Rule, ShardTensor, refuse, wrap


def _elementwise(func: Callable[..., Any]) -> Rule:
    """The rule of a loss with one term for each element."""
    names = list(signature(func).parameters)

    def _rule(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        reduction = _pop_reduction(given)
        tensors = [n for n, v in given.items() if isinstance(v, Tensor)]
        parts, first, back = align_broadcast(func, [given[n] for n in tensors])
        with native():
            terms = func(**(given | dict(zip(tensors, parts, strict=True)) | {"reduction": "none"}))
        terms = wrap(terms, first._sharding, terms.ndim - back)
        if reduction == "batchmean":
            return terms.sum() / global_shape(first)[0]
        if reduction == "mean" and func is F.mse_loss and given.get("weight") is not None:
            return terms.sum() / given["weight"].sum()
        return _reduced(terms, reduction)

    return _rule


def _pop_reduction(given: dict[str, Any]) -> str:
    """Remove and return the reduction, which may be given by its deprecated arguments."""
    size_average, reduce = given.pop("size_average", None), given.pop("reduce", None)
    reduction = given.pop("reduction", "mean")
    if size_average is not None or reduce is not None:
        reduction = legacy_reduction(size_average, reduce)
    if reduction not in ("none", "mean", "sum", "batchmean"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    return str(reduction)


def _reduced(terms: ShardTensor, reduction: str) -> Any:
    if reduction == "none":
        return terms
    return terms.sum() if reduction == "sum" else terms.mean()


def _rowwise(func: Callable[..., Any]) -> Rule:
    """The rule of a loss of row vectors, with one term for each row."""
    names = list(signature(func).parameters)

    def _rule(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        reduction = _pop_reduction(given)
        first = require_same_sharding(func, list(given.values()))
        if first._dim != 0 or ndim_of(first) < 2:
            why = "the sharded dim must be the first of two or more"
            raise refuse(func, list(given.values()), None, why)
        parts = {
            n: narrow_to_owned(v, first._sharding, 0)
            if isinstance(v, Tensor) and type(v) is not ShardTensor and n != "weight"
            else v
            for n, v in given.items()
        }
        with native():
            terms = func(**parts, reduction="none")
        return _reduced(wrap(terms, first._sharding, 0), reduction)

    return _rule


_l1_loss = _elementwise(F.l1_loss)


def l1_loss(*args: Any, **kwargs: Any) -> Any:
    """F.l1_loss; refused with a weight, which torch does not pass to `__torch_function__`."""
    if l1_loss_weight() is not None:
        why = "torch drops the weight: write ((x - y).abs() * weight).sum() / weight.sum()"
        raise refuse(F.l1_loss, args, None, why)
    return _l1_loss(*args, **kwargs)


def _classification(func: Callable[..., Any]) -> Rule:
    """The rule of cross entropy and negative log likelihood; class weights also weight the mean."""
    names = list(signature(func).parameters)

    def _rule(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        reduction = _pop_reduction(given)
        x, target = given.pop("input"), given.pop("target")
        first = require_same_sharding(func, (x, target))
        if ndim_of(x) < 2 or (type(x) is ShardTensor and first._dim == 1):
            raise refuse(func, (x, target), None, "the classes are sharded")
        indices = not target.is_floating_point()  # class indices, else probabilities
        x, target, dim = _owned_rows(x, target, first, indices)
        with native():
            terms = func(x, target, **given, reduction="none")
            weights = _class_weights(target, given) if indices else None
        terms = wrap(terms, first._sharding, dim - (dim > 1))
        if reduction != "mean" or weights is None:
            return _reduced(terms, reduction)
        return terms.sum() / first._sharding.domain.all_reduce(weights.sum())

    return _rule


def _owned_rows(
    x: Any, target: Any, first: ShardTensor, indices: bool
) -> tuple[Tensor, Tensor, int]:
    """Owned rows of input and target, and the sharded dim of the input."""
    sharding, dim = first._sharding, first._dim
    if type(x) is not ShardTensor:
        dim += dim > 0  # `first` is the target: class indices, without a dim of classes
        x = narrow_to_owned(x, sharding, dim)
    if type(target) is not ShardTensor:
        target = narrow_to_owned(target, sharding, dim - (dim > 1 and indices))
    return x, target, dim


def _class_weights(target: Tensor, given: dict[str, Any]) -> Tensor:
    """Weight of the class of every target, zero if the target is ignored."""
    valid = target != given.get("ignore_index", -100)
    weight = given.get("weight")
    if weight is None:
        ones: Tensor = valid.to(torch.get_default_dtype())
        return ones
    weights: Tensor = weight[torch.where(valid, target, 0)] * valid
    return weights


ELEMENTWISE = """
mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div
poisson_nll_loss gaussian_nll_loss soft_margin_loss hinge_embedding_loss margin_ranking_loss
"""
ROWWISE = """
cosine_embedding_loss multilabel_soft_margin_loss multilabel_margin_loss multi_margin_loss
triplet_margin_loss
"""
RULES: dict[Any, Rule] = {
    **{f: _elementwise(f) for n in ELEMENTWISE.split() if (f := getattr(F, n, None))},
    **{f: _rowwise(f) for n in ROWWISE.split() if (f := getattr(F, n, None))},
    F.l1_loss: l1_loss,
    F.cross_entropy: _classification(F.cross_entropy),
    F.nll_loss: _classification(F.nll_loss),
}
