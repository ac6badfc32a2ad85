"""What can go wrong, as a tree.

    MeshshardError
    ├── ReadError        a file or object cannot be turned into a mesh
    ├── MeshError        the mesh contradicts itself: ids, offsets, arities, coordinates
    ├── PartitionError   no valid labels: METIS failed, labels refused, a plan that does not close
    ├── StoreError       a folder of shards is unfinished, damaged, mismatched or in the way
    ├── RenderError      this machine cannot draw
    ├── DomainError      ranks disagree, one is gone, or a collective failed
    └── NoShardRule      a sharded tensor met a function without an exact rule (meshshard.tensor)

    MeshWarning          the input is usable, but something in it deserves a look

A message is one line: what is wrong (file, cell, array), then the remedy; `n_of` counts.
"""

__all__ = [
    "DomainError",
    "MeshError",
    "MeshWarning",
    "MeshshardError",
    "PartitionError",
    "ReadError",
    "RenderError",
    "StoreError",
]


def n_of(n: int, things: str) -> str:
    """What a message says of a number of things: "8 ranks", "1 rank"."""
    return f"{n:,} {things.removesuffix('s') if n == 1 else things}"


class MeshshardError(Exception):
    """Base of every error that meshshard raises on purpose."""


class ReadError(MeshshardError):
    """A file or object cannot be turned into a mesh."""


class MeshError(MeshshardError):
    """The mesh contradicts itself."""


class PartitionError(MeshshardError):
    """No valid partition could be made or proved."""


class StoreError(MeshshardError):
    """A folder of shards is unfinished, damaged, mismatched or in the way."""


class DomainError(MeshshardError):
    """Ranks disagree, one is gone, or a collective failed; says rank, operation and rows."""


class RenderError(MeshshardError):
    """This machine cannot draw."""


class MeshWarning(UserWarning):
    """The input is usable, but something in it deserves a look."""
