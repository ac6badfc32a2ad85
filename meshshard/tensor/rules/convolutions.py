"""Rules of convolutions on grids whose rows are sharded: a grid is a graph with a halo of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from meshshard.comm.linear import Window, apply
from meshshard.tensor.align import native_ndim
from meshshard.tensor.shard_tensor import Rule, Sharding, ShardTensor, native, refuse, wrap

__all__ = ["RULES"]


def _conv(func: Callable[..., Any], n: int) -> Rule:
    """ConvNd of (batch, channels, grid): the first grid dim, or the batch, may be sharded."""

    def _rule(
        x: Any, weight: Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1,
    ) -> Any:  # fmt: skip
        if type(x) is not ShardTensor or type(weight) is ShardTensor or native_ndim(x) != n + 2:
            raise refuse(func, (x, weight), None, "give (batch, channels, grid) and plain weights")
        if x._dim == 0:
            with native():
                out = func(x, weight, bias, stride, padding, dilation, groups)
            return wrap(out, x._sharding, 0)
        if not x._sharding.domain.whole:
            raise refuse(func, (x,), None, "it couples rows, of which some are here")
        stride, dilation = _each(stride, n), _each(dilation, n)
        reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        padding = [r // 2 for r in reach] if padding == "same" else padding
        padding = [0] * n if padding == "valid" else _each(padding, n)
        at = x._dim - 2
        if x._dim >= 2 and padding[at] == 0 and stride[at] == reach[at] + 1 > 1:
            return _patches(x, stride[at], lambda y: func(
                y, weight, bias, stride, padding, dilation, groups))  # fmt: skip
        if x._dim < 2 or stride[at] != 1 or 2 * padding[at] != reach[at]:
            raise refuse(func, (x, weight), None, "rows need stride 1 and padding that keeps them")
        wide = _with_halo(x, padding[at])
        padding[at] = 0
        with native():
            out = func(wide, weight, bias, stride, padding, dilation, groups)
            out = out.narrow(x._dim, 0, x._sharding.own)
        return wrap(out, x._sharding, x._dim)

    return _rule


def _patches(x: ShardTensor, each: int, conv: Callable[[Tensor], Tensor]) -> ShardTensor:
    """Kernels side by side, as in a patch embedding: each lies on one rank."""
    old = x._sharding
    if any(n % each for n in old.sizes):
        why = f"patches of {each} rows need sizes that are multiples of it: redistribute first"
        raise refuse("conv", (x,), None, why)
    sizes = [n // each for n in old.sizes]
    with native():
        own = x.view_as(x)
        if not old.own:  # a kernel must fit, though nothing comes of it
            own = F.pad(own.movedim(x._dim, -1), (0, each)).movedim(-1, x._dim)
        out = conv(own).narrow(x._dim, 0, sizes[old.domain.rank])
    return wrap(out, Sharding(old.domain, sizes), x._dim)


def _with_halo(x: ShardTensor, reach: int) -> Tensor:
    """Own rows between `reach` rows of the neighbors, zeros beyond the ends of the grid."""
    sharding = x._sharding
    with native():
        rows = x.movedim(x._dim, 0)
        wide = apply(Window(sharding.domain, sharding.sizes, reach), rows)
        above = max(0, reach - sharding.first)
        below = max(0, sharding.first + sharding.own + reach - sharding.total)
        if not sharding.own:  # a kernel must fit, though nothing comes of it
            above, below = 0, 2 * reach + 1
        return F.pad(wide.movedim(0, -1), (above, below)).movedim(-1, x._dim)


def _each(value: Any, n: int) -> list[int]:
    return [value] * n if isinstance(value, int) else list(value)


RULES: dict[Any, Rule] = {
    F.conv1d: _conv(F.conv1d, 1),
    F.conv2d: _conv(F.conv2d, 2),
    F.conv3d: _conv(F.conv3d, 3),
    torch.conv1d: _conv(torch.conv1d, 1),
    torch.conv2d: _conv(torch.conv2d, 2),
    torch.conv3d: _conv(torch.conv3d, 3),
}
