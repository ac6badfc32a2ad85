"""Rules of Fourier transforms along dims that are not sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshshard.tensor.align import ndim_of
from meshshard.tensor.rules.batched import batched, labels_of
from meshshard.tensor.rules.table import int_list
from meshshard.tensor.shard_tensor import Rule


def _one_dim(x: Tensor, n: Any = None, dim: int = -1, norm: Any = None) -> str:
    return _along(x, (dim,))


def _two_dims(x: Tensor, s: Any = None, dim: Any = (-2, -1), norm: Any = None) -> str:
    return _along(x, dim)


def _many_dims(x: Tensor, s: Any = None, dim: Any = None, norm: Any = None) -> str:
    """The last len(s) dims by default, or all."""
    last = ndim_of(x) if s is None else len(int_list(s))
    return _along(x, range(-last, 0) if dim is None else dim)


def _along(x: Tensor, dims: Any) -> str:
    labels = labels_of(ndim_of(x), int_list(dims))
    return f"input {labels} -> {labels}"


def _shift(sign: int) -> Rule:
    """The rule of fftshift and ifftshift: a roll by half the size."""

    def _rule(x: Any, dim: Any = None) -> Any:
        dims = range(ndim_of(x)) if dim is None else int_list(dim)
        sizes = [x.shape[d] for d in dims]
        return torch.roll(x, [n // 2 if sign > 0 else (n + 1) // 2 for n in sizes], tuple(dims))

    return _rule


def _spectra(*_: Any, **options: Any) -> str:
    """The result of stft; real and imaginary parts are a last dim of it unless it is complex."""
    return "input t -> ft" if options.get("return_complex") else "input t -> ftc"


KINDS = {"": _one_dim, "2": _two_dims, "n": _many_dims}
RULES: dict[Any, Rule] = {
    **{
        func: batched(func, signature, pad=True)
        for name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
        for end, signature in KINDS.items()
        for func in (getattr(torch.fft, name + end),)
    },
    torch.fft.fftshift: _shift(1),
    torch.fft.ifftshift: _shift(-1),
    **{f: batched(f, _spectra, pad=True) for f in (torch.functional.stft, Tensor.stft)},
    **{f: batched(f, "input ft -> t", pad=True) for f in (torch.istft, Tensor.istft)},
}
