"""ShardTensor: local rows that answer with the global shape; and what rules are made of.

The local tensor itself carries the class, so C++ autograd, DDP, FSDP2, checkpoints and hooks see an
ordinary tensor of own rows. Python sees the global shape: every torch function comes to
`__torch_function__` and is answered by the rule in `RULES`, or refused by name.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor

from meshshard.comm import Domain
from meshshard.errors import MeshshardError, n_of

__all__ = [
    "RULES",
    "NoShardRule",
    "ShardTensor",
    "Sharding",
    "called_from",
    "dim_of",
    "local_of",
    "name_of",
    "native",
    "refuse",
    "shard_rule",
    "sharded",
    "wrap",
]

Rule = Callable[..., Any]
Sharded = Any  # a ShardTensor, where operations follow whose results torch's stubs call Tensors
R = TypeVar("R", bound=Rule)
RULES: dict[Any, Rule] = {}
native = torch._C.DisableTorchFunctionSubclass  # within it, a ShardTensor is its own rows
_node = torch._C._current_autograd_node
_forward_mode = torch._C._is_fwd_grad_enabled  # off within autograd.Function.forward only
_in_hook = [False]  # a user's hook on a gradient sees global shapes, though backward is running


class NoShardRule(MeshshardError):  # noqa: N818 - a word of the docs
    """A sharded tensor met an operation that has no exact rule."""


class Sharding:
    """How rows are divided: the domain, and how many each of its ranks owns.

    Attributes:
        domain: the ranks.
        sizes: rows of each rank: the sharding shapes.
        total: rows of all.
        first: id of this rank's first row.
        origin: (n_own,) int64 row in the source of every own row, which random numbers are keyed
            by; None where ids are rows in the source.
        shards: for every rank the rows of each of its shards, in order; one shard a rank where
            nothing else was said.

    Raises:
        MeshshardError: sizes for another number of ranks, or below zero; or shards that do not add
            up to them.
    """

    __slots__ = ("domain", "first", "origin", "own", "shards", "sizes", "total")

    def __init__(
        self,
        domain: Domain,
        sizes: Sequence[int],
        origin: Tensor | None = None,
        shards: Sequence[Sequence[int]] | None = None,
    ) -> None:
        if len(sizes) != domain.size:
            raise MeshshardError(f"{n_of(len(sizes), 'sizes')} for {n_of(domain.size, 'ranks')}")
        self.domain = domain
        self.sizes = tuple(int(n) for n in sizes)
        if min(self.sizes) < 0:
            raise MeshshardError(f"sizes {self.sizes}: a rank owns 0 rows or more")
        self.total = sum(self.sizes)
        self.first = domain.offset(self.sizes)
        self.own = self.sizes[domain.rank]
        self.origin = origin
        self.shards = tuple(map(tuple, shards or [(n,) for n in self.sizes]))
        if tuple(map(sum, self.shards)) != self.sizes:
            raise MeshshardError(f"shards of {self.shards} rows for ranks of {self.sizes}")

    def sources(self, device: torch.device | None = None) -> Tensor:
        """(n_own,) int64 row in the source of every own row."""
        if self.origin is None:
            return torch.arange(self.first, self.first + self.own, device=device)
        return self.origin.to(device or self.origin.device)

    def __eq__(self, other: object) -> bool:
        """Same ranks, same sizes."""
        return self is other or (
            isinstance(other, Sharding)
            and self.domain.group == other.domain.group
            and self.sizes == other.sizes
        )

    def __hash__(self) -> int:
        return hash(self.sizes)

    def __repr__(self) -> str:
        return f"sizes {self.sizes}"


class ShardTensor(Tensor):
    """Rows of one tensor that is divided over the ranks of a domain.

    `shape` is the global one. Functions work by rules: exact, or refused with `NoShardRule`.
    Reductions over the sharded dim return plain replicated tensors. Build one with `shard`,
    `ShardTensor.from_local` or from a shard's field.

    Attributes:
        sharding: domain and sizes.
        sharded_dim: the dim that is divided.
    """

    _sharding: Sharding
    _dim: int

    @staticmethod
    def from_local(local: Tensor, sharding: Sharding, dim: int = 0) -> ShardTensor:
        """Own rows as a sharded tensor; the storage is shared.

        A leaf that wants a gradient gets its global one. Anything else that is being
        differentiated is in the midst of local autograd, and stays there (see `meshshard.comm`).

        Raises:
            MeshshardError: the rows are not as many as the sharding says.
            IndexError: there is no such dim.
        """
        dim = dim_of(dim, local.ndim)
        if local.ndim == 0 or local.shape[dim] != sharding.own:
            raise MeshshardError(
                f"rank {sharding.domain.rank} has a tensor {tuple(local.shape)}, "
                f"sizes say {n_of(sharding.own, 'rows')} on dim {dim}"
            )
        with native():
            alias = local.view_as(local)
            if type(alias) is not Tensor:  # a collective of torch under way: a copy has waited
                alias = alias.clone()
            if type(alias) is not Tensor:
                raise MeshshardError(f"own rows must be a plain tensor, not {type(local).__name__}")
            if local.requires_grad and local.is_leaf and torch.is_grad_enabled():
                scale = 1 / sharding.domain.size
                alias.register_hook(lambda grad: grad * scale)  # type: ignore[no-untyped-call]
        return wrap(alias, sharding, dim)

    @property
    def sharding(self) -> Sharding:
        """Domain and sizes."""
        return self._sharding

    @property
    def sharded_dim(self) -> int:
        """The dim that is divided."""
        return self._dim

    @property
    def _is_param(self) -> bool:
        """Whether it is a parameter: never. DDP and FSDP would mix the rows of all ranks."""
        return False

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        why = "a parameter is the same on every rank: optimize a leaf, x.requires_grad_()"
        raise refuse("nn.Parameter", (self,), None, why)

    def to_local(self) -> Tensor:
        """Own rows as a plain tensor, in the midst of local autograd (see `meshshard.comm`)."""
        with native():
            return self.view_as(self)

    def gather(self, *args: Any, **kwargs: Any) -> Tensor:
        """Without arguments: the whole tensor on every rank, replicated; with, as torch.gather.

        Communication: one all-to-all, forward and backward.
        """
        if args or kwargs:
            return torch.gather(self, *args, **kwargs)
        rows = self.to_local().movedim(self._dim, 0)
        domain = self._sharding.domain
        return domain.all_gather(rows, self._sharding.sizes).movedim(0, self._dim)

    def redistribute(self, sizes: Sequence[int]) -> ShardTensor:
        """The same rows in the same order under other sizes, to balance after rows were dropped.

        Communication: one all-to-all, forward and backward.
        """
        old = self._sharding
        new = Sharding(old.domain, sizes, _moved(old.origin, old, sizes))
        rows = self.to_local().movedim(self._dim, 0)
        moved = old.domain.redistribute(rows, old.sizes, new.sizes)
        return wrap(moved.movedim(0, self._dim), new, self._dim)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer a torch function by its rule, or refuse it by name."""
        rule = RULES.get(func)
        if rule is None:
            raise refuse(func, args, kwargs)
        if _node() is not None and _in_backward(func):
            with native():
                return func(*args, **(kwargs or {}))
        if not _forward_mode() and not torch.is_inference_mode_enabled():
            return _in_own_function(rule, func, args, kwargs or {})
        return rule(*args, **kwargs) if kwargs else rule(*args)


def _in_backward(func: Any) -> bool:
    """Whether this is the backward of a function outside of us, which is local autograd.

    Checkpoints detach there what they will run forward again, as sharded as it was.
    """
    return not torch.is_grad_enabled() and not _in_hook[0] and func is not Tensor.detach


def _in_own_function(rule: Rule, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A rule within a user's autograd.Function: exact as long as it treats rows alone.

    The backward of such a function gets own rows of the gradient; where forward has reduced over
    ranks it could not be right. All ranks have made the same calls, so all raise.
    """
    found = sharded([*args, *kwargs.values()])
    domain = found[0]._sharding.domain if found else None
    before = domain.traffic.total().calls if domain else 0
    out = rule(*args, **kwargs)
    if domain and domain.traffic.total().calls != before and not _checkpointing():
        why = "it couples rows inside your own autograd.Function, whose backward sees own rows"
        raise refuse(func, args, kwargs, why)
    return out


def _checkpointing() -> bool:
    """Whether the function around is torch's own, which runs a model forward."""
    return called_from("torch/utils/checkpoint.py", "forward")


def called_from(file: str, function: str = "") -> bool:
    """Whether a function of a file of torch, or any of its functions, is being run."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith(file) and function in ("", code.co_name):
            return True
        frame = frame.f_back
    return False


def dim_of(dim: int, ndim: int) -> int:
    """A dim counted from the left.

    Raises:
        IndexError: as torch does, out of range.
    """
    if not -ndim <= dim < max(ndim, 1):
        raise IndexError(f"Dimension out of range (dims are {-ndim} to {ndim - 1}, got {dim})")
    return dim % max(ndim, 1)


def wrap(local: Tensor, sharding: Sharding, dim: int) -> ShardTensor:
    """Make a fresh local tensor a sharded one, without a copy and without a node of autograd."""
    out: ShardTensor = local  # type: ignore[assignment]
    out._sharding = sharding
    out._dim = dim
    local.__class__ = ShardTensor  # last: Dynamo breaks its graph here
    return out


def local_of(x: Any) -> Tensor:
    """Own rows of a sharded tensor as a plain one; a plain tensor as it is."""
    rows: Tensor = x.to_local() if isinstance(x, ShardTensor) else x
    return rows


def sharded(args: Any) -> list[ShardTensor]:
    """Every sharded tensor among arguments, one level of lists deep."""
    found = []
    for a in args:
        if type(a) is ShardTensor:
            found.append(a)
        elif isinstance(a, (list, tuple)):
            found += [b for b in a if type(b) is ShardTensor]
    return found


def shard_rule(func: Callable[..., Any]) -> Callable[[R], R]:
    """Decorator: answer `func` on sharded tensors by the decorated function, of equal signature.

    The rule sees ShardTensors. `x.to_local()` gives own rows, `x.sharding` sizes and domain, whose
    collectives are differentiable; `ShardTensor.from_local` makes the answer sharded again.
    """

    def _install(rule: R) -> R:
        RULES[func] = rule
        return rule

    return _install


def name_of(func: Any) -> str:
    """What users call a torch function; attributes by the name of the attribute."""
    owner = getattr(func, "__self__", None)
    if getattr(func, "__name__", "") in ("__get__", "__set__") and owner is not None:
        return f"Tensor.{getattr(owner, '__name__', owner)}"
    name = str(getattr(func, "__qualname__", func))
    if "<locals>" in name:  # one of torch's two-way functions, F.max_pool1d
        name = func.__name__
    name = re.sub(r"^pybind11_\w+\.", "", name)
    return name.replace("TensorBase.", "Tensor.").replace("_VariableFunctionsClass.", "torch.")


def refuse(func: Any, args: Any = (), kwargs: Any = None, why: str = "") -> NoShardRule:
    """The error for an operation without an exact rule: its name, shapes, the ways out."""
    name = name_of(func) if not isinstance(func, str) else func
    every = [*args, *(kwargs or {}).values()]
    shapes = ", ".join(
        f"{tuple(a.shape)} with dim {a._dim} in {a._sharding}" for a in sharded(every)
    )
    reason = f" ({why})" if why else ""
    rule = f": {shapes}; register one with @shard_rule, or use" if shapes else "; use"
    return NoShardRule(
        f"{name} has no exact rule for sharded tensors{reason}{rule} x.gather() "
        f"(the whole, on every rank)"
    )


def _moved(origin: Tensor | None, old: Sharding, sizes: Sequence[int]) -> Tensor | None:
    if origin is None:
        return None
    return old.domain.redistribute(origin, old.sizes, tuple(sizes))


def _eagerly(func: Any) -> None:
    """Dynamo leaves a function, and all that it calls, to run as it is."""
    dynamo = torch._C._dynamo.eval_frame
    if hasattr(dynamo, "set_code_exec_strategy"):
        skip = dynamo._FrameAction.SKIP
        dynamo.set_code_exec_strategy(func.__code__, dynamo._FrameExecStrategy(skip, skip))


def uncompiled(call: Callable[..., Any], *given: Any) -> Any:
    """The value of a call; where a tensor is sharded, Dynamo leaves it to run as it is."""
    return _as_it_is(call, given) if sharded(given) else call(*given)


def _as_it_is(call: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    return call(*given)


_eagerly(_as_it_is)
_eagerly(ShardTensor.__torch_function__.__func__)  # type: ignore[attr-defined]
