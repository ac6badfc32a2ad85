"""take_rows: global rows by number, from the ranks that own them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshshard.comm.linear import AllToAll, apply
from meshshard.tensor._torch_private import native
from meshshard.tensor.align import require_whole_domain
from meshshard.tensor.shard_tensor import ShardTensor, wrap
from meshshard.tensor.sharding import Sharding

__all__ = ["sharding_of_rows", "take_rows"]


def sharding_of_rows(rows: Tensor, old: Sharding, sizes: Sequence[int]) -> Sharding:
    """The sharding of rows that are taken by number; each keeps its row in the source.

    Random numbers are keyed by it, so they move with the row.

    Args:
        rows: as in `take_rows`.
        old: sharding of the tensor from which they are taken.
        sizes: number of rows that every rank wants.

    Communication: that of `take_rows`, without backward, if rows are not numbered as in the source.
    """
    new = Sharding(old.domain, sizes)
    if old.origin is None:
        return new
    sources = wrap(old.sources(rows.device).clone(), old, 0)
    return Sharding(old.domain, sizes, take_rows(sources, rows, new).to_local())


def take_rows(x: ShardTensor, rows: Tensor, sharding: Sharding) -> ShardTensor:
    """Rows of a sharded tensor by global number, on the ranks that want them.

    Gradients are added where several ranks, or one rank several times, take the same row.

    Args:
        x: sharded along any dim.
        rows: (sharding.own,) int64 global rows of `x` that this rank wants, each in 0 to
            `x.sharding.total` - 1; in any order, repeats allowed.
        sharding: of the result.

    Raises:
        NoShardRule: the domain is that of a deep halo, which has some of the rows.

    Communication: one all-to-all of counts, one of row numbers; one of rows forward and backward.
    """
    old = x._sharding
    domain = old.domain
    require_whole_domain("a permutation of rows", (x,), domain)
    with native():
        values = x.movedim(x._dim, 0)
        if domain.size > 1:
            order, want = domain.group_by_rank(old.owners(rows))
            requested, send = domain.route(rows[order], want)
            sent = values.index_select(0, requested - old.first)
            received = apply(AllToAll(domain, tuple(send), tuple(want)), sent)
            back = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order)).to(order))
            values = received.index_select(0, back)
        else:
            values = values.index_select(0, rows)
        return wrap(values.movedim(0, x._dim), sharding, x._dim)
