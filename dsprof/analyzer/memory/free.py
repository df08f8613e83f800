"""What memory a rank surely has left at its peak: the one answer to whether something more would fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pandas as pd

from .use_by_step import MemoryUse, main_place

SURELY_HELD: Final = 0.85
"""Of the capacity: so much may be in use at the peak."""


def least_free(table: pd.DataFrame, uses: Sequence[MemoryUse], ranks: Sequence[int]) -> int | None:
    """Bytes that are surely free where these ranks keep their tensors, on the one with least; None where that is not
    known of all of them, or there are no ranks."""
    found = []
    for rank in ranks:
        use = main_place(uses, rank)
        free = None if use is None else surely_free(table, uses, use)
        if free is None:
            return None
        found.append(free)
    return min(found, default=None)


def surely_free(table: pd.DataFrame, uses: Sequence[MemoryUse], use: MemoryUse) -> int | None:
    """Bytes; below 0 where more is in use already; None where it is not known how much there is. Ranks that have memory
    in common have an equal part of it.

    table: of all ranks (`use_by_step.COLUMNS`); uses: of all ranks; use: of the one
    """
    if use.capacity is None or use.share is None:
        return None
    if use.on_host:
        sharing = sum(one.on_host and one.capacity == use.capacity for one in uses)
        return int(use.capacity * (SURELY_HELD - use.share)) // max(sharing, 1)
    free = int(use.capacity * SURELY_HELD) - use.reserved
    seen = table["free"][(table["rank"] == use.rank) & (table["place"] == use.place)].dropna()
    return min(free, int(seen.min())) if len(seen) else free
