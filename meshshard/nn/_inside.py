"""Inside: what is true while a plain convolution runs on the rings of a shard.

Halo rows are refreshed before each further propagate. Draws are keyed by the edge or the row in the
source, and norms over rows see own rows of all ranks, so that neither depends on the partition.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshshard.comm import linear
from meshshard.nn._coupling import COUPLING
from meshshard.nn._rings import Rings, padded
from meshshard.nn._sparse import largest
from meshshard.tensor.core import Sharding, ShardTensor, native, refuse, wrap

__all__ = ["RUNNING", "Inside", "own_rows"]

RUNNING: ContextVar[Inside | None] = ContextVar("meshshard convolution", default=None)


class Inside(TorchFunctionMode):
    """One run of a convolution on the rings of a shard, and what it has done so far.

    Attributes:
        rings: rows and edges that it sees.
        name: what to call the convolution in errors.
        own: whether it is a user's, so that nothing is known of it.
        edge_index: what it propagates along at the moment.
        within: whether it does so just now.
        stale: whether halo rows have to be fetched again before they are read.
    """

    def __init__(self, rings: Rings, name: str, own: bool = False) -> None:
        super().__init__()
        self.rings, self.name, self.own = rings, name, own
        self.edge_index = rings.edge_index
        self.within = self.stale = False

    def __enter__(self) -> Inside:
        """Make this the run that is under way."""
        self._token = RUNNING.set(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """It is over."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        RUNNING.reset(self._token)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Draws and norms by our rules, the rest as it is."""
        rule = _RULES.get(func)
        if rule is None:
            return func(*args, **(kwargs or {}))
        return rule(self, func, args, kwargs or {})

    def kind(self, rows: int) -> str:
        """What so many rows are: 'rows', 'nodes' of a bipartite graph, 'edges' or ''."""
        rings = self.rings
        known = {rings.n_to: "nodes", rings.n_rows: "rows"}
        n_edges = self.edge_index.shape[1]
        if self.within:
            known[n_edges] = "edges"
        else:
            known.setdefault(n_edges, "edges")
        return known.get(rows, "")

    def before(self, conv: Any, edge_index: Tensor, given: dict[str, Any]) -> dict[str, Any]:
        """What a convolution is about to send along edges, with a true halo."""
        self.edge_index, self.within = edge_index, True
        if not self.stale:
            return given
        names = {a[:-2] for a in (*conv._user_args, *conv._edge_user_args) if a.endswith("_j")}
        for hook in ("message", "edge_update"):  # which may pick rows of its own
            names |= set(conv.inspector.get_param_names(hook))
        read = sorted(names & given.keys())
        return given | {name: self.refreshed(given[name], conv.node_dim) for name in read}

    def refreshed(self, x: Any, dim: int) -> Any:
        """Rows whose halo is fetched again; of a pair those of the sources."""
        if isinstance(x, (tuple, list)):
            return (self.refreshed(x[0], dim), *x[1:])
        if not isinstance(x, Tensor) or x.ndim == 0:
            return x
        dim = max(dim, -x.ndim)
        if x.shape[dim] != self.rings.n_rows:
            return x
        own = x.movedim(dim, 0)[: self.rings.graph.sources.own]
        return self.rings.rows(own).movedim(0, dim)

    def keys(self, x: Tensor) -> tuple[Tensor, int]:
        """What the draws of every row of a tensor are keyed by, and the dim of the rows."""
        rings = self.rings
        for dim, rows in enumerate(x.shape):
            kind = self.kind(rows)
            if kind == "rows":
                return rings.origins, dim
            if kind == "nodes":
                return padded(rings.graph.nodes.sources(rings.graph.device), rings.n_to), dim
            if kind == "edges":
                same = self.edge_index is rings.edge_index
                return rings.names if same else self._pairs(), dim
        raise self.refused("dropout", x)

    def refused(self, what: str, x: Tensor) -> Exception:
        """The error for rows that are neither nodes nor edges."""
        why = f"{tuple(x.shape)} has neither a row for each node nor for each edge"
        return refuse(f"{what} inside {self.name}", (), None, why)

    def _pairs(self) -> Tensor:
        """Names of edges that the convolution has made itself, loops for example."""
        graph, (source, to) = self.rings.graph, self.edge_index
        places = self.rings.origins
        if self.rings.n_to != self.rings.n_rows:
            places = padded(graph.nodes.sources(graph.device), self.rings.n_to)
        names: Tensor = (places[to] << 32) + self.rings.origins[source]
        return names


def _dropout(run: Inside, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    x = args[0] if args else kwargs.pop("input")
    if type(x) is ShardTensor:
        return func(x, *args[1:], **kwargs)
    given = dict(zip(("p", "training", "inplace"), args[1:], strict=False))
    given |= {"training" if name == "train" else name: value for name, value in kwargs.items()}
    if not given.get("training", True) or given.get("p", 0.5) == 0:
        return x
    keys, dim = run.keys(x)
    domain = run.rings.graph.domain
    mine = [len(keys) * (rank == domain.rank) for rank in range(domain.size)]
    keyed = Sharding(domain, mine, keys)
    out = F.dropout(wrap(x.view_as(x), keyed, dim), given.get("p", 0.5))
    with native():
        return out.view_as(out)


def _batch_norm(run: Inside, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    x = args[0] if args else kwargs["input"]
    names = ("input", "running_mean", "running_var", "weight", "bias", "training")
    given = dict(zip(names, args, strict=False)) | kwargs
    by_row = not given.get("training", False) and given.get("running_mean") is not None
    if type(x) is ShardTensor or by_row:
        return func(*args, **kwargs)
    given.pop("input")
    tail = args[len(names) :]
    rest = [given.pop(name) for name in names[1:] if name in given and len(args) > 1]
    return own_rows(run, x, lambda own: func(own, *rest, *tail, **given))


def own_rows(run: Inside, x: Tensor, norm: Callable[[Any], Any]) -> Tensor:
    """A function that couples rows, on the own rows of all ranks; zeros behind them.

    What was derived of halo rows has to be fetched again.
    """
    graph, kind = run.rings.graph, run.kind(x.shape[0])
    if not kind or (kind == "edges" and run.edge_index is not run.rings.edge_index):
        raise run.refused("a norm over rows", x)
    sharding = {"rows": graph.sources, "nodes": graph.nodes, "edges": graph.edges}[kind]
    run.stale |= kind == "rows"
    out = norm(ShardTensor.from_local(x[: sharding.own], sharding))
    return padded(out.to_local(), x.shape[0])


def _scatter(run: Inside, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Sums and maxima of the rows of edges at their destinations, by a sparse product."""
    names = ("self", "dim", "index", "src", "reduce")
    given: dict[str, Any] = dict(zip(names, args, strict=False)) | kwargs
    out, index, src = given["self"], given.get("index"), given.get("src")
    how = given.get("reduce", "sum")
    op = run.rings.arriving if run.edge_index is run.rings.edge_index else None
    known = how in ("sum", "amax") and (how == "sum" or given.get("include_self") is False)
    if op is None or not known or not _along_edges(run, out, index, src, given["dim"]):
        return func(*args, **kwargs)
    assert isinstance(src, Tensor)
    return out.add_(linear.apply(op, src) if how == "sum" else largest(op, src))


def _along_edges(run: Inside, out: Any, index: Any, src: Any, dim: int) -> bool:
    """Whether rows go to the destinations of all edges."""
    rings = run.rings
    to = rings.edge_index[1]
    if not isinstance(src, Tensor) or not src.is_floating_point() or type(src) is ShardTensor:
        return False
    same = index.data_ptr() == to.data_ptr() and index.shape == src.shape
    steps = all(step == 0 for step in index.stride()[1:])
    return bool(same and steps and dim % src.ndim == 0 and out.shape[0] == rings.n_to)


_RULES: dict[Any, Callable[..., Any]] = {
    F.dropout: _dropout,
    torch.dropout: _dropout,
    F.batch_norm: _batch_norm,
    Tensor.scatter_add_: _scatter,
    Tensor.scatter_reduce_: _scatter,
    **COUPLING,
}
