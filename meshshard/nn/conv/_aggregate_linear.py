"""A linear layer of aggregated neighbors, W S x + V z + b, computed tile by tile.

S is a sum, mean or maximum over in-edges. A tile of some 2,000 rows of S x is multiplied while it
is in the cache. If S is linear, the gradients have the same form: with t = S* g, those of x and W
are t W and t^T x; maxima are recomputed. So neither S x nor t is ever whole in memory.

What it buys, against the same products on whole arrays (`_untiled`; 128 channels, about 6 edges per
node, one thread of a Xeon with 1.25 MiB of L2, forward and backward): memory beyond the input is
0.54 (SAGE) and 0.77 (GCN) at 490,000 nodes; time is 0.80 and 0.98 at 200,000 nodes with glibc's
defaults, 1.10 and 1.28 where glibc keeps freed memory. On a GPU there is one tile.
`benchmarks/results/graphs.json` compares with PyG.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from meshshard.comm import linear
from meshshard.nn.graph._sparse import MaxBackward, SegmentSum, segment_max
from meshshard.nn.graph.aggregate import NeighborSum
from meshshard.tensor import ShardGraph, ShardTensor
from meshshard.tensor.shard_tensor import local_of

__all__ = ["aggregate_linear"]

MIN_ROWS = 64  # matrix products of very few rows are rounded in another order


def aggregate_linear(
    op: NeighborSum | SegmentSum,
    graph: ShardGraph,
    pair: tuple[Any, Any],
    weight: Tensor,
    bias: Any = None,
    root: Any = None,
) -> Any:
    """W S x + V z + b for every node, rounded as two separate products would be.

    Args:
        op: S, a sum or mean of owned rows; or the in-edges over whose local rows the maximum is
            taken.
        graph: the edges.
        pair: x, (n_sources, in) rows of the sources, and z, (n_nodes, width) rows of the nodes,
            which may be x; sharded, or plain on one rank.
        weight: W, (out, in).
        bias: b, (out,), or None.
        root: V, (out, width), or None.

    Returns:
        (n_nodes, out) rows, sharded like the nodes if x is sharded.

    Communication: one exchange, and one backward if x requires a gradient.
    """
    x = local_of(pair[0])
    z: Tensor | None = x if pair[1] is pair[0] else local_of(pair[1])
    if isinstance(op, SegmentSum):
        x = graph.local(x)
    z = None if root is None or z is x else z
    # Where x needs no gradient, S x is kept, so that nothing is sent in the backward pass.
    keep_sums = torch.is_grad_enabled() and not x.requires_grad
    call: Any = _untiled if keep_sums else _AggregateLinear.apply
    out = call(op, x, weight, bias, root, z)
    return ShardTensor.from_local(out, graph.nodes) if type(pair[0]) is ShardTensor else out


def _untiled(op: Any, x: Tensor, weight: Tensor, bias: Any, root: Any, z: Any) -> Tensor:
    rows = segment_max(op, x) if isinstance(op, SegmentSum) else linear.apply(op, x)
    out = F.linear(rows, weight, bias)
    return out if root is None else out + F.linear(x if z is None else z, root)


class _AggregateLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, op: Any, x: Tensor, weight: Tensor, bias: Any, root: Any, z: Any
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias, root, z)
        ctx.op = op
        own = None if root is None else x if z is None else z
        out = x.new_empty(op.rows_out, len(weight))
        tiles = op.tiles(x, "max") if isinstance(op, SegmentSum) else op.tiles(x)
        for where, rows in tiles:
            target = None if own is None else own[where]
            if isinstance(where, slice):
                _product(rows, weight, bias, root, target, out[where])
            else:
                out.index_copy_(0, where, _padded_product(rows, weight, bias, root, target))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, bias, root, z = ctx.saved_tensors
        if torch.is_grad_enabled():
            return None, *_differentiable_gradients(ctx, grad)
        grad = grad.contiguous()
        to_root = torch.zeros_like(root) if root is not None and z is None else None
        to_x, to_weight = torch.empty_like(x), torch.zeros_like(weight)
        backward = _backward_of_max if isinstance(ctx.op, SegmentSum) else _backward_of_sum
        for rows in backward(ctx.op, x, weight, grad, to_x, to_weight):
            if to_root is not None:
                to_x[rows].addmm_(grad[rows], root)
                to_root.addmm_(grad[rows].t(), x[rows])
        to_z = None
        if z is not None and root is not None:
            to_root, to_z = grad.t() @ z, grad @ root
        return None, to_x, to_weight, None if bias is None else grad.sum(0), to_root, to_z


def _differentiable_gradients(ctx: Any, grad: Tensor) -> Iterator[Any]:
    """Gradients by ordinary operations, of views: one input may have been computed from another."""
    views: Any = [None if a is None else a.view_as(a) for a in ctx.saved_tensors]
    needed = ctx.needs_input_grad[1:]
    inputs = [a if n else None for a, n in zip(views, needed, strict=True)]
    leaves = [a for a in inputs if a is not None]
    found = torch.autograd.grad(_untiled(ctx.op, *views), leaves, grad, create_graph=True)
    grads = iter(found)
    return (None if a is None else next(grads) for a in inputs)


def _backward_of_sum(
    op: NeighborSum, x: Tensor, weight: Tensor, grad: Tensor, to_x: Tensor, to_weight: Tensor
) -> Iterator[slice]:
    """Write the gradients of x and W tile by tile; yield the rows of x that are written."""
    for where, rows in op.adjoint().tiles(grad):
        if isinstance(where, slice):
            torch.mm(rows, weight, out=to_x[where])
            yield where
        else:
            to_x.index_add_(0, where, rows @ weight)
        to_weight.addmm_(rows.t(), x[where])


def _backward_of_max(
    op: SegmentSum, x: Tensor, weight: Tensor, grad: Tensor, to_x: Tensor, to_weight: Tensor
) -> Iterator[slice]:
    """The same for maxima, which are recomputed."""
    to_x.zero_()
    for where, top in op.tiles(x, "max"):
        MaxBackward(op, x, top, where.start).add_to(to_x, grad[where] @ weight)
        to_weight.addmm_(grad[where].t(), top)
        yield where


def _product(rows: Tensor, weight: Tensor, bias: Any, root: Any, own: Any, out: Tensor) -> None:
    if bias is None:
        torch.mm(rows, weight.t(), out=out)
    else:
        torch.addmm(bias, rows, weight.t(), out=out)
    if root is not None:
        out.addmm_(own, root.t())


def _padded_product(rows: Tensor, weight: Tensor, bias: Any, root: Any, own: Any) -> Tensor:
    """The product of a few rows, rounded as among many."""
    n, padding = len(rows), max(0, MIN_ROWS - len(rows))
    rows = F.pad(rows, (0, 0, 0, padding))
    own = None if own is None else F.pad(own, (0, 0, 0, padding))
    out = rows.new_empty(len(rows), len(weight))
    _product(rows, weight, bias, root, own, out)
    return out[:n]
