"""The three types of arrays, the places of stretches of them, and the rows that columns of them have."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.floating[Any]]
"""Of any precision: what the steps of many ranks consist of is float32 (`graph.segment_work`)."""
Int = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

MOST_ROWS: Final = 1 << 62
"""Numbers that there may be for the rows of some columns, as one number each."""


def places(first: Int, count: Int) -> Int:
    """`count` places from each `first` on, of all one behind the other."""
    found: Int = np.repeat(first - (np.cumsum(count) - count), count) + np.arange(int(count.sum()))
    return found


def different_rows(*columns: Int) -> list[list[int]]:
    """The different rows of columns of whole numbers, in order.

    Each row is one number, as far as all of them fit: numpy compares rows byte by byte, which takes ten times as long.
    """
    if not len(columns[0]):
        return []
    least = [int(column.min()) for column in columns]
    spans = [int(column.max()) - low + 1 for column, low in zip(columns, least, strict=True)]
    if math.prod(spans) > MOST_ROWS:
        rows: list[list[int]] = np.unique(np.stack(columns, axis=1), axis=0).tolist()
        return rows
    number = np.ravel_multi_index([column - low for column, low in zip(columns, least, strict=True)], spans)
    found: list[list[int]] = (np.stack(np.unravel_index(np.unique(number), spans), axis=1) + least).tolist()
    return found
