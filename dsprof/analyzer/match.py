"""Join each collective across ranks: who came first, who last, and how long the bytes took once all were there."""

from __future__ import annotations

import numpy as np
import pandas as pd

COLLECTIVE_COLUMNS = (
    "group", "seq", "name", "purpose", "step", "bytes", "ranks",
    "first_ns", "last_ns", "late_rank", "end_ns", "transfer_ns",
)  # fmt: skip

GLOO_WORKERS = 2
"""Collectives of one group that run at once: gloo has two worker threads a group."""


def match_collectives(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per collective that ended on some captured rank (COLLECTIVE_COLUMNS), ordered by last arrival.

    An arrival is the issue: true starts on gloo are bounds. `ranks` is how many captured ranks issued it.
    `transfer_ns` runs from the last arrival, or from when the group had a worker free, to the last end known.
    """
    comm = rows[(rows["kind"] == "comm") & rows["peer"].isna() & rows["seq"].notna() & rows["issue_ns"].notna()]
    if comm.empty:
        return pd.DataFrame({name: pd.Series(dtype="int64") for name in COLLECTIVE_COLUMNS})
    table = pd.DataFrame(
        {
            "group": comm["group"].astype(str),
            "seq": comm["seq"].astype("int64"),
            "name": comm["name"].astype(str),
            "purpose": comm["purpose"].astype(str),
            "step": comm["step"],
            "bytes": comm["bytes"].fillna(0).astype("int64"),
            "rank": comm["rank"],
            "issue": comm["issue_ns"].astype("int64"),
            "end": comm["start_ns"] + comm["dur_ns"],
        }
    ).sort_values(["group", "seq", "issue"], ignore_index=True)
    by = table.groupby(["group", "seq"], sort=False)
    matched = by.agg(
        name=("name", "first"),
        purpose=("purpose", "first"),
        step=("step", "max"),
        bytes=("bytes", "max"),
        ranks=("rank", "size"),
        first_ns=("issue", "first"),
        last_ns=("issue", "last"),
        late_rank=("rank", "last"),
        end_ns=("end", "max"),
    ).reset_index()
    matched = matched[matched["end_ns"].notna()].astype({"end_ns": "int64"}).reset_index(drop=True)
    matched["transfer_ns"] = _transfer(matched)
    return matched.sort_values("last_ns", ignore_index=True)[list(COLLECTIVE_COLUMNS)]


def _transfer(matched: pd.DataFrame) -> pd.Series[int]:
    """Time each collective took once all were there and its group had a worker free: first issued, first served."""
    transfer = pd.Series(0, index=matched.index, dtype="int64")
    for _, group in matched.groupby("group", sort=False):
        free = [0] * GLOO_WORKERS
        taken = []
        for last, end in zip(group["last_ns"].tolist(), group["end_ns"].tolist(), strict=True):
            worker = free.index(min(free))
            taken.append(max(end - max(last, free[worker]), 0))
            free[worker] = max(end, free[worker])
        transfer[group.index] = np.array(taken, np.int64)
    return transfer
