"""A large table that is seldom asked for, in few bytes: as tasks send what they found.

It lies in blocks of whole ranks. What goes through all of it asks for one block after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import pandas as pd

from .packing import pack, unpack

ROWS: Final = 1 << 16
"""That a block has about."""


class PackedTable:
    """The table is made anew each time that it is asked for."""

    def __init__(self, table: pd.DataFrame) -> None:
        """table: has a column `rank`; it is sorted by that."""
        if not table["rank"].is_monotonic_increasing:
            table = table.sort_values("rank", kind="stable", ignore_index=True)
        rank = table["rank"].to_numpy(np.int64)
        begins = np.append(0, np.flatnonzero(np.diff(rank)) + 1)  # of each rank
        wanted = np.arange(0, len(table), ROWS)
        first = np.unique(begins[np.searchsorted(begins, wanted, "right") - 1]).tolist() or [0]
        ends = [*first[1:], len(table)]
        self._blocks = [pack(table.iloc[one:end].reset_index(drop=True)) for one, end in zip(first, ends, strict=True)]
        self._ranks = [(int(rank[one]), int(rank[end - 1])) for one, end in zip(first, ends, strict=True) if end > one]

    def __len__(self) -> int:
        """How many blocks there are: one at least."""
        return len(self._blocks)

    def table(self) -> pd.DataFrame:
        """All of it."""
        return _joined([*self.blocks()])

    def blocks(self) -> Iterator[pd.DataFrame]:
        """One after the other, each of whole ranks; without a row, one of none."""
        for block in self._blocks:
            found: pd.DataFrame = unpack(block)
            yield found

    def of_ranks(self, first: int, last: int) -> pd.DataFrame:
        """The rows of ranks from `first` to `last`."""
        places = [place for place, (low, high) in enumerate(self._ranks) if low <= last and high >= first] or [0]
        table = _joined([unpack(self._blocks[place]) for place in places])
        return table[table["rank"].between(first, last)].reset_index(drop=True)


def _joined(tables: list[pd.DataFrame]) -> pd.DataFrame:
    return tables[0] if len(tables) == 1 else pd.concat(tables, ignore_index=True)
