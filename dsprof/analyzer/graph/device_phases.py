"""Phases of a device that were timed by events, and the steps of a rank, of its host and of both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from ..arrays import Int
from ..budget.lanes import MAIN, on_stream
from ..columns import may_hold

PHASES: Final = ("forward", "recompute", "backward", "optimizer")
"""What is timed on streams."""
ENDS_STEP: Final = ("backward", "optimizer")
"""Phases of the training thread, the last of which in a step ends it there."""
MOSTLY: Final = 0.9
"""Of the time in phases, what must be on one stream for that to be the one that computes."""


@dataclass(frozen=True)
class DevicePhases:
    """P on the stream that computes, none inside another, in order of launch. issue, host_end: when the host began and
    ended them; start, end: the same of the device, ns. name: [P]; lane: of the stream."""

    lane: str
    name: npt.NDArray[np.object_]
    issue: Int
    host_end: Int
    start: Int
    end: Int


def device_phases(rows: pd.DataFrame) -> DevicePhases | None:
    if not may_hold(rows["kind"], lambda kind: kind == "kernel"):
        return None
    timed = (rows["kind"] == "kernel") & (rows["source"] == "measured") & rows["name"].isin(PHASES)
    timed &= rows["dur_ns"].notna() & rows["issue_ns"].notna()
    table = rows[["name", "lane", "start_ns", "dur_ns", "issue_ns"]][timed]
    table = table[on_stream(table["lane"])]
    if table.empty:
        return None
    spent = table.groupby(table["lane"].astype(str))["dur_ns"].sum()
    if spent.max() < MOSTLY * spent.sum():
        return None
    lane = str(spent.idxmax())
    table = table[table["lane"] == lane].sort_values(["issue_ns", "start_ns"], kind="stable")
    host = rows[["start_ns", "dur_ns"]][(rows["kind"] == "phase") & rows["dur_ns"].notna() & rows["name"].isin(PHASES)]
    last = (host["start_ns"] + host["dur_ns"]).groupby(host["start_ns"]).max()
    issue = table["issue_ns"].to_numpy(np.int64)
    host_end = last.reindex(issue).fillna(-1).to_numpy(np.int64)
    host_end = np.where(host_end < 0, issue, host_end)
    outermost = issue >= np.append(np.iinfo(np.int64).min, np.maximum.accumulate(host_end)[:-1])
    table = table[outermost]
    start = table["start_ns"].to_numpy(np.int64)
    return DevicePhases(
        lane, table["name"].astype(str).to_numpy(object), issue[outermost], host_end[outermost], start,
        start + table["dur_ns"].to_numpy(np.int64),
    )  # fmt: skip


def host_steps(rows: pd.DataFrame) -> tuple[Int, Int, Int]:
    """Number of each step, and when the training thread began and ended it."""
    chosen = (rows["kind"] == "phase") & (rows["lane"] == MAIN) & rows["dur_ns"].notna() & (rows["step"] >= 0)
    phases = rows[["name", "step", "start_ns", "dur_ns"]][chosen]
    ends = phases[phases["name"].isin(ENDS_STEP)]
    end = (ends["start_ns"] + ends["dur_ns"]).groupby(ends["step"]).max().astype("int64")
    numbers = end.index.to_numpy(np.int64)
    first = phases.groupby("step")["start_ns"].min().reindex(end.index).to_numpy(np.int64)
    last = end.to_numpy(np.int64)
    follows = np.append(False, np.diff(numbers) == 1)[: len(numbers)]
    begin = np.where(follows, np.append(0, last[:-1])[: len(last)], first)
    return numbers, begin, np.maximum(last, begin + 1)


def step_ends(rows: pd.DataFrame) -> pd.Series[int]:
    """Step -> when it ended, for the host and the device."""
    steps = rows[["step", "start_ns", "dur_ns"]][(rows["kind"] == "step") & rows["dur_ns"].notna()]
    return (steps["start_ns"] + steps["dur_ns"]).astype("int64").set_axis(steps["step"].to_numpy(np.int64))
