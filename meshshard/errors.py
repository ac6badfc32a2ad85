"""The tree of errors.

    MeshshardError
    ├── ReadError        a file or object cannot be turned into a mesh
    ├── MeshError        a mesh is inconsistent: ids, offsets, numbers of points, coordinates
    ├── PartitionError   no valid partition: METIS failed, or labels or a plan are invalid
    ├── StoreError       a folder of shards is incomplete, damaged, mismatched or cannot be replaced
    ├── RenderError      this machine cannot render
    ├── DomainError      ranks disagree, a rank is gone, or a collective failed
    └── NoShardRule      a function has no exact rule for sharded tensors (meshshard.tensor)

    MeshWarning          the input is usable, but something in it should be checked

A message is one line: what is wrong (which file, cell, array or rank), then the remedy.
"""

import re

__all__ = [
    "DomainError",
    "MeshError",
    "MeshWarning",
    "MeshshardError",
    "NoShardRule",
    "PartitionError",
    "ReadError",
    "RenderError",
    "StoreError",
    "n_of",
    "printable",
]

# control characters, and those that turn the direction of text
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def n_of(n: int, things: str) -> str:
    """A number of things in a message: "8 ranks", "1 rank"."""
    return f"{n:,} {things.removesuffix('s') if n == 1 else things}"


def printable(text: str) -> str:
    """One line for a terminal: control characters, as in names in files, become escapes."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class MeshshardError(Exception):
    """Base class of all errors that meshshard raises."""


class ReadError(MeshshardError):
    """A file or object cannot be turned into a mesh."""


class MeshError(MeshshardError):
    """A mesh is inconsistent: ids, offsets, numbers of points or coordinates are invalid."""


class PartitionError(MeshshardError):
    """No valid partition: METIS failed, or labels or a plan are invalid."""


class StoreError(MeshshardError):
    """A folder of shards is incomplete, damaged, mismatched or cannot be replaced."""


class DomainError(MeshshardError):
    """Ranks disagree, a rank is gone, or a collective failed; names rank, operation and rows."""


class NoShardRule(MeshshardError, NotImplementedError):  # noqa: N818 - a word of the docs
    """A torch function without an exact rule was called on a sharded tensor."""


class RenderError(MeshshardError):
    """This machine cannot render."""


class MeshWarning(UserWarning):
    """The input is usable, but something in it should be checked."""
