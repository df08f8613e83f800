"""The steps of each rank, under numbers that mean the same on all ranks."""

from __future__ import annotations

import numpy as np
import pandas as pd

from .analysis import StepTime


def align_steps(rows: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Rows with each rank's steps numbered like those of the rank that has most, and what had to be moved.

    A rank whose first records are lost counts from a later step. The steps in which it issued the collectives it
    shares with the others tell how far it is off.
    """
    comm = rows[(rows["kind"] == "comm") & rows["peer"].isna() & rows["seq"].notna() & (rows["step"] >= 0)]
    if comm["rank"].nunique() < 2:
        return rows, []
    key = comm["group"].astype(str) + "/" + comm["seq"].astype(str)
    table = pd.DataFrame({"key": key, "rank": comm["rank"], "step": comm["step"]})
    table = table.drop_duplicates(["key", "rank"]).pivot(index="key", columns="rank", values="step")
    counts = rows[rows["kind"] == "step"].groupby("rank").size().reindex(table.columns, fill_value=0)
    reference = table[counts.idxmax()]
    shift, warnings = {}, []
    for rank in table.columns:
        off = (reference - table[rank]).dropna()
        by = int(off.mode().iloc[0]) if len(off) else 0
        if by and (off == by).mean() > 0.5:
            shift[rank] = by
            warnings.append(f"rank {rank}: its capture begins {by} steps late; its steps were renumbered")
    if not shift:
        return rows, warnings
    moved = rows["rank"].map(shift).fillna(0).astype("int32")
    return rows.assign(step=rows["step"].where(rows["step"] < 0, rows["step"] + moved)), warnings


def completed_steps(rows: pd.DataFrame) -> pd.DataFrame:
    """rank, step, start_ns, dur_ns, middle. The middle half is of the steps that every captured rank completed."""
    steps = rows.loc[(rows["kind"] == "step") & rows["dur_ns"].notna(), ["rank", "step", "start_ns", "dur_ns"]]
    steps = steps.astype({"dur_ns": "int64"}).sort_values(["rank", "step"], ignore_index=True)
    shared = steps.groupby("step").size()
    common = np.sort(shared[shared == steps["rank"].nunique()].index.to_numpy())
    count = len(common)
    chosen = common[count // 4 : count - count // 4] if count >= 4 else common
    return steps.assign(middle=steps["step"].isin(chosen))


def step_time(steps: pd.DataFrame) -> StepTime | None:
    """Mean over the middle half, quantiles over all; None without a step."""
    middle = steps[steps["middle"]]
    if middle.empty:
        return None
    every = steps["dur_ns"].to_numpy(np.float64) / 1e6
    p10, median, p90 = np.percentile(every, [10, 50, 90])
    return StepTime(float(middle["dur_ns"].mean() / 1e6), float(median), float(p10), float(p90))
