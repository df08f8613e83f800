"""What capturing should have cost the job: the records written, times what one costs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import pandas as pd

from dsprof.run import RunInfo

COLLECTIVE_NS: Final = {True: 3_300.0, False: 52_000.0}
RECORD_NS: Final = {True: 200.0, False: 1_600.0}
"""CPU time of recording a collective, and anything else, with the native recorder and with the Python one: measured
once in a tight loop, so an estimate. benchmarks/overhead.py measures what a job really pays."""


def count_records(rows: pd.DataFrame) -> pd.DataFrame:
    """step, collectives, others: how many records of each the rows of a rank come from."""
    measured = rows["source"] == "measured"
    is_collective = (rows["kind"] == "comm")[measured].to_numpy(bool)
    step, at = np.unique(rows["step"][measured].to_numpy(np.int64), return_inverse=True)
    count, collectives = np.bincount(at), np.bincount(at, is_collective).astype(np.int64)
    return pd.DataFrame({"step": step, "collectives": collectives, "others": count - collectives})


def estimate_overhead(run: RunInfo, recorded: Iterable[pd.DataFrame], ordinary: pd.DataFrame) -> float | None:
    """Percent of the ordinary steps that their records should have cost; not a measurement of this run. None without a
    step, and of another tool's trace: nobody told what its records cost. `recorded`: of each rank (`count_records`)."""
    if ordinary.empty or run.imported:
        return None
    steps, native = ordinary["step"].unique(), all(item.native for item in run.ranks)
    spent = 0.0
    for counts in recorded:
        counts = counts[counts["step"].isin(steps)]
        spent += counts["collectives"].sum() * COLLECTIVE_NS[native] + counts["others"].sum() * RECORD_NS[native]
    return float(100 * spent / ordinary["dur_ns"].sum())
