"""ShardTensor: local rows that answer with the global shape, and the parts that rules are made of.

The local tensor itself carries the class, so C++ autograd, DDP, FSDP2, checkpoints and hooks see an
ordinary tensor of owned rows. Python sees the global shape: every torch function goes through
`__torch_function__`, which calls the rule in `RULES` or refuses the function by name.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from meshshard.comm import Domain
from meshshard.errors import MeshshardError, NoShardRule, n_of
from meshshard.tensor._torch_private import (
    current_autograd_node,
    forward_mode_enabled,
    in_checkpoint,
    in_transform,
    native,
    not_compiled,
)
from meshshard.tensor.keywords import signature_names
from meshshard.tensor.moved import MOVED, is_moved
from meshshard.tensor.row_copy import RowCopy, plain
from meshshard.tensor.sharding import Sharding

__all__ = [
    "RULES",
    "NoShardRule",
    "Rule",
    "ShardTensor",
    "Sharded",
    "alias_of",
    "apply_local",
    "in_user_hook",
    "local_of",
    "name_of",
    "normalize_dim",
    "refuse",
    "refuse_unasked",
    "shard_rule",
    "sharded_in",
    "uncompiled",
    "wrap",
]

Rule = Callable[..., Any]
Sharded = Any  # a ShardTensor, on which functions are called whose stubs promise a Tensor
R = TypeVar("R", bound=Rule)
RULES: dict[Any, Rule] = {}
TRANSFORMED = (
    "torch.vmap and torch.func would take the owned rows as the whole tensor: call the function on "
    "x itself, differentiate with torch.autograd"
)


class _Hook(threading.local):
    """Whether a user's hook on a gradient runs: it sees global shapes, although backward runs."""

    runs = False


in_user_hook = _Hook()


class ShardTensor(Tensor):
    """Rows of one tensor that is divided over the ranks of a domain.

    `shape` is the global one. Functions work by rules: exact, or refused with `NoShardRule`.
    Reductions over the sharded dim return plain replicated tensors. Make one with `shard`, with
    `ShardTensor.from_local` or from a field of a shard.

    Attributes:
        sharding: domain and sizes.
        sharded_dim: the dim that is divided.

    Examples:
        >>> import torch
        >>> from meshshard.comm import init_domain
        >>> from meshshard.tensor import shard
        >>> x = shard(torch.arange(6.0), init_domain(), [6])  # on two ranks e.g. [2, 4]
        >>> x.shape, x.mean()  # the global shape, the mean of all rows
        (torch.Size([6]), tensor(2.5000))
    """

    _sharding: Sharding
    _dim: int

    @staticmethod
    def from_local(local: Tensor, sharding: Sharding, dim: int = 0) -> ShardTensor:
        """Owned rows as a sharded tensor that shares their storage.

        If `local` is a leaf that requires a gradient, it gets its global gradient. Any other tensor
        that is being differentiated stays in local autograd (see `meshshard.comm`).

        Raises:
            MeshshardError: the number of rows is not the one in the sharding.
            IndexError: `local` does not have the dim.
        """
        dim = normalize_dim(dim, local.ndim)
        if local.ndim == 0 or local.shape[dim] != sharding.own:
            raise MeshshardError(
                f"from_local: rank {sharding.domain.rank} expected {n_of(sharding.own, 'rows')} on "
                f"dim {dim}, got a tensor of shape {tuple(local.shape)}"
            )
        with native():
            leaf = local.requires_grad and local.is_leaf and torch.is_grad_enabled()
            alias = _LeafRows.apply(local, sharding.domain.size) if leaf else alias_of(local)  # type: ignore[no-untyped-call]
            if type(alias) is not Tensor:  # the result of an asynchronous collective: clone waits
                alias = alias.clone()
            if type(alias) is not Tensor:
                kind = type(local).__name__
                raise MeshshardError(
                    f"from_local: expected a plain tensor of owned rows, got a {kind}"
                )
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
        """What `nn.Parameter` sets. Never true: DDP and FSDP would mix the rows of all ranks."""
        return False

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        why = "a parameter is replicated; to optimize a field, use a leaf: x.requires_grad_()"
        raise refuse("nn.Parameter", (self,), None, why)

    def to_local(self) -> Tensor:
        """Owned rows as a plain tensor, in local autograd (see `meshshard.comm`)."""
        with native():
            if self.requires_grad and self.is_leaf and torch.is_grad_enabled():
                return _RowsOfLeaf.apply(self)  # type: ignore[no-any-return, no-untyped-call]
            return alias_of(self)

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
        """The same rows in the same order under other sizes, for example after rows were dropped.

        Communication: one all-to-all, forward and backward.
        """
        old = self._sharding
        origin = old.origin
        if origin is not None:
            origin = old.domain.redistribute(origin, old.sizes, tuple(sizes))
        new = Sharding(old.domain, sizes, origin)
        rows = self.to_local().movedim(self._dim, 0)
        moved = old.domain.redistribute(rows, old.sizes, new.sizes)
        return wrap(moved.movedim(0, self._dim), new, self._dim)

    @classmethod
    @not_compiled
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the rule of a torch function, or refuse the function by name."""
        if RowCopy in types:
            return func(*map(plain, args), **{n: plain(a) for n, a in (kwargs or {}).items()})
        rule = RULES.get(func)
        if rule is None:
            raise refuse(func, args, kwargs)
        if in_transform():
            raise refuse(func, args, kwargs, TRANSFORMED)
        if current_autograd_node() is not None and _in_local_backward(func):
            with native():
                return func(*args, **(kwargs or {}))
        if kwargs:
            args, kwargs = signature_names(args, kwargs)
        if kwargs and "out" in kwargs:
            return _into_out(rule, func, args, kwargs)
        if not forward_mode_enabled() and not torch.is_inference_mode_enabled():
            return _in_own_function(rule, func, args, kwargs or {})
        return rule(*args, **kwargs) if kwargs else rule(*args)


def _into_out(rule: Rule, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a rule and copy the result into `out`, which must be as the result.

    Raises:
        NoShardRule: `out` has another dtype, shape or sharding, or is plain where the result is
            sharded, or the arguments are plain.
        RuntimeError: autograd records the function, as in torch.
    """
    rest = {name: value for name, value in kwargs.items() if name != "out"}
    if kwargs["out"] is None:
        return rule(*args, **rest)
    if not sharded_in([*args, *rest.values()]):
        raise refuse(func, args, kwargs, "out= is sharded, the arguments are not")
    result = rule(*args, **rest)
    many = isinstance(result, (tuple, list))
    results, outs = (result, kwargs["out"]) if many else ((result,), (kwargs["out"],))
    for found, out in zip(results, outs, strict=True):
        if torch.is_grad_enabled() and (found.requires_grad or out.requires_grad):
            raise RuntimeError(
                f"{name_of(func)}(): functions with out=... arguments don't support automatic "
                "differentiation, but one of the arguments requires grad."
            )
        if not _same_layout(found, out):
            why = "out= has another dtype, shape or sharding than the result: assign the result"
            raise refuse(func, (*args, out), rest, why)
        if is_moved(out):
            raise refuse(func, (*args, out), rest, MOVED)
    for found, out in zip(results, outs, strict=True):
        with native():
            out.copy_(found)
    return type(result)(outs) if many else outs[0]


def _same_layout(x: Any, y: Any) -> bool:
    """Whether two tensors have the same dtype and shape, and the same sharding or none."""
    if x.dtype != y.dtype:
        return False
    if type(x) is not ShardTensor or type(y) is not ShardTensor:
        return type(x) is not ShardTensor and type(y) is not ShardTensor and x.shape == y.shape
    return x._dim == y._dim and x._sharding == y._sharding and x.shape == y.shape


def _in_local_backward(func: Any) -> bool:
    """Whether this is the backward of a user's or torch's function: it works on local rows.

    Checkpointing calls detach there on the inputs of the next forward, which stay sharded.
    """
    return not torch.is_grad_enabled() and not in_user_hook.runs and func is not Tensor.detach


def _in_own_function(rule: Rule, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A rule inside the forward of a user's autograd.Function: exact if it is row-wise.

    The backward of such a function gets the owned rows of the gradient, so a forward that reduces
    over ranks would get a wrong one. All ranks have made the same calls, so all raise.
    """
    found = sharded_in([*args, *kwargs.values()])
    domain = found[0]._sharding.domain if found else None
    before = _coupling_calls(domain) if domain else 0
    out = rule(*args, **kwargs)
    if domain and _coupling_calls(domain) != before and not in_checkpoint():
        why = (
            "it couples rows inside your own autograd.Function, whose backward gets the owned rows "
            "only"
        )
        raise refuse(func, args, kwargs, why)
    return out


def _coupling_calls(domain: Domain) -> int:
    """Number of collectives so far that couple rows; those that find errors do not."""
    errors = domain.traffic.counts.get("errors")
    return domain.traffic.total().calls - (errors.calls if errors else 0)


class _LeafRows(torch.autograd.Function):
    """A view of a leaf, whose gradient in local autograd becomes the global one.

    A hook on an ordinary view would be lost when the leaf is changed in place.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        ctx.size = size
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.size, None


class _RowsOfLeaf(torch.autograd.Function):
    """The rows of a sharded leaf; not a view, as torch.compile cannot trace a sharded base."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def alias_of(x: Tensor) -> Tensor:
    """The same values; not a view if `x` needs no gradient, so that it may become a leaf.

    Autograd takes the gradient of a view of a view to the base, which such a leaf is not.
    """
    return x.view_as(x) if x.requires_grad else x.detach()


def normalize_dim(dim: int, ndim: int) -> int:
    """A dim counted from the left.

    Raises:
        IndexError: the dim is out of range, as in torch.
    """
    if not -ndim <= dim < max(ndim, 1):
        raise IndexError(f"Dimension out of range (dims are {-ndim} to {ndim - 1}, got {dim})")
    return dim % max(ndim, 1)


def wrap(local: Tensor, sharding: Sharding, dim: int) -> ShardTensor:
    """Make a new local tensor a sharded one, without a copy and without a node of autograd."""
    out: ShardTensor = local  # type: ignore[assignment]
    out._sharding = sharding
    out._dim = dim
    local.__class__ = ShardTensor  # last: TorchDynamo breaks its graph here
    return out


def apply_local(
    func: Callable[..., Any],
    x: ShardTensor,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    dim: int | None = None,
) -> ShardTensor:
    """A function of the local rows of `x`; the result is sharded as `x`, along `dim` if given."""
    with native():
        out = func(x, *args, **kwargs) if kwargs else func(x, *args)
    return wrap(out, x._sharding, x._dim if dim is None else dim)


def local_of(x: Any) -> Tensor:
    """Local rows of a sharded tensor as a plain one; a plain tensor as it is."""
    rows: Tensor = x.to_local() if isinstance(x, ShardTensor) else x
    return rows


def sharded_in(args: Iterable[Any]) -> list[ShardTensor]:
    """Every sharded tensor among arguments, one level of lists deep."""
    found = []
    for a in args:
        if type(a) is ShardTensor:
            found.append(a)
        elif isinstance(a, (list, tuple)):
            found += [b for b in a if type(b) is ShardTensor]
    return found


def shard_rule(func: Callable[..., Any]) -> Callable[[R], R]:
    """Decorator: the decorated function is the rule of `func` on sharded tensors.

    It has the signature of `func` and gets ShardTensors. `x.to_local()` gives the owned rows,
    `x.sharding` the sizes and the domain, whose collectives are differentiable;
    `ShardTensor.from_local` makes the result sharded again.
    """

    def _install(rule: R) -> R:
        RULES[func] = rule
        return rule

    return _install


def name_of(func: Any) -> str:
    """The public name of a torch function; for the getter of an attribute, the attribute's name."""
    owner = getattr(func, "__self__", None)
    if getattr(func, "__name__", "") in ("__get__", "__set__") and owner is not None:
        return f"Tensor.{getattr(owner, '__name__', owner)}"
    name = str(getattr(func, "__qualname__", func))
    if "<locals>" in name:  # a function that torch chooses by an argument, as F.max_pool1d
        name = func.__name__
    name = re.sub(r"^pybind11_\w+\.", "", name)
    return name.replace("TensorBase.", "Tensor.").replace("_VariableFunctionsClass.", "torch.")


def refuse(func: Any, args: Any = (), kwargs: Any = None, why: str = "") -> NoShardRule:
    """The error for an operation without an exact rule: its name, shapes and what to do."""
    name = name_of(func) if not isinstance(func, str) else func
    shapes = ", ".join(map(_described, sharded_in([*args, *(kwargs or {}).values()])))
    reason = f" ({why})" if why else ""
    got = f": got {shapes}; register a rule with @shard_rule, or use" if shapes else "; use"
    return NoShardRule(
        f"{name} has no exact rule for sharded tensors{reason}{got} x.gather() "
        "(the whole tensor on every rank)"
    )


def _described(x: ShardTensor) -> str:
    with native():
        shape = list(x.shape)
    shape[x._dim] = x._sharding.total
    return f"{tuple(shape)} sharded along dim {x._dim} with {x._sharding}"


def refuse_unasked(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse what PyTorch would call on the owned rows alone, see `UNASKED`."""
    if sharded_in([*args, *kwargs.values()]):
        raise refuse(name, args, kwargs, "it would take the owned rows as the whole tensor")


def uncompiled(call: Callable[..., Any], *given: Any) -> Any:
    """The value of a call; if an argument is sharded, TorchDynamo does not compile the call."""
    return _call_uncompiled(call, given) if sharded_in(given) else call(*given)


@not_compiled
def _call_uncompiled(call: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    return call(*given)
