"""What capturing cost the job: as its ranks measured it, or else the records written, times what one costs."""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd

from dsprof.run import RunInfo
from dsprof.schema import HOOK_SECONDS, SAMPLE_SECONDS, SIDE_THREAD_SECONDS

from ..arrays import Int
from ..columns import RankRows, as_rows

COLLECTIVE_NS: Final = {True: 3_300.0, False: 52_000.0}
RECORD_NS: Final = {True: 200.0, False: 1_600.0}
"""CPU time of recording a collective, and anything else, with the native recorder and with the Python one: measured
once in a tight loop, so an estimate. benchmarks/overhead.py measures what a job really pays."""

RECORDED: Final = ("step", "collectives", "others")
MOST_NUMBERS: Final = 1 << 20
"""Numbers of steps from the first to the last that are counted in an array of so many."""


def count_records(rows: pd.DataFrame | RankRows) -> pd.DataFrame:
    """RECORDED: how many records of each kind the rows of a rank come from, by step."""
    rows = as_rows(rows)
    measured = rows.are("source", "measured")
    of, is_collective = rows.whole("step")[measured], rows.are("kind", "comm")[measured]
    first = of.min(initial=np.iinfo(np.int64).max)
    if len(of) and of.max() - first <= MOST_NUMBERS:  # counting takes a tenth of what sorting does
        every = np.bincount(of - first)
        there = np.flatnonzero(every)
        step, count = there + first, every[there]
        collectives = np.bincount((of - first)[is_collective], minlength=len(every))[there]
    else:
        step, at = np.unique(of, return_inverse=True)
        count, collectives = np.bincount(at), np.bincount(at, is_collective).astype(np.int64)
    return pd.DataFrame({"step": step, "collectives": collectives, "others": count - collectives})


def estimate_overhead(run: RunInfo, recorded: pd.DataFrame, ordinary: pd.DataFrame) -> float | None:
    """Percent of the ordinary steps that their records should have cost; not a measurement of this run. None without a
    step, and of another tool's trace: nobody told what its records cost. `recorded`: of all ranks (`count_records`)."""
    if ordinary.empty or run.imported:
        return None
    steps, native = np.unique(ordinary["step"].to_numpy(np.int64)), all(item.native for item in run.ranks)
    inside = np.isin(recorded["step"].to_numpy(), steps)
    collectives, others = (int(recorded[name].to_numpy()[inside].sum()) for name in ("collectives", "others"))
    spent = collectives * COLLECTIVE_NS[native] + others * RECORD_NS[native]
    return float(100 * spent / ordinary["dur_ns"].sum())


def measure_overhead(rows: pd.DataFrame | RankRows, ordinary: pd.DataFrame) -> float | None:
    """Percent of the ordinary steps that capturing took, mean of the ranks, by their gauges: hooks in the steps in
    which they were timed, samples after steps, and the CPU time of side threads, though other cores may have run them.
    None unless every rank measured it.
    """
    if ordinary.empty:
        return None
    rows = as_rows(rows)
    of_capture = rows.are("name", HOOK_SECONDS, SAMPLE_SECONDS, SIDE_THREAD_SECONDS)
    read = np.flatnonzero(rows.are("kind", "gauge") & of_capture)
    read = read[np.lexsort((rows.whole("start_ns")[read], rows.whole("rank")[read]))]
    ranks, rank = np.unique(ordinary["rank"].to_numpy(np.int64), return_inverse=True)
    step_s = np.bincount(rank, ordinary["dur_ns"].to_numpy(np.float64)) / np.bincount(rank) / 1e9
    begin, end = (np.searchsorted(rows.whole("rank")[read], ranks, side) for side in ("left", "right"))
    shares = []
    for low, high, mean_s in zip(begin.tolist(), end.tolist(), step_s.tolist(), strict=True):
        share = _share(rows, read[low:high], mean_s)
        if share is None:
            return None
        shares.append(share)
    return 100 * float(np.mean(shares))


def _share(rows: RankRows, read: Int, step_s: float) -> float | None:
    """Of the time of one rank, whose ordinary step takes `step_s`. read: where its gauges are, in order of time."""
    hooks, when, value = read[rows.are("name", HOOK_SECONDS)[read]], rows.whole("start_ns"), rows.real("value")
    hooks = hooks[~np.isnan(value[hooks])]
    if not len(hooks):
        return None
    share = float(np.median(value[hooks])) / step_s
    for name in (SAMPLE_SECONDS, SIDE_THREAD_SECONDS):
        told = read[rows.are("name", name)[read]]
        elapsed_s = float(when[told[-1]] - when[told[0]]) / 1e9 if len(told) else 0.0
        if elapsed_s <= 0:
            return None
        share += max(float(value[told[-1]] - value[told[0]]), 0.0) / elapsed_s
    return share
