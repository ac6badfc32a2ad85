"""Array: the type of NumPy arrays in annotations."""

from typing import Any, TypeAlias

import numpy as np

__all__ = ["Array"]

Array: TypeAlias = np.ndarray[Any, Any]
