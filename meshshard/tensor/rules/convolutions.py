"""Rules of convolutions on grids that are sharded along one dim, with a halo of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from meshshard.comm.linear import Window, apply
from meshshard.tensor._torch_private import native
from meshshard.tensor.align import ndim_of, require_whole_domain
from meshshard.tensor.rules.table import functions_named
from meshshard.tensor.shard_tensor import Rule, ShardTensor, apply_local, refuse, wrap
from meshshard.tensor.sharding import Sharding


def _conv(func: Callable[..., Any], n: int) -> Rule:
    """The rule of ConvNd on (batch, channels, *grid), sharded by batch or along a grid dim."""

    def _rule(
        x: Any, weight: Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1,
    ) -> Any:  # fmt: skip
        if type(x) is not ShardTensor or type(weight) is ShardTensor or ndim_of(x) != n + 2:
            why = "expected a sharded input (batch, channels, *grid) and plain weights"
            raise refuse(func, (x, weight), None, why)
        if x._dim == 0:
            return apply_local(func, x, (weight, bias, stride, padding, dilation, groups))
        require_whole_domain(func, (x,), x._sharding.domain)
        stride, dilation = _each(stride, n), _each(dilation, n)
        reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        if padding == "same":
            x, padding = _pad_end(x, reach, stride), [r // 2 for r in reach]
        padding = [0] * n if padding == "valid" else _each(padding, n)
        at = x._dim - 2
        if x._dim >= 2 and padding[at] == 0 and stride[at] == reach[at] + 1 > 1:
            return _patches(x, stride[at], lambda y: func(
                y, weight, bias, stride, padding, dilation, groups))  # fmt: skip
        if x._dim < 2 or stride[at] != 1 or 2 * padding[at] != reach[at]:
            why = "along the sharded dim, expected stride 1 and padding that keeps its size"
            raise refuse(func, (x, weight), None, why)
        wide = _with_halo(x, padding[at])
        padding[at] = 0
        with native():
            out = func(wide, weight, bias, stride, padding, dilation, groups)
            out = out.narrow(x._dim, 0, x._sharding.own)
        return wrap(out, x._sharding, x._dim)

    return _rule


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


def _patches(x: ShardTensor, each: int, conv: Callable[[Tensor], Tensor]) -> ShardTensor:
    """Kernels that do not overlap, as in a patch embedding: each lies on one rank."""
    old = x._sharding
    if any(n % each for n in old.sizes):
        why = f"with patches of {each} rows, sizes must be multiples of it: redistribute first"
        raise refuse("conv", (x,), None, why)
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


def _each(value: Any, n: int) -> list[int]:
    return [value] * n if isinstance(value, int) else list(value)


RULES: dict[Any, Rule] = {f: _conv(f, n) for n in (1, 2, 3) for f in functions_named(f"conv{n}d")}
