"""Rules of sorts and other functions along one dim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from meshshard.tensor._torch_private import native
from meshshard.tensor.align import ndim_of
from meshshard.tensor.rules.table import functions_named
from meshshard.tensor.shard_tensor import Rule, Sharded, normalize_dim, refuse, wrap


def _along(func: Callable[..., Any]) -> Rule:
    """The rule of a function along one dim, which must not be the sharded one."""
    at = 1 if func.__name__ in ("topk", "kthvalue") else 0
    of_all = func.__name__ in ("median", "nanmedian")

    def _rule(x: Sharded, *args: Any, **kwargs: Any) -> Any:
        dim = kwargs.get("dim", args[at] if len(args) > at else None)
        if of_all and not isinstance(dim, int):
            raise refuse(func, (x,), kwargs, "it couples all rows")
        dim = -1 if dim is None else dim
        ndim = ndim_of(x)
        dim = normalize_dim(dim, ndim)
        if dim == x._dim:
            raise refuse(func, (x,), kwargs, "along the sharded dim it couples all rows")
        with native():
            out = func(x, *args, **kwargs)
            many = not isinstance(out, Tensor)
            first = out[0] if many else out
            at_dim = x._dim - (dim < x._dim and first.ndim < ndim)
        if not many:
            return wrap(out, x._sharding, at_dim)
        return type(out)(tuple(wrap(o, x._sharding, at_dim) for o in out))

    return _rule


_glu = _along(F.glu)


def glu(x: Any, dim: int = -1) -> Any:
    """F.glu; along the sharded dim the second half of the rows moves to the first.

    Communication: one all-to-all, forward and backward, if `dim` is sharded.
    """
    rows = x.shape[dim]
    if normalize_dim(dim, ndim_of(x)) != x._dim or rows % 2:
        return _glu(x, dim)
    first, second = x.chunk(2, dim)
    return first * torch.sigmoid(second.redistribute(first._sharding.sizes))


ALONG = "sort argsort topk kthvalue median nanmedian mode"
RULES: dict[Any, Rule] = {
    **{f: _along(f) for f in functions_named(ALONG)},
    F.glu: glu,
}
