"""ConvContext: the state of one call of an ordinary convolution on the subgraph of a shard.

Halo rows are exchanged again before every further propagate, and rules replace some functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshshard.nn.conv._subgraph import HaloSubgraph, pad_rows
from meshshard.tensor.shard_tensor import NoShardRule, refuse

__all__ = ["RUNNING", "ConvContext", "Rule"]

Rule = Callable[["ConvContext", Callable[..., Any], Any, dict[str, Any]], Any]
RUNNING: ContextVar[ConvContext | None] = ContextVar("meshshard convolution", default=None)


class ConvContext(TorchFunctionMode):
    """Context manager: one call of a convolution, during which `RUNNING` holds its context.

    Attributes:
        subgraph: the rows and edges that it is called with.
        name: the name of the convolution in errors.
        rules: functions that replace torch functions, called with this context, the torch function
            and its arguments.
        max_over_ranks: `tensor.max()` is over the edges, or the integers of nodes, of all ranks.
        edge_index: the edges of the current propagate, or of the last one.
        in_propagate: whether a propagate or an edge update is running.
        stale: whether halo rows must be exchanged before they are read again.
    """

    def __init__(
        self,
        subgraph: HaloSubgraph,
        name: str,
        rules: Mapping[Any, Rule],
        max_over_ranks: bool = False,
    ) -> None:
        super().__init__()
        self.subgraph, self.name, self.rules = subgraph, name, rules
        self.max_over_ranks = max_over_ranks
        self.edge_index = subgraph.edge_index
        self.in_propagate = self.stale = False

    def __enter__(self) -> ConvContext:
        self._token = RUNNING.set(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        RUNNING.reset(self._token)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call the rule of a function, or the function itself if it has none."""
        rule = self.rules.get(func)
        if rule is None:
            return func(*args, **(kwargs or {}))
        return rule(self, func, args, kwargs or {})

    def kind(self, n: int) -> str:
        """What n rows are: "rows", "nodes" of a bipartite graph, "edges", or ""."""
        known = {self.subgraph.n_destinations: "nodes", self.subgraph.n_rows: "rows"}
        n_edges = self.edge_index.shape[1]
        if self.in_propagate:
            known[n_edges] = "edges"
        else:
            known.setdefault(n_edges, "edges")
        return known.get(n, "")

    def before_propagate(
        self, conv: Any, edge_index: Tensor, arguments: dict[str, Any]
    ) -> dict[str, Any]:
        """Note that a propagate begins; its arguments, with halo rows that are up to date."""
        self.edge_index, self.in_propagate = edge_index, True
        if not self.stale:
            return arguments
        names = {a[:-2] for a in (*conv._user_args, *conv._edge_user_args) if a.endswith("_j")}
        for hook in ("message", "edge_update"):  # which may index rows themselves
            names |= set(conv.inspector.get_param_names(hook))
        read = sorted(names & arguments.keys())
        refreshed = {name: self._refresh(arguments[name], conv.node_dim) for name in read}
        return arguments | refreshed

    def _refresh(self, x: Any, dim: int) -> Any:
        """Rows with their halo exchanged again; of a pair, the rows of the sources."""
        if isinstance(x, (tuple, list)):
            return (self._refresh(x[0], dim), *x[1:])
        if not isinstance(x, Tensor) or x.ndim == 0:
            return x
        dim = max(dim, -x.ndim)
        if x.shape[dim] != self.subgraph.n_rows:
            return x
        owned = self.subgraph.owned(x.movedim(dim, 0))
        return self.subgraph.rows(owned).movedim(0, dim)

    def random_keys(self, x: Tensor) -> tuple[Tensor, int]:
        """The key of the random numbers of every row of a tensor, and the dim of the rows."""
        subgraph = self.subgraph
        for dim, n in enumerate(x.shape):
            kind = self.kind(n)
            if kind == "rows":
                return subgraph.row_keys, dim
            if kind == "nodes":
                return self._destination_keys(), dim
            if kind == "edges":
                same = self.edge_index is subgraph.edge_index
                return subgraph.edge_keys if same else self._keys_of_new_edges(), dim
        raise self.unknown_rows("dropout", x)

    def unknown_rows(self, what: str, x: Tensor) -> NoShardRule:
        """The error for a tensor whose rows are neither nodes nor edges."""
        why = f"a tensor {tuple(x.shape)} has neither a row per node nor a row per edge"
        return refuse(f"{what} inside {self.name}", (), None, why)

    def _keys_of_new_edges(self) -> Tensor:
        """Keys of edges that the convolution has made, as self-loops, from the keys of the ends."""
        source, to = self.edge_index
        keys: Tensor = (self._destination_keys()[to] << 32) + self.subgraph.row_keys[source]
        return keys

    def _destination_keys(self) -> Tensor:
        subgraph, graph = self.subgraph, self.subgraph.graph
        if subgraph.n_destinations == subgraph.n_rows:
            return subgraph.row_keys
        return pad_rows(graph.nodes.sources(graph.device), subgraph.n_destinations)
