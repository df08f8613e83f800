"""Columns of tables as arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from .arrays import Bool, Int

Words = npt.NDArray[np.object_]


def may_hold(column: pd.Series[Any], wanted: Callable[[str], bool]) -> bool:
    """Whether a row of a category can be what is wanted. It looks at the values that there are, not at the rows."""
    if not isinstance(column.dtype, pd.CategoricalDtype):
        return True
    return any(wanted(str(value)) for value in column.dtype.categories.tolist())


def is_one_of(column: pd.Series[Any], *values: str) -> Bool:
    """Which rows have one of these values. Of a category only codes are compared, which takes a tenth of what comparing
    a column with a word does."""
    if not isinstance(column.dtype, pd.CategoricalDtype):
        found: Bool = column.isin(values).to_numpy(bool)
        return found
    words = column.dtype.categories.tolist()
    codes = column.array.codes
    places = [words.index(value) for value in values if value in words]
    chosen: Bool = np.zeros(len(codes), bool)
    for place in places:
        chosen |= codes == place
    return chosen


def codes_of(column: pd.Series[Any]) -> tuple[Int, Words]:
    """A number for each value, in order of the values (as text), and the values; -1: none. Of a category nothing is
    looked at but its codes."""
    categories = column.astype("category").cat
    names = categories.categories.astype(str).to_numpy(object)
    order = np.argsort(names, kind="stable")
    place = np.append(np.argsort(order), -1)
    return place[categories.codes.to_numpy()].astype(np.int64), names[order]
