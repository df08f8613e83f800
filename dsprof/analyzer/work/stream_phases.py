"""What devices took for the phases that their hosts launched: where whole phases were timed on streams, what lies
between their ends but for the waits; where kernels were traced, the kernels that were launched in each.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Final

import numpy as np
import pandas as pd

from dsprof.engine.schedule import COMPUTE

from ..arrays import Bool, Int
from ..budget.intervals import Intervals, outermost
from ..budget.lanes import MAIN, STREAM, on_stream
from ..columns import may_hold
from ..graph.device_phases import PHASES

STREAM_PHASES: Final = {
    "rank": "int64", "step": "int64", "name": "object", "stage": "Int64", "start_ns": "int64", "ms": "float64",
}  # fmt: skip
READ: Final = ("kind", "name", "lane", "step", "stage", "start_ns", "dur_ns", "issue_ns", "source")


def stream_phases(rows: pd.DataFrame, rank: int) -> pd.DataFrame:
    """STREAM_PHASES of each phase of a rank, by launch. start_ns: when its host began it. Empty without a device that
    was timed."""
    if not may_hold(rows["lane"], lambda lane: lane.startswith(STREAM)):
        return no_stream_phases()
    rows = rows[list(READ)][rows["dur_ns"].notna() & rows["step"].notna()]
    streams = on_stream(rows["lane"])
    timed = rows[streams & (rows["kind"] == "kernel") & (rows["source"] == "measured") & rows["name"].isin(PHASES)]
    timed = timed[outermost_rows(timed, ("name", "lane"))]
    others = ~rows["step"].isin(timed["step"])  # in a step there are the one or the others
    tables = [_timed(rows[streams], timed), _launched(rows[others], rows[others & streams])]
    found = pd.concat([table for table in tables if len(table)] or [no_stream_phases()], ignore_index=True)
    return found.assign(rank=rank)[list(STREAM_PHASES)].sort_values("start_ns", kind="stable")


def no_stream_phases() -> pd.DataFrame:
    """STREAM_PHASES without a row."""
    return _empty().copy()


@cache
def _empty() -> pd.DataFrame:
    """Made once: most ranks of most jobs have none."""
    return pd.DataFrame({name: pd.Series(dtype=dtype) for name, dtype in STREAM_PHASES.items()})


def outermost_rows(phases: pd.DataFrame, of_same: Sequence[str]) -> Bool:
    """Which of some rows of phases lie in no other that has the same values in these columns: an engine's span for what
    it computes again holds those of the modules within it."""
    start = phases["start_ns"].to_numpy(np.int64)
    end = start + phases["dur_ns"].to_numpy(np.int64)
    found = np.ones(len(phases), bool)
    for of in phases.groupby(list(of_same), observed=True).indices.values():
        found[of] = outermost(start[of], end[of])
    return found


def _timed(of_streams: pd.DataFrame, timed: pd.DataFrame) -> pd.DataFrame:
    """Phases that were timed as a whole, each without what its stream waited for."""
    waited = np.zeros(len(timed))
    lanes = timed["lane"].astype(str).to_numpy(object)
    start = timed["start_ns"].to_numpy(np.int64)
    end = start + timed["dur_ns"].to_numpy(np.int64)
    waits = of_streams[of_streams["kind"] == "wait"]
    for lane in dict.fromkeys(lanes.tolist()):
        of_lane = waits[waits["lane"].astype(str) == lane]
        begin = of_lane["start_ns"].to_numpy(np.int64)
        stood = Intervals.union(begin, begin + of_lane["dur_ns"].to_numpy(np.int64))
        mine = lanes == lane
        waited[mine] = stood.before(end[mine]) - stood.before(start[mine])
    launched = timed["issue_ns"].where(timed["issue_ns"].notna(), timed["start_ns"]).astype("int64")
    return pd.DataFrame(
        {
            "step": timed["step"].astype("int64"),
            "name": timed["name"].astype(str),
            "stage": timed["stage"].astype("Int64"),
            "start_ns": launched,
            "ms": (end - start - waited) / 1e6,
        }
    )


def _launched(rows: pd.DataFrame, of_streams: pd.DataFrame) -> pd.DataFrame:
    """Phases, and actions of a schedule, with the kernels that the training thread launched in each."""
    acts = (rows["kind"] == "pipe") & rows["name"].isin(COMPUTE)
    acts |= (rows["kind"] == "phase") & rows["name"].isin(PHASES)
    host = rows[acts & (rows["lane"] == MAIN)].sort_values("start_ns", kind="stable")
    kernels = of_streams[(of_streams["kind"] == "kernel") & of_streams["issue_ns"].notna()]
    kernels = kernels.sort_values("issue_ns", kind="stable")
    if host.empty or kernels.empty:
        return no_stream_phases()
    launch = kernels["issue_ns"].to_numpy(np.int64)
    upto = np.concatenate([[0.0], np.cumsum(kernels["dur_ns"].to_numpy(np.float64))])
    start: Int = host["start_ns"].to_numpy(np.int64)
    end = start + host["dur_ns"].to_numpy(np.int64)
    spent = upto[np.searchsorted(launch, end)] - upto[np.searchsorted(launch, start)]
    return pd.DataFrame(
        {
            "step": host["step"].astype("int64"),
            "name": host["name"].astype(str),
            "stage": host["stage"].astype("Int64"),
            "start_ns": host["start_ns"].astype("int64"),
            "ms": spent / 1e6,
        }
    )
