"""Waits inside C++, where nothing of ours can bracket them."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import numpy as np
import pandas as pd

from dsprof.schema import BACKWARD_DONE

from .rows import Int, derived_rows, ends, integers, present, texts

UNMARKED: Final = np.iinfo(np.int64).min
FINALIZER_NS: Final = 5_000_000
FINALIZER_BYTES_PER_NS: Final = 0.5
"""After its last all-reduce DDP copies the gradients out. If backward goes on longer than this many bytes would
take, it was computing, not waiting."""


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
    kind, name, start = texts(rows, "kind"), texts(rows, "name"), rows["start_ns"].to_numpy(np.int64)
    end, issued, ended = ends(rows), integers(rows, "issue_ns", -1), present(rows, "dur_ns")
    backward = np.flatnonzero((kind == "phase") & (name == "backward") & ended)
    backward = backward[np.argsort(start[backward], kind="stable")]
    begin, stop = start[backward], end[backward]

    def backward_of(moments: Int) -> Int:
        """Index of the backward in which each moment is; -1: in none."""
        at: Int = np.searchsorted(begin, moments, "right").astype(np.int64) - 1
        if len(begin):
            at[moments > stop[at]] = -1
        return at

    # What a device communicates its streams wait for, not this thread.
    of_one, waits = ~present(rows, "peer"), kind == "wait"
    own = (kind == "comm") & ~rows["engine"].to_numpy(bool) & ~rows["device"].to_numpy(bool)
    comm = np.flatnonzero(own & of_one & ended)
    comm = comm[backward_of(issued[comm]) >= 0]
    numbered = present(rows, "seq")
    named = set(_keys(rows, np.flatnonzero(waits & numbered & of_one)))
    comm = comm[np.array([key not in named for key in _keys(rows, comm)], bool)]
    if not len(comm):
        return rows[:0]
    number = backward_of(issued[comm])
    order = np.lexsort((issued[comm], number))
    comm, number = comm[order], number[order]
    first = np.flatnonzero(np.diff(number, prepend=-1))  # of each backward
    which = np.repeat(np.arange(len(first)), np.diff(first, append=len(comm)))

    marks = np.flatnonzero((kind == "mark") & (name == BACKWARD_DONE))
    marks = marks[backward_of(start[marks]) >= 0]
    done = np.full(len(backward), UNMARKED, np.int64)
    np.maximum.at(done, backward_of(start[marks]), start[marks])
    marked = done[number] != UNMARKED
    all_issued = np.maximum.reduceat(issued[comm] + integers(rows, "host_ns")[comm], first)[which]
    copying = FINALIZER_NS + np.add.reduceat(integers(rows, "bytes")[comm], first)[which] / FINALIZER_BYTES_PER_NS
    ends_soon = stop[number] - np.maximum.reduceat(end[comm], first)[which] < copying
    guessed = ends_soon & ~np.isin(number, backward_of(start[waits & ~numbered]))
    since = np.minimum(np.where(marked, done[number], all_issued), stop[number])

    over = np.clip(end[comm], since, stop[number])
    for one, after in pairwise([*first.tolist(), len(comm)]):
        np.maximum.accumulate(over[one:after], out=over[one:after])
    begun = np.append(np.int64(0), over[:-1])
    begun[first] = since[first]
    begun = np.clip(begun, issued[comm], over)
    length = over - begun
    # One without length is kept where there is no other: it says where the rank would have waited.
    last = np.append(first[1:], len(comm)) - 1
    only = (np.maximum.reduceat(length, first)[which] == 0) & np.isin(np.arange(len(comm)), last)
    found = (marked | guessed) & ((length > 0) | only)
    comm, where = comm[found], backward[number[found]]
    return derived_rows(
        "wait",
        name[comm],
        begun[found],
        over[found],
        integers(rows, "thread")[where],
        lane=texts(rows, "lane")[where],
        issue_ns=rows["issue_ns"].array[where],  # of a stream's backward, which tells the step
        group=texts(rows, "group")[comm],
        seq=rows["seq"].array[comm],
    )


def _keys(rows: pd.DataFrame, at: Int) -> list[tuple[object, object]]:
    """Group and number of these rows."""
    return list(zip(texts(rows, "group")[at].tolist(), rows["seq"].array[at].tolist(), strict=True))
