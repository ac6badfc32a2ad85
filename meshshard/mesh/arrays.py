"""Array: what every numpy array of the package is typed as."""

from typing import Any, TypeAlias

import numpy as np

__all__ = ["Array"]

Array: TypeAlias = np.ndarray[Any, Any]
