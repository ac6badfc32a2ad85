"""Calls from PyTorch's operator and module databases: samples, variants, shardings and sizes."""

import copy
import os
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_flatten, tree_unflatten

DEVICE = os.environ.get("MESHSHARD_TEST_DEVICE", "cpu")  # benchmarks/gpu.py sets it
SPLITS = ((0.55, 0.0, 0.45), (0.0, 0.3, 0.7))  # share of the rows of each rank
DTYPES = (torch.float64, torch.complex128, torch.int64, torch.bool, torch.float32)
# Random operations of the database seed the default generator, which simulated ranks share.
common_methods_invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
NOT_TENSOR_WORK = ("to_sparse", "sparse", "jiterator", "torch.ops", "_segment_reduce", "nested")


@dataclass
class Call:
    """One call of an operation: its arguments as leaves, and which of them are sharded.

    Attributes:
        function: called with the arguments.
        leaves: of (input, args, kwargs), flattened.
        spec: how to put them together.
        dims: sharded dim of each sharded leaf, by number of the leaf.
        label: which variant and sharding this is.
        serial: what serial PyTorch calls, if it is not the function.
        compare: whether values are compared; not for random numbers.
    """

    function: Callable[..., Any]
    leaves: list[Any]
    spec: Any
    dims: dict[int, int]
    label: str
    compare: bool = True
    sizes: tuple[int, ...] = field(default=())
    serial: Callable[..., Any] | None = None

    def __call__(self, leaves: list[Any]) -> Any:
        value, args, kwargs = tree_unflatten(leaves, self.spec)
        return self.function(value, *args, **kwargs)


def dtype_of(op: Any) -> torch.dtype | None:
    """float64, or what the operation takes instead."""
    return next((d for d in DTYPES if d in op.dtypes), None)


def full_name(op: Any) -> str:
    return op.name + (f" ({op.variant_test_name})" if op.variant_test_name else "")


def draws(op: Any, sample: Any) -> bool:
    """Whether a call draws random numbers, or returns memory that nothing has written."""
    names = ("rand", "bernoulli", "multinomial", "normal", "dropout", "rrelu", "uniform", "empty",
             "exponential", "cauchy", "geometric", "log_normal", "fractional_max_pool",
             "multi_head_attention", "lowrank")  # fmt: skip
    exact = ("nn.functional.normalize", "nn.functional.layer_norm", "native_dropout_backward")
    given = sample.kwargs
    if op.name in exact or not any(word in op.name for word in names):
        return bool(given.get("dropout_p"))
    p = sample.args[9] if "multi_head_attention" in op.name else given.get("p", 1.0)
    return p != 0.0 and given.get("training", True)


def cut(rows: int, split: tuple[float, ...]) -> tuple[int, ...]:
    """Sizes that add up to the rows."""
    ends = [round(rows * sum(split[: i + 1])) for i in range(len(split))]
    return tuple(b - a for a, b in zip([0, *ends[:-1]], ends, strict=True))


def shardings(leaves: list[Any]) -> Iterator[tuple[str, dict[int, int]]]:
    """First tensor alone on each dim; with all that have as many rows there; each other alone."""
    tensors = [(i, a) for i, a in enumerate(leaves) if isinstance(a, torch.Tensor) and a.ndim]
    if not tensors:
        return
    first, x = tensors[0]
    for dim in range(x.ndim):
        if x.shape[dim] < 2:
            continue
        yield f"input dim {dim}", {first: dim}
        mates = {
            i: a.ndim - x.ndim + dim
            for i, a in tensors[1:]
            if a.ndim >= x.ndim - dim and a.shape[a.ndim - x.ndim + dim] == x.shape[dim]
        }
        if mates:
            yield f"all dim {dim}", {first: dim, **mates}
    for i, a in tensors[1:]:
        for dim in range(a.ndim):
            if a.shape[dim] > 1:
                yield f"argument {i} dim {dim}", {i: dim}


def variants(op: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    yield "function", op.op
    if op.method_variant is not None:
        yield "method", op.method_variant
    if op.inplace_variant is not None:
        yield "in place", op.inplace_variant


def in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    """Call on a copy, so that a leaf is not changed; return the value and the changed copy."""

    def _call(x: Any, *args: Any, **kwargs: Any) -> Any:
        changed = x.clone()
        value = function(changed, *args, **kwargs)
        return value, changed

    return _call


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values with strides that are not those of a fresh tensor."""
    out = (
        torch.empty((*x.shape, 2), dtype=x.dtype, device=x.device)[..., 0] if x.ndim else x.clone()
    )
    return out.copy_(x.detach()).requires_grad_(x.requires_grad)


def samples_of(op: Any, samples: int | None, grad: bool = True) -> list[Any]:
    """The first samples of an operation, by default all."""
    dtype = dtype_of(op)
    if dtype is None:
        return []
    grad = grad and op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        random.seed(0)  # with gradients, multi_head_attention_forward yields a random sample
        return list(op.sample_inputs(DEVICE, dtype, requires_grad=grad))[:samples]


def calls(op: Any, samples: int | None = None) -> Iterator[Call]:
    """Every call of an operation: samples (in random order), variants, shardings, sizes."""
    numbered = list(enumerate(samples_of(op, samples)))
    random.Random(0).shuffle(numbered)  # for a limit of time
    for number, sample in numbered:
        for call in calls_of_sample(op, sample):
            yield replace(call, label=f"sample {number}, {call.label}")


def calls_of_errors(op: Any, samples: int | None = None) -> Iterator[Call]:
    """Calls that PyTorch refuses, by its own list of wrong arguments."""
    given = list(op.error_inputs(DEVICE))[:samples] if op.error_inputs_func else []
    for number, sample in enumerate(error.sample_input for error in given):
        leaves, spec = tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
        tensors = [a for a in leaves if isinstance(a, torch.Tensor)]
        if all(a.layout == torch.strided and a.device.type == DEVICE for a in tensors):
            for name, dims in shardings(leaves):
                first, dim = next(iter(dims.items()))
                sizes = cut(leaves[first].shape[dim], SPLITS[0])
                label = f"error {number}, {name}, sizes {sizes}"
                yield Call(op.op, leaves, spec, dims, label, sizes=sizes)


def calls_with_out(op: Any, samples: int | None = None) -> Iterator[Call]:
    """Calls with `out=` tensors that are sharded as the result."""
    for number, sample in enumerate(samples_of(op, samples, grad=False) if op.supports_out else ()):
        leaves, spec = tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
        for name, dims in shardings(leaves):
            first, dim = next(iter(dims.items()))
            sizes = cut(leaves[first].shape[dim], SPLITS[0])
            label = f"sample {number}, out=, {name}, sizes {sizes}"
            # The result without out=: with it, torch drops the conjugation of fft.ihfft2(dim=(0,)).
            run = into_out(op.op)
            want = without_out(op.op, run)
            yield Call(run, leaves, spec, dims, label, not draws(op, sample), sizes, want)


def without_out(function: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which raises if torch cannot call it with `out=` either."""

    def _call(*args: Any, **kwargs: Any) -> Any:
        run(*args, **kwargs)
        return function(*args, **kwargs)

    return _call


def into_out(function: Callable[..., Any]) -> Callable[..., Any]:
    """Call once for the layout of the result, then into tensors of this layout."""

    def _call(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        many = isinstance(found, (tuple, list))
        out = tuple(map(torch.zeros_like, found)) if many else torch.zeros_like(found)
        function(*args, **kwargs, out=out)
        return out

    return _call


def calls_of_module(info: Any, samples: int | None = None) -> Iterator[Call]:
    """Every call of a module, in training and in evaluation; its parameters are leaves too."""
    for training in (True, False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            inputs = list(
                info.module_inputs_func(
                    info, device=DEVICE, dtype=torch.float64, requires_grad=True, training=training
                )
            )
        for number, given in enumerate(inputs[:samples]):
            made = given.constructor_input
            module = info.module_cls(*made.args, **made.kwargs)
            module = module.double().to(DEVICE).train(training)
            if given.forward_input is not None and "Lazy" not in info.name:
                label = f"{'training' if training else 'evaluation'}, input {number}"
                yield from calls_of_input(module, given.forward_input, label)


def calls_of_input(module: torch.nn.Module, given: Any, label: str) -> Iterator[Call]:
    """Every sharding of one input of a module."""
    parameters = {n: p.detach().requires_grad_() for n, p in module.named_parameters()}
    inputs = tree_flatten((given.args, given.kwargs))[0]
    leaves, spec = tree_flatten((parameters, given.args, given.kwargs))

    def _call(values: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(copy.deepcopy(module), values, args, kwargs)

    for name, dims in shardings(inputs):
        first, dim = next(iter(dims.items()))
        for split in SPLITS:
            sizes = cut(inputs[first].shape[dim], split)
            moved = {i + len(parameters): d for i, d in dims.items()}
            compare = not module.training or "Dropout" not in repr(module)
            text = f"{label}, {name}, sizes {sizes}"
            yield Call(_call, leaves, spec, moved, text, compare, sizes)


def calls_of_sample(op: Any, sample: Any) -> Iterator[Call]:
    """Variants, shardings, sizes and strides of one sample."""
    leaves, spec = tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
    for (how, function), (name, dims) in product(variants(op), list(shardings(leaves))):
        changes = how == "in place"
        if changes and (sample.broadcasts_input or 0 not in dims):
            continue
        run = in_place(function) if changes else function
        first, dim = next(iter(dims.items()))
        sizes = [cut(leaves[first].shape[dim], split) for split in SPLITS]
        other = [strided(a) if i in dims else a for i, a in enumerate(leaves)]
        compare = not draws(op, sample)
        yield Call(run, leaves, spec, dims, f"{how}, {name}, sizes {sizes[0]}", compare, sizes[0])
        if how == "function":
            yield Call(
                run, leaves, spec, dims, f"{how}, {name}, sizes {sizes[1]}", compare, sizes[1]
            )
            yield Call(
                run, other, spec, dims, f"strided, {name}, sizes {sizes[0]}", compare, sizes[0]
            )


def operations() -> list[Any]:
    return [op for op in op_db if not any(w in op.name for w in NOT_TENSOR_WORK)]


def modules() -> list[Any]:
    return list(module_db)
