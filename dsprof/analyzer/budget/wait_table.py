"""Every wait of the training threads as a table, for the reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import pandas as pd

from ..arrays import Float
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
    issued, step = named["step"].to_numpy(np.float64), _step_begun_last(waits, steps)
    waits = waits.assign(
        arrival_ns=waits["arrival_ns"].astype("Int64").mask(waits["lane"] != NOTHING),
        group=named["group"].to_numpy(object),
        seq=named["seq"].astype("Int64").array,
        issued_step=pd.array(np.where(issued < step, issued, np.nan), "Int64"),
    )
    return waits[list(WAIT_COLUMNS)]


def _step_begun_last(waits: pd.DataFrame, steps: pd.DataFrame) -> Float:
    """The step that the rank of each wait had begun last when that began; NaN: none. Of all ranks at once."""
    rank, when = (
        np.concatenate([table[name].to_numpy(np.int64) for table in (steps, waits)]) for name in ("rank", "start_ns")
    )
    of_wait = np.arange(len(rank)) >= len(steps)
    order = np.lexsort((of_wait, when, rank))
    last = np.maximum.accumulate(np.where(of_wait[order], -1, np.arange(len(order))))
    begun = order[np.maximum(last, 0)]
    known = (last >= 0) & (rank[begun] == rank[order]) & ~of_wait[begun]
    number = np.append(steps["step"].to_numpy(np.float64), np.nan)
    found = np.empty(len(order))
    found[order] = number[np.where(known, begun, len(steps))]
    return found[len(steps) :]
