"""Errors and warnings of meshshard.

    MeshshardError
    ├── ReadError        a file or object cannot be turned into a mesh
    ├── MeshError        a mesh is inconsistent: ids, offsets, cell sizes, coordinates
    ├── PartitionError   no valid partition: METIS failed, wrong labels, an inconsistent plan
    ├── StoreError       a folder of shards is incomplete, damaged, mismatched or already exists
    ├── RenderError      this machine cannot draw
    ├── DomainError      ranks disagree, a rank has ended, or a collective failed
    └── NoShardRule      a sharded tensor met a function without an exact rule (meshshard.tensor)

    MeshWarning          the input is usable, but should be checked

A message is one line: what is wrong (file, cell, array), then the remedy.
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
    """A count with its noun, for a message: "8 ranks", "1 rank"."""
    return f"{n:,} {things.removesuffix('s') if n == 1 else things}"


class MeshshardError(Exception):
    """Base of every error that meshshard raises on purpose."""


class ReadError(MeshshardError):
    """A file or object cannot be turned into a mesh."""


class MeshError(MeshshardError):
    """A mesh is inconsistent."""


class PartitionError(MeshshardError):
    """No valid partition was found, or a partition is inconsistent."""


class StoreError(MeshshardError):
    """A folder of shards is incomplete, damaged, mismatched or already exists."""


class DomainError(MeshshardError):
    """Ranks disagree, a rank has ended, or a collective failed."""


class RenderError(MeshshardError):
    """This machine cannot draw."""


class MeshWarning(UserWarning):
    """The input is usable, but should be checked."""
