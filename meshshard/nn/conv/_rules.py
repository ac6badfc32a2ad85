"""Rules of functions that a convolution calls while it runs on the hops of a shard.

Draws are keyed by the edge or the row in the source, and norms over rows see own rows of all ranks,
so that neither depends on the partition. Sums at destinations are sparse products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from meshshard.comm import linear
from meshshard.nn.conv._context import ConvContext, Rule
from meshshard.nn.conv._coupling import COUPLING, scattered
from meshshard.nn.conv._subgraph import padded
from meshshard.nn.graph._sparse import largest
from meshshard.tensor.shard_tensor import Sharding, ShardTensor, native, wrap

__all__ = ["RULES", "on_own_rows"]


def _dropout(run: ConvContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    x = args[0] if args else kwargs.pop("input")
    if type(x) is ShardTensor:
        return func(x, *args[1:], **kwargs)
    given = dict(zip(("p", "training", "inplace"), args[1:], strict=False))
    given |= {"training" if name == "train" else name: value for name, value in kwargs.items()}
    if not given.get("training", True) or given.get("p", 0.5) == 0:
        return x
    keys, dim = run.keys(x)
    domain = run.hops.graph.domain
    mine = [len(keys) * (rank == domain.rank) for rank in range(domain.size)]
    keyed = Sharding(domain, mine, keys)
    out = F.dropout(wrap(x.view_as(x), keyed, dim), given.get("p", 0.5))
    with native():
        return out.view_as(out)


def _batch_norm(run: ConvContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    x = args[0] if args else kwargs["input"]
    names = ("input", "running_mean", "running_var", "weight", "bias", "training")
    given = dict(zip(names, args, strict=False)) | kwargs
    by_row = not given.get("training", False) and given.get("running_mean") is not None
    if type(x) is ShardTensor or by_row:
        return func(*args, **kwargs)
    given.pop("input")
    tail = args[len(names) :]
    rest = [given.pop(name) for name in names[1:] if name in given and len(args) > 1]
    return on_own_rows(run, x, lambda own: func(own, *rest, *tail, **given))


def on_own_rows(run: ConvContext, x: Tensor, norm: Callable[[Any], Any]) -> Tensor:
    """A function that couples rows, on the own rows of all ranks; zeros elsewhere.

    What was derived of halo rows has to be fetched again.
    """
    graph, kind = run.hops.graph, run.kind(x.shape[0])
    if not kind or (kind == "edges" and run.edge_index is not run.hops.edge_index):
        raise run.refused("a norm over rows", x)
    sharding = {"rows": graph.sources, "nodes": graph.nodes, "edges": graph.edges}[kind]
    run.stale |= kind == "rows"
    own = run.hops.own(x) if kind == "rows" else x[: sharding.own]
    out = norm(ShardTensor.from_local(own, sharding)).to_local()
    return run.hops.around(out) if kind == "rows" else padded(out, x.shape[0])


def _scatter(run: ConvContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Sums and maxima of the rows of edges at their destinations, by a sparse product."""
    names = ("self", "dim", "index", "src", "reduce")
    given: dict[str, Any] = dict(zip(names, args, strict=False)) | kwargs
    out, index, src = given["self"], given.get("index"), given.get("src")
    how = given.get("reduce", "sum")
    scattered(run, func, out, index, src, how)
    op = run.hops.arriving if run.edge_index is run.hops.edge_index else None
    known = how in ("sum", "amax") and (how == "sum" or given.get("include_self") is False)
    if op is None or not known or not _along_edges(run, out, index, src, given["dim"]):
        return func(*args, **kwargs)
    assert isinstance(src, Tensor)
    return out.add_(linear.apply(op, src) if how == "sum" else largest(op, src))


def _along_edges(run: ConvContext, out: Any, index: Any, src: Any, dim: int) -> bool:
    """Whether rows go to the destinations of all edges."""
    hops = run.hops
    to = hops.edge_index[1]
    if not isinstance(src, Tensor) or not src.is_floating_point() or type(src) is ShardTensor:
        return False
    same = index.data_ptr() == to.data_ptr() and index.shape == src.shape
    steps = all(step == 0 for step in index.stride()[1:])
    return bool(same and steps and dim % src.ndim == 0 and out.shape[0] == hops.n_to)


RULES: dict[Any, Rule] = {
    F.dropout: _dropout,
    torch.dropout: _dropout,
    F.batch_norm: _batch_norm,
    Tensor.scatter_add_: _scatter,
    Tensor.scatter_reduce_: _scatter,
    **COUPLING,
}
