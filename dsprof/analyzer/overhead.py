"""What capturing should have cost the job: the records written, times what one costs."""

from __future__ import annotations

from typing import Final

import pandas as pd

from dsprof.run import RunInfo

COLLECTIVE_NS: Final = {True: 3_300.0, False: 52_000.0}
RECORD_NS: Final = {True: 200.0, False: 1_600.0}
"""CPU time of recording a collective, and anything else, with the native recorder and with the Python one: measured
once in a tight loop, so an estimate. benchmarks/overhead.py measures what a job really pays."""


def estimate_overhead(run: RunInfo, rows: pd.DataFrame, ordinary: pd.DataFrame) -> float | None:
    """Percent of the ordinary steps that their records should have cost; not a measurement of this run. None without a
    step."""
    if ordinary.empty:
        return None
    recorded = (rows["source"] == "measured") & rows["step"].isin(ordinary["step"].unique())
    collectives = int((recorded & (rows["kind"] == "comm")).sum())
    native = all(item.native for item in run.ranks)
    spent = collectives * COLLECTIVE_NS[native] + (int(recorded.sum()) - collectives) * RECORD_NS[native]
    return float(100 * spent / ordinary["dur_ns"].sum())
