"""Which thread trains, which lane a row is on, and how deep the rows of a lane nest."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

from .rows import Int, ends, integers, present, texts


def training_thread(rows: pd.DataFrame) -> int:
    """The thread that calls backward and steps the optimizer; where neither was seen, the one with most phases.

    An optimizer that is stepped inside backward may be on a thread of the autograd engine's.
    """
    kind, name, thread = texts(rows, "kind"), texts(rows, "name"), integers(rows, "thread")
    phase = kind == "phase"
    backward, optimizer = phase & (name == "backward"), phase & (name == "optimizer")
    both = optimizer & np.isin(thread, thread[backward])
    for chosen in (both, backward, optimizer, phase, np.ones(len(rows), bool)):
        if chosen.any():
            threads, times = np.unique(thread[chosen], return_counts=True)
            return int(threads[times.argmax()])
    return 0


def lanes(rows: pd.DataFrame, main: int) -> npt.NDArray[np.object_]:
    """Lane of each row: the one that it came with; else its group's, or its thread's: `main` for the thread `main`."""
    lane, thread = np.full(len(rows), "main", object), integers(rows, "thread")
    for other in np.unique(thread[thread != main]).tolist():
        lane[thread == other] = f"thread.{other}"
    comm, group = texts(rows, "kind") == "comm", texts(rows, "group")
    for name in pd.unique(group[comm]):
        lane[comm & (group == name)] = f"comm.{name}"
    lane[comm & pd.isna(group)] = None
    given = present(rows, "lane")
    lane[given] = texts(rows, "lane")[given]
    return lane


def depths(rows: pd.DataFrame) -> Int:
    """Nesting within the lane: how many rows that began before are still open.

    Rows come ordered by start, longer first. Collectives' lanes may overlap: depth 0.
    """
    depth = np.zeros(len(rows), np.int64)
    start, end = rows["start_ns"].to_numpy(np.int64), ends(rows)
    lane, names = pd.factorize(texts(rows, "lane"))
    lane[texts(rows, "kind") == "comm"] = -1
    for number in range(len(names)):
        at = np.flatnonzero(lane == number)
        begun, over = start[at], np.sort(end[at])
        # A row without length is over when it begins; those of this moment that are still to come are not.
        instants = np.flatnonzero(end[at] == begun)
        later = np.searchsorted(begun[instants], begun, "right") - np.searchsorted(instants, np.arange(len(at)))
        depth[at] = np.arange(len(at)) - (np.searchsorted(over, begun, "right") - later)
    return depth
