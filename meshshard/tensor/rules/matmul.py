"""Rules of products: the sharded dim is kept, or contracted by an all-reduce of partial sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from meshshard.tensor._torch_private import native
from meshshard.tensor.align import narrow_to_owned, ndim_of, require_same_sharding
from meshshard.tensor.autocast import plus_bias
from meshshard.tensor.rules.batched import batched
from meshshard.tensor.rules.pointwise import pointwise
from meshshard.tensor.rules.table import functions_named, named
from meshshard.tensor.shard_tensor import (
    Rule,
    ShardTensor,
    apply_local,
    name_of,
    refuse,
    sharded_in,
    wrap,
)

ALL_PAIRS = (
    "it multiplies all pairs of rows: use F.scaled_dot_product_attention if a softmax follows"
)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
LETTERS = "abcdefghijlopqrstuvwxyz"  # batch dims; k is contracted, m and n are rows and columns


def _contract(
    func: Any, operands: Sequence[Tensor], labels: Sequence[str], out: str,
    compute: Callable[..., Any],
) -> Any:  # fmt: skip
    """A multilinear operation whose dims have labels, as in einsum.

    Plain operands are narrowed to owned rows along the label of the sharded dim. If the result has
    this label, it is sharded there; else the local products are added over the ranks.
    """
    first = require_same_sharding(func, operands)
    sharding = first._sharding
    if all(x.dtype == torch.bool for x in operands):  # ranks without rows would not raise
        raise NotImplementedError(f"{name_of(func)} is not implemented for bools")
    pairs = list(zip(operands, labels, strict=True))
    names = {label[x._dim] for x, label in pairs if type(x) is ShardTensor}
    if len(names) != 1 or any(label.count(next(iter(names))) > 1 for label in labels):
        raise refuse(func, operands, None, ALL_PAIRS)
    name = names.pop()
    parts = []
    for x, label in pairs:
        if type(x) is not ShardTensor and name in label:
            at = label.index(name)
            if x.shape[at] not in (1, sharding.total):
                why = f"a plain tensor has {x.shape[at]} rows, expected 1 or {sharding.total}"
                raise refuse(func, operands, None, why)
            x = narrow_to_owned(x, sharding, at) if x.shape[at] == sharding.total else x
        parts.append(x)
    with native():
        local = compute(*parts)
    if name in out:
        return wrap(local, sharding, out.index(name))
    return sharding.domain.all_reduce(local)


def matmul(a: Tensor, b: Tensor) -> Any:
    """torch.matmul of vectors, matrices and batches of matrices."""
    na, nb = ndim_of(a), ndim_of(b)
    batch = LETTERS[: max(na, nb) - 2]
    left = "k" if na == 1 else batch[len(batch) - (na - 2) :] + "mk"
    right = "k" if nb == 1 else batch[len(batch) - (nb - 2) :] + "kn"
    out = batch + ("m" if na > 1 else "") + ("n" if nb > 1 else "")
    return _contract(torch.matmul, (a, b), (left, right), out, torch.matmul)


def rmatmul(b: Tensor, a: Tensor) -> Any:
    """Tensor.__rmatmul__."""
    return matmul(a, b)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """F.linear; if the features are sharded, partial products are all-reduced before the bias."""
    ndim = ndim_of(x)
    others = type(weight) is ShardTensor or type(bias) is ShardTensor
    if type(x) is ShardTensor and not others and x._dim < ndim - 1 and ndim_of(weight) > 1:
        return apply_local(F.linear, x, (weight, bias))  # the common case, with the least overhead
    if not sharded_in((x, weight)):
        return plus_bias(F.linear(x, weight), bias)
    if ndim_of(weight) < 2:
        return plus_bias(torch.matmul(x, weight), bias)
    rows = LETTERS[: ndim - 1]
    out = _contract(F.linear, (x, weight), (rows + "k", "nk"), rows + "n", F.linear)
    return plus_bias(out, bias)


_bilinear = batched(F.bilinear, "input1 k, input2 m, weight Okm -> O sum km", pad=True)


def bilinear(input1: Any, input2: Any, weight: Any, bias: Any = None) -> Any:
    """F.bilinear; as in linear, partial products are all-reduced before the bias."""
    product = _bilinear if sharded_in((input1, input2, weight)) else F.bilinear
    out = product(input1, input2, weight)
    return out if bias is None else out + bias


def einsum(*args: Any) -> Any:
    """torch.einsum: the label of the sharded dim is kept or contracted."""
    if not isinstance(args[0], str):
        raise refuse(torch.einsum, args, None, "pass the equation as a string")
    equation, operands = args[0].replace(" ", ""), args[1:]
    operands = tuple(operands[0]) if isinstance(operands[0], (list, tuple)) else operands
    inputs, arrow, out = equation.partition("->")
    labels = inputs.split(",")
    if "..." in equation:
        labels, out = _expand_dots(labels, out, arrow, operands)
    elif not arrow:
        every = "".join(labels)
        out = "".join(sorted(c for c in set(every) if every.count(c) == 1))
    explicit = ",".join(labels) + "->" + out
    dtype = _autocast_dtype(explicit, operands)

    def _compute(*parts: Tensor) -> Tensor:
        local = torch.einsum(explicit, *parts)
        return local if dtype is None else local.to(dtype)

    return _contract(torch.einsum, operands, labels, out, _compute)


def _autocast_dtype(equation: str, operands: Sequence[Tensor]) -> torch.dtype | None:
    """The dtype of an einsum under autocast, None without it.

    torch multiplies dims of size 1 without a matrix product, which autocast leaves as it is, so the
    dtype is that of a small example with the global sizes, not that of the local rows.
    """
    device = operands[0].device.type
    if not torch.is_autocast_enabled(device):
        return None
    small = [
        torch.zeros([min(n, 2) or 2 for n in x.shape], dtype=x.dtype, device=x.device)
        for x in operands
    ]
    return torch.einsum(equation, *small).dtype


def _expand_dots(
    labels: list[str], out: str, arrow: str, operands: Sequence[Tensor]
) -> tuple[list[str], str]:
    """The labels with "..." replaced by unused capital letters, aligned from the right."""
    most = 0
    n_dotted = []
    for label, x in zip(labels, operands, strict=True):
        n = ndim_of(x) - len(label.replace("...", ""))
        most = max(most, n if "..." in label else 0)
        n_dotted.append(n)
    used = set("".join(labels))
    free = [c for c in "ZYXWVUTSRQPONMLKJIHGFEDCBA" if c not in used][:most]
    expanded = [
        label.replace("...", "".join(free[most - n :]))
        for label, n in zip(labels, n_dotted, strict=True)
    ]
    if not arrow:
        every = "".join(labels).replace(".", "")
        out = "..." + "".join(sorted(c for c in set(every) if every.count(c) == 1))
    return expanded, out.replace("...", "".join(free))


def _labeled(func: Callable[..., Any], left: str, right: str, out: str) -> Rule:
    def _rule(a: Tensor, *args: Tensor, **kwargs: Tensor) -> Any:
        (b,) = (*args, *kwargs.values())
        return _contract(func, (a, b), (left, right), out, func)

    return _rule


def added(product: Callable[..., Any]) -> Rule:
    """The rule of addmm, addmv and baddbmm: beta * x + alpha * product(a, b).

    With beta = 0 the values of x are ignored, NaN included.
    """

    def _rule(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
        if x.dtype in INTEGERS:  # torch truncates
            beta, alpha = int(beta), int(alpha)
        scaled = beta * x if beta else _zeros(x)
        return plus_bias(alpha * product(a, b), scaled)

    return _rule


def _zeros(x: Any) -> Any:
    """Zeros in place of all elements, which get the gradient 0."""
    return x.masked_fill(torch.ones_like(x, dtype=torch.bool), 0)


def outer(a: Tensor, b: Tensor) -> Any:
    """torch.outer of a sharded and a plain vector."""
    return _contract(torch.outer, (a, b), ("m", "n"), "mn", torch.outer)


_pointwise_cross = pointwise(torch.linalg.cross)


def _cross_of_rows(a: Tensor, b: Tensor, dim: int) -> Any:
    """The cross product of vectors along the sharded dim: components move between ranks."""
    if a.shape[dim] != 3 or b.shape[dim] != 3:
        raise RuntimeError(f"linalg.cross: inputs dimension {dim} must have length 3")
    (a1, a2), (b1, b2) = ([torch.roll(x, -n, dim) for n in (1, 2)] for x in (a, b))
    return a1 * b2 - a2 * b1


def _cross(func: Callable[..., Any]) -> Rule:
    """The rule of cross products. `torch.cross` without a dim uses the first dim of size 3."""

    def _rule(a: Tensor, b: Tensor, dim: int | None = None) -> Any:
        use_first_of_size_3 = dim is None and func is not torch.linalg.cross and 3 in a.shape
        dim = a.shape.index(3) if use_first_of_size_3 else -1 if dim is None else dim
        back = a.ndim - dim if dim >= 0 else -dim
        if any(ndim_of(x) - x._dim == back for x in (a, b) if type(x) is ShardTensor):
            return _cross_of_rows(a, b, -back)
        return _pointwise_cross(a, b, dim=-back)

    return _rule


RULES: dict[Any, Rule] = {
    **named({
        "matmul __matmul__": matmul, "__rmatmul__": rmatmul,
        "mm": _labeled(torch.mm, "mk", "kn", "mn"),
        "bmm": _labeled(torch.bmm, "bmk", "bkn", "bmn"),
        "mv": _labeled(torch.mv, "mk", "k", "m"),
        "dot": _labeled(torch.dot, "k", "k", ""),
        "vdot": _labeled(torch.vdot, "k", "k", ""),
        "outer ger": outer,
        "addmm": added(torch.mm), "addmv": added(torch.mv), "baddbmm": added(torch.bmm),
        "linear": linear, "bilinear": bilinear, "einsum": einsum,
    }),
    **{f: _cross(f) for f in functions_named("cross")},
}  # fmt: skip
