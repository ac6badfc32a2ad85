"""Rules of gradients, hooks and backward: the API boundary, where gradients have global values.

Local autograd holds S times the global gradient (S ranks, see `meshshard.comm`): a sharded seed is
multiplied by S on its way in, a sharded gradient divided by S on its way out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from meshshard.tensor._torch_private import (
    current_autograd_node,
    native,
    tensors_of_module_hook,
)
from meshshard.tensor.align import global_shape, narrow_to_owned, require_same_sharding
from meshshard.tensor.shard_tensor import Rule, ShardTensor, in_user_hook, refuse, wrap
from meshshard.tensor.sharding import Sharding


def grad(x: ShardTensor) -> Any:
    """The global gradient, sharded as the tensor."""
    with native():
        found = x.grad if x.is_leaf else getattr(x, "_retained_grad", None)
    if found is None or type(found) is ShardTensor:
        return found
    return wrap(found, x._sharding, x._dim)


def set_grad(x: ShardTensor, value: Any) -> None:
    """Replace the gradient."""
    with native():
        x.grad = value


def requires_grad_(x: ShardTensor, requires_grad: bool = True) -> ShardTensor:
    """Require a gradient; a leaf gets its global one."""
    with native():
        x.requires_grad_(requires_grad)
        # A leaf that is made while backward runs belongs to a checkpoint, in local autograd.
        boundary = requires_grad and x.is_leaf and current_autograd_node() is None
        if boundary and not getattr(x, "_scales_gradient", False):
            scale = 1 / x._sharding.domain.size
            x.register_hook(lambda g: None if g is None else g * scale)  # type: ignore[no-untyped-call]
            x._scales_gradient = True  # type: ignore[attr-defined]
    return x


def set_requires_grad(x: ShardTensor, value: bool) -> None:
    """As `requires_grad_`."""
    requires_grad_(x, value)


@contextmanager
def _user_hook() -> Iterator[None]:
    """While a user's hook runs, sharded tensors have their global shape."""
    in_user_hook.runs = True
    try:
        yield
    finally:
        in_user_hook.runs = False


def _shown(g: Any, sharding: Sharding, dim: int, scale: float) -> Any:
    """A gradient of local autograd as a user's hook gets it."""
    if g is None:
        return None
    with native():
        return wrap(g.view_as(g) if scale == 1 else g / scale, sharding, dim)


def _returned(g: Any, scale: float) -> Any:
    """What a user's hook has returned, as local autograd gets it."""
    if g is None:
        return None
    with native():
        return g.view_as(g) if scale == 1 else g * scale


def register_hook(x: ShardTensor, hook: Callable[[Any], Any]) -> Any:
    """A hook that gets, and may replace, the global gradient as a sharded tensor."""
    with native():
        scale = 1.0 if x.is_leaf else float(x._sharding.domain.size)

    def _with_global_value(g: Tensor | None) -> Tensor | None:
        if g is None:
            return None
        with _user_hook():
            new: Tensor | None = hook(_shown(g, x._sharding, x._dim, scale))
        return _returned(new, scale)  # type: ignore[no-any-return]

    with native():
        return x.register_hook(_with_global_value)  # type: ignore[no-untyped-call]


def grad_fn(x: ShardTensor) -> Any:
    """The node of the local tensor; for a hook of a module, one whose gradients are global."""
    tensors = tensors_of_module_hook()
    with native():
        node = x.grad_fn
        if tensors is None or node is None:
            return node
        first = next(t for t in tensors if t.requires_grad)
    if type(first) is not ShardTensor:
        why = "the first tensor that requires a gradient is plain; use y.register_hook"
        raise refuse("nn.Module.register_full_backward_hook", (x,), None, why)
    return _ModuleNode(node, tensors)


class _ModuleNode:
    """The node of the inputs or outputs of a module, as its full backward hook uses it.

    Args:
        node: of local autograd.
        tensors: what the gradients that pass through it belong to.
    """

    def __init__(self, node: Any, tensors: Sequence[Any]) -> None:
        self._node, self.name = node, node.name
        self._layouts = [  # without the tensors, which hold the node
            (t._sharding, t._dim, float(t._sharding.domain.size))
            if type(t) is ShardTensor
            else None
            for t in tensors
        ]

    def register_hook(self, hook: Callable[[Any, Any], Any]) -> Any:
        """A hook that gets, and may replace, the global gradients."""

        def _with_global_values(inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
            with _user_hook():
                new = hook(self._all_shown(inputs), self._all_shown(outputs))
            if new is None:
                return None
            pairs = zip(new, self._layouts, strict=True)
            return tuple(_returned(g, at[2]) if at else g for g, at in pairs)

        return self._node.register_hook(_with_global_values)

    def _all_shown(self, grads: Sequence[Any]) -> tuple[Any, ...]:
        pairs = zip(grads, self._layouts, strict=True)
        return tuple(_shown(g, *at) if at else g for g, at in pairs)


def _layout(x: Any) -> tuple[Sharding, int, float] | None:
    """Sharding, dim and scale of the gradients of a sharded tensor."""
    if type(x) is not ShardTensor:
        return None
    return x._sharding, x._dim, float(x._sharding.domain.size)


def retain_grad(x: ShardTensor) -> None:
    """Keep the global gradient of an intermediate tensor."""
    with native():
        if x.is_leaf:
            return
        scale = 1 / x._sharding.domain.size

        def _retain(g: Tensor) -> None:
            with native():
                old = getattr(x, "_retained_grad", None)
                new = g * scale
                x._retained_grad = new if old is None else old + new  # type: ignore[attr-defined]

        x.register_hook(_retain)  # type: ignore[no-untyped-call]


def backward(
    x: Any,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Tensor.backward with a sharded seed or sharded inputs."""
    autograd_backward((x,), (gradient,), retain_graph, create_graph, inputs=inputs)


def autograd_backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """torch.autograd.backward: sharded seeds are multiplied by the number of ranks."""
    tensors = _as_tuple(tensors)
    seeds = _seeds("Tensor.backward", tensors, _as_tuple(grad_tensors or grad_variables))
    with native():
        torch.autograd.backward(tensors, seeds, retain_graph, create_graph, inputs=inputs)


def autograd_grad(
    outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any
) -> tuple[Any, ...]:
    """torch.autograd.grad: seeds as in backward, sharded gradients divided by the ranks."""
    outputs, inputs = _as_tuple(outputs), _as_tuple(inputs)
    if kwargs.get("is_grads_batched"):
        raise refuse("torch.autograd.grad", (*outputs, *inputs), None, "is_grads_batched=True")
    seeds = _seeds("torch.autograd.grad", outputs, _as_tuple(grad_outputs))
    with native():
        found = torch.autograd.grad(outputs, inputs, seeds, *args, **kwargs)
    return tuple(_global_gradient(g, x) for g, x in zip(found, inputs, strict=True))


def _global_gradient(g: Tensor | None, x: Any) -> Any:
    """A gradient with its global value, sharded as the tensor that it belongs to."""
    if g is None or type(x) is not ShardTensor:
        return g
    with native():
        scaled = getattr(x, "_scales_gradient", False) and x.is_leaf
        g = g.view_as(g) if scaled else g / x._sharding.domain.size
    return wrap(g, x._sharding, x._dim)


def _seeds(func: str, outputs: Sequence[Any], seeds: Sequence[Any]) -> list[Tensor | None]:
    """Seeds for local autograd: those of sharded outputs are multiplied by the ranks."""
    seeds = seeds or [None] * len(outputs)
    return [
        _sharded_seed(func, y, v) if type(y) is ShardTensor else _replicated_seed(func, v)
        for y, v in zip(outputs, seeds, strict=True)
    ]


def _replicated_seed(func: str, seed: Any) -> Any:
    if type(seed) is ShardTensor:
        why = "the output is replicated, so its gradient must be a plain tensor: v.gather()"
        raise refuse(func, (seed,), None, why)
    return seed


def _sharded_seed(func: str, y: ShardTensor, seed: Any) -> Any:
    if seed is None:
        why = "a sharded output needs a gradient of its shape; or reduce it to a loss"
        raise refuse(func, (y,), None, why)
    if type(seed) is ShardTensor:
        require_same_sharding(func, (y, seed))
    elif seed.shape != global_shape(y):
        raise refuse(func, (y,), None, f"its gradient has shape {tuple(seed.shape)}")
    else:
        seed = narrow_to_owned(seed, y._sharding, y._dim)
    with native():
        return seed * y._sharding.domain.size


def _as_tuple(x: Any) -> tuple[Any, ...]:
    if x is None:
        return ()
    return (x,) if isinstance(x, Tensor) else tuple(x)


_grad: Any = Tensor.grad
_grad_alias: Any = Tensor._grad
RULES: dict[Any, Rule] = {
    _grad.__get__: grad,
    _grad.__set__: set_grad,
    _grad_alias.__get__: grad,
    Tensor.requires_grad.__set__: set_requires_grad,  # type: ignore[attr-defined]
    Tensor.requires_grad_: requires_grad_,
    Tensor.register_hook: register_hook,
    Tensor.grad_fn.__get__: grad_fn,  # type: ignore[union-attr]
    Tensor.retain_grad: retain_grad,
    Tensor.backward: backward,
    torch.autograd.backward: autograd_backward,
    torch.autograd.grad: autograd_grad,
}
