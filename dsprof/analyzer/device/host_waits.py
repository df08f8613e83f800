"""Where one rank's training thread waits for its device, and what the device stood idle after it.

A rank's rows are looked at once, with all else that is measured of it: jobs have thousands of ranks.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Final

import numpy as np
import pandas as pd

from dsprof.schema import HOST_SYNC

from ..arrays import Bool, Float, Int
from ..budget.intervals import Intervals
from ..budget.lanes import MAIN, on_stream
from ..columns import RankRows

HOST_WAITS: Final = ("rank", "step", "watched", "call", "site", "ms", "updating", "idle_ms")
TRACED: Final = re.compile(r"(cuda|hip)(Device|Stream|Event)Synchronize$|(cuda|hip)Memcpy$")
"""Names of the waits of a trace of torch.profiler's, which has no rows of ours."""
DEVICES_OWN: Final = ("kernel", "copy", "comm")
"""Kinds of what a device does on its streams."""
UNKNOWN: Final = "an unknown line"


def host_waits(rows: RankRows, rank: int) -> pd.DataFrame:
    """HOST_WAITS of a rank's rows: in which step, the call, its line, how long the thread waited, whether that was when
    it was `updating` weights, and how long the device then stood idle, where kernels were recorded. watched: whether
    dsprof watched for the call; torch.profiler tells of the same waits by other names."""
    here = rows.are("lane", MAIN) & rows.known("dur_ns")
    codes, names = rows.codes("name")
    named = np.append([TRACED.match(name) is not None for name in names.tolist()], False).astype(bool)
    watched = here & rows.are("kind", "mark") & rows.are("name", HOST_SYNC) & rows.known("purpose")
    traced = here & rows.are("kind", "wait") & named[codes]
    if not (watched | traced).any():
        return no_host_waits()
    start = rows.whole("start_ns")
    end = start + rows.whole("dur_ns")
    own, update = _own(rows), here & rows.are("kind", "phase") & rows.are("name", "optimizer")
    busy, updates = Intervals.union(start[own], end[own]), Intervals.union(start[update], end[update])
    tables = [
        _table(rows, rank, np.flatnonzero(chosen), how, busy, updates)
        for chosen, how in ((watched, True), (traced, False))
        if chosen.any()
    ]
    return pd.concat(tables, ignore_index=True)


def _table(rows: RankRows, rank: int, place: Int, watched: bool, busy: Intervals, updates: Intervals) -> pd.DataFrame:
    """busy: when the device did something; updates: when the thread was updating weights"""
    start = rows.whole("start_ns")
    end = start + rows.whole("dur_ns")
    site = rows.words("site", place)
    site[~rows.known("site")[place]] = UNKNOWN
    return pd.DataFrame({
        "rank": np.full(len(place), rank), "step": rows.whole("step", -1)[place], "watched": watched,
        "call": rows.words("purpose" if watched else "name", place), "site": site,
        "ms": rows.real("dur_ns")[place] / 1e6,
        "updating": updates.holds(start[place]), "idle_ms": _idle_after(busy, end[place]),
    })  # fmt: skip


def no_host_waits() -> pd.DataFrame:
    """HOST_WAITS without a row."""
    return _empty().copy()


@cache
def _empty() -> pd.DataFrame:
    """Made once: most ranks of most jobs have none."""
    kinds = {
        "rank": "int64", "step": "int64", "watched": "bool", "ms": "float64", "updating": "bool", "idle_ms": "float64",
    }  # fmt: skip
    return pd.DataFrame({name: pd.Series(dtype=kinds.get(name, "object")) for name in HOST_WAITS})


def kernel_steps(rows: RankRows) -> Int:
    """The steps of whose kernels the device has told."""
    steps: Int = np.unique(rows.whole("step", -1)[_own(rows) & rows.are("kind", "kernel") & rows.known("step")])
    return steps


def _own(rows: RankRows) -> Bool:
    """What the device did, by its own kernels: what is measured is whole phases, by events."""
    own: Bool = rows.are("kind", *DEVICES_OWN) & rows.known("dur_ns") & ~rows.are("source", "measured")
    return own & on_stream(rows.table["lane"])


def _idle_after(busy: Intervals, moments: Int) -> Float:
    """For how long the device had nothing to do around each of these moments, when a wait for it was over, ms: from the
    end of what it did last to the next. Of waits that end in one such time, the first has it."""
    following = np.searchsorted(busy.start, moments, "right")
    between = (following > 0) & (following < len(busy.start))
    idle = np.zeros(len(moments))
    before, after = busy.end[following[between] - 1], busy.start[following[between]]
    drained = moments[between] >= before  # else it had other work
    _, first = np.unique(following[between], return_index=True)
    taken = np.zeros(int(between.sum()), bool)
    taken[first] = True
    idle[between] = np.where(drained & taken, after - before, 0) / 1e6
    return idle
