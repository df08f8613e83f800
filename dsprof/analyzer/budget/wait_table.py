"""Every wait of the training threads as a table, for the reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import pandas as pd
from pandas.arrays import IntegerArray

from ..arrays import Bool, Float, Int
from .label import NOTHING
from .step_budget import RankTime

WAIT_COLUMNS: Final = ("rank", "start_ns", "end_ns", "arrival_ns", "group", "seq", "issued_step")


def waits_table(times: Mapping[int, RankTime], collectives: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """WAIT_COLUMNS, as `Analysis.waits` says."""
    if not times:
        return pd.DataFrame(columns=list(WAIT_COLUMNS))

    def every(name: str) -> Int:
        return np.concatenate([time.waits[name].to_numpy(np.int64) for time in times.values()])

    rank = np.repeat(np.array([*times], np.int64), [len(time.waits) for time in times.values()])
    start, collective = every("start_ns"), every("collective")
    unknown = collective == NOTHING
    number = np.append(collectives["step"].to_numpy(np.int64), 0)[collective]
    known = ~unknown & (number < _step_begun_last(rank, start, steps))
    return pd.DataFrame(
        {
            "rank": rank,
            "start_ns": start,
            "end_ns": every("end_ns"),
            "arrival_ns": _whole(every("arrival_ns"), every("lane") == NOTHING),
            "group": np.append(collectives["group"].to_numpy(object), np.nan)[collective],
            "seq": _whole(np.append(collectives["seq"].to_numpy(np.int64), 0)[collective], ~unknown),
            "issued_step": _whole(number, known),
        },
        copy=False,
    )


def _whole(values: Int, known: Bool) -> IntegerArray:
    return IntegerArray(values, ~known)


def _step_begun_last(of_waits: Int, begun_ns: Int, steps: pd.DataFrame) -> Float:
    """The step that the rank of each wait had begun last when that began; NaN: none. Of all ranks at once."""
    rank = np.concatenate([steps["rank"].to_numpy(np.int64), of_waits])
    when = np.concatenate([steps["start_ns"].to_numpy(np.int64), begun_ns])
    of_wait = np.arange(len(rank)) >= len(steps)
    order = np.lexsort((of_wait, when, rank))
    last = np.maximum.accumulate(np.where(of_wait[order], -1, np.arange(len(order))))
    begun = order[np.maximum(last, 0)]
    known = (last >= 0) & (rank[begun] == rank[order]) & ~of_wait[begun]
    number = np.append(steps["step"].to_numpy(np.float64), np.nan)
    found = np.empty(len(order))
    found[order] = number[np.where(known, begun, len(steps))]
    return found[len(steps) :]
