"""A PyG convolution that is called with sharded rows and a plain `edge_index`."""

from __future__ import annotations

import warnings
import zlib
from typing import Any

from torch import Tensor

from meshshard.errors import DomainError, MeshWarning
from meshshard.tensor._torch_private import called_by_message_passing
from meshshard.tensor.shard_tensor import ShardTensor

__all__ = ["check_plain_edges"]

REMEDY = (
    "convert the model with nn.convert and pass shard.graph, or "
    "ShardGraph.from_edge_index(edge_index, x.sharding)"
)


def check_plain_edges(x: ShardTensor, rows: Tensor) -> None:
    """Warn once that a convolution gathers the rows of all edges on every rank.

    It is exact if all ranks have the same edges.

    Args:
        x: the rows of the nodes.
        rows: a row of the `edge_index`, if a convolution of PyG selects rows.

    Communication: one gather of objects, if a convolution selects rows.

    Raises:
        DomainError: on every rank, if they have different edges, as `shard.edge_index` is.
    """
    if not called_by_message_passing():
        return
    ids: Any = rows.detach().cpu().contiguous().numpy()
    found = x.sharding.domain.share(zlib.crc32(ids))
    if len(set(found)) > 1:
        raise DomainError(
            "a convolution got sharded rows and an edge_index that differs between the ranks (of "
            f"local rows, as shard.edge_index?): {REMEDY}"
        )
    warnings.warn(
        "a convolution got sharded rows and a plain edge_index: every rank gathers the rows of "
        f"all edges and computes all of them; {REMEDY}",
        MeshWarning,
        stacklevel=2,
    )
