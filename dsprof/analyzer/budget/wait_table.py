"""Every wait of the training threads as a table, for the reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import pandas as pd

from .label import NOTHING
from .step_budget import RankTime

WAIT_COLUMNS: Final = ("rank", "start_ns", "end_ns", "arrival_ns", "group", "seq", "issued_step")


def waits_table(times: Mapping[int, RankTime], collectives: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """WAIT_COLUMNS, as `Analysis.waits` says."""
    tables = [time.waits.assign(rank=rank) for rank, time in times.items()]
    if not tables:
        return pd.DataFrame(columns=list(WAIT_COLUMNS))
    waits = pd.concat(tables, ignore_index=True)
    named = collectives[["group", "seq", "step"]].reindex(waits["collective"].where(waits["collective"] != NOTHING))
    issued = named["step"].to_numpy(np.float64)
    step = np.full(len(waits), np.nan)
    start = waits["start_ns"].to_numpy(np.int64)
    of_rank = waits.groupby("rank").indices
    for rank, mine in steps.groupby("rank"):
        chosen = of_rank.get(rank, np.empty(0, np.int64))
        at = np.searchsorted(mine["start_ns"].to_numpy(np.int64), start[chosen], "right") - 1
        step[chosen[at >= 0]] = mine["step"].to_numpy(np.float64)[at[at >= 0]]
    waits = waits.assign(
        arrival_ns=waits["arrival_ns"].astype("Int64").mask(waits["lane"] != NOTHING),
        group=named["group"].to_numpy(object),
        seq=named["seq"].astype("Int64").array,
        issued_step=pd.array(np.where(issued < step, issued, np.nan), "Int64"),
    )
    return waits[list(WAIT_COLUMNS)]
