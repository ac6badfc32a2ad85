"""Coupling: functions over all rows, which a convolution that sees some rows must not call.

PyG's own convolutions are tested; in a user's such a call would be silently wrong, so it is refused
by name. Functions of single rows, of one edge or along the edges of one node are not concerned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from meshshard.nn.conv._inside import Inside, Rule
from meshshard.tensor.core import ShardTensor, name_of, refuse

__all__ = ["COUPLING"]

NAMES = (
    "sum", "mean", "std", "var", "var_mean", "std_mean", "norm", "amax", "amin", "max", "min",
    "softmax", "log_softmax", "logsumexp", "cumsum", "median", "sort", "argsort", "topk", "prod",
    "nanmean", "nansum", "argmax", "argmin",
)  # fmt: skip


def _reduced(run: Inside, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    x = args[0] if args else kwargs.get("input")
    if x is run.rings.edge_index and func is Tensor.max:
        return x.new_tensor(run.rings.n_rows - 1)  # PyG asks so how many nodes there are
    if not isinstance(x, Tensor) or type(x) is ShardTensor or not x.is_floating_point():
        return func(*args, **kwargs)
    whole = not [a for a in args[1:] if not isinstance(a, bool)] and "dim" not in kwargs
    if run.name == "ChebConv" and whole and func is Tensor.max:
        return run.rings.graph.domain.all_reduce(func(x), "max")
    over = run.own and not isinstance(x, nn.Parameter) and _over_rows(func, x, args, kwargs)
    if over and run.kind(x.shape[0]):
        raise _refused(run, func, x)
    return func(*args, **kwargs)


def _refused(run: Inside, func: Any, x: Tensor) -> Exception:
    what = f"{name_of(func)} over {tuple(x.shape)} inside {run.name}"
    why = "it couples all rows, a convolution sees those near its own: do it outside"
    return refuse(what, (), None, why)


def _product(run: Inside, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """A product; refused where a user's contracts the rows."""
    if run.own and len(run.rings.graph.indices) and not kwargs:
        for x in _contracted(func, args):
            if type(x) is Tensor and x.ndim <= 2 and run.kind(len(x)):
                raise _refused(run, func, x)
    return func(*args, **kwargs)


def _contracted(func: Any, args: Any) -> list[Any]:
    """Factors whose first dim is summed over."""
    if func is not torch.einsum:
        return [args[1]]
    terms, _, out = str(args[0]).replace(" ", "").partition("->")
    factors = args[1] if isinstance(args[1], (tuple, list)) else args[1:]
    return [x for t, x in zip(terms.split(","), factors, strict=False) if t[:1] not in (out or t)]


def _over_rows(func: Any, x: Tensor, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a function reduces, or orders, the first dim."""
    given = [a for a in args[1:] if isinstance(a, (int, tuple, list)) and not isinstance(a, bool)]
    if name_of(func).endswith(("norm", "topk")):
        given = given[1:]
    dims = kwargs.get("dim", given[0] if given else None)
    if x.ndim == 0 or (dims is None and any(isinstance(a, Tensor) for a in args[1:])):
        return False  # the larger of two
    if dims is None:
        return True
    every = dims if isinstance(dims, (tuple, list)) else (dims,)
    return any(isinstance(d, int) and d % x.ndim == 0 for d in every) or not every


COUPLING: dict[Any, Rule] = {
    **{
        f: _reduced for n in NAMES for h in (torch, Tensor, F) if callable(f := getattr(h, n, None))
    },
    torch.linalg.vector_norm: _reduced,
    torch.linalg.norm: _reduced,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.einsum), _product),
    **dict.fromkeys((torch.mm, Tensor.mm), _product),
}
