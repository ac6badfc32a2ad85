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
from meshshard.tensor.shard_tensor import Rule, ShardTensor, refuse, sharded_in, wrap
from meshshard.tensor.tokens import accumulation_dtype


def _elementwise(func: Callable[..., Any]) -> Rule:
    """The rule of a loss with one term for each element."""
    names = list(signature(func).parameters)

    def _rule(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        reduction = _pop_reduction(given)
        if func is F.gaussian_nll_loss:
            given["var"] = _variances(given["input"], given["var"])
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


def _variances(x: Tensor, var: Any) -> Any:
    """One variance for each row gets a dim of features, as in torch."""
    one_a_row = isinstance(var, Tensor) and var.shape == x.shape[:-1]
    return var.unsqueeze(-1) if one_a_row else var


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
        found = sharded_in(given.values())
        if any(x._dim for x in found) or ndim_of(given[names[0]]) < 2:
            why = "the sharded dim must be the first of two or more"
            raise refuse(func, list(given.values()), None, why)
        parts = {n: _owned_terms(func, n, v, first) for n, v in given.items()}
        with native():
            terms = func(**parts, reduction="none")
        return _reduced(wrap(terms, first._sharding, 0), reduction)

    return _rule


def _owned_terms(func: Any, name: str, value: Any, first: ShardTensor) -> Any:
    """Owned rows of a plain argument of all rows; a weight of classes as it is."""
    if not isinstance(value, Tensor) or type(value) is ShardTensor:
        return value
    if name == "weight" and (value.ndim < 2 or len(value) == 1):
        return value
    rows, total = len(value), first._sharding.total
    if rows != total:
        raise refuse(func, (first,), None, f"{name} has {rows} rows, expected {total}")
    return narrow_to_owned(value, first._sharding, 0)


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
        with native():
            dtype, local = terms.dtype, terms.sum(dtype=accumulation_dtype(terms.dtype))
        domain = first._sharding.domain
        return (domain.all_reduce(local) / domain.all_reduce(weights.sum())).to(dtype)

    return _rule


def _owned_rows(
    x: Any, target: Any, first: ShardTensor, indices: bool
) -> tuple[Tensor, Tensor, int]:
    """Owned rows of input and target, and the sharded dim of the input."""
    sharding, dim = first._sharding, first._dim
    if type(x) is not ShardTensor:
        dim += dim > 0  # class indices have no dim of classes
    at = dim - (dim > 1 and indices)
    shape = list(x.shape)
    del shape[1 : 1 + indices]
    fits = all(s._dim == d for s, d in ((x, dim), (target, at)) if type(s) is ShardTensor)
    if not fits or list(target.shape) != shape:
        why = f"expected a target of shape {tuple(shape)}, sharded along dim {at} or plain"
        raise refuse("cross_entropy or nll_loss", (x, target), None, why)
    if type(x) is not ShardTensor:
        x = narrow_to_owned(x, sharding, dim)
    if type(target) is not ShardTensor:
        target = narrow_to_owned(target, sharding, at)
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
