"""Rules of gradients, hooks and backward: the API boundary, where gradients have global values.

Local autograd holds S times the global gradient (S ranks, see `meshshard.comm`): a sharded seed is
multiplied by S on its way in, a sharded gradient divided by S on its way out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshshard.tensor._torch_private import current_autograd_node, native
from meshshard.tensor.align import global_shape, narrow_to_owned, require_same_sharding
from meshshard.tensor.shard_tensor import Rule, ShardTensor, in_user_hook, refuse, wrap


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


def register_hook(x: ShardTensor, hook: Callable[[Any], Any]) -> Any:
    """A hook that gets, and may replace, the global gradient as a sharded tensor."""
    scale = float(x._sharding.domain.size)
    with native():
        leaf = x.is_leaf

    def _with_global_value(g: Tensor | None) -> Tensor | None:
        if g is None:
            return None
        with native():
            shown = g.view_as(g) if leaf else g / scale
        in_user_hook[0] = True
        try:
            new = hook(wrap(shown, x._sharding, x._dim))
        finally:
            in_user_hook[0] = False
        if new is None:
            return None
        with native():
            return new.view_as(new) if leaf else new * scale  # type: ignore[no-any-return]

    with native():
        return x.register_hook(_with_global_value)  # type: ignore[no-untyped-call]


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
    Tensor.retain_grad: retain_grad,
    Tensor.backward: backward,
    torch.autograd.backward: autograd_backward,
    torch.autograd.grad: autograd_grad,
}
