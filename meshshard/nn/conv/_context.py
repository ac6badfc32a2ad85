"""ConvContext: what is true while a plain convolution runs on the hops of a shard.

Halo rows are refreshed before each further propagate; some functions are answered by rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshshard.nn.conv._subgraph import HaloSubgraph, padded
from meshshard.tensor.shard_tensor import refuse

__all__ = ["RUNNING", "ConvContext", "Rule"]

Rule = Callable[["ConvContext", Callable[..., Any], Any, dict[str, Any]], Any]
RUNNING: ContextVar[ConvContext | None] = ContextVar("meshshard convolution", default=None)


class ConvContext(TorchFunctionMode):
    """One run of a convolution on the hops of a shard, and what it has done so far.

    Attributes:
        hops: rows and edges that it sees.
        name: what to call the convolution in errors.
        rules: what answers a torch function, given the run, it and its arguments.
        own: whether it is a user's, so that nothing is known of it.
        edge_index: what it propagates along at the moment.
        within: whether it does so just now.
        stale: whether halo rows have to be fetched again before they are read.
    """

    def __init__(
        self, hops: HaloSubgraph, name: str, rules: Mapping[Any, Rule], own: bool = False
    ) -> None:
        super().__init__()
        self.hops, self.name, self.rules, self.own = hops, name, rules, own
        self.edge_index = hops.edge_index
        self.within = self.stale = False

    def __enter__(self) -> ConvContext:
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
        """What has a rule by it, the rest as it is."""
        rule = self.rules.get(func)
        if rule is None:
            return func(*args, **(kwargs or {}))
        return rule(self, func, args, kwargs or {})

    def kind(self, rows: int) -> str:
        """What so many rows are: 'rows', 'nodes' of a bipartite graph, 'edges' or ''."""
        hops = self.hops
        known = {hops.n_to: "nodes", hops.n_rows: "rows"}
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
        if x.shape[dim] != self.hops.n_rows:
            return x
        return self.hops.rows(self.hops.own(x.movedim(dim, 0))).movedim(0, dim)

    def keys(self, x: Tensor) -> tuple[Tensor, int]:
        """What the draws of every row of a tensor are keyed by, and the dim of the rows."""
        hops = self.hops
        for dim, rows in enumerate(x.shape):
            kind = self.kind(rows)
            if kind == "rows":
                return hops.origins, dim
            if kind == "nodes":
                return padded(hops.graph.nodes.sources(hops.graph.device), hops.n_to), dim
            if kind == "edges":
                same = self.edge_index is hops.edge_index
                return hops.names if same else self._pairs(), dim
        raise self.refused("dropout", x)

    def refused(self, what: str, x: Tensor) -> Exception:
        """The error for rows that are neither nodes nor edges."""
        why = f"{tuple(x.shape)} has neither a row for each node nor for each edge"
        return refuse(f"{what} inside {self.name}", (), None, why)

    def _pairs(self) -> Tensor:
        """Names of edges that the convolution has made itself, loops for example."""
        graph, (source, to) = self.hops.graph, self.edge_index
        places = self.hops.origins
        if self.hops.n_to != self.hops.n_rows:
            places = padded(graph.nodes.sources(graph.device), self.hops.n_to)
        names: Tensor = (places[to] << 32) + self.hops.origins[source]
        return names
