"""Rows of devices and of waits for them, beside those of a made-up job on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from dsprof.schema import COLUMNS, HOST_SYNC
from dsprof.trace import Trace

MS = 1_000_000


def joined(trace: Trace, rows: Sequence[Mapping[str, Any]], facts: Sequence[Mapping[str, Any]]) -> Trace:
    """`trace` with more rows, each in the step that it begins in, and facts."""
    before = trace.rows
    more = pd.DataFrame([{"restart": 0, "ended": True, "source": "measured", **row} for row in rows])
    steps = before[before["kind"] == "step"]
    for rank, mine in more.groupby("rank"):
        of_rank = steps[steps["rank"] == rank]
        ends = (of_rank["start_ns"] + of_rank["dur_ns"]).to_numpy(np.int64)
        more.loc[mine.index, "step"] = np.searchsorted(ends, mine["start_ns"].to_numpy(np.int64), "right")
    more = more.reindex(columns=list(COLUMNS)).fillna({"step": -1}).astype(COLUMNS)
    whole = pd.concat([before.astype(object), more.astype(object)], ignore_index=True)
    whole = whole.sort_values(["rank", "start_ns"], kind="stable", ignore_index=True).astype(COLUMNS)
    return Trace.of(replace(trace.run, facts=[*trace.run.facts, *map(dict, facts)]), whole)


def span_of(trace: Trace, rank: int) -> tuple[int, int]:
    """From the beginning of a rank's first step to the end of its last, ns."""
    steps = trace.rows[(trace.rows["kind"] == "step") & (trace.rows["rank"] == rank)]
    return int(steps["start_ns"].min()), int((steps["start_ns"] + steps["dur_ns"]).max())


def readings(trace: Trace, rank: int, every_ms: float = 100.0, **gauges: Any) -> list[dict[str, Any]]:
    """A device's gauges (without `device.`) over the whole run; a value, or what gives it from the reading's number."""
    begin, end = span_of(trace, rank)
    return [
        {"rank": rank, "kind": "gauge", "name": f"device.{name}", "lane": f"gpu.{rank}", "thread": 9, "start_ns": when,
         "dur_ns": 0, "value": float(value(number) if callable(value) else value)}
        for number, when in enumerate(range(begin, end, round(every_ms * MS)))
        for name, value in gauges.items()
    ]  # fmt: skip


def waits(
    trace: Trace, rank: int, after_ms: float, ms: float, call: str = "item", site: str | None = "/home/me/train.py:31",
    lane: str = "main",
) -> list[dict[str, Any]]:  # fmt: skip
    """A wait for the device in every step, so long after the step's beginning."""
    steps = trace.rows[(trace.rows["kind"] == "step") & (trace.rows["rank"] == rank)]
    return [
        {"rank": rank, "kind": "mark", "name": HOST_SYNC, "lane": lane, "thread": 7, "dur_ns": round(ms * MS),
         "start_ns": int(begin) + round(after_ms * MS), "purpose": call, "site": site}
        for begin in steps["start_ns"]
    ]  # fmt: skip


def kernels(trace: Trace, rank: int, *spans: tuple[float, float]) -> list[dict[str, Any]]:
    """Kernels in every step, from so many ms after its beginning to so many."""
    steps = trace.rows[(trace.rows["kind"] == "step") & (trace.rows["rank"] == rank)]
    return [
        {"rank": rank, "kind": "kernel", "name": "gemm", "lane": "cuda.7", "thread": 0, "source": "imported",
         "start_ns": int(begin) + round(first * MS), "dur_ns": round((last - first) * MS)}
        for begin in steps["start_ns"]
        for first, last in spans
    ]  # fmt: skip
