"""Coupling: functions over all rows, which a convolution that sees some rows must not call.

PyG's own convolutions are tested; in a user's such a call would be silently wrong, so it is refused
by name. Functions of single rows, of one edge or along the edges of one node are not concerned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from meshshard.nn.conv._context import ConvContext, Rule
from meshshard.tensor.shard_tensor import ShardTensor, name_of, refuse

__all__ = ["COUPLING", "scattered"]

NAMES = (
    "sum", "mean", "std", "var", "var_mean", "std_mean", "norm", "amax", "amin", "max", "min",
    "softmax", "log_softmax", "logsumexp", "cumsum", "median", "sort", "argsort", "topk", "prod",
    "nanmean", "nansum", "argmax", "argmin", "normalize", "softmin", "logcumsumexp", "cumprod",
    "kthvalue", "quantile", "aminmax", "roll", "flip", "diff",
)  # fmt: skip
LATE = ("norm", "topk", "normalize", "roll", "kthvalue", "quantile", "diff")  # dims come third
SCATTERS = (
    "index_add",
    "index_add_",
    "index_reduce",
    "index_reduce_",
    "scatter_add",
    "scatter_reduce",
)

ATTENTION = (F.scaled_dot_product_attention, F.multi_head_attention_forward)
RECURRENT = (torch._VF.lstm, torch._VF.gru, torch._VF.rnn_tanh, torch._VF.rnn_relu)
OVER_GRIDS = (F.conv1d, F.conv2d, F.instance_norm, F.group_norm)


def _reduced(run: ConvContext, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    x = args[0] if args else kwargs.get("input")
    if x is run.hops.edge_index and func is Tensor.max:
        return x.new_tensor(run.hops.n_rows - 1)  # PyG asks so how many nodes there are
    if not isinstance(x, Tensor) or type(x) is ShardTensor or not x.is_floating_point():
        return func(*args, **kwargs)
    whole = not [a for a in args[1:] if not isinstance(a, bool)] and "dim" not in kwargs
    if run.name == "ChebConv" and whole and func is Tensor.max:
        return run.hops.graph.domain.all_reduce(func(x), "max")
    over = run.own and not isinstance(x, nn.Parameter) and _over_rows(func, x, args, kwargs)
    if over and run.kind(x.shape[0]):
        raise _refused(run, func, x)
    return func(*args, **kwargs)


def _refused(run: ConvContext, func: Any, x: Tensor) -> Exception:
    what = f"{name_of(func)} over {tuple(x.shape)} inside {run.name}"
    why = "it couples all rows, a convolution sees those near its own: do it outside"
    return refuse(what, (), None, why)


def _product(run: ConvContext, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """A product; refused where a user's contracts the rows."""
    if run.own and len(run.hops.graph.indices) and not kwargs:
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
    late = name_of(func).endswith(LATE)
    given = [a for a in args[1 + late :] if isinstance(a, (int, tuple, list))]
    given = [a for a in given if not isinstance(a, bool)]
    dims = kwargs.get("dim", kwargs.get("dims", given[0] if given else None))
    if dims is None and func in (F.normalize, torch.diff, Tensor.diff):
        dims = 1 if func is F.normalize else -1
    if x.ndim == 0 or (dims is None and any(isinstance(a, Tensor) for a in args[1:])):
        return False  # the larger of two
    if dims is None:
        return True
    every = dims if isinstance(dims, (tuple, list)) else (dims,)
    return any(isinstance(d, int) and d % x.ndim == 0 for d in every) or not every


def scattered(
    run: ConvContext, func: Any, out: Any, index: Any, src: Any, how: str = "sum"
) -> None:
    """Refuse what a user's convolution sums where it is not complete.

    Rows of nodes are some of all; edges that leave a node may end at rows without features, so
    that only their number and weights are known there.
    """
    if not run.own or type(src) is not Tensor or not src.is_floating_point():
        return
    nodes = ("rows", "nodes")
    if run.kind(len(src)) in nodes and run.kind(len(out)) not in nodes:
        raise _refused(run, func, src)
    if run.edge_index.layout != torch.strided:
        return
    source, to = run.edge_index
    wide = src.shape[1:].numel() > 1 or how not in ("sum", "mean")
    if wide and index.data_ptr() == source.data_ptr() != to.data_ptr():
        what = f"{name_of(func)} at the sources of edges inside {run.name}"
        why = "a node has all edges that arrive, not those that leave: sum at edge_index[1]"
        raise refuse(what, (), None, why)


def _scattered(
    run: ConvContext, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    names = ("input", "dim", "index", "source", "reduce")
    given = dict(zip(names, args, strict=False)) | kwargs
    src = given.get("source", given.get("src"))
    scattered(run, func, given.get("input"), given.get("index"), src, given.get("reduce", "sum"))
    return func(*args, **kwargs)


def _along(run: ConvContext, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """What goes along some dims; refused in a user's where rows lie there.

    A rank without edges has so few rows that their number tells nothing: the others refuse.
    """
    x, dims = _along_dims(func, args, kwargs)
    telling = run.own and len(run.hops.graph.indices) and type(x) is Tensor
    if telling and any(run.kind(x.shape[d]) == "rows" for d in dims if d < x.ndim):
        raise _refused(run, func, x)
    return func(*args, **kwargs)


def _along_dims(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Sequence[int]]:
    """A tensor, and the dims along which a function goes."""
    if func in ATTENTION:
        keys = args[1] if len(args) > 1 else kwargs["key"]
        return keys, (0,) if func is F.multi_head_attention_forward else (keys.ndim - 2,)
    if func in RECURRENT:
        return args[0], (1 if args[-1] is True else 0,)
    return args[0] if args else kwargs["input"], (2, 3, 4)  # convolutions, norms of channels


COUPLING: dict[Any, Rule] = {
    **{
        f: _reduced for n in NAMES for h in (torch, Tensor, F) if callable(f := getattr(h, n, None))
    },
    torch.linalg.vector_norm: _reduced,
    torch.linalg.norm: _reduced,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.einsum), _product),
    **dict.fromkeys((torch.mm, Tensor.mm), _product),
    **{f: _scattered for n in SCATTERS for h in (torch, Tensor) if (f := getattr(h, n, None))},
    **dict.fromkeys((*ATTENTION, *RECURRENT, *OVER_GRIDS), _along),
}
