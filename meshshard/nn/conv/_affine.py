"""Affine: W S x + V z + b, for sums, means or maxima S over in-edges, multiplied while cached.

Where S is linear, gradients look alike: with t = S* g those of x and W are t W and t^T x. Maxima
are found again. So neither S x nor t is ever whole in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from meshshard.comm import linear
from meshshard.nn.graph._sparse import Spread, Total, largest
from meshshard.nn.graph.aggregate import NeighborSum

__all__ = ["affine"]

FEW = 64  # rows: products of very few are rounded in another order


def affine(
    op: NeighborSum | Total,
    x: Tensor,
    weight: Tensor,
    bias: Any = None,
    root: Any = None,
    z: Any = None,
) -> Tensor:
    """(own nodes, out) rows weight S x + root z + bias, in the order of rounding of two products.

    Args:
        op: S, sums or means of own rows; or the edges, of whose local rows the largest are taken.
        x: (own or local sources, in) rows.
        weight: (out, in) of what is summed.
        bias: (out,), if any.
        root: (out, width) of own rows, if they count.
        z: (own nodes, width) own rows where they are not x.

    Communication: of sums one exchange, and one backward where x wants a gradient.
    """
    if torch.is_grad_enabled() and not x.requires_grad:
        return _plain(op, x, weight, bias, root, z)  # sums kept, so nothing is sent backward
    out: Tensor = _Affine.apply(op, x, weight, bias, root, z)  # type: ignore[no-untyped-call]
    return out


def _plain(op: Any, x: Tensor, weight: Tensor, bias: Any, root: Any, z: Any) -> Tensor:
    rows = largest(op, x) if isinstance(op, Total) else linear.apply(op, x)
    out = F.linear(rows, weight, bias)
    return out if root is None else out + F.linear(x if z is None else z, root)


class _Affine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, op: Any, x: Tensor, weight: Tensor, bias: Any, root: Any, z: Any
    ) -> Tensor:
        """The value."""
        ctx.save_for_backward(x, weight, bias, root, z)
        ctx.op = op
        own = x if z is None else z
        out = x.new_empty(op.rows_out, len(weight))
        for where, rows in op.parts(x, True) if isinstance(op, Total) else op.parts(x):
            if isinstance(where, slice):
                _product(rows, weight, bias, root, own[where], out[where])
            else:
                out.index_copy_(0, where, _few(rows, weight, bias, root, own[where]))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Differentiable where that is asked."""
        x, weight, bias, root, z = ctx.saved_tensors
        if torch.is_grad_enabled():
            return None, *_again(ctx, grad)
        grad = grad.contiguous()
        to_root = torch.zeros_like(root) if root is not None and z is None else None
        to_x, to_weight = torch.empty_like(x), torch.zeros_like(weight)
        back = _from_tops if isinstance(ctx.op, Total) else _from_sums
        for where in back(ctx.op, x, weight, grad, to_x, to_weight):
            if to_root is not None:
                to_x[where].addmm_(grad[where], root)
                to_root.addmm_(grad[where].t(), x[where])
        to_z = None
        if z is not None and root is not None:
            to_root, to_z = grad.t() @ z, grad @ root
        return None, to_x, to_weight, None if bias is None else grad.sum(0), to_root, to_z


def _again(ctx: Any, grad: Tensor) -> Iterator[Any]:
    """Gradients that have gradients, of views: one argument may have been made of another."""
    views: Any = [None if a is None else a.view_as(a) for a in ctx.saved_tensors]
    wanted = ctx.needs_input_grad[1:]
    given = [a if w else None for a, w in zip(views, wanted, strict=True)]
    leaves = [a for a in given if a is not None]
    out = _plain(ctx.op, *views)
    found = iter(torch.autograd.grad(out, leaves, grad, create_graph=True))
    return (None if a is None else next(found) for a in given)


def _from_sums(
    op: NeighborSum, x: Tensor, weight: Tensor, grad: Tensor, to_x: Tensor, to_weight: Tensor
) -> Iterator[slice]:
    """Rows of the transpose, multiplied while cached; which of them are there."""
    for where, rows in op.adjoint().parts(grad):
        if isinstance(where, slice):
            torch.mm(rows, weight, out=to_x[where])
            yield where
        else:
            to_x.index_add_(0, where, rows @ weight)
        to_weight.addmm_(rows.t(), x[where])


def _from_tops(
    op: Total, x: Tensor, weight: Tensor, grad: Tensor, to_x: Tensor, to_weight: Tensor
) -> Iterator[slice]:
    """Maxima, found again, and gradients to where they were found."""
    to_x.zero_()
    for where, top in op.parts(x, True):
        Spread(op, x, top, where.start).add(to_x, grad[where] @ weight)
        to_weight.addmm_(grad[where].t(), top)
        yield where


def _product(rows: Tensor, weight: Tensor, bias: Any, root: Any, own: Tensor, out: Tensor) -> None:
    if bias is None:
        torch.mm(rows, weight.t(), out=out)
    else:
        torch.addmm(bias, rows, weight.t(), out=out)
    if root is not None:
        out.addmm_(own, root.t())


def _few(rows: Tensor, weight: Tensor, bias: Any, root: Any, own: Tensor) -> Tensor:
    """Some rows, as they would be among many."""
    n, more = len(rows), max(0, FEW - len(rows))
    rows, own = (F.pad(a, (0, 0, 0, more)) for a in (rows, own))
    out = rows.new_empty(len(rows), len(weight))
    _product(rows, weight, bias, root, own, out)
    return out[:n]
