"""Rules that replace torch functions while an ordinary convolution runs on the subgraph of a shard.

Random numbers are keyed by the row or the edge in the source, and norms over rows use the owned
rows of all ranks, so that neither depends on the partition. Sums at destinations are sparse
matrix products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from meshshard.comm import linear
from meshshard.nn.conv._context import ConvContext, Rule
from meshshard.nn.conv._subgraph import pad_rows
from meshshard.nn.graph._sparse import segment_max
from meshshard.tensor import Sharding, ShardTensor
from meshshard.tensor._torch_private import native
from meshshard.tensor.shard_tensor import wrap

__all__ = ["RULES", "on_owned_rows"]


def _dropout(run: ConvContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    x = args[0] if args else kwargs.pop("input")
    if type(x) is ShardTensor:
        return func(x, *args[1:], **kwargs)
    given = dict(zip(("p", "training", "inplace"), args[1:], strict=False))
    given |= {"training" if name == "train" else name: value for name, value in kwargs.items()}
    if not given.get("training", True) or given.get("p", 0.5) == 0:
        return x
    keys, dim = run.random_keys(x)
    domain = run.subgraph.graph.domain
    sizes = [len(keys) * (rank == domain.rank) for rank in range(domain.size)]
    keyed = Sharding(domain, sizes, keys)
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
    return on_owned_rows(run, x, lambda owned: func(owned, *rest, *tail, **given))


def on_owned_rows(run: ConvContext, x: Tensor, norm: Callable[[Any], Any]) -> Tensor:
    """Apply a function of all rows to the owned rows of all ranks; other rows become zero.

    Halo rows have to be exchanged again before they are read.
    """
    subgraph, graph, kind = run.subgraph, run.subgraph.graph, run.kind(x.shape[0])
    if not kind or (kind == "edges" and run.edge_index is not subgraph.edge_index):
        raise run.unknown_rows("a norm over rows", x)
    sharding = {"rows": graph.sources, "nodes": graph.nodes, "edges": graph.edges}[kind]
    run.stale |= kind == "rows"
    owned = subgraph.owned(x) if kind == "rows" else x[: sharding.own]
    out = norm(ShardTensor.from_local(owned, sharding)).to_local()
    return subgraph.place(out) if kind == "rows" else pad_rows(out, x.shape[0])


def _scatter(run: ConvContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Sum or maximum of edge rows at their destinations, by a sparse matrix product."""
    names = ("self", "dim", "index", "src", "reduce")
    given: dict[str, Any] = dict(zip(names, args, strict=False)) | kwargs
    out, src, reduce = given["self"], given.get("src"), given.get("reduce", "sum")
    known = reduce == "sum" or (reduce == "amax" and given.get("include_self") is False)
    op = run.subgraph.edge_sum if run.edge_index is run.subgraph.edge_index else None
    if op is None or not known or not _is_over_edges(run, out, given.get("index"), src, given):
        return func(*args, **kwargs)
    assert isinstance(src, Tensor)
    return out.add_(linear.apply(op, src) if reduce == "sum" else segment_max(op, src))


def _is_over_edges(run: ConvContext, out: Any, index: Any, src: Any, given: Any) -> bool:
    """Whether `index` scatters one row per edge to the destinations of the edges."""
    to = run.subgraph.edge_index[1]
    if not isinstance(src, Tensor) or not src.is_floating_point() or type(src) is ShardTensor:
        return False
    same = index.data_ptr() == to.data_ptr() and index.shape == src.shape
    expanded = all(step == 0 for step in index.stride()[1:])
    on_rows = given["dim"] % src.ndim == 0 and out.shape[0] == run.subgraph.n_destinations
    return bool(same and expanded and on_rows)


def _max(run: ConvContext, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """edge_index.max(), from which PyG infers the number of nodes; maxima over all ranks."""
    x = args[0]
    if x is run.subgraph.edge_index:
        return x.new_tensor(run.subgraph.n_rows - 1)
    over_rows = x.is_floating_point() or (x.ndim > 0 and run.kind(x.shape[0]) == "rows")
    if run.max_over_ranks and len(args) == 1 and not kwargs and over_rows:
        return run.subgraph.graph.domain.all_reduce(func(x), "max")
    return func(*args, **kwargs)


RULES: dict[Any, Rule] = {
    F.dropout: _dropout,
    torch.dropout: _dropout,
    F.batch_norm: _batch_norm,
    Tensor.max: _max,
    Tensor.scatter_add_: _scatter,
    Tensor.scatter_reduce_: _scatter,
}
