"""The three types of arrays, and the places of stretches of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]


def places(first: Int, count: Int) -> Int:
    """`count` places from each `first` on, of all one behind the other."""
    found: Int = np.repeat(first - (np.cumsum(count) - count), count) + np.arange(int(count.sum()))
    return found
