"""Outcomes of calls on simulated ranks, compared with serial PyTorch."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from meshshard.comm import simulate
from meshshard.errors import DomainError
from meshshard.tensor import NoShardRule, ShardTensor

TOLERANCE = {  # relative to the largest number
    torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-5, torch.complex64: 1e-5,
    torch.float16: 1e-2, torch.bfloat16: 1e-1, torch.complex32: 1e-2,
}  # fmt: skip
ORDER = ("exact", "refused", "wrong", "diverged", "error")  # from best to worst


class Outcome(NamedTuple):
    """What became of a call: a word of `ORDER`, and why."""

    kind: str
    why: str = ""


def on_ranks(n_ranks: int, job: Callable[[Any], str], device: str = "cpu") -> list[Outcome]:
    """The outcome of a job on each rank; the job returns what differs from serial, or nothing."""
    found = [Outcome("error", "nothing")] * n_ranks

    def _rank(domain: Any) -> None:
        try:
            wrong = job(domain)
            found[domain.rank] = Outcome("wrong", wrong) if wrong else Outcome("exact")
        except NoShardRule as error:
            found[domain.rank] = Outcome("refused", str(error))
        except DomainError as error:
            found[domain.rank] = Outcome("diverged", str(error))
        except Exception as error:
            found[domain.rank] = Outcome("error", f"{type(error).__name__}: {error}")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        simulate(n_ranks, _rank, device)
    return found


def worst(found: list[Outcome]) -> Outcome:
    """The worst outcome of all ranks; those that must be the same on all ranks have diverged."""
    kinds = {outcome.kind for outcome in found}
    if len(kinds) > 1 and kinds != {"exact", "wrong"}:
        each = (f"rank {r}: {outcome.kind} {outcome.why}" for r, outcome in enumerate(found))
        return Outcome("diverged", "; ".join(each))
    return max(found, key=lambda outcome: ORDER.index(outcome.kind))


def differs(got: Any, value: Any, slack: float = 0.0, compare: bool = True) -> str:
    """What is wrong with one result, empty where nothing is."""
    if not isinstance(value, torch.Tensor):
        if isinstance(got, torch.Tensor):
            return f"a tensor for {type(value).__name__}"
        same = got == value or not compare or (value != value and got != got)
        return "" if same else f"{got!r} for {value!r}"
    if not isinstance(got, torch.Tensor):
        return f"{type(got).__name__} for a tensor"
    if tuple(got.shape) != tuple(value.shape):
        return f"shape {tuple(got.shape)} for {tuple(value.shape)}"
    if got.dtype != value.dtype:
        return f"dtype {got.dtype} for {value.dtype}"
    whole = got.detach().gather() if type(got) is ShardTensor else got.detach()
    return unequal(whole, value.detach(), slack) if compare else ""


def unequal(got: torch.Tensor, value: torch.Tensor, slack: float = 0.0) -> str:
    """How values differ beyond rounding of their dtype, or beyond `slack` if it is larger."""
    got, value = got.resolve_conj().resolve_neg(), value.resolve_conj().resolve_neg()
    if not value.numel():
        return ""
    if not (value.is_floating_point() or value.is_complex()):
        return "" if torch.equal(got, value) else "values differ"
    slack = max(slack, TOLERANCE[value.dtype])
    finite = value.abs()[value.isfinite()]
    scale = max(finite.max().item() if finite.numel() else 1.0, 1e-3 if slack < 1e-6 else 1.0)
    close = torch.allclose(got, value, rtol=slack, atol=slack * scale, equal_nan=True)
    return "" if close else f"values differ by {(got - value).abs().max().item():.2e}"


def global_gradient(domain: Any, leaf: torch.Tensor, grad: Any) -> torch.Tensor | None:
    """The gradient of a sharded leaf; the mean over the ranks of those of a replicated one."""
    if type(leaf) is ShardTensor:
        return None if grad is None else grad.detach().gather()
    part = torch.zeros_like(leaf) if grad is None else grad.detach().clone()
    return domain.all_reduce(part) / domain.size
