"""What each module takes in forward, where every module was timed (level full). What is computed again in backward,
and forwards without gradients, are not part of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from dsprof.schema import SHARDING

from .intervals import nest

COLUMNS: Final = ("module", "calls", "ms", "own_ms")
SUMS: Final = ("calls", "ns", "own_ns")


def sum_modules(rows: pd.DataFrame) -> pd.DataFrame:
    """Of one rank, by name: calls, ns and own_ns (without the modules called inside) a step, mean over the steps after
    the first. Empty where no module was timed."""
    chosen = (rows["kind"] == "module") & (rows["name"] != SHARDING) & rows["dur_ns"].notna() & (rows["step"] >= 0)
    table = rows.loc[chosen, ["step", "name", "thread", "start_ns", "dur_ns"]]
    table = table[table["step"] > table["step"].min()]
    table = table[_in_forward(table, rows)]
    empty = pd.DataFrame(columns=list(SUMS), index=pd.Index([], name="module", dtype=object), dtype=float)
    found = [_own(of_thread) for _, of_thread in table.groupby("thread")]
    if not found:
        return empty
    steps = table["step"].nunique()
    sums = pd.concat(found).groupby("module")[list(SUMS)].sum() / steps
    return sums.astype(float)


def _in_forward(table: pd.DataFrame, rows: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Which calls began in a forward of their thread that was for training."""
    forward = (rows["kind"] == "phase") & (rows["name"] == "forward") & (rows["source"] == "measured")
    trains = rows.loc[forward & rows["dur_ns"].notna() & rows["grad"].fillna(True), ["thread", "start_ns", "dur_ns"]]
    found = np.zeros(len(table), bool)
    thread, start = table["thread"].to_numpy(np.int64), table["start_ns"].to_numpy(np.int64)
    for one, phases in trains.groupby("thread"):
        mine = np.flatnonzero(thread == one)
        begin = np.sort(phases["start_ns"].to_numpy(np.int64))
        end = np.sort((phases["start_ns"] + phases["dur_ns"]).to_numpy(np.int64))
        # Outermost calls of a thread do not overlap.
        found[mine] = np.searchsorted(begin, start[mine], "right") > np.searchsorted(end, start[mine], "left")
    return found


def _own(table: pd.DataFrame) -> pd.DataFrame:
    """Each call's own time: what of it is in no module that it calls."""
    length = table["dur_ns"].to_numpy(np.int64)
    order = np.lexsort((-length, table["start_ns"].to_numpy(np.int64)))
    start, length = table["start_ns"].to_numpy(np.int64)[order], length[order]
    end, parent = nest(start, start + length)
    taken = end - start
    inside = np.bincount(parent[parent >= 0], taken[parent >= 0], minlength=len(start))
    names = table["name"].astype(str).to_numpy(object)[order]
    return pd.DataFrame({"module": names, "calls": 1, "ns": taken, "own_ns": taken - inside})


def module_times(sums: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """COLUMNS, most own time first: calls and ms a step, mean over the ranks that have the module."""
    tables = [table for table in sums if len(table)]
    if not tables:
        return pd.DataFrame(columns=list(COLUMNS))
    mean = pd.concat(tables).groupby("module").mean()
    found = pd.DataFrame({"calls": mean["calls"], "ms": mean["ns"] / 1e6, "own_ms": mean["own_ns"] / 1e6})
    return found.reset_index().sort_values(["own_ms", "module"], ascending=[False, True], ignore_index=True)
