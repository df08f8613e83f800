"""Which thread trains, which lane a row is on, and how deep the rows of a lane nest."""

from __future__ import annotations

import numpy as np
import pandas as pd

from .rows import Int, ends


def training_thread(rows: pd.DataFrame) -> int:
    """The thread that calls backward and steps the optimizer; where neither was seen, the one with most phases.

    An optimizer that is stepped inside backward may be on a thread of the autograd engine's.
    """
    rows = rows[["kind", "name", "thread"]]
    phases = rows[rows["kind"] == "phase"]
    backward, optimizer = phases[phases["name"] == "backward"], phases[phases["name"] == "optimizer"]
    both = optimizer[optimizer["thread"].isin(backward["thread"])]
    for chosen in (both, backward, optimizer, phases, rows):
        if len(chosen):
            return int(chosen["thread"].mode().iloc[0])
    return 0


def lanes(rows: pd.DataFrame, main: int) -> pd.Series[str]:
    """Lane of each row: the one that it came with; else its group's, or its thread's: `main` for the thread `main`."""
    lane = pd.Series("main", index=rows.index, dtype=object)
    other = rows["thread"] != main
    lane[other] = "thread." + rows.loc[other, "thread"].astype(str)
    comm = rows["kind"] == "comm"
    lane[comm] = "comm." + rows.loc[comm, "group"].astype(str)
    given = rows["lane"].notna()
    lane[given] = rows.loc[given, "lane"]
    return lane


def depths(rows: pd.DataFrame) -> Int:
    """Nesting within the lane: how many rows that began before are still open.

    Rows come ordered by start, longer first. Collectives' lanes may overlap: depth 0.
    """
    depth = np.zeros(len(rows), np.int64)
    start, end = rows["start_ns"].to_numpy(np.int64), ends(rows)
    nests = (rows["kind"] != "comm").to_numpy()
    for of_lane in rows[nests].groupby("lane", observed=True).indices.values():
        at = np.flatnonzero(nests)[np.sort(of_lane)]
        begun, over = start[at], np.sort(end[at])
        # A row without length is over when it begins; those of this moment that are still to come are not.
        instants = np.flatnonzero(end[at] == begun)
        later = np.searchsorted(begun[instants], begun, "right") - np.searchsorted(instants, np.arange(len(at)))
        depth[at] = np.arange(len(at)) - (np.searchsorted(over, begun, "right") - later)
    return depth
