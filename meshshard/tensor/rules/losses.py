"""Rules of losses: local terms, then their global sum or mean."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
from meshshard.tensor.autocast import in_float32
from meshshard.tensor.rules.batched import batched
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


def _of_terms(func: Callable[..., Any], terms: Callable[..., Any]) -> Rule:
    """The rule of a loss given its terms, one for each sample."""
    names = list(signature(func).parameters)

    def _rule(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        reduction = _pop_reduction(given)
        if func in FLOAT32:
            given = {name: in_float32(value) for name, value in given.items()}
        return _reduced(terms(**given), reduction)

    return _rule


def _of_samples(func: Callable[..., Any], text: str) -> Rule:
    """The rule of a loss that couples the classes of a sample."""
    rule = batched(func, text, pad=True)

    def _terms(**given: Any) -> Any:
        given = {n: v for n, v in given.items() if v is not None}
        return rule(**given, reduction="none")

    return _of_terms(func, _terms)


def _cosine_terms(input1: Any, input2: Any, target: Any, margin: float = 0.0) -> Any:
    """Terms of F.cosine_embedding_loss, with the epsilon of torch."""
    product = (input1 * input2).sum(-1)
    squares = ((input1 * input1).sum(-1) + 1e-12) * ((input2 * input2).sum(-1) + 1e-12)
    cosine = product / squares.sqrt()
    same, other = (target == 1).to(cosine.dtype), (target == -1).to(cosine.dtype)
    return same * (1 - cosine) + other * (cosine - margin).clamp_min(0)


def _multilabel_terms(input: Any, target: Any, weight: Any = None) -> Any:  # noqa: A002
    """Terms of F.multilabel_soft_margin_loss."""
    terms = -(target * F.logsigmoid(input) + (1 - target) * F.logsigmoid(-input))
    return (terms if weight is None else terms * weight).mean(-1)


def _triplet_terms(
    anchor: Any, positive: Any, negative: Any, *, margin: float = 1.0, swap: bool = False,
    distance_function: Any = None, **norm: Any,
) -> Any:  # fmt: skip
    """Terms of F.triplet_margin_loss and F.triplet_margin_with_distance_loss.

    Raises:
        ValueError: the margin is not positive, as in torch.
    """
    if margin <= 0:
        raise ValueError(f"margin must be greater than 0, got {margin}")
    distance: Any = distance_function or partial(F.pairwise_distance, **norm)
    near, far = distance(anchor, positive), distance(anchor, negative)
    if swap:
        far = torch.minimum(far, distance(positive, negative))
    return (near - far + margin).clamp_min(0)


_ctc_terms = batched(
    F.ctc_loss, "log_probs tNc, targets Ns, input_lengths N, target_lengths N -> N", pad=True
)


def ctc_loss(
    log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, blank: int = 0,
    reduction: str = "mean", zero_infinity: bool = False,
) -> Any:  # fmt: skip
    """F.ctc_loss of sharded samples, with padded targets."""
    given = [log_probs, targets, input_lengths, target_lengths]
    if ndim_of(log_probs) != 3 or ndim_of(targets) != 2:
        why = "expected log_probs (time, samples, classes) and targets (samples, length)"
        raise refuse(F.ctc_loss, given, None, why)
    lengths = [x if isinstance(x, Tensor) else torch.tensor(x) for x in given[2:]]
    options = {"blank": blank, "reduction": "none", "zero_infinity": zero_infinity}
    terms = _ctc_terms(*given[:2], *lengths, **options)
    if reduction == "mean":
        terms = terms / lengths[1].to(terms.device, terms.dtype).clamp_min(1)
    return _reduced(terms, reduction)


def linear_cross_entropy(
    input: Any, linear_weight: Any, target: Any, *, linear_bias: Any = None,  # noqa: A002
    ignore_index: Any = None, options: Any = None, **given: Any,
) -> Any:  # fmt: skip
    """F.linear_cross_entropy, without its blocks of samples: owned rows are one block."""
    shape = (*input.shape[:-1], *linear_weight.shape[:-1])
    bias = None if linear_bias is None else linear_bias.flatten()
    logits = F.linear(input, linear_weight.flatten(0, -2), bias).reshape(shape)
    if ignore_index is not None and target.shape == logits.shape:
        raise RuntimeError("ignore_index is given, but the target contains probabilities")
    ignored = -100 if ignore_index is None else ignore_index
    return F.cross_entropy(logits, target, ignore_index=ignored, **given)


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
        classes = 0 if ndim_of(x) == 1 else 1
        with_classes = (x, target) if target.is_floating_point() else (x,)
        by_class = any(type(t) is ShardTensor and t._dim == classes for t in with_classes)
        if by_class or sharded_in(given.values()):
            x = in_float32(x)
            log_p = F.log_softmax(x, classes) if func is F.cross_entropy else x
            terms, weights = _terms_of_classes(log_p, target, classes, **given)
            if reduction != "mean" or weights is None:
                return _reduced(terms, reduction)
            return _weighted_mean(terms.sum(), weights.sum())
        first = require_same_sharding(func, (x, target))
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
        return _weighted_mean(domain.all_reduce(local), domain.all_reduce(weights.sum())).to(dtype)

    return _rule


def _weighted_mean(total: Tensor, weight: Tensor) -> Tensor:
    """The mean; NaN without any weight, with a gradient of zero, as in torch."""
    return torch.where(weight == 0, torch.nan, total / torch.where(weight == 0, 1, weight))


def _terms_of_classes(
    log_p: Any, target: Any, dim: int, weight: Any = None, ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> tuple[Any, Any]:  # fmt: skip
    """Terms of samples whose classes or class weights are sharded, and the weights of a mean."""
    n = log_p.shape[dim]
    column = [-1 if d == dim else 1 for d in range(ndim_of(log_p))]
    scale = 1 if weight is None else weight.view(column)
    if target.is_floating_point():
        target = target * (1 - label_smoothing) + label_smoothing / n
        return -(log_p * target * scale).sum(dim), None
    each = _numbered(log_p, dim, n).view(column)
    valid = (target != ignore_index).unsqueeze(dim)
    chosen = ((each == target.unsqueeze(dim)) & valid) * scale
    smooth = (log_p * valid * scale).sum(dim) if label_smoothing else 0
    terms = (1 - label_smoothing) * (log_p * chosen).sum(dim) + label_smoothing / n * smooth
    return -terms, chosen.sum(dim).to(log_p.dtype)


def _numbered(x: Any, dim: int, n: int) -> Any:
    """The numbers of the classes, sharded as they are."""
    if type(x) is not ShardTensor or x._dim != dim:
        return torch.arange(n, device=x.device)
    return wrap(x._sharding.rows(x.device), x._sharding, 0)


def _owned_rows(
    x: Any, target: Any, first: ShardTensor, indices: bool
) -> tuple[Tensor, Tensor, int]:
    """Owned rows of input and target, and the sharded dim of the input."""
    sharding, dim = first._sharding, first._dim
    if type(x) is not ShardTensor:
        dim += dim > 0 and indices  # class indices have no dim of classes
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
SAMPLES: dict[Any, str] = {
    F.multi_margin_loss: "input c, target, weight c ->",
    F.multilabel_margin_loss: "input c, target c ->",
}
FLOAT32 = {F.cosine_embedding_loss, F.triplet_margin_loss}  # under autocast
TERMS: dict[Any, Callable[..., Any]] = {
    F.cosine_embedding_loss: _cosine_terms,
    F.multilabel_soft_margin_loss: _multilabel_terms,
    F.triplet_margin_loss: _triplet_terms,
    F.triplet_margin_with_distance_loss: _triplet_terms,
}
RULES: dict[Any, Rule] = {
    **{f: _elementwise(f) for n in ELEMENTWISE.split() if (f := getattr(F, n, None))},
    **{f: _of_samples(f, text) for f, text in SAMPLES.items()},
    **{f: _of_terms(f, terms) for f, terms in TERMS.items()},
    F.l1_loss: l1_loss,
    F.ctc_loss: ctc_loss,
    F.linear_cross_entropy: linear_cross_entropy,
    F.cross_entropy: _classification(F.cross_entropy),
    F.nll_loss: _classification(F.nll_loss),
}
