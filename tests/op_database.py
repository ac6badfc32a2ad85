"""PyTorch's operator and module databases on sharded tensors: samples sharded in every way.

Three simulated ranks with uneven and empty shards; values, types, shapes and all gradients are
compared with serial PyTorch. Used by test_op_database.py and benchmarks/op_database.py.
"""

import copy
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from outcomes import (
    ORDER,
    TOLERANCE,
    Outcome,
    differs,
    global_gradient,
    on_ranks,
    unequal,
    worst,
)
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_flatten, tree_unflatten

from meshshard.tensor import ShardTensor, shard

RANKS = 3
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


def random(op: Any) -> bool:
    names = ("rand", "bernoulli", "multinomial", "normal", "dropout", "rrelu", "uniform", "empty",
             "exponential", "cauchy", "geometric", "log_normal", "fractional_max_pool",
             "multi_head_attention")  # fmt: skip
    exact = ("nn.functional.normalize", "nn.functional.layer_norm")
    return op.name not in exact and any(word in op.name for word in names)


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
        return list(op.sample_inputs(DEVICE, dtype, requires_grad=grad))[:samples]


def calls(op: Any, samples: int | None = None) -> Iterator[Call]:
    """Every call of an operation: samples, variants, shardings, sizes."""
    for number, sample in enumerate(samples_of(op, samples)):
        for call in calls_of_sample(op, sample):
            yield replace(call, label=f"sample {number}, {call.label}")


def calls_with_out(op: Any, samples: int | None = None) -> Iterator[Call]:
    """Calls with `out=` tensors that are sharded as the result."""
    for number, sample in enumerate(samples_of(op, samples, grad=False) if op.supports_out else ()):
        leaves, spec = tree_flatten((sample.input, tuple(sample.args), dict(sample.kwargs)))
        for name, dims in shardings(leaves):
            first, dim = next(iter(dims.items()))
            sizes = cut(leaves[first].shape[dim], SPLITS[0])
            label = f"sample {number}, out=, {name}, sizes {sizes}"
            # The result without out=: with it, torch drops the conjugation of fft.ihfft2(dim=(0,)).
            run, want = into_out(op.op), tensors_of(op.op)
            yield Call(run, leaves, spec, dims, label, not random(op), sizes, want)


def tensors_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which raises if its results are not all tensors, as for `out=`."""

    def _call(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        if not all(isinstance(x, torch.Tensor) for x in tree_flatten(found)[0]):
            raise TypeError("a result is no tensor")
        return found

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
        compare = not random(op) and not sample.kwargs.get("dropout_p")
        yield Call(run, leaves, spec, dims, f"{how}, {name}, sizes {sizes[0]}", compare, sizes[0])
        if how == "function":
            yield Call(
                run, leaves, spec, dims, f"{how}, {name}, sizes {sizes[1]}", compare, sizes[1]
            )
            yield Call(
                run, other, spec, dims, f"strided, {name}, sizes {sizes[0]}", compare, sizes[0]
            )


def fresh(a: Any) -> Any:
    """A copy of a leaf for one run, with the same strides."""
    if not isinstance(a, torch.Tensor):
        return a
    copy = (
        torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=a.device).copy_(a.detach())
        if (a.layout == torch.strided)
        else a.detach().clone()
    )
    return copy.requires_grad_(a.requires_grad)


def coefficients(x: torch.Tensor) -> torch.Tensor:
    numbers = torch.cos(torch.arange(x.numel(), dtype=torch.float64, device=x.device) + 1)
    return numbers.reshape(x.shape).to(x.dtype)


def differentiable(leaves: list[Any]) -> list[int]:
    return [i for i, a in enumerate(leaves) if isinstance(a, torch.Tensor) and a.requires_grad]


def serial(call: Call) -> tuple[list[Any], Any, list[Any]]:
    """Values, their structure, and gradients of all leaves that want one."""
    leaves = [fresh(a) for a in call.leaves]
    values, spec = tree_flatten(replace(call, function=call.serial or call.function)(leaves))
    wanted = differentiable(leaves)
    grads: list[Any] = [None] * len(wanted)
    outs = [v for v in values if isinstance(v, torch.Tensor) and v.requires_grad]
    if wanted and outs and call.compare:
        seeds = [coefficients(v.detach()) for v in outs]
        inputs = [leaves[i] for i in wanted]
        grads = list(torch.autograd.grad(outs, inputs, seeds, allow_unused=True))
    return values, spec, grads


def of_rank(domain: Any, call: Call, values: list[Any], spec: Any, grads: list[Any]) -> str:
    """Run a call on one rank; what differs from serial, empty where nothing does."""
    leaves = [
        shard(fresh(a).detach(), domain, call.sizes, dim=call.dims[i])
        if i in call.dims
        else fresh(a)
        for i, a in enumerate(call.leaves)
    ]
    for i in call.dims:
        if call.leaves[i].requires_grad:
            leaves[i].requires_grad_()
    got, found = tree_flatten(call(leaves))
    if found != spec and len(got) != len(values):
        return f"structure {found} for {spec}"
    for g, v in zip(got, values, strict=True):
        if wrong := differs(g, v, compare=call.compare):
            return wrong
    if any(g is not None for g in grads):
        return gradients_differ(domain, call, leaves, got, values, grads)
    return ""


def gradients_differ(
    domain: Any, call: Call, leaves: list[Any], got: list[Any], values: list[Any], grads: list[Any]
) -> str:
    """What is wrong with gradients, empty where nothing is."""
    outs, seeds = [], []
    for g, v in zip(got, values, strict=True):
        if not (isinstance(v, torch.Tensor) and v.requires_grad):
            continue
        if not g.requires_grad:
            return "a result without gradient"
        seed = coefficients(v.detach())
        outs.append(g)
        seeds.append(
            shard(seed, domain, g.sharding, dim=g.sharded_dim) if type(g) is ShardTensor else seed
        )
    wanted = differentiable(call.leaves)
    found = torch.autograd.grad(outs, [leaves[i] for i in wanted], seeds, allow_unused=True)
    slack = max(TOLERANCE.get(out.dtype, 0.0) for out in outs)
    for i, g, v in zip(wanted, found, grads, strict=True):
        whole = global_gradient(domain, leaves[i], g)
        if v is None and whole is not None and not whole.any():
            continue
        if whole is None and v is not None and not v.any():
            continue
        if (whole is None) != (v is None):
            return f"gradient of argument {i} is {'missing' if whole is None else 'there'}"
        if whole is not None and (wrong := unequal(whole, v.detach(), slack)):
            return f"gradient of argument {i}: {wrong}"
    return ""


def outcome(call: Call) -> Outcome | None:
    """What became of a call on three ranks; None where serial PyTorch does not run it either."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            want = serial(call)
    except Exception:
        return None
    return worst(on_ranks(RANKS, lambda domain: of_rank(domain, call, *want), DEVICE))


@dataclass
class Verdict:
    """Of one operation: how many calls had which outcome, and one example of each."""

    name: str
    counts: dict[str, int]
    examples: dict[str, str]

    @property
    def word(self) -> str:
        bad = [k for k in ORDER[2:] if self.counts.get(k)]
        if bad:
            return bad[-1]
        if not self.counts.get("refused"):
            return "exact"
        return "partly" if self.counts.get("exact") else "refused"


def judge(name: str, calls: Iterable[Call]) -> Verdict | None:
    """The verdict on an operation by its calls; None where it has nothing to shard."""
    counts: dict[str, int] = {}
    examples: dict[str, str] = {}
    for call in calls:
        found = outcome(call)
        if found is None:
            continue
        counts[found.kind] = counts.get(found.kind, 0) + 1
        examples.setdefault(found.kind, f"{call.label}: {found.why}"[:400])
    return Verdict(name, counts, examples) if counts else None


def operations() -> list[Any]:
    return [op for op in op_db if not any(w in op.name for w in NOT_TENSOR_WORK)]


def modules() -> list[Any]:
    return list(module_db)


__all__ = [
    "Verdict", "calls", "calls_of_module", "calls_with_out", "full_name", "judge", "modules",
    "operations",
]  # fmt: skip
