"""Rules of convolutions on grids that are sharded along one dim, with a halo of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from meshshard.comm.linear import Window, apply
from meshshard.tensor._torch_private import native
from meshshard.tensor.align import ndim_of, require_whole_domain
from meshshard.tensor.autocast import plus_bias
from meshshard.tensor.rules.batched import batched
from meshshard.tensor.rules.table import functions_named
from meshshard.tensor.shard_tensor import (
    Rule,
    ShardTensor,
    apply_local,
    refuse,
    sharded_in,
    wrap,
)
from meshshard.tensor.sharding import Sharding


def _conv(func: Callable[..., Any], n: int) -> Rule:
    """The rule of ConvNd on (batch, channels, *grid), sharded along any dim or with its weights."""
    off_grid = _off_grid(func, n, "Oc")

    def _rule(
        x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1,
    ) -> Any:  # fmt: skip
        given = (weight, bias, stride, padding, dilation, groups)
        plain = type(x) is not ShardTensor or bool(sharded_in((weight, bias)))
        if plain or x._dim < ndim_of(x) - n:
            return off_grid(x, *given)
        if ndim_of(x) == n + 1:
            return _along_grid(func, n, x.unsqueeze(0), *given).squeeze(0)
        return _along_grid(func, n, x, *given)

    return _rule


def _off_grid(func: Callable[..., Any], n: int, channels: str) -> Rule:
    """The rule of a convolution whose batch or channels are sharded, of inputs or of results.

    Args:
        func: the convolution or its transpose.
        n: number of dims of the grid.
        channels: letters of the first two dims of the weight.

    Communication: one all-reduce of the result if the channels of the input are sharded.
    """
    grid, kernel = "xyz"[:n], "ijk"[:n]
    text = f"input c{grid}, weight {channels}{kernel}, bias O -> O{grid}"
    one_group = batched(func, f"{text} sum c", pad=True)
    many_groups = batched(func, text.replace("O", "o"), pad=True)
    at = channels.index("c")

    def _rule(x: Any, weight: Any, bias: Any = None, *options: Any, **kwargs: Any) -> Any:
        groups = kwargs.get("groups", options[3] if len(options) > 3 else 1)
        if groups != 1:
            return many_groups(x, weight, bias, *options, **kwargs)
        adds = any(
            type(t) is ShardTensor and t._dim == d
            for t, d in ((x, ndim_of(x) - n - 1), (weight, at))
        )
        if bias is None or not adds:
            return one_group(x, weight, bias, *options, **kwargs)
        if bias.dtype != weight.dtype:
            raise RuntimeError(f"weight {weight.dtype} and bias {bias.dtype} should be the same")
        product = one_group(x, weight, None, *options, **kwargs)
        return plus_bias(product, bias.view(-1, *[1] * n))

    return _rule


def _along_grid(
    func: Callable[..., Any], n: int, x: ShardTensor, weight: Tensor, bias: Any, *options: Any
) -> Any:
    """A convolution along the sharded dim of the grid, with a halo or of patches."""
    stride, padding, dilation, groups = options
    require_whole_domain(func, (x,), x._sharding.domain)
    stride, dilation = each_dim(stride, n), each_dim(dilation, n)
    reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    if padding == "same":
        x, padding = _pad_end(x, reach, stride), [r // 2 for r in reach]
    padding = [0] * n if padding == "valid" else each_dim(padding, n)
    at = x._dim - 2
    if padding[at] == 0 and stride[at] == reach[at] + 1 > 1:
        return patches(x, stride[at], lambda y: func(
            y, weight, bias, stride, padding, dilation, groups))  # fmt: skip
    if stride[at] != 1 or 2 * padding[at] != reach[at]:
        why = "along the sharded dim, expected stride 1 and padding that keeps its size"
        raise refuse(func, (x, weight), None, why)
    wide = _with_halo(x, padding[at])
    padding[at] = 0
    with native():
        out = func(wide, weight, bias, stride, padding, dilation, groups)
        return wrap(out.narrow(x._dim, 0, x._sharding.own), x._sharding, x._dim)


def _pad_end(x: ShardTensor, reach: list[int], stride: list[int]) -> ShardTensor:
    """The place that padding="same" adds at the end of dims with an even kernel.

    Raises:
        RuntimeError: the stride is not 1, as in torch.
    """
    if max(stride) > 1:
        raise RuntimeError("padding='same' is not supported for strided convolutions")
    ends = [0 if d == x._dim else r % 2 for d, r in enumerate(reach, 2)]
    if not any(ends):
        return x
    return apply_local(F.pad, x, ([n for end in reversed(ends) for n in (0, end)],))


def patches(x: ShardTensor, each: int, conv: Callable[[Tensor], Tensor]) -> ShardTensor:
    """Kernels that do not overlap, as in a patch embedding: each lies on one rank."""
    old = x._sharding
    if any(n % each for n in old.sizes):
        why = f"with patches of {each} rows, sizes must be multiples of it: redistribute first"
        raise refuse("a convolution or pool", (x,), None, why)
    sizes = [n // each for n in old.sizes]
    with native():
        rows = x.view_as(x)
        if not old.own:  # torch needs rows for one kernel; its output is dropped
            rows = F.pad(rows.movedim(x._dim, -1), (0, each)).movedim(-1, x._dim)
        out = conv(rows).narrow(x._dim, 0, sizes[old.domain.rank])
    return wrap(out, Sharding(old.domain, sizes), x._dim)


def _with_halo(x: ShardTensor, reach: int) -> Tensor:
    """Owned rows between `reach` rows of the neighbors; zeros beyond the ends of the grid."""
    sharding = x._sharding
    with native():
        rows = x.movedim(x._dim, 0)
        wide = apply(Window(sharding.domain, sharding.sizes, reach), rows)
        above = max(0, reach - sharding.first)
        below = max(0, sharding.first + sharding.own + reach - sharding.total)
        if not sharding.own:  # torch needs rows for one kernel; its output is dropped
            above, below = 0, 2 * reach + 1
        return F.pad(wide.movedim(0, -1), (above, below)).movedim(-1, x._dim)


def each_dim(value: Any, n: int) -> list[int]:
    """One number for each of n dims; torch repeats a single one."""
    several = [value] if isinstance(value, int) else list(value)
    return several * n if len(several) == 1 else several


RULES: dict[Any, Rule] = {
    **{f: _conv(f, n) for n in (1, 2, 3) for f in functions_named(f"conv{n}d")},
    **{f: _off_grid(f, n, "cO") for n in (1, 2, 3) for f in functions_named(f"conv_transpose{n}d")},
}
