"""Rules of functions on (batch, channels, *grid) that treat samples or channels separately."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from meshshard.tensor._torch_private import native
from meshshard.tensor.align import ndim_of
from meshshard.tensor.rules.batched import batched, batched_rules
from meshshard.tensor.rules.convolutions import each_dim, patches
from meshshard.tensor.rules.table import functions_named, named
from meshshard.tensor.shard_tensor import Rule, refuse, wrap

GRID = {1: "x", 2: "xy", 3: "xyz"}
POOLS = """
lp_pool max_pool_with_indices adaptive_max_pool adaptive_max_pool_with_indices
"""
UPSAMPLING = "interpolate upsample upsample_nearest upsample_bilinear"


def _sized(name: str, n: int) -> str:
    """The name of a pool of n dims."""
    return name.replace("pool", f"pool{n}d")


def _grid_of(x: Any, *_: Any, **__: Any) -> str:
    """All dims after batch and channels are the grid."""
    grid = "xyz"[: ndim_of(x) - 2]
    return f"input {grid} -> {grid}"


def _sampled(x: Any, *_: Any, **__: Any) -> str:
    """Points of the grid and channels are independent of each other."""
    grid = GRID[ndim_of(x) - 2]
    return f"input C{grid}, grid {grid.upper()}t -> C{grid.upper()}"


def _across_channels(x: Any, *_: Any, **__: Any) -> str:
    points = "XYZ"[: ndim_of(x) - 2]
    return f"input c{points} -> c{points}"


def _adaptive_mean(func: Callable[..., Any], n: int) -> Rule:
    """The rule of adaptive_avg_pool; one number for a whole grid, which may be sharded."""
    rule = batched(func, f"input {GRID[n]} -> {GRID[n]}", pad=True)

    def _rule(input: Any, output_size: Any) -> Any:  # noqa: A002
        sizes = (output_size,) if isinstance(output_size, int) else tuple(output_size)
        if set(sizes) == {1} and input._dim >= ndim_of(input) - n:
            return input.mean(tuple(range(-n, 0)), keepdim=True)
        return rule(input, output_size)

    return _rule


def _pool(func: Callable[..., Any], n: int) -> Rule:
    """The rule of avg_pool and max_pool; windows that do not overlap may lie along rows."""
    rule = batched(func, f"input {GRID[n]} -> {GRID[n]}", pad=True)

    def _rule(
        input: Any, kernel_size: Any, stride: Any = None, padding: Any = 0,  # noqa: A002
        *args: Any, **kwargs: Any,
    ) -> Any:  # fmt: skip
        at = input._dim - (ndim_of(input) - n)
        if at >= 0:
            kernel, pads = each_dim(kernel_size, n), each_dim(padding, n)
            apart = each_dim(stride, n)[at] if stride else kernel[at]
            dilated = "max" in func.__name__ and bool(args)
            dilated = dilated or each_dim(kwargs.get("dilation", 1), n)[at] != 1
            if kernel[at] == apart and not pads[at] and not dilated:
                given = (kernel_size, stride, padding, *args)
                return patches(input, apart, lambda y: func(y.contiguous(), *given, **kwargs))
        return rule(input, kernel_size, stride, padding, *args, **kwargs)

    return _rule


def _fractional(func: Callable[..., Any], n: int) -> Rule:
    """The rule of fractional pools, whose random regions are drawn as by rand_like."""
    rule = batched(func, f"input {GRID[n]}, _random_samples n -> {GRID[n]}", pad=True)

    def _rule(x: Any, *args: Any, _random_samples: Any = None, **kwargs: Any) -> Any:
        if ndim_of(x) == n + 1:
            out = _rule(x.unsqueeze(0), *args, _random_samples=_random_samples, **kwargs)
            return out.squeeze(0) if isinstance(out, Tensor) else tuple(o.squeeze(0) for o in out)
        if _random_samples is None:
            with native():
                like = x.new_empty((*x.shape[:2], n))
            if x._dim > 1:
                raise refuse(func, (x,), None, "the grid is sharded")
            _random_samples = torch.rand_like(wrap(like, x._sharding, x._dim))
        return rule(x, *args, _random_samples=_random_samples, **kwargs)

    return _rule


def affine_grid(theta: Any, size: Any, align_corners: Any = None) -> Any:
    """F.affine_grid: the points of a grid times each matrix."""
    _, _, *grid = size
    n = len(grid)
    same = torch.eye(n, n + 1, dtype=theta.dtype, device=theta.device)
    points = F.affine_grid(same[None], [1, 1, *grid], align_corners=bool(align_corners))
    out = torch.matmul(F.pad(points.reshape(-1, n), (0, 1), value=1.0), theta.mT)
    return out.reshape(out.shape[0], *grid, n)


def pixel_shuffle(x: Any, upscale_factor: int) -> Any:
    """F.pixel_shuffle: channels become r x r pixels."""
    r, (*batch, c, h, w) = upscale_factor, x.shape
    if r < 1 or c % (r * r):
        raise RuntimeError(f"pixel_shuffle: {c} channels are not divisible by {r} squared")
    x = x.reshape(*batch, c // (r * r), r, r, h, w).movedim((-4, -3), (-3, -1))
    return x.reshape(*batch, c // (r * r), h * r, w * r)


def pixel_unshuffle(x: Any, downscale_factor: int) -> Any:
    """F.pixel_unshuffle: r x r pixels become channels."""
    r, (*batch, c, h, w) = downscale_factor, x.shape
    if r < 1 or h % r or w % r:
        raise RuntimeError(f"pixel_unshuffle: a grid of {h} x {w} is not divisible by {r}")
    x = x.reshape(*batch, c, h // r, r, w // r, r).movedim((-3, -1), (-4, -3))
    return x.reshape(*batch, c * r * r, h // r, w // r)


def channel_shuffle(x: Any, groups: int) -> Any:
    """F.channel_shuffle: the channels of the groups in turn."""
    shape = x.shape
    if groups < 1 or shape[1] % groups:
        raise RuntimeError(f"channel_shuffle: {shape[1]} channels are not divisible by {groups}")
    grouped = x.reshape(shape[0], groups, shape[1] // groups, *shape[2:])
    return grouped.transpose(1, 2).reshape(shape)


RULES: dict[Any, Rule] = {
    **{
        rule: found
        for n, grid in GRID.items()
        for rule, found in batched_rules(
            {
                " ".join(_sized(name, n) for name in POOLS.split()): f"input {grid} -> {grid}",
                f"max_unpool{n}d": f"input {grid}, indices {grid} -> {grid}",
            },
            pad=True,
        ).items()
    },
    **batched_rules(
        {
            UPSAMPLING: _grid_of,
            "fold": "input kl -> cxy",
            "grid_sample grid_sampler_2d grid_sampler_3d": _sampled,
            "local_response_norm": _across_channels,
        },
        pad=True,
    ),
    F.unfold: batched(F.unfold, "input cxy -> kl", pad=True),
    **{
        f: _pool(f, n)
        for n in GRID
        for name in ("avg_pool", "max_pool")
        for f in functions_named(_sized(name, n))
    },
    **{
        f: _adaptive_mean(f, n) for n in GRID for f in functions_named(f"adaptive_avg_pool{n}d")
    },
    **{
        f: _fractional(f, n)
        for n in (2, 3)
        for name in ("fractional_max_pool", "fractional_max_pool_with_indices")
        for f in functions_named(_sized(name, n))
    },
    **named({
        "affine_grid": affine_grid, "pixel_shuffle": pixel_shuffle,
        "pixel_unshuffle": pixel_unshuffle, "channel_shuffle": channel_shuffle,
        "native_channel_shuffle": channel_shuffle,
    }),
}  # fmt: skip
