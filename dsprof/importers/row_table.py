"""Rows of one rank as an importer meets them, one at a time, held as columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pandas as pd

from dsprof.run import RunError
from dsprof.schema import COLUMNS
from dsprof.trace import concat_rows

BLOCK: Final = 1 << 15
"""Rows that are held as they came, before they become columns."""
MOST_ROWS: Final = 20_000_000
"""Of one rank: some 3 GB."""
DEFAULTS: Final = {"rank": 0, "restart": 0, "step": -1, "source": "imported"}


class RowTable:
    def __init__(self) -> None:
        self._block: list[Mapping[str, Any]] = []
        self._tables: list[pd.DataFrame] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, row: Mapping[str, Any]) -> None:
        """A row by its columns (`schema.COLUMNS`); `kind`, `name`, `lane` and `start_ns` are needed, what is not there
        is null. Raises RunError where there are too many."""
        self._block.append(row)
        self._count += 1
        if len(self._block) >= BLOCK:
            self._flush()
            if self._count > MOST_ROWS:
                raise RunError(
                    f"more than {MOST_ROWS:,} events of one rank; trace fewer steps, or leave out more of them"
                )

    def table(self) -> pd.DataFrame:
        """All rows in order of time; of two that begin together the longer one first. The RowTable is empty then."""
        self._flush()
        rows = concat_rows(self._tables)
        self._tables, self._count = [], 0
        length = rows["dur_ns"].to_numpy(np.int64, na_value=0)
        order = np.lexsort((-length, rows["start_ns"].to_numpy(np.int64)))
        return rows.iloc[order].reset_index(drop=True)

    def _flush(self) -> None:
        if not self._block:
            return
        named = {column for row in self._block for column in row}
        columns = {}
        for name, kind in COLUMNS.items():
            if name in named:
                values = [row.get(name, DEFAULTS.get(name)) for row in self._block]
                columns[name] = pd.Series(values, dtype=kind if kind != "float64" else "object")
            else:
                columns[name] = pd.Series([DEFAULTS.get(name)] * len(self._block), dtype="object")
        self._tables.append(pd.DataFrame(columns).astype(COLUMNS))
        self._block = []
