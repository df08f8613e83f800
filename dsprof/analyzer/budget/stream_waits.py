"""What a device's stream waited for where it was not told: for the communication that ended as the wait did.

FSDP has its streams wait for events, which say nothing of what comes before them.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd

from dsprof.run import RunInfo

from ..align.match import Matches
from ..arrays import Int

AT_ONCE_NS: Final = 50_000
"""What ends so soon after something else has ended is taken to have waited for it."""
NONE: Final = -1


def ended_together(
    start: Int, end: Int, rows: pd.DataFrame, matches: Matches | None, run: RunInfo | None = None
) -> Int:
    """Of waits of a rank's streams from `start` to `end` (ns), the row of the matched table of the communication that
    ended as each one did; -1: none did, or the wait took no time. rows: of that rank."""
    found = np.full(len(end), NONE, np.int64)
    which = np.flatnonzero(end - start > AT_ONCE_NS)
    if not len(which) or matches is None or not matches.unique:  # before looking at rows, as of most streams
        return found
    timed = (rows["kind"] == "comm") & rows["seq"].notna() & rows["arrival_ns"].notna() & rows["dur_ns"].notna()
    comm = rows[timed]
    if comm.empty:
        return found
    row = matches.find(comm, run)
    ended = (comm["start_ns"] + comm["dur_ns"]).to_numpy(np.int64)
    order = np.argsort(ended, kind="stable")
    at = np.searchsorted(ended[order], end[which] + AT_ONCE_NS, "right") - 1
    near = (at >= 0) & (np.abs(ended[order][np.maximum(at, 0)] - end[which]) <= AT_ONCE_NS)
    found[which[near]] = row[order][at[near]]
    return found
