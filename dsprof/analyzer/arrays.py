"""The three types of arrays, and sums by the numbers that rows have."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]


def sums_of(value: Float, *places: tuple[Int, Int]) -> Float:
    """Sums of `value`, [N], over all that has the same numbers: an axis for each (names of its places in order, number
    of each value [N]). What has a number that no place has is left out; NaN where nothing is."""
    at, inside = np.zeros(len(value), np.int64), np.ones(len(value), bool)
    for names, number in places:
        place = np.minimum(np.searchsorted(names, number), max(len(names) - 1, 0))
        inside &= (names[place] == number) if len(names) else False
        at = at * len(names) + place
    shape = tuple(len(names) for names, _ in places)
    size = int(np.prod(shape))
    found = np.bincount(at[inside], value[inside], size).astype(np.float64)
    found[np.bincount(at[inside], minlength=size) == 0] = np.nan
    return found.reshape(shape)
