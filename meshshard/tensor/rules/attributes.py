"""Rules of attributes, gradients and conversions: what a sharded tensor says of itself."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshshard.tensor.align import own_rows, require_same_sharding, shape_of
from meshshard.tensor.shard_tensor import (
    Rule,
    ShardTensor,
    _in_hook,
    called_from,
    native,
    refuse,
    wrap,
)

__all__ = ["RULES"]


def _asked(func: Callable[..., Any]) -> Rule:
    """The local tensor's own answer, which is the global one too."""

    def _rule(*args: Any, **kwargs: Any) -> Any:
        with native():
            return func(*args, **kwargs)

    return _rule


LOCAL_ATTRIBUTES = [
    "dtype", "device", "layout", "requires_grad", "grad_fn", "is_leaf", "ndim", "is_cuda",
    "is_cpu", "is_sparse", "is_sparse_csr", "is_quantized", "is_nested", "is_meta", "is_mps",
    "is_xla", "is_xpu", "is_mkldnn", "is_vulkan", "is_ipu", "is_maia", "is_mtia", "itemsize",
    "output_nr", "name", "_version", "_base", "_backward_hooks", "_post_accumulate_grad_hooks",
    "grad_dtype", "retains_grad", "_cdata", "volatile",
]  # fmt: skip
LOCAL_METHODS = [
    "dim", "ndimension", "is_floating_point", "is_complex", "is_signed", "element_size",
    "is_contiguous", "is_inference", "is_conj", "is_neg", "get_device", "is_pinned",
    "is_shared", "_is_view", "is_same_size",
]  # fmt: skip
LOCAL_FUNCTIONS = [
    "is_floating_point", "is_complex", "is_tensor", "is_inference", "is_conj",
    "is_neg", "result_type", "can_cast", "is_storage", "is_same_size",
]  # fmt: skip


def shape(x: ShardTensor) -> torch.Size:
    """The global shape."""
    return shape_of(x)


def size(x: ShardTensor, dim: int | None = None) -> Any:
    """The global shape, or one of its numbers."""
    if dim is not None and sys._getframe(2).f_code.co_filename.endswith("_functorch/vmap.py"):
        raise refuse("torch.vmap", (x,), None, "it would map over own rows; call the function on x")
    whole = shape_of(x)
    return whole if dim is None else whole[dim]


def numel(x: ShardTensor) -> int:
    """Numbers in the whole tensor."""
    return shape_of(x).numel()


def length(x: ShardTensor) -> int:
    """Rows of the whole tensor."""
    return shape_of(x)[0]


def grad(x: ShardTensor) -> Any:
    """The global gradient of own rows, sharded alike."""
    with native():
        found = x.grad if x.is_leaf else getattr(x, "_kept", None)
    if found is None or type(found) is ShardTensor:
        return found
    return wrap(found, x._sharding, x._dim)


def set_grad(x: ShardTensor, value: Any) -> None:
    """Replace the gradient."""
    with native():
        x.grad = value


def set_data(x: ShardTensor, value: Any) -> None:
    """Replace the values, by a tensor sharded alike."""
    require_same_sharding("Tensor.data", (x, value))
    with native():
        x.data = value


def data(x: ShardTensor) -> ShardTensor:
    """The values, outside of autograd."""
    with native():
        out = x.data
    return wrap(out, x._sharding, x._dim)


def requires_grad_(x: ShardTensor, requires_grad: bool = True) -> ShardTensor:
    """Ask for a gradient: a leaf gets the global one (a door, see meshshard.comm)."""
    with native():
        x.requires_grad_(requires_grad)
        # A leaf made within backward belongs to a checkpoint, in the midst of local autograd.
        door = requires_grad and x.is_leaf and torch._C._current_autograd_node() is None
        if door and not getattr(x, "_scales_gradient", False):
            scale = 1 / x._sharding.domain.size
            x.register_hook(lambda g: g * scale)  # type: ignore[no-untyped-call]
            x._scales_gradient = True  # type: ignore[attr-defined]
    return x


def set_requires_grad(x: ShardTensor, value: bool) -> None:
    """The same as `requires_grad_`."""
    requires_grad_(x, value)


def register_hook(x: ShardTensor, hook: Callable[[Any], Any]) -> Any:
    """A hook on the gradient, which sees it as a sharded tensor with its global value."""
    scale = float(x._sharding.domain.size)
    with native():
        leaf = x.is_leaf

    def _seen(g: Tensor) -> Tensor | None:
        with native():
            shown = g.view_as(g) if leaf else g / scale
        _in_hook[0] = True
        try:
            answer = hook(wrap(shown, x._sharding, x._dim))
        finally:
            _in_hook[0] = False
        if answer is None:
            return None
        with native():
            return answer.view_as(answer) if leaf else answer * scale  # type: ignore[no-any-return]

    with native():
        return x.register_hook(_seen)  # type: ignore[no-untyped-call]


def retain_grad(x: ShardTensor) -> None:
    """Keep the gradient of an intermediate tensor, as its global value."""
    with native():
        if x.is_leaf:
            return
        scale = 1 / x._sharding.domain.size

        def _keep(g: Tensor) -> None:
            with native():
                kept = getattr(x, "_kept", None)
                more = g * scale
                x._kept = more if kept is None else kept + more  # type: ignore[attr-defined]

        x.register_hook(_keep)  # type: ignore[no-untyped-call]


def backward(
    x: Any,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Tensor.backward with a sharded seed, or with sharded inputs."""
    autograd_backward((x,), (gradient,), retain_graph, create_graph, inputs=inputs)


def autograd_backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """torch.autograd.backward: a sharded seed is multiplied by the ranks of its domain."""
    tensors = _several(tensors)
    seeds = _seeds("Tensor.backward", tensors, _several(grad_tensors or grad_variables))
    with native():
        torch.autograd.backward(tensors, seeds, retain_graph, create_graph, inputs=inputs)


def autograd_grad(
    outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any
) -> tuple[Any, ...]:
    """torch.autograd.grad: seeds as in backward, sharded gradients divided by the ranks."""
    outputs, inputs = _several(outputs), _several(inputs)
    if kwargs.get("is_grads_batched"):
        raise refuse("torch.autograd.grad", (*outputs, *inputs), None, "is_grads_batched")
    seeds = _seeds("torch.autograd.grad", outputs, _several(grad_outputs))
    with native():
        found = torch.autograd.grad(outputs, inputs, seeds, *args, **kwargs)
    return tuple(_global(g, x) for g, x in zip(found, inputs, strict=True))


def _global(g: Tensor | None, x: Any) -> Any:
    """A gradient as its global value, sharded like the tensor that it belongs to."""
    if g is None or type(x) is not ShardTensor:
        return g
    with native():
        leaf_door = getattr(x, "_scales_gradient", False) and x.is_leaf
        g = g.view_as(g) if leaf_door else g / x._sharding.domain.size
    return wrap(g, x._sharding, x._dim)


def _seeds(func: str, outputs: Sequence[Any], seeds: Sequence[Any]) -> list[Tensor | None]:
    """Seeds in local autograd: those of sharded outputs times the ranks."""
    seeds = seeds or [None] * len(outputs)
    out = []
    for y, v in zip(outputs, seeds, strict=True):
        if type(y) is not ShardTensor:
            if type(v) is ShardTensor:
                raise refuse(func, (v,), None, "a sharded seed of a replicated output")
            out.append(v)
            continue
        if v is None:
            raise refuse(func, (y,), None, "a sharded output needs a seed; reduce it to a loss")
        if type(v) is not ShardTensor:
            if v.shape != shape_of(y):
                raise refuse(func, (y,), None, f"a seed of shape {tuple(v.shape)}")
            v = own_rows(v, y._sharding, y._dim)
        else:
            require_same_sharding(func, (y, v))
        with native():
            out.append(v * y._sharding.domain.size)
    return out


def _several(x: Any) -> tuple[Any, ...]:
    if x is None:
        return ()
    return (x,) if isinstance(x, Tensor) else tuple(x)


def stride(x: ShardTensor, dim: int | None = None) -> Any:
    """Strides of the own rows: they say the order of dims, not places in a whole."""
    with native():
        return x.stride() if dim is None else x.stride(dim)


def deepcopy(x: ShardTensor, memo: dict[int, Any]) -> ShardTensor:
    """A copy of own rows; the domain is shared."""
    if id(x) in memo:
        return memo[id(x)]  # type: ignore[no-any-return]
    with native():
        if not x.is_leaf:
            raise refuse("copy.deepcopy", (x,), None, "only leaves can be copied; detach it")
        out = x.detach().clone()
        wanted, kept = x.requires_grad, x.grad
    made = wrap(out, x._sharding, x._dim)
    if wanted:
        requires_grad_(made)
    if kept is not None:
        set_grad(made, copy.deepcopy(kept, memo))
    memo[id(x)] = made
    return made


def text(x: ShardTensor, *_: Any, **__: Any) -> str:
    """Shapes and sizes, and own values; nothing is communicated."""
    with native():
        own = repr(x.detach())
    domain = x._sharding.domain
    return (
        f"ShardTensor(shape {tuple(shape_of(x))}, dim {x._dim} in {x._sharding.sizes}, "
        f"rank {domain.rank} of {domain.size}: {own})"
    )


def detach(x: ShardTensor) -> ShardTensor:
    """The values, outside of autograd; not for DDP, which sends buffers of rank 0 to all."""
    if sys._getframe(2).f_code.co_name == "_sync_module_states":
        why = (
            "it sends rank 0's rows to all; give the field to forward, or make it a plain attribute"
        )
        raise refuse("a sharded buffer in DistributedDataParallel", (x,), None, why)
    with native():
        return wrap(x.detach(), x._sharding, x._dim)


def new_like(func: Callable[..., Any]) -> Rule:
    """Factories such as new_zeros: the whole shape makes sharded rows, others a plain tensor."""

    def _rule(x: ShardTensor, *wanted: Any, **kwargs: Any) -> Any:
        wanted = kwargs.pop("size", wanted)
        shape = torch.Size(
            wanted[0] if len(wanted) == 1 and not isinstance(wanted[0], int) else wanted
        )
        value = ()
        if func is torch.Tensor.new_full:
            shape, value = torch.Size(wanted[0]), tuple(wanted[1:])
        alike_shape = len(shape) > x._dim and shape[x._dim] == x._sharding.total
        if alike_shape and x._sharding.total > 1:
            local = torch.Size((*shape[: x._dim], x._sharding.own, *shape[x._dim + 1 :]))
            with native():
                return wrap(func(x, local, *value, **kwargs), x._sharding, x._dim)
        with native():
            return func(x, shape, *value, **kwargs)

    return _rule


def _refused(name: str, why: str) -> Rule:
    def _rule(*args: Any, **kwargs: Any) -> Any:
        raise refuse(name, args, kwargs, why)

    return _rule


def storage(x: ShardTensor) -> Any:
    """Own rows in memory: nobody's business. torch.compile asks first, and then runs eagerly."""
    if called_from("torch/_subclasses/meta_utils.py"):
        from torch._dynamo.exc import Unsupported

        raise Unsupported(str(refuse("torch.compile", (x,), None, COMPILED)), "a ShardTensor")
    raise refuse("Tensor.untyped_storage", (x,), None, LOST)


COMPILED = (
    "compile what is done with own rows, a function of x.to_local() and domain.exchange, "
    "and give it to ShardTensor.from_local"
)
LOST = "it would see own rows only: use x.gather() for all, x.to_local() for own rows"
REFUSED: dict[str, str] = {
    "__array__": LOST, "__array_wrap__": LOST, "numpy": LOST, "tolist": LOST, "item": LOST,
    "__float__": LOST, "__int__": LOST, "__index__": LOST, "__complex__": LOST,
    "__bool__": "whether a sharded tensor is true is not one answer: reduce it first",
    "__contains__": "compare and reduce: (x == value).any()",
    "__dlpack__": LOST, "__dlpack_device__": LOST, "__reduce_ex__":
    "a domain cannot be saved: save x.gather(), or x.to_local() and x.sharding.sizes",
    "storage": LOST, "_typed_storage": LOST, "data_ptr": LOST,
    "share_memory_": LOST, "set_": LOST, "resize_": LOST, "as_strided": LOST,
}  # fmt: skip

_get = {n: getattr(torch.Tensor, n) for n in LOCAL_ATTRIBUTES if hasattr(torch.Tensor, n)}
_grad: Any = torch.Tensor.grad
_same_grad: Any = torch.Tensor._grad
RULES: dict[Any, Rule] = {
    **{a.__get__: _asked(a.__get__) for a in _get.values()},
    **{f: _asked(f) for n in LOCAL_METHODS if (f := getattr(torch.Tensor, n, None))},
    **{f: _asked(f) for n in LOCAL_FUNCTIONS if (f := getattr(torch, n, None))},
    **{
        f: _refused(f"Tensor.{n}", why)
        for n, why in REFUSED.items()
        if (f := getattr(torch.Tensor, n, None)) and callable(f)
    },
    **{
        f: new_like(f)
        for n in ("empty", "zeros", "ones", "full")
        if (f := getattr(torch.Tensor, f"new_{n}"))
    },
    torch.Tensor.shape.__get__: shape,  # type: ignore[attr-defined]
    torch.Tensor.size: size,
    torch.Tensor.numel: numel,
    torch.Tensor.nelement: numel,
    torch.numel: numel,
    torch.Tensor.__len__: length,
    torch.Tensor.nbytes.__get__: lambda x: numel(x) * x.element_size(),  # type: ignore[attr-defined]
    torch.Tensor.stride: stride,
    torch.Tensor.detach: detach,
    torch.Tensor.untyped_storage: storage,
    _grad.__get__: grad,
    _grad.__set__: set_grad,
    _same_grad.__get__: grad,
    torch.Tensor.data.__get__: data,  # type: ignore[attr-defined]
    torch.Tensor.data.__set__: set_data,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad.__set__: set_requires_grad,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad_: requires_grad_,
    torch.Tensor.register_hook: register_hook,
    torch.Tensor.retain_grad: retain_grad,
    torch.Tensor.backward: backward,
    torch.autograd.backward: autograd_backward,
    torch.autograd.grad: autograd_grad,
    torch.Tensor.__deepcopy__: deepcopy,
    torch.Tensor.__repr__: text,
    torch.Tensor.__hash__: lambda x: id(x),
    torch.Tensor.__format__: lambda x, spec: text(x),
    torch.Tensor.__setstate__: _refused("Tensor.__setstate__", LOST),
}
