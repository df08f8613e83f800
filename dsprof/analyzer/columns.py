"""Columns of tables as arrays.

What is measured of a rank asks for the same columns of its rows again and again, and of tables as small as a rank's,
pandas takes longer for each such question than numpy does for the answer: `RankRows` asks it once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt
import pandas as pd
from pandas.api.extensions import ExtensionArray
from pandas.arrays import NumpyExtensionArray

from .arrays import Bool, Float, Int

Words = npt.NDArray[np.object_]
Column: TypeAlias = "pd.Series[Any] | ExtensionArray"
Found = TypeVar("Found")


def may_hold(column: Column, wanted: Callable[[str], bool]) -> bool:
    """Whether a row of a category can be what is wanted. It looks at the values that there are, not at the rows."""
    if not isinstance(column.dtype, pd.CategoricalDtype):
        return True
    return any(wanted(str(value)) for value in column.dtype.categories.tolist())


def _array_of(column: Column) -> ExtensionArray:
    return column.array if isinstance(column, pd.Series) else column


def is_one_of(column: Column, *values: str) -> Bool:
    """Which rows have one of these values. Of a category only codes are compared, which takes a tenth of what comparing
    a column with a word does."""
    array: Any = _array_of(column)
    if not isinstance(array, pd.Categorical):
        found: Bool = pd.Series(array).isin(values).to_numpy(bool)
        return found
    words = array.categories.tolist()
    codes = array.codes
    places = [words.index(value) for value in values if value in words]
    chosen: Bool = np.zeros(len(codes), bool)
    for place in places:
        chosen |= codes == place
    return chosen


def codes_of(column: Column) -> tuple[Int, Words]:
    """A number for each value, in order of the values (as text), and the values; -1: none. Of a category nothing is
    looked at but its codes."""
    array: Any = _array_of(column)
    if not isinstance(array, pd.Categorical):
        array = pd.Categorical(array)
    names = np.array([str(value) for value in array.categories.tolist()], object)
    order = np.argsort(names, kind="stable")
    place = np.append(np.argsort(order), -1)
    return place[array.codes].astype(np.int64, copy=False), names[order]


class RankRows:
    """Rows of one rank or of several, whose columns are made arrays when they are asked for first, and kept. The arrays
    are shared: nothing writes to them."""

    def __init__(self, table: pd.DataFrame) -> None:
        self.table = table
        self._kept: dict[Hashable, Any] = {}
        self._arrays: dict[str, ExtensionArray] = {}

    def __len__(self) -> int:
        return len(self.table)

    def whole(self, name: str, missing: int = 0) -> Int:
        """A column of whole numbers, with `missing` where there is none."""
        return self._once((name, missing), lambda: self.array(name).to_numpy(np.int64, na_value=missing))

    def real(self, name: str) -> Float:
        """A column of numbers; NaN where there is none."""
        return self._once((name, "real"), lambda: _real(self.array(name)))

    def known(self, name: str) -> Bool:
        """Which rows have a value."""
        return self._once((name, "known"), lambda: ~np.asarray(self.array(name).isna(), bool))

    def true(self, name: str, missing: bool) -> Bool:
        """A column of yes and no, with `missing` where neither is told."""
        return self._once((name, "true", missing), lambda: self.array(name).to_numpy(bool, na_value=missing))

    def are(self, name: str, *values: str) -> Bool:
        """Which rows have one of these values."""
        return self._once((name, values), lambda: self._are(name, values))

    def _are(self, name: str, values: Sequence[str]) -> Bool:
        if isinstance(self.array(name), pd.Categorical):
            return is_one_of(self.array(name), *values)
        codes, words = self.codes(name)  # of words, each is looked at once for all questions
        return np.isin(codes, np.flatnonzero(np.isin(words, values)))

    def codes(self, name: str) -> tuple[Int, Words]:
        """`codes_of` the column."""
        return self._once((name, "codes"), lambda: codes_of(self.array(name)))

    def words(self, name: str, place: Int) -> Words:
        """The values at these places, as text; "nan" where there is none."""
        codes, words = self.codes(name)
        found: Words = np.append(words, "nan")[codes[place]]
        return found

    def may_hold(self, name: str, wanted: Callable[[str], bool]) -> bool:
        """Whether a row can be what is wanted (`may_hold`)."""
        return may_hold(self.array(name), wanted)

    def take(self, columns: Sequence[str], place: Int) -> pd.DataFrame:
        """A table of these columns, of the rows at these places."""
        return pd.DataFrame(self.take_arrays(columns, place), index=self.table.index.take(place), copy=False)

    def take_arrays(self, columns: Sequence[str], place: Int) -> dict[str, ExtensionArray]:
        """The same as arrays: what is joined with other ranks' before anybody looks at it needs to be no table."""
        return {name: self.array(name).take(place) for name in columns}

    def by_step(self, value: Float, place: Int, ranks: Int, steps: Int) -> Float:
        """Sums of `value`, one a row, over the rows at these places, [R, S] by these ranks and steps, which are in
        order; NaN where there is no row."""
        # Whole columns made wider are not kept: of many ranks they are large.
        rank, step = (np.asarray(self.array(name))[place] for name in ("rank", "step"))
        inside = np.isin(rank, ranks) & np.isin(step, steps)
        at = np.searchsorted(ranks, rank[inside]) * len(steps) + np.searchsorted(steps, step[inside])
        size = len(ranks) * len(steps)
        found = np.bincount(at, value[place[inside]], size).astype(np.float64)
        found[np.bincount(at, minlength=size) == 0] = np.nan
        return found.reshape(len(ranks), len(steps))

    def array(self, name: str) -> ExtensionArray:
        """A column. A table makes a Series each time that it is asked for one, which takes longer than most answers."""
        if name not in self._arrays:
            self._arrays[name] = self.table[name].array
        return self._arrays[name]

    def _once(self, key: Hashable, make: Callable[[], Found]) -> Found:
        if key not in self._kept:
            self._kept[key] = make()
        return cast(Found, self._kept[key])


def _real(array: ExtensionArray) -> Float:
    if isinstance(array, NumpyExtensionArray) and array.to_numpy().dtype == np.float64:
        found: Float = array.to_numpy().view()  # pandas, told to put NaN where NaN is, makes a copy
        found.flags.writeable = False
        return found
    return cast(Float, array.to_numpy(np.float64, na_value=np.nan))


def as_rows(rows: pd.DataFrame | RankRows, known: RankRows | None = None) -> RankRows:
    """known: what has been made of a table already, which may be this one."""
    if known is not None and known.table is rows:
        return known
    return rows if isinstance(rows, RankRows) else RankRows(rows)
