"""Waits inside C++, where nothing of ours can bracket them."""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd

from dsprof.schema import BACKWARD_DONE

from .rows import Int, derived_rows, ends

FINALIZER_NS: Final = 5_000_000
FINALIZER_BYTES_PER_NS: Final = 0.5
"""After its last all-reduce DDP copies the gradients out. If backward goes on longer than this many bytes would
take, it was computing, not waiting."""

OF_WAITS: Final = (
    "kind", "name", "lane", "thread", "start_ns", "dur_ns", "issue_ns", "host_ns", "group", "engine", "device", "seq",
    "peer", "bytes",
)  # fmt: skip
"""Columns that tell of DDP's waits: to select rows takes as long as there are columns."""


def name_inner_waits(rows: pd.DataFrame) -> None:
    """Give a wait of c10d's inside a communication of the engine, such as a norm, what the engine says of that."""
    engine = rows["engine"].eq(True)
    if not engine.any():
        return
    comm = rows[(rows["kind"] == "comm") & engine & rows["dur_ns"].notna()].sort_values("start_ns", kind="stable")
    waits = rows[(rows["kind"] == "wait") & ~engine & rows["dur_ns"].notna()]
    for thread, inner in waits.groupby("thread"):
        around = comm[comm["thread"] == thread]
        if around.empty:
            continue
        at = np.searchsorted(around["start_ns"].to_numpy(np.int64), inner["start_ns"].to_numpy(np.int64), "right") - 1
        within = (at >= 0) & (ends(inner) <= ends(around)[at])
        for column in ("purpose", "module", "stage", "microbatch"):
            rows.loc[inner.index[within], column] = around[column].array[at[within]]


def backward_waits(rows: pd.DataFrame) -> pd.DataFrame:
    """Waits of DDP's reducer at the end of each backward: for one collective after the other, in order of issue.

    They begin at the mark that the last gradient has been made. Only a collective that no measured wait names can be
    waited for there: a wait in Python is recorded by `Work.wait` itself, and the engine's by the engine. Without the
    mark they begin when the last collective has been issued, unless backward goes on for longer than it takes to copy
    the gradients, or something unknown is waited for in it.
    """
    rows = rows[[*OF_WAITS]]
    backward = rows[(rows["kind"] == "phase") & (rows["name"] == "backward") & rows["dur_ns"].notna()]
    backward = backward.sort_values("start_ns", ignore_index=True)
    begin, stop = backward["start_ns"].to_numpy(np.int64), ends(backward)

    def backward_of(when: pd.Series[int]) -> Int:
        """Index of the backward in which each moment is; -1: in none."""
        moments = when.to_numpy(np.int64)
        at: Int = np.searchsorted(begin, moments, "right").astype(np.int64) - 1
        if len(begin):
            at[moments > stop[at]] = -1
        return at

    # What a device communicates its streams wait for, not this thread.
    own = (rows["kind"] == "comm") & ~rows["engine"].eq(True) & ~rows["device"].eq(True)
    comm = rows[own & rows["peer"].isna() & rows["dur_ns"].notna()]
    waits = rows[rows["kind"] == "wait"]
    comm = comm.assign(backward=backward_of(comm["issue_ns"]), key=_key(comm))
    comm = comm[(comm["backward"] >= 0) & ~comm["key"].isin(_key(waits[waits["seq"].notna() & waits["peer"].isna()]))]
    if comm.empty:
        return rows[:0]
    comm = comm.sort_values(["backward", "issue_ns"], kind="stable", ignore_index=True)
    number = comm["backward"].to_numpy(np.int64)
    by = comm.groupby("backward")

    marks = rows[(rows["kind"] == "mark") & (rows["name"] == BACKWARD_DONE)]
    done = marks["start_ns"].groupby(backward_of(marks["start_ns"])).max()
    marked = comm["backward"].map(done)
    comm["end"] = ends(comm)
    comm["issued"] = comm["issue_ns"] + comm["host_ns"].fillna(0)
    copying = FINALIZER_NS + comm["bytes"].fillna(0).groupby(number).transform("sum") / FINALIZER_BYTES_PER_NS
    ends_soon = stop[number] - by["end"].transform("max") < copying
    unknown = np.unique(backward_of(waits.loc[waits["seq"].isna(), "start_ns"]))
    guessed = ends_soon & ~comm["backward"].isin(unknown)
    since = np.minimum(marked.fillna(by["issued"].transform("max")).to_numpy(np.int64), stop[number])

    comm["end"] = np.clip(comm["end"].to_numpy(np.int64), since, stop[number])
    comm["end"] = by["end"].cummax()
    start = by["end"].shift().fillna(pd.Series(since)).to_numpy(np.int64)
    comm["start"] = np.clip(start, comm["issue_ns"].to_numpy(np.int64), comm["end"].to_numpy(np.int64))
    comm["length"] = comm["end"] - comm["start"]
    # One without length is kept where there is no other: it says where the rank would have waited.
    only = (by["length"].transform("max") == 0) & ~comm["backward"].duplicated(keep="last")
    found = comm[(marked.notna() | guessed) & ((comm["length"] > 0) | only)]
    where = backward.loc[found["backward"], ["thread", "lane", "issue_ns"]].reset_index(drop=True)
    return derived_rows(
        "wait",
        found["name"].to_numpy(object),
        found["start"].to_numpy(np.int64),
        found["end"].to_numpy(np.int64),
        where["thread"],
        lane=where["lane"],
        issue_ns=where["issue_ns"].astype("Int64").array,  # of a stream's backward, which tells the step
        group=found["group"].to_numpy(object),
        seq=found["seq"].array,
    )


def _key(rows: pd.DataFrame) -> pd.Series[str]:
    return rows["group"].astype(str) + "/" + rows["seq"].astype(str)
