"""Rules of attention: every row attends to the rows of all ranks.

Queries and keys may have the same sharding, different ones (two clouds), or one of them may be
replicated: see `meshshard.tensor.attention`. nn.MultiheadAttention, and the layers that torch
builds on it, use the same rule.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from meshshard.comm import Domain
from meshshard.tensor._torch_private import is_left_aligned, native
from meshshard.tensor.align import align_broadcast, narrow_to_owned, ndim_of, require_whole_domain
from meshshard.tensor.attention import (
    AttentionSpec,
    DropoutKey,
    attention_with_weights,
    ring_attention,
)
from meshshard.tensor.rules.random import dropout
from meshshard.tensor.shard_tensor import Rule, ShardTensor, refuse, sharded_in, wrap
from meshshard.tensor.sharding import Sharding

SDPA = F.scaled_dot_product_attention
MHA = F.multi_head_attention_forward
broadcast_shapes: Any = torch.broadcast_shapes


@dataclass(frozen=True)
class _Options:
    """Arguments of scaled_dot_product_attention after queries, keys and values."""

    attn_mask: Any = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def scaled_dot_product_attention(
    query: Any, key: Any, value: Any, *args: Any, **kwargs: Any
) -> Any:
    """Attention along dim -2, which may be sharded, as may be a dim of the batch."""
    return _attention(query, key, value, _Options(*args, **kwargs))[0]


def _attention(
    query: Any, key: Any, value: Any, options: _Options, weights: bool = False
) -> tuple[Any, Any]:
    """The output, and the weights (…, queries, keys) if they are asked for."""
    qkv = (query, key, value)
    found = sharded_in(qkv)
    backs = {ndim_of(x) - x._dim for x in found}
    if not found:
        raise refuse(SDPA, (*qkv, options.attn_mask), None, "only the mask is sharded")
    if 1 in backs or len(backs) > 1:
        why = "features are sharded" if 1 in backs else "the sharded dims do not line up"
        raise refuse(SDPA, (*qkv, options.attn_mask), None, why)
    if any(x._sharding.domain.group != found[0]._sharding.domain.group for x in found):
        raise refuse(SDPA, qkv, None, "the arguments belong to different domains")
    if options.attn_mask is not None and options.is_causal:
        raise RuntimeError(
            "scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True"
        )
    return (_over_rows if backs == {2} else _over_batch)(qkv, options, weights)


def _over_batch(qkv: tuple[Any, ...], options: _Options, weights: bool) -> tuple[Any, Any]:
    """The batch or the heads are sharded: local attention of each."""
    (q, k, v, mask), first, back = align_broadcast(SDPA, (*qkv, options.attn_mask))
    if options.enable_gqa and back == 3:
        raise refuse(SDPA, qkv, None, "the heads are sharded, with enable_gqa=True")
    at = max(ndim_of(x) for x in (q, k, v)) - back
    given: dict[str, Any] = {
        "attn_mask": mask,
        "is_causal": options.is_causal,
        "scale": options.scale,
        "enable_gqa": options.enable_gqa,
    }
    with native():
        if not first._sharding.own:  # torch does not broadcast empty batches
            q, k, v = _with_one_batch_shape((q, k, v), keep_heads=options.enable_gqa)
        if not options.dropout_p and not weights:
            return wrap(SDPA(q, k, v, **given), first._sharding, at), None
        identity = torch.eye(k.shape[-2], dtype=q.dtype, device=q.device)
        attended = SDPA(q, k, identity.expand(*k.shape[:-1], -1), **given)
    kept = dropout(wrap(attended, first._sharding, at), options.dropout_p)
    with native():
        groups = q.shape[-3] // v.shape[-3] if options.enable_gqa else 1
        v = v if groups == 1 else v.repeat_interleave(groups, -3)
        return wrap(kept @ v, first._sharding, at), kept


def _with_one_batch_shape(tensors: tuple[Tensor, ...], keep_heads: bool) -> list[Tensor]:
    """Tensors with broadcast batch dims; with grouped queries the numbers of heads are kept."""
    last = 3 if keep_heads else 2
    batch = broadcast_shapes(*(x.shape[:-last] for x in tensors))
    return [x.expand(*batch, *x.shape[-last:]) for x in tensors]


def _over_rows(qkv: tuple[Any, ...], options: _Options, weights: bool) -> tuple[Any, Any]:
    """Rows are sharded: queries, keys, or both."""
    query, key, value = qkv
    queries, keys = _shardings(query, key, value)
    require_whole_domain(SDPA, qkv, keys.domain)
    mask = _owned_mask(options.attn_mask, query, keys)
    with native():
        q, k, v = (x.view_as(x) for x in qkv)
        if type(key) is not type(value):
            k, v = (_owned_keys(x, keys, plain=type(x) is Tensor) for x in (key, value))
        q, k, v = _autocast(q, k, v)
        _check(q, k, v, options.enable_gqa)
        scale = q.shape[-1] ** -0.5 if options.scale is None else options.scale
        bhnd = _BHND(q, k, v, options.enable_gqa)
        mask = bhnd.mask(mask)
        key_of_dropout = _dropout_key(options.dropout_p, queries, keys, q)
        spec = AttentionSpec(queries, keys, scale, options.is_causal, mask, key_of_dropout)
        if weights or (mask is not None and mask.requires_grad):
            out, attended = attention_with_weights(bhnd.q, bhnd.k, bhnd.v, spec)
            attended = bhnd.restore(attended)
        else:
            out, attended = ring_attention(bhnd.q, bhnd.k, bhnd.v, spec), None
        out = bhnd.restore(out)
    if type(query) is ShardTensor:
        attended = None if attended is None else wrap(attended, queries, attended.ndim - 2)
        return wrap(out, query._sharding, out.ndim - 2), attended
    return out, None if attended is None else wrap(attended, keys, attended.ndim - 1)


def _shardings(query: Any, key: Any, value: Any) -> tuple[Sharding, Sharding]:
    """Of queries and of keys; the sharding of one rank if they are replicated."""
    pair = sharded_in((key, value))
    if len(pair) == 2 and pair[0]._sharding != pair[1]._sharding:
        why = "keys and values are sharded differently: redistribute one to the other's sizes"
        raise refuse(SDPA, (query, key, value), None, why)
    return tuple(  # type: ignore[return-value]
        x._sharding if type(x) is ShardTensor else Sharding(Domain(), [x.shape[-2]])
        for x in (query, pair[0] if pair else key)
    )


def _owned_keys(x: Any, keys: Sharding, plain: bool) -> Tensor:
    """Owned rows of keys or values, one of which is plain."""
    x = x.view_as(x)
    if plain and x.shape[-2] != keys.total:
        why = f"a plain tensor has {x.shape[-2]} rows, expected {keys.total}"
        raise refuse(SDPA, (x,), None, why)
    return narrow_to_owned(x, keys, x.ndim - 2) if plain else x


def _check(q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> None:
    """Check dtypes and shapes before the first collective, identically on every rank.

    Raises:
        RuntimeError: they do not fit, as in torch.
    """
    shapes = [tuple(x.shape) for x in (q, k, v)]
    if len({q.dtype, k.dtype, v.dtype}) > 1:
        raise RuntimeError(
            f"attention: expected queries, keys and values of one dtype, got {q.dtype}, {k.dtype} "
            f"and {v.dtype}"
        )
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise RuntimeError(
            "attention: expected queries and keys of one width, and as many values as keys; got "
            f"local shapes {shapes}"
        )
    heads = [x.shape[-3] if x.ndim > 2 else 1 for x in (q, k, v)]
    if gqa and (heads[1] != heads[2] or heads[0] % max(heads[1], 1)):
        raise RuntimeError(
            "attention: with enable_gqa, the number of query heads must be a multiple of that of "
            f"keys and of values; got {heads} heads"
        )


def _owned_mask(mask: Any, query: Any, keys: Sharding) -> Tensor | None:
    """The mask of owned queries (or 1) x all keys (or 1)."""
    if mask is None:
        return None
    if type(mask) is ShardTensor:
        back = ndim_of(mask) - mask._dim
        by_keys = back == 1 and (ndim_of(mask) < 2 or mask.shape[-2] == 1)
        if by_keys and mask._sharding == keys:
            return mask.gather()
        if back != 2 or type(query) is not ShardTensor or mask._sharding != query._sharding:
            why = (
                "attn_mask must be plain, or sharded as the queries, or sharded as the keys and "
                "the same for all queries"
            )
            raise refuse(SDPA, (query, mask), None, why)
        return mask.to_local()
    mask = mask if mask.ndim > 1 else mask[None]
    if mask.shape[-1] not in (1, keys.total):
        why = f"attn_mask has {mask.shape[-1]} columns, expected 1 or {keys.total}"
        raise refuse(SDPA, sharded_in([query]), None, why)
    if type(query) is ShardTensor and mask.shape[-2] not in (1, query._sharding.total):
        why = f"attn_mask has {mask.shape[-2]} rows, expected 1 or {query._sharding.total}"
        raise refuse(SDPA, (query,), None, why)
    if type(query) is ShardTensor and mask.shape[-2] != 1:
        mask = narrow_to_owned(mask, query._sharding, mask.ndim - 2)
    return mask  # type: ignore[no-any-return]


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors in the dtype of autocast, as torch casts the arguments of its attention."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if x.dtype != torch.float64 else x for x in tensors)


def _dropout_key(p: float, queries: Sharding, keys: Sharding, like: Tensor) -> DropoutKey | None:
    """The seed, identical on every rank, and the rows in the source that key the mask."""
    if not p:
        return None
    seed = queries.domain.shared_seed()
    rows, columns = (s.sources(like.device) for s in (queries, keys))
    return DropoutKey(seed, p, rows, keys.domain.all_gather(columns, keys.sizes))


class _BHND:
    """Queries, keys and values as (batch, heads, rows, width), and back."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> None:
        self.ndim = max(x.ndim for x in (q, k, v))
        wide = [x[(None,) * (max(4, self.ndim) - x.ndim)] for x in (q, k, v)]
        self.batch = broadcast_shapes(*(x.shape[:-3] for x in wide))
        heads = [x.shape[-3] for x in wide]
        if not gqa:
            heads = [next((n for n in heads if n != 1), 1)] * 3
        self.q, self.k, self.v = (
            x.expand(*self.batch, h, -1, -1).flatten(0, -4)
            for x, h in zip(wide, heads, strict=True)
        )

    def mask(self, mask: Tensor | None) -> Tensor | None:
        """A mask with four dims, each of full size or 1."""
        if mask is None:
            return None
        mask = mask[(None,) * (len(self.batch) + 3 - mask.ndim)]
        if len(self.batch) > 1:
            mask = mask.expand(*self.batch, -1, -1, -1)
        return mask.flatten(0, -4)

    def restore(self, x: Tensor) -> Tensor:
        """A result with the dims of the arguments."""
        x = x.reshape(*self.batch, *x.shape[1:])
        return x.reshape(x.shape[x.ndim - self.ndim :])


# --------------------------------------------------------------------------- nn.MultiheadAttention
def multi_head_attention_forward(*args: Any, **kwargs: Any) -> Any:
    """nn.MultiheadAttention of (rows, batch, width), each argument sharded or plain.

    The weights are exact, but store owned queries x all keys: need_weights=False avoids that.
    """
    bound = inspect.signature(MHA).bind(*args, **kwargs)
    bound.apply_defaults()
    given = SimpleNamespace(**bound.arguments)
    if given.bias_k is not None or given.add_zero_attn:
        raise refuse(MHA, args, None, "bias_k, bias_v and add_zero_attn add a row to sharded keys")
    if given.static_k is not None or given.static_v is not None:
        raise refuse(MHA, args, None, "static_k or static_v is given")
    if given.is_causal and given.attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    q, k, v = (_split_heads(x, given.num_heads) for x in _projected(given))
    causal = given.is_causal and given.key_padding_mask is None and not given.need_weights
    mask = None if causal else _merged_mask(given)
    p = given.dropout_p if given.training else 0.0
    out, weights = _attention(q, k, v, _Options(mask, p, causal), given.need_weights)
    out = out.movedim(-2, 0).flatten(-2)
    out = F.linear(out, given.out_proj_weight, given.out_proj_bias)
    if given.need_weights and given.average_attn_weights:
        weights = weights.mean(-3)
    return out, weights


def never_left_aligned(x: Any, mask: Any) -> bool:
    """Keep nn.TransformerEncoder from making nested tensors of a padding mask."""
    return False


def _split_heads(x: Any, heads: int) -> Any:
    """(rows, batch, width) to (batch, heads, rows, width of a head)."""
    return x.unflatten(-1, (heads, -1)).movedim(0, -2)


def _projected(given: SimpleNamespace) -> list[Any]:
    """Queries, keys and values; by one product if they are the same tensor."""
    qkv = [given.query, given.key, given.value]
    bias = given.in_proj_bias
    if given.use_separate_proj_weight:
        weights = [given.q_proj_weight, given.k_proj_weight, given.v_proj_weight]
    elif given.query is given.key is given.value:
        return list(F.linear(given.query, given.in_proj_weight, bias).chunk(3, -1))
    else:
        weights = given.in_proj_weight.chunk(3)
    biases = [None] * 3 if bias is None else bias.chunk(3)
    return [F.linear(x, w, b) for x, w, b in zip(qkv, weights, biases, strict=True)]


def _merged_mask(given: SimpleNamespace) -> Any:
    """Both masks of nn.MultiheadAttention, in which true means masked, as numbers to add."""
    mask, padding, like = given.attn_mask, given.key_padding_mask, given.in_proj_bias
    like = given.out_proj_weight if like is None else like
    if mask is not None:
        mask = _additive(mask, like)
        mask = mask.unflatten(0, (-1, given.num_heads)) if mask.ndim == 3 else mask
    if padding is None:
        return mask
    padding = _additive(padding.gather() if type(padding) is ShardTensor else padding, like)
    padding = padding[..., None, None, :] if padding.ndim == 2 else padding[None, None, :]
    if type(mask) is ShardTensor:
        why = "attn_mask is sharded and key_padding_mask is given: add it to attn_mask"
        raise refuse(MHA, (given.query, mask), None, why)
    return padding if mask is None else mask + padding


def _additive(mask: Any, like: Tensor) -> Any:
    if mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -math.inf)


RULES: dict[Any, Rule] = {
    SDPA: scaled_dot_product_attention,
    MHA: multi_head_attention_forward,
    is_left_aligned: never_left_aligned,
}
