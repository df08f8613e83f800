"""Rows of the trace as they are added, block by block, and all of them as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from dsprof.schema import COLUMNS

from .events import UNKNOWN

Int = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Coded:
    """A column of words, each as its place in `words`; UNKNOWN: none."""

    codes: Int
    words: Sequence[str]

    def __getitem__(self, chosen: npt.NDArray[Any]) -> Coded:
        return Coded(self.codes[chosen], self.words)

    @classmethod
    def of(cls, column: Sequence[str | None]) -> Coded:
        known: dict[str | None, int] = {None: UNKNOWN}
        codes = [known.setdefault(word, len(known) - 1) for word in column]
        return cls(np.array(codes, np.int64), [word for word in known if word is not None])


Column = str | Coded | Int
"""One word for all rows, or of each its word or its number, which is UNKNOWN where it is none."""


class RowBlocks:
    def __init__(self) -> None:
        self._blocks: list[tuple[int, dict[str, Column]]] = []

    def add(self, count: int, **columns: Column) -> None:
        if count:
            self._blocks.append((count, columns))

    def table(self) -> pd.DataFrame:
        """The columns of `schema.COLUMNS`, `rank` 0, in order of time; of two that begin together the longer one first.
        What no block has is null; the step is -1, the source `imported`."""
        total = sum(count for count, _ in self._blocks)
        start, length = self._numbers("start_ns", total, 0), self._numbers("dur_ns", total, 0)
        order = np.lexsort((-length, start))
        columns: dict[str, Any] = {}
        for name, kind in COLUMNS.items():
            if kind == "category":
                columns[name] = self._words(name, total, order)
            elif kind in ("int64", "int32", "int16"):
                default = -1 if name == "step" else 0
                columns[name] = self._numbers(name, total, default)[order].astype(kind)
            elif kind.startswith("Int"):
                values = self._numbers(name, total, UNKNOWN)[order]
                columns[name] = pd.arrays.IntegerArray(values.astype(kind.lower()), values == UNKNOWN)
            elif kind == "boolean":
                known = name == "ended"
                columns[name] = pd.arrays.BooleanArray(np.full(total, known), np.full(total, not known))
            else:
                columns[name] = np.full(total, np.nan)
        return pd.DataFrame(columns, copy=False)

    def _numbers(self, name: str, total: int, missing: int) -> Int:
        result = np.full(total, missing, np.int64)
        at = 0
        for count, columns in self._blocks:
            value = columns.get(name)
            if isinstance(value, np.ndarray):
                result[at : at + count] = value
            at += count
        return result

    def _words(self, name: str, total: int, order: Int) -> pd.Categorical:
        codes, known = np.full(total, UNKNOWN, np.int32), dict[str, int]()
        at = 0
        for count, columns in self._blocks:
            value = columns.get(name, "imported" if name == "source" else None)
            if isinstance(value, str):
                codes[at : at + count] = known.setdefault(value, len(known))
            elif isinstance(value, Coded):
                place = np.full(len(value.words) + 1, UNKNOWN, np.int32)  # the last one is that of UNKNOWN
                for one in np.flatnonzero(np.bincount(value.codes + 1)[1:]).tolist():
                    place[one] = known.setdefault(value.words[one], len(known))
                codes[at : at + count] = place[value.codes]
            at += count
        names = sorted(known)
        place = np.full(len(known) + 1, UNKNOWN, np.int32)
        for number, word in enumerate(names):
            place[known[word]] = number
        return pd.Categorical.from_codes(place[codes[order]], pd.Index(names, dtype=object))
