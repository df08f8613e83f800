"""Put every rank on one clock.

The ranks of one host share CLOCK_MONOTONIC. Between hosts, a synchronizing collective is the common event: no rank
can leave it before the last has arrived, and all leave within a transfer's tail of one another, so the median
difference of its ends over many collectives estimates the offset, and their spread the error.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd

from dsprof.run import RunInfo
from dsprof.schema import SYNCHRONIZING


def align(rows: pd.DataFrame, run: RunInfo) -> tuple[pd.DataFrame, float, list[str]]:
    """Rows on the clock of the first rank's host, the error of that in microseconds, and warnings."""
    host_of = {item.rank: item.host for item in run.ranks}
    hosts = list(dict.fromkeys(host_of[rank] for rank in sorted(host_of)))
    if len(hosts) < 2:
        return rows, 0.0, []
    ended = rows[(rows["kind"] == "comm") & rows["dur_ns"].notna() & rows["name"].isin(SYNCHRONIZING)]
    ends = pd.DataFrame(
        {
            "key": ended["group"].astype(str) + "/" + ended["seq"].astype(str),
            "host": ended["rank"].map(host_of),
            "end": ended["start_ns"] + ended["dur_ns"].astype("int64"),
        }
    )
    table = ends.groupby(["key", "host"])["end"].median().unstack()
    offsets, error_ns, warnings = {hosts[0]: 0}, 0.0, []
    for host in hosts[1:]:
        both = (table[host] - table[hosts[0]]).dropna() if {host, hosts[0]} <= set(table.columns) else pd.Series()
        if both.empty:
            warnings.append(f"host {host}: no collective shared with {hosts[0]}, so its clock could not be aligned")
            continue
        offsets[host] = int(both.median())
        error_ns = max(error_ns, float((both - both.median()).abs().median()))
    shift = rows["rank"].map({rank: offsets.get(host, 0) for rank, host in host_of.items()}).fillna(0).astype("int64")
    return rows.assign(start_ns=rows["start_ns"] - shift, issue_ns=rows["issue_ns"] - shift), error_ns / 1e3, warnings


LEAST_JUMP_NS: Final = 100_000_000
"""Ends of one collective lie milliseconds apart on a busy host; this is a clock."""
FEWEST: Final = 8
"""Collectives on each side of a jump."""


def find_jumps(rows: pd.DataFrame) -> tuple[float, list[str]]:
    """By how much the clock of a rank moves against the others' during the run, microseconds, and warnings.

    No rank leaves a synchronizing collective before the last has come, so its ends on the ranks stay together.
    """
    ended = rows[(rows["kind"] == "comm") & rows["dur_ns"].notna() & rows["name"].isin(SYNCHRONIZING)]
    if ended["rank"].nunique() < 2:
        return 0.0, []
    ends = pd.DataFrame(
        {
            "key": ended["group"].astype(str) + "/" + ended["seq"].astype(str),
            "rank": ended["rank"],
            "step": ended["step"],
            "end": ended["start_ns"] + ended["dur_ns"].astype("int64"),
        }
    ).drop_duplicates(["key", "rank"])
    table = ends.pivot(index="key", columns="rank", values="end")
    # Of two ranks nobody can say which clock it was; of more, the one that differs.
    apart = table.sub(table.median(axis=1) if table.shape[1] > 2 else table.iloc[:, 0], axis=0)
    steps = ends.groupby("key")["step"].max().reindex(apart.index)
    worst, warnings = 0.0, []
    for rank in apart.columns:
        mine = apart[rank].dropna()
        mine = mine.loc[steps[mine.index].sort_values(kind="stable").index]
        if len(mine) < 2 * FEWEST:
            continue
        early, late = float(mine.iloc[:FEWEST].median()), float(mine.iloc[-FEWEST:].median())
        if abs(late - early) < LEAST_JUMP_NS:
            continue
        worst = max(worst, abs(late - early))
        beyond = np.abs(mine.to_numpy(np.float64) - early) > abs(late - early) / 2
        step = int(steps[mine.index[int(beyond.argmax())]])
        warnings.append(
            f"rank {rank}: its clock moves by {(late - early) / 1e9:+.1f} s against the others' in step {step}; who "
            "waited for whom is not known from there on"
        )
    return worst / 1e3, warnings
