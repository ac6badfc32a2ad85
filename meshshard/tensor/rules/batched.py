"""Rules of functions that treat samples, matrices or lines separately: exact on local rows.

Their signatures are those of NumPy's generalized ufuncs: the names of the arguments, each with a
letter for each of its last dims, then the dims of the results. `"A nn, B nK -> nK"` is a solver.
All dims before these are batch dims, which broadcast. A small letter is a dim that the function
couples; a capital one is a dim along which it is independent, as the columns K of a right side.
`"x ck, weight Kc -> Kx sum c"` is a function that adds over c, whose parts the ranks can add.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from meshshard.comm import Domain
from meshshard.tensor._torch_private import native
from meshshard.tensor.align import (
    narrow_to_broadcast,
    ndim_of,
    require_same_sharding,
    require_whole_domain,
)
from meshshard.tensor.rules.table import functions_named
from meshshard.tensor.shard_tensor import (
    Rule,
    ShardTensor,
    normalize_dim,
    refuse,
    sharded_in,
    wrap,
)
from meshshard.tensor.sharding import Sharding

__all__ = ["batched", "batched_rules", "labels_of"]

Signature = str | Callable[..., str]
Place = int | str  # of the sharded dim: a batch dim, counted from the right from 1, or a letter
COUPLED = "it couples the sharded dim: gather it, or shard a batch dim"


def batched(
    func: Callable[..., Any], signature: Signature, *, pad: bool = False, may_fail: bool = False
) -> Rule:
    """The rule of a function that is exact on local rows, unless it couples the sharded dim.

    Args:
        func: the torch function.
        signature: see the module; or a function of the arguments that returns it.
        pad: torch refuses an empty batch, so a rank without rows computes one and drops it.
        may_fail: it raises for some values, which is then raised on all ranks.

    Communication: none; with `may_fail` one all-reduce of a number; one of the result if the
        function adds over the sharded dim.
    """

    def _rule(*args: Any, **kwargs: Any) -> Any:
        text = signature if isinstance(signature, str) else signature(*args, **kwargs)
        inputs, outputs, added = _parsed(text)
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        dims = _dims_of(inputs, given)
        sharding, place = _place(func, given, dims, added)
        if place in added:
            require_whole_domain(func, args, sharding.domain)
        parts = {
            key: _owned(func, given[key], labels, sharding, place, pad)
            for key, labels in dims.items()
        }
        given |= parts
        positional = [given.pop(i) for i in range(len(args))]

        def _call() -> Any:
            with native():
                return func(*positional, **given)

        out = _agreed(sharding.domain, _call) if may_fail else _call()
        if place in added:
            return sharding.domain.all_reduce(out)
        return _wrapped(out, outputs, sharding, place, pad)

    return _rule


def batched_rules(table: Mapping[str, Signature], **options: bool) -> dict[Any, Rule]:
    """Rules of functions by names, which blanks separate."""
    return {
        f: batched(f, signature, **options)
        for names, signature in table.items()
        for f in functions_named(names)
    }


def labels_of(ndim: int, coupled: Sequence[int]) -> str:
    """A letter for every dim of a tensor: small for those that are coupled."""
    small = [normalize_dim(d, ndim) for d in coupled]
    letters = (chr(ord("a") + d) for d in range(ndim))
    return "".join(c if d in small else c.upper() for d, c in enumerate(letters))


@lru_cache
def _parsed(text: str) -> tuple[list[tuple[str, str]], list[str], list[str]]:
    """(name, letters) of every argument, the letters of every result, those added over."""
    left, _, right = text.partition("->")
    right, _, added = right.partition(" sum ")
    inputs = [(words[0], "".join(words[1:])) for words in map(str.split, left.split(","))]
    return inputs, [part.strip() for part in right.split(",")], list(added)


def _dims_of(inputs: list[tuple[str, str]], given: dict[Any, Any]) -> dict[Any, str]:
    """The letters of every tensor among the arguments, by position or name."""
    keys = [(name if name in given else i, labels) for i, (name, labels) in enumerate(inputs)]
    return {key: labels for key, labels in keys if isinstance(given.get(key), Tensor)}


def _place(
    func: Any, given: dict[Any, Any], dims: dict[Any, str], added: Sequence[str]
) -> tuple[Sharding, Place]:
    """The sharding, and the place of the sharded dim.

    Raises:
        NoShardRule: the function couples this dim, or arguments are sharded along different ones.
    """
    values = list(given.values())
    first = require_same_sharding(func, values)
    found = {key: x for key, x in given.items() if sharded_in([x])}
    if not found.keys() <= dims.keys():
        raise refuse(func, values, None, "this argument must be plain")
    places = {_place_of(x, dims[key]) for key, x in found.items()}
    if len(places) > 1:
        raise refuse(func, values, None, "the sharded dims of the arguments do not line up")
    place = places.pop()
    if isinstance(place, str) and place.islower() and place not in added:
        raise refuse(func, values, None, COUPLED)
    return first._sharding, place


def _place_of(x: ShardTensor, labels: str) -> Place:
    start = ndim_of(x) - len(labels)
    return start - x._dim if x._dim < start else labels[x._dim - start]


def _dim_at(ndim: int, labels: str, place: Place) -> int:
    """The dim at a place; negative if there is none."""
    if isinstance(place, int):
        return ndim - len(labels) - place
    return ndim - len(labels) + labels.index(place) if place in labels else -1


def _owned(
    func: Any, x: Tensor, labels: str, sharding: Sharding, place: Place, pad: bool
) -> Tensor:
    """Owned rows of an argument; one row of zeros instead of none if `pad`."""
    dim = _dim_at(ndim_of(x), labels, place)
    if dim < 0:
        return x
    if type(x) is not ShardTensor:
        x = narrow_to_broadcast(func, (x,), x, sharding, dim)
        x = x.expand([sharding.own if d == dim else n for d, n in enumerate(x.shape)])
    if sharding.own or not pad:
        return x
    with native():
        return torch.cat(
            [x, x.new_zeros([1 if d == dim else n for d, n in enumerate(x.shape)])], dim
        )


def _agreed(domain: Domain, call: Callable[[], Any]) -> Any:
    """The result of a call; if it fails on any rank, the error is raised on all.

    Communication: one all-reduce of a flag; one gather of objects if it failed.

    Raises:
        LinAlgError: a matrix is singular, or the algorithm did not converge.
    """
    error, out = None, None
    try:
        out = call()
    except RuntimeError as raised:
        error = raised
    failed = torch.tensor([float(error is not None)], device=domain.device)
    if not domain.all_reduce_(failed, "errors", "max").item():
        return out
    messages = domain.share(str(error) if error else None)
    rank, message = next((r, text) for r, text in enumerate(messages) if text is not None)
    raise LinAlgError(f"rank {rank}: {message}") from error


def _wrapped(out: Any, outputs: Sequence[str], sharding: Sharding, place: Place, pad: bool) -> Any:
    """Sharded results; those without the place of the sharded dim are plain."""
    if isinstance(out, (tuple, list)):
        labels = [outputs[min(i, len(outputs) - 1)] for i in range(len(out))]
        each = [_wrapped(o, [n], sharding, place, pad) for o, n in zip(out, labels, strict=True)]
        return type(out)(each)
    if not isinstance(out, Tensor) or type(out) is ShardTensor or outputs[0] == "plain":
        return out
    dim = _dim_at(ndim_of(out), outputs[0], place)
    if dim < 0:
        return out
    with native():
        out = out.narrow(dim, 0, 0) if pad and not sharding.own else out
        return wrap(out, sharding, dim)
