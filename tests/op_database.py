"""PyTorch's operator and module databases on sharded tensors, compared with serial PyTorch.

Three simulated ranks with uneven and empty shards; values, types, shapes and all gradients are
compared. Used by test_op_database.py and benchmarks/op_database.py.
"""

import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from op_calls import (
    DEVICE,
    Call,
    calls,
    calls_of_errors,
    calls_of_module,
    calls_with_out,
    full_name,
    modules,
    operations,
)
from outcomes import ORDER, TOLERANCE, Outcome, differs, global_gradient, on_ranks, unequal, worst
from torch.utils._pytree import tree_flatten

from meshshard.tensor import ShardTensor, shard

RANKS = 3


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


def sharded_leaves(domain: Any, call: Call) -> list[Any]:
    """Fresh copies of the leaves, sharded as the call says."""
    return [
        shard(fresh(a).detach(), domain, call.sizes, dim=call.dims[i])
        if i in call.dims
        else fresh(a)
        for i, a in enumerate(call.leaves)
    ]


def of_rank(domain: Any, call: Call, values: list[Any], spec: Any, grads: list[Any]) -> str:
    """Run a call on one rank; what differs from serial, empty where nothing does."""
    leaves = sharded_leaves(domain, call)
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


def outcome_of_error(call: Call) -> Outcome | None:
    """What became of a call that serial PyTorch refuses: exact if every rank raises."""
    try:
        call([fresh(a) for a in call.leaves])
    except Exception as error:
        serial_error = type(error).__name__
        found = on_ranks(RANKS, lambda domain: str(call(sharded_leaves(domain, call))), DEVICE)
    else:
        return None
    internal = {"AttributeError", "AssertionError", "KeyError", "UnboundLocalError"}
    for rank in found:
        kind = rank.why.partition(":")[0]
        if rank.kind == "wrong" or kind in internal - {serial_error}:
            return rank._replace(why=f"accepted: {rank.why}" if rank.kind == "wrong" else rank.why)
    return Outcome("refused" if {rank.kind for rank in found} == {"refused"} else "exact")


class Suite(NamedTuple):
    """One database.

    Attributes:
        entries: returns its entries.
        name: of an entry.
        calls: of an entry, by its first samples.
        outcome: of a call.
    """

    entries: Callable[[], list[Any]]
    name: Callable[[Any], str]
    calls: Callable[[Any, int | None], Iterator[Call]]
    outcome: Callable[[Call], Outcome | None] = outcome


SUITES = {
    "operations": Suite(operations, full_name, calls),
    "operations with out=": Suite(operations, full_name, calls_with_out),
    "wrong arguments": Suite(operations, full_name, calls_of_errors, outcome_of_error),
    "modules": Suite(modules, lambda info: info.name, calls_of_module),
}


@dataclass
class Verdict:
    """Of one operation.

    Attributes:
        name: of the operation.
        counts: how many calls had which outcome.
        examples: one call of each outcome, and why.
        complete: whether all calls were made in the time allowed.
    """

    name: str
    counts: dict[str, int]
    examples: dict[str, str]
    complete: bool = True

    @property
    def word(self) -> str:
        bad = [k for k in ORDER[2:] if self.counts.get(k)]
        if bad:
            return bad[-1]
        if not self.counts.get("refused"):
            return "exact"
        return "partly" if self.counts.get("exact") else "refused"


def judge(
    suite: Suite, entry: Any, samples: int | None = None, seconds: float = math.inf
) -> Verdict | None:
    """The verdict on an operation by its calls; None where it has nothing to shard.

    Args:
        suite: a database.
        entry: one of its entries.
        samples: how many of its samples are taken; None for all.
        seconds: after which no further call is made.
    """
    counts: dict[str, int] = {}
    examples: dict[str, str] = {}
    end, complete = time.monotonic() + seconds, True
    for call in suite.calls(entry, samples):
        if time.monotonic() > end:
            complete = False
            break
        found = suite.outcome(call)
        if found is None:
            continue
        counts[found.kind] = counts.get(found.kind, 0) + 1
        examples.setdefault(found.kind, f"{call.label}: {found.why}"[:400])
    return Verdict(suite.name(entry), counts, examples, complete) if counts else None
