"""Rules of attributes and copies: shapes are global, all else is that of the local rows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshshard.comm.workers import send_to_workers
from meshshard.tensor._torch_private import (
    called_by_ddp,
    called_by_fake_tensor,
    called_by_vmap,
    native,
    unsupported_by_dynamo,
)
from meshshard.tensor.align import global_shape, require_same_sharding
from meshshard.tensor.rules.autograd import requires_grad_, set_grad
from meshshard.tensor.shard_tensor import Rule, ShardTensor, apply_local, refuse, wrap
from meshshard.tensor.sharding import Sharding

LOCAL_ATTRIBUTES = """
dtype device layout requires_grad is_leaf ndim is_cuda is_cpu is_sparse is_sparse_csr
is_quantized is_nested is_meta is_mps is_xla is_xpu is_mkldnn is_vulkan is_ipu is_maia is_mtia
itemsize output_nr name _version _base _backward_hooks _post_accumulate_grad_hooks grad_dtype
retains_grad _cdata volatile
"""
LOCAL_METHODS = """
dim ndimension is_floating_point is_complex is_signed element_size is_inference
is_conj is_neg get_device is_pinned is_shared _is_view is_same_size stride
"""
LOCAL_FUNCTIONS = """
is_floating_point is_complex is_tensor is_inference is_conj is_neg result_type can_cast is_storage
is_same_size
"""
LOCAL_ONLY = "it sees the local rows only: use x.gather() for all rows, x.to_local() for owned ones"
COMPILED = (
    "compile a function of the owned rows x.to_local(), which may call domain.exchange, and make "
    "its result sharded with ShardTensor.from_local"
)
REFUSED: dict[str, str] = {
    "__array__ __array_wrap__ numpy tolist item __float__ __int__ __index__ __complex__ __dlpack__ "
    "__dlpack_device__ storage _typed_storage data_ptr share_memory_ set_ resize_ as_strided "
    "__setstate__": LOCAL_ONLY,
    "__bool__": "its truth value is ambiguous: reduce it first",
    "__contains__": "compare and reduce: (x == value).any()",
    "__reduce_ex__": "a domain cannot be saved: save x.gather(), or x.to_local() and "
    "x.sharding.sizes",
}


def _of_local_rows(func: Callable[..., Any]) -> Rule:
    """What the local tensor returns, which holds for the whole one too."""

    def _rule(*args: Any, **kwargs: Any) -> Any:
        with native():
            return func(*args, **kwargs)

    return _rule


def size(x: ShardTensor, dim: int | None = None) -> Any:
    """The global shape, or the size of one dim."""
    if dim is not None and called_by_vmap():
        why = "it would map over the local rows; call the function on x itself"
        raise refuse("torch.vmap", (x,), None, why)
    shape = global_shape(x)
    return shape if dim is None else shape[dim]


def numel(x: ShardTensor) -> int:
    """Number of elements of the whole tensor."""
    return global_shape(x).numel()


def length(x: ShardTensor) -> int:
    """Size of the first dim of the whole tensor."""
    return global_shape(x)[0]


def set_data(x: ShardTensor, value: Any) -> None:
    """Replace the values by those of a tensor with the same sharding."""
    require_same_sharding("Tensor.data", (x, value))
    with native():
        x.data = value


def data(x: ShardTensor) -> ShardTensor:
    """The values, outside of autograd."""
    with native():
        out = x.data
    return wrap(out, x._sharding, x._dim)


def deepcopy(x: ShardTensor, memo: dict[int, Any]) -> ShardTensor:
    """A copy of the owned rows on the same domain."""
    if id(x) in memo:
        return memo[id(x)]  # type: ignore[no-any-return]
    with native():
        if not x.is_leaf:
            raise refuse("copy.deepcopy", (x,), None, "only leaves can be copied; detach it first")
        out = x.detach().clone()
        requires_grad, grad = x.requires_grad, x.grad
    made = wrap(out, x._sharding, x._dim)
    if requires_grad:
        requires_grad_(made)
    if grad is not None:
        set_grad(made, copy.deepcopy(grad, memo))
    memo[id(x)] = made
    return made


def to_worker(x: ShardTensor) -> tuple[Any, ...]:
    """What a process that is not a rank gets of a sharded tensor: owned rows and sharding."""
    if x.requires_grad and not x.is_leaf:
        raise refuse("pickle", (x,), None, "only leaves are sent to a process; detach it first")
    with native():
        rows, requires_grad = x.detach(), x.requires_grad
    return _from_worker, (rows, x._sharding, x._dim, requires_grad)


def _from_worker(rows: Tensor, sharding: Sharding, dim: int, requires_grad: bool) -> ShardTensor:
    x = wrap(rows, sharding, dim)
    return requires_grad_(x) if requires_grad else x


def text(x: ShardTensor, *_: Any, **__: Any) -> str:
    """Global shape, sizes and local rows; without communication."""
    with native():
        local = repr(x.detach())
    domain = x._sharding.domain
    return (
        f"ShardTensor(shape {tuple(global_shape(x))}, dim {x._dim} in {x._sharding.sizes}, "
        f"rank {domain.rank} of {domain.size}: {local})"
    )


def detach(x: ShardTensor) -> ShardTensor:
    """The values, outside of autograd; refused as a buffer of DDP, which broadcasts buffers."""
    if called_by_ddp():
        why = (
            "DDP would send rank 0's rows to all ranks; pass the field to forward, or make it a "
            "plain attribute"
        )
        raise refuse("a sharded buffer in DistributedDataParallel", (x,), None, why)
    return apply_local(Tensor.detach, x)


def new_like(func: Callable[..., Any]) -> Rule:
    """new_zeros and the like: sharded if the shape has all rows on the sharded dim, else plain."""

    def _rule(x: ShardTensor, *wanted: Any, **kwargs: Any) -> Any:
        value: tuple[Any, ...] = ()
        if func is Tensor.new_full:
            value = (kwargs.pop("fill_value"),) if "fill_value" in kwargs else wanted[-1:]
            wanted = wanted[:1]
        wanted = kwargs.pop("size", wanted)
        shape = torch.Size(
            wanted[0] if len(wanted) == 1 and not isinstance(wanted[0], int) else wanted
        )
        whole = len(shape) > x._dim and shape[x._dim] == x._sharding.total
        if whole and x._sharding.total > 1:
            local = torch.Size((*shape[: x._dim], x._sharding.own, *shape[x._dim + 1 :]))
            return apply_local(func, x, (local, *value), kwargs)
        with native():
            return func(x, shape, *value, **kwargs)

    return _rule


def _refused(name: str, why: str) -> Rule:
    def _rule(*args: Any, **kwargs: Any) -> Any:
        raise refuse(name, args, kwargs, why)

    return _rule


def storage(x: ShardTensor) -> Any:
    """Refused: the storage holds the local rows only. torch.compile then runs eagerly."""
    if called_by_fake_tensor():
        raise unsupported_by_dynamo(str(refuse("torch.compile", (x,), None, COMPILED)))
    raise refuse("Tensor.untyped_storage", (x,), None, LOCAL_ONLY)


def _getters(names: str) -> list[Callable[..., Any]]:
    return [getattr(Tensor, n).__get__ for n in names.split() if hasattr(Tensor, n)]


def _methods(home: Any, names: str) -> list[Callable[..., Any]]:
    found = (getattr(home, n, None) for n in names.split())
    return [f for f in found if callable(f)]


RULES: dict[Any, Rule] = {
    **{f: _of_local_rows(f) for f in _getters(LOCAL_ATTRIBUTES)},
    **{f: _of_local_rows(f) for f in _methods(Tensor, LOCAL_METHODS)},
    **{f: _of_local_rows(f) for f in _methods(torch, LOCAL_FUNCTIONS)},
    **{
        f: _refused(f"Tensor.{f.__name__}", why)
        for names, why in REFUSED.items()
        for f in _methods(Tensor, names)
    },
    **{f: new_like(f) for f in _methods(Tensor, "new_empty new_zeros new_ones new_full")},
    Tensor.shape.__get__: global_shape,  # type: ignore[attr-defined]
    Tensor.size: size,
    Tensor.numel: numel,
    Tensor.nelement: numel,
    torch.numel: numel,
    Tensor.__len__: length,
    Tensor.nbytes.__get__: lambda x: numel(x) * x.element_size(),  # type: ignore[attr-defined]
    Tensor.detach: detach,
    torch.detach: detach,
    Tensor.untyped_storage: storage,
    Tensor.data.__get__: data,  # type: ignore[attr-defined]
    Tensor.data.__set__: set_data,  # type: ignore[attr-defined]
    Tensor.__deepcopy__: deepcopy,
    Tensor.__repr__: text,
    Tensor.__hash__: lambda x: id(x),
    Tensor.__format__: lambda x, spec: text(x),
}

send_to_workers(ShardTensor, to_worker)
