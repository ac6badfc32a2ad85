"""Rules of products: the sharded dim is kept, or contracted by an all-reduce of partial sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from meshshard.tensor.align import native_ndim, own_rows, require_same_sharding
from meshshard.tensor.rules.pointwise import broadcasting
from meshshard.tensor.shard_tensor import Rule, ShardTensor, native, refuse, wrap

__all__ = ["RULES", "contract"]

ALL_PAIRS = (
    "all pairs of rows meet: F.scaled_dot_product_attention where a softmax follows, or gather"
)
LETTERS = "abcdefghijlopqrstuvwxyz"  # batch dims; k is contracted, m and n are rows and columns


def contract(
    func: Any, operands: Sequence[Tensor], labels: Sequence[str], out: str,
    compute: Callable[..., Any],
) -> Any:  # fmt: skip
    """A multilinear operation whose dims have labels.

    Plain operands give their own part along the sharded label. Where the result has the label it
    is sharded there; else own products are partial sums, added over the ranks.
    """
    first = require_same_sharding(func, operands)
    sharding = first._sharding
    pairs = list(zip(operands, labels, strict=True))
    names = {lab[x._dim] for x, lab in pairs if type(x) is ShardTensor}
    if len(names) != 1 or any(lab.count(next(iter(names))) > 1 for lab in labels):
        raise refuse(func, operands, None, ALL_PAIRS)
    name = names.pop()
    parts = []
    for x, lab in pairs:
        if type(x) is not ShardTensor and name in lab:
            at = lab.index(name)
            if x.shape[at] not in (1, sharding.total):
                why = f"a plain tensor has {x.shape[at]} rows for {sharding.total}"
                raise refuse(func, operands, None, why)
            x = own_rows(x, sharding, at) if x.shape[at] == sharding.total else x
        parts.append(x)
    with native():
        local = compute(*parts)
    if name in out:
        return wrap(local, sharding, out.index(name))
    return sharding.domain.all_reduce(local)


def matmul(a: Tensor, b: Tensor) -> Any:
    """torch.matmul, with its batch dims and vectors."""
    na, nb = native_ndim(a), native_ndim(b)
    batch = LETTERS[: max(na, nb) - 2]
    left = "k" if na == 1 else batch[len(batch) - (na - 2) :] + "mk"
    right = "k" if nb == 1 else batch[len(batch) - (nb - 2) :] + "kn"
    out = batch + ("m" if na > 1 else "") + ("n" if nb > 1 else "")
    return contract(torch.matmul, (a, b), (left, right), out, torch.matmul)


def rmatmul(b: Tensor, a: Tensor) -> Any:
    """The other operand's matmul."""
    return matmul(a, b)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """X W^T + b: rows alone; where features are sharded, partial sums are added, then the bias."""
    ndim = native_ndim(x)
    if type(x) is ShardTensor and type(weight) is not ShardTensor and x._dim < ndim - 1:
        with native():
            return wrap(F.linear(x, weight, bias), x._sharding, x._dim)
    rows = LETTERS[: ndim - 1]
    out = contract(F.linear, (x, weight), (rows + "k", "nk"), rows + "n", F.linear)
    return out if bias is None else out + bias


def bilinear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Rows alone."""
    first = require_same_sharding(F.bilinear, (x, y, weight))
    both = type(x) is ShardTensor and type(y) is ShardTensor and type(weight) is not ShardTensor
    if not both or first._dim == native_ndim(first) - 1:
        raise refuse(F.bilinear, (x, y, weight), None, "both inputs must be sharded by rows")
    with native():
        return wrap(F.bilinear(x, y, weight, bias), first._sharding, first._dim)


def einsum(*args: Any) -> Any:
    """torch.einsum: the label of the sharded dim is kept or contracted."""
    if not isinstance(args[0], str):
        raise refuse(torch.einsum, args, None, "give the equation as a string")
    equation, operands = args[0].replace(" ", ""), args[1:]
    operands = tuple(operands[0]) if isinstance(operands[0], (list, tuple)) else operands
    inputs, arrow, out = equation.partition("->")
    labels = inputs.split(",")
    if "..." in equation:
        labels, out = _without_dots(labels, out, arrow, operands)
    elif not arrow:
        every = "".join(labels)
        out = "".join(sorted(c for c in set(every) if every.count(c) == 1))
    spelled = ",".join(labels) + "->" + out
    return contract(torch.einsum, operands, labels, out, lambda *x: torch.einsum(spelled, *x))


def _without_dots(
    labels: list[str], out: str, arrow: str, operands: Sequence[Tensor]
) -> tuple[list[str], str]:
    """Name the dims that dots stand for, by capital letters, aligned from the right."""
    most = 0
    named = []
    for lab, x in zip(labels, operands, strict=True):
        n = native_ndim(x) - len(lab.replace("...", ""))
        most = max(most, n if "..." in lab else 0)
        named.append(n)
    used = set("".join(labels))
    free = [c for c in "ZYXWVUTSRQPONMLKJIHGFEDCBA" if c not in used][:most]
    done = [
        lab.replace("...", "".join(free[most - n :])) for lab, n in zip(labels, named, strict=True)
    ]
    if not arrow:
        every = "".join(labels).replace(".", "")
        out = "..." + "".join(sorted(c for c in set(every) if every.count(c) == 1))
    return done, out.replace("...", "".join(free))


def _labeled(func: Callable[..., Any], left: str, right: str, out: str) -> Rule:
    def _rule(a: Tensor, b: Tensor) -> Any:
        return contract(func, (a, b), (left, right), out, func)

    return _rule


def _added(product: Callable[..., Any]) -> Rule:
    """Addmm and its kin: beta times the first, plus alpha times the product of the others."""

    def _rule(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
        return beta * x + alpha * product(a, b)

    return _rule


def outer(a: Tensor, b: Tensor) -> Any:
    """Outer product of a sharded and a plain vector."""
    return contract(torch.outer, (a, b), ("m", "n"), "mn", torch.outer)


def _cross(func: Callable[..., Any]) -> Rule:
    """Vector products: rows alone. `torch.cross` without a dim takes the first of three numbers."""

    def _rule(a: Tensor, b: Tensor, dim: int | None = None) -> Any:
        of_three = dim is None and func is not torch.linalg.cross and 3 in a.shape
        dim = a.shape.index(3) if of_three else -1 if dim is None else dim
        back = a.ndim - dim if dim >= 0 else -dim
        if any(native_ndim(x) - x._dim == back for x in (a, b) if type(x) is ShardTensor):
            raise refuse(func, (a, b), None, "its three numbers lie along the sharded dim")
        return broadcasting(torch.linalg.cross)(a, b, dim=-back)

    return _rule


def _of_matrices(func: Callable[..., Any]) -> Rule:
    """A function of each of many matrices, of which the sharded dim counts them."""

    def _rule(x: Any, *args: Any, **kwargs: Any) -> Any:
        if x._dim >= native_ndim(x) - 2:
            raise refuse(func, (x,), kwargs, "the matrix itself is sharded")
        with native():
            return wrap(func(x, *args, **kwargs), x._sharding, x._dim)

    return _rule


def _both(name: str, rule: Rule) -> dict[Any, Rule]:
    homes = (torch, torch.Tensor, torch.linalg, torch._C._nn, F)
    return {f: rule for h in homes if callable(f := getattr(h, name, None))}


RULES: dict[Any, Rule] = {
    **_both("matmul", matmul), torch.Tensor.__matmul__: matmul, torch.Tensor.__rmatmul__: rmatmul,
    **_both("mm", _labeled(torch.mm, "mk", "kn", "mn")),
    **_both("bmm", _labeled(torch.bmm, "bmk", "bkn", "bmn")),
    **_both("mv", _labeled(torch.mv, "mk", "k", "m")),
    **_both("dot", _labeled(torch.dot, "k", "k", "")),
    **_both("vdot", _labeled(torch.vdot, "k", "k", "")),
    **_both("outer", outer), **_both("ger", outer),
    **_both("addmm", _added(torch.mm)), **_both("addmv", _added(torch.mv)),
    **_both("baddbmm", _added(torch.bmm)),
    **_both("linear", linear), **_both("bilinear", bilinear), torch.bilinear: bilinear,
    **{f: _cross(f) for f in (torch.cross, torch.Tensor.cross, torch.linalg.cross)},
    **{f: _of_matrices(f) for n in ("det", "inv", "inverse", "pinv", "eigvalsh", "svdvals")
       for f in _both(n, matmul)},
    torch.einsum: einsum, torch.functional.einsum: einsum,
}  # fmt: skip
