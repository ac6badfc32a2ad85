"""Rules of attention: rows that attend to all rows, wherever these are.

Queries and keys may be sharded alike, sharded differently (two clouds), or one of them replicated:
see `softmax`. nn.MultiheadAttention and what torch builds of it are texts over one rule.
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
from meshshard.tensor.align import align_broadcast, native_ndim, own_rows
from meshshard.tensor.attention.ring_attention import How, attention, composed
from meshshard.tensor.attention.tiles import DropoutKey
from meshshard.tensor.rules.random import dropout
from meshshard.tensor.shard_tensor import Rule, Sharding, ShardTensor, native, refuse, sharded, wrap

__all__ = ["RULES"]

SDPA = F.scaled_dot_product_attention
MHA = F.multi_head_attention_forward
broadcast: Any = torch.broadcast_shapes


@dataclass(frozen=True)
class Given:
    """What scaled_dot_product_attention takes besides queries, keys and values."""

    attn_mask: Any = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def scaled_dot_product_attention(
    query: Any, key: Any, value: Any, *args: Any, **kwargs: Any
) -> Any:
    """Attention along dim -2, which may be sharded; or along rows of samples that are sharded."""
    return attended(query, key, value, Given(*args, **kwargs))[0]


def attended(
    query: Any, key: Any, value: Any, given: Given, weights: bool = False
) -> tuple[Any, Any]:
    """The output, and where they are wanted the weights: (…, queries, keys)."""
    every = (query, key, value)
    found = sharded(every)
    backs = {native_ndim(x) - x._dim for x in found}
    if not found or 1 in backs or len(backs) > 1:
        why = "features are sharded" if 1 in backs else "sharded dims do not line up"
        raise refuse(SDPA, (*every, given.attn_mask), None, why if found else "of the mask alone")
    if any(x._sharding.domain.group != found[0]._sharding.domain.group for x in found):
        raise refuse(SDPA, every, None, "two domains meet")
    if given.attn_mask is not None and given.is_causal:
        raise RuntimeError(
            "scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True"
        )
    if backs != {2}:
        return _by_samples(every, given, weights)
    return _by_rows(every, given, weights)


def _by_samples(every: tuple[Any, ...], given: Given, weights: bool) -> tuple[Any, Any]:
    """Samples, or heads, are sharded: each rank attends within its own."""
    (q, k, v, mask), first, back = align_broadcast(SDPA, (*every, given.attn_mask))
    if given.enable_gqa and back == 3:
        raise refuse(SDPA, every, None, "heads are sharded and keys have fewer of them")
    at = native_ndim(first) - back
    options = (given.is_causal, given.scale, given.enable_gqa)
    with native():
        if not given.dropout_p and not weights:
            return wrap(_local(q, k, v, mask, options), first._sharding, at), None
        ones = torch.eye(k.shape[-2], dtype=q.dtype, device=q.device)
        seen = _local(q, k, ones.expand(*k.shape[:-1], -1), mask, options)
    kept = dropout(wrap(seen, first._sharding, at), given.dropout_p)
    with native():
        groups = q.shape[-3] // v.shape[-3] if given.enable_gqa else 1
        v = v if groups == 1 else v.repeat_interleave(groups, -3)
        return wrap(kept @ v, first._sharding, at), kept


def _local(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, options: tuple[bool, float | None, bool]
) -> Tensor:
    causal, scale, gqa = options
    return SDPA(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=gqa)


def _by_rows(every: tuple[Any, ...], given: Given, weights: bool) -> tuple[Any, Any]:
    """Rows are sharded: queries, keys, or both."""
    query, key, value = every
    rows, columns = _shardings(query, key, value)
    if not columns.domain.whole:
        raise refuse(SDPA, every, None, "it couples rows, of which some are here")
    mask = _mask(given.attn_mask, query, columns)
    with native():
        q, k, v = (x.view_as(x) for x in every)
        if type(key) is not type(value):
            k, v = (_cut(x, columns, plain=type(x) is Tensor) for x in (key, value))
        q, k, v = _autocast(q, k, v)
        _check(q, k, v, given.enable_gqa)
        scale = q.shape[-1] ** -0.5 if given.scale is None else given.scale
        four = _Four(q, k, v, given.enable_gqa)
        mask = four.mask(mask)
        chance = _chance(given.dropout_p, rows, columns, q)
        how = How(rows, columns, scale, given.is_causal, mask, chance)
        if weights or (mask is not None and mask.requires_grad):
            out, seen = composed(four.q, four.k, four.v, how)
            seen = four.back(seen)
        else:
            out, seen = attention(four.q, four.k, four.v, how), None
        out = four.back(out)
    if type(query) is ShardTensor:
        seen = None if seen is None else wrap(seen, rows, seen.ndim - 2)
        return wrap(out, query._sharding, out.ndim - 2), seen
    return out, None if seen is None else wrap(seen, columns, seen.ndim - 1)


def _shardings(query: Any, key: Any, value: Any) -> tuple[Sharding, Sharding]:
    """Of queries and of keys; that of one rank where they are replicated."""
    sides = sharded((key, value))
    if len(sides) == 2 and sides[0]._sharding != sides[1]._sharding:
        why = "keys and values are sharded differently: redistribute one to the other's sizes"
        raise refuse(SDPA, (query, key, value), None, why)
    return tuple(  # type: ignore[return-value]
        x._sharding if type(x) is ShardTensor else Sharding(Domain(), [x.shape[-2]])
        for x in (query, sides[0] if sides else key)
    )


def _cut(x: Any, columns: Sharding, plain: bool) -> Tensor:
    """Own rows of keys or values of which only the others are sharded."""
    x = x.view_as(x)
    if plain and x.shape[-2] != columns.total:
        raise refuse(SDPA, (x,), None, f"{x.shape[-2]} plain rows for {columns.total} sharded ones")
    return own_rows(x, columns, x.ndim - 2) if plain else x


def _check(q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> None:
    """What must hold before the first message, alike on every rank.

    Raises:
        RuntimeError: as torch does.
    """
    shapes = [tuple(x.shape) for x in (q, k, v)]
    if len({q.dtype, k.dtype, v.dtype}) > 1:
        raise RuntimeError(f"attention: types differ: {q.dtype}, {k.dtype}, {v.dtype}")
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        raise RuntimeError(f"attention: shapes do not fit: own rows {shapes}")
    heads = [x.shape[-3] if x.ndim > 2 else 1 for x in (q, k, v)]
    if gqa and (heads[1] != heads[2] or heads[0] % max(heads[1], 1)):
        raise RuntimeError(f"attention: enable_gqa with {heads} heads")


def _mask(mask: Any, query: Any, columns: Sharding) -> Tensor | None:
    """Own queries (or 1) x all keys (or 1) of a mask, plain or sharded by queries or by keys."""
    if mask is None:
        return None
    if type(mask) is ShardTensor:
        back = native_ndim(mask) - mask._dim
        by_keys = back == 1 and (native_ndim(mask) < 2 or mask.shape[-2] == 1)
        if by_keys and mask._sharding == columns:
            return mask.gather()
        if back != 2 or type(query) is not ShardTensor or mask._sharding != query._sharding:
            why = "a mask is plain, or sharded by queries, or by keys and the same for all queries"
            raise refuse(SDPA, (query, mask), None, why)
        return mask.to_local()
    mask = mask if mask.ndim > 1 else mask[None]
    if mask.shape[-1] not in (1, columns.total):
        why = f"a mask of {mask.shape[-1]} columns for {columns.total} keys"
        raise refuse(SDPA, sharded([query]), None, why)
    if type(query) is ShardTensor and mask.shape[-2] not in (1, query._sharding.total):
        why = f"a mask of {mask.shape[-2]} rows for {query._sharding.total} queries"
        raise refuse(SDPA, (query,), None, why)
    if type(query) is ShardTensor and mask.shape[-2] != 1:
        mask = own_rows(mask, query._sharding, mask.ndim - 2)
    return mask  # type: ignore[no-any-return]


def _autocast(*every: Tensor) -> tuple[Tensor, ...]:
    """The type that autocast wants, as torch's own function casts."""
    kind = every[0].device.type
    if not torch.is_autocast_enabled(kind):
        return every
    wanted = torch.get_autocast_dtype(kind)
    return tuple(x.to(wanted) if x.dtype != torch.float64 else x for x in every)


def _chance(p: float, rows: Sharding, columns: Sharding, like: Tensor) -> DropoutKey | None:
    """A draw that every rank makes alike, as the default generator is alike."""
    if not p:
        return None
    seed = rows.domain.shared_seed()
    queries, keys = (s.sources(like.device) for s in (rows, columns))
    return DropoutKey(seed, p, queries, columns.domain.all_gather(keys, columns.sizes))


class _Four:
    """Queries, keys and values as (batch, heads, rows, width), and the way back."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, gqa: bool) -> None:
        self.ndim = max(x.ndim for x in (q, k, v))
        wide = [x[(None,) * (max(4, self.ndim) - x.ndim)] for x in (q, k, v)]
        self.batch = broadcast(*(x.shape[:-3] for x in wide))
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

    def back(self, x: Tensor) -> Tensor:
        """A result with the dims that were given."""
        x = x.reshape(*self.batch, *x.shape[1:])
        return x.reshape(x.shape[x.ndim - self.ndim :])


# --------------------------------------------------------------------------- nn.MultiheadAttention
def multi_head_attention_forward(*args: Any, **kwargs: Any) -> Any:
    """What nn.MultiheadAttention calls: (rows, batch, width), each of the three sharded or plain.

    Weights that are wanted are exact, and hold own queries x all keys: need_weights=False spares
    them.
    """
    bound = inspect.signature(MHA).bind(*args, **kwargs)
    bound.apply_defaults()
    given = SimpleNamespace(**bound.arguments)
    if given.bias_k is not None or given.add_zero_attn:
        raise refuse(MHA, args, None, "bias_k, bias_v and add_zero_attn add a row to sharded keys")
    if given.static_k is not None or given.static_v is not None:
        raise refuse(MHA, args, None, "static_k and static_v")
    if given.is_causal and given.attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    q, k, v = (_heads(x, given.num_heads) for x in _projected(given))
    causal = given.is_causal and given.key_padding_mask is None and not given.need_weights
    mask = None if causal else _merged_mask(given)
    p = given.dropout_p if given.training else 0.0
    out, seen = attended(q, k, v, Given(mask, p, causal), given.need_weights)
    out = out.movedim(-2, 0).flatten(-2)
    out = F.linear(out, given.out_proj_weight, given.out_proj_bias)
    if given.need_weights and given.average_attn_weights:
        seen = seen.mean(-3)
    return out, seen


def is_left_aligned(x: Any, mask: Any) -> bool:
    """What nn.TransformerEncoder asks before it makes nested tensors of a mask: it shall not."""
    return False


def _heads(x: Any, heads: int) -> Any:
    """(rows, batch, width) to (batch, heads, rows, width of a head)."""
    return x.unflatten(-1, (heads, -1)).movedim(0, -2)


def _projected(given: SimpleNamespace) -> list[Any]:
    """Queries, keys and values; by one product where they are of one tensor."""
    every = [given.query, given.key, given.value]
    bias = given.in_proj_bias
    if given.use_separate_proj_weight:
        weights = [given.q_proj_weight, given.k_proj_weight, given.v_proj_weight]
    elif given.query is given.key is given.value:
        return list(F.linear(given.query, given.in_proj_weight, bias).chunk(3, -1))
    else:
        weights = given.in_proj_weight.chunk(3)
    biases = [None] * 3 if bias is None else bias.chunk(3)
    return [F.linear(x, w, b) for x, w, b in zip(every, weights, biases, strict=True)]


def _merged_mask(given: SimpleNamespace) -> Any:
    """Both masks of nn.MultiheadAttention, where true means masked, as numbers to add."""
    mask, padding, like = given.attn_mask, given.key_padding_mask, given.in_proj_bias
    like = given.out_proj_weight if like is None else like
    if mask is not None:
        mask = _added(mask, like)
        mask = mask.unflatten(0, (-1, given.num_heads)) if mask.ndim == 3 else mask
    if padding is None:
        return mask
    padding = _added(padding.gather() if type(padding) is ShardTensor else padding, like)
    padding = padding[..., None, None, :] if padding.ndim == 2 else padding[None, None, :]
    if type(mask) is ShardTensor:
        raise refuse(MHA, (given.query, mask), None, "a sharded attn_mask with a key_padding_mask")
    return padding if mask is None else mask + padding


def _added(mask: Any, like: Tensor) -> Any:
    if mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -math.inf)


RULES: dict[Any, Rule] = {
    SDPA: scaled_dot_product_attention,
    MHA: multi_head_attention_forward,
    torch._nested_tensor_from_mask_left_aligned: is_left_aligned,
}
