"""A large table that is seldom asked for, in few bytes: as tasks send what they found.

It lies in blocks of whole ranks. What goes through all of it asks for one block after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Final

import numpy as np
import pandas as pd

from .packing import pack, unpack

ROWS: Final = 1 << 16
"""That a block has about."""


class PackedTable:
    """Each time that rows are asked for they are made anew."""

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

    @staticmethod
    def joined(tables: Sequence[PackedTable]) -> PackedTable:
        """Tables of different ranks each, in order of rank, one behind the other."""
        found, filled = copy(tables[0]), [table for table in tables if table._ranks]
        if filled:
            found._blocks = [block for table in filled for block in table._blocks]
            found._ranks = [ranks for table in filled for ranks in table._ranks]
        return found

    def table(self) -> pd.DataFrame:
        """All of it."""
        return _joined([*self.blocks()])

    def blocks(self) -> Iterator[pd.DataFrame]:
        """One after the other, each of whole ranks; without a row, one of none."""
        for block in self._blocks:
            found: pd.DataFrame = unpack(block)
            yield found

    def with_ranks(self, ranks: Sequence[int]) -> Iterator[tuple[list[int], pd.DataFrame]]:
        """Some of these ranks, which are sorted, and a block that has all rows of them, until all were given."""
        ends = [last for _, last in self._ranks[:-1]]
        at = np.searchsorted(ranks, ends, "right").tolist()
        for block, first, last in zip(self.blocks(), [0, *at], [*at, len(ranks)], strict=True):
            yield [*ranks[first:last]], block

    def of_ranks(self, *ranks: int) -> pd.DataFrame:
        """The rows of these ranks."""
        wanted = np.array(ranks)
        places = [place for place, (low, high) in enumerate(self._ranks) if ((wanted >= low) & (wanted <= high)).any()]
        table = _joined([unpack(self._blocks[place]) for place in places or [0]])
        return table[table["rank"].isin(ranks)].reset_index(drop=True)


def _joined(tables: list[pd.DataFrame]) -> pd.DataFrame:
    return tables[0] if len(tables) == 1 else pd.concat(tables, ignore_index=True)
