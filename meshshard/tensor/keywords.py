"""Keywords: names of arguments that torch takes besides those in its signatures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

NUMPY = {"axis": "dim", "keepdims": "keepdim", "x2": "other"}  # as in torch's argument parser
NOT_FIRST = {"condition", "sorted_sequence"}  # arguments before `input`


def signature_names(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Sequence[Any], Any]:
    """Arguments with NumPy's names replaced by torch's, and a keyword `input` as the first."""
    kwargs = {NUMPY.get(name, name): value for name, value in kwargs.items()}
    if "input" in kwargs and not args and NOT_FIRST.isdisjoint(kwargs):
        args = (kwargs.pop("input"),)
    return args, kwargs
