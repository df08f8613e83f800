"""What a rank did in each step, a few rows of it: what ranks are compared by beside their communications."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd

from dsprof.live.tail import SAMPLES
from dsprof.schema import Kind
from dsprof.trace.load import Columns

from ..align.participants import NOT_TOLD
from ..arrays import Int
from ..columns import RankRows, as_rows

KINDS: Final = ("step", "phase", "pipe", "gauge", "pause")
ACTIVITY: Final = (
    "rank", "step", "kind", "name", "lane", "start_ns", "dur_ns", "ended", "stage", "bytes", "value", "grad", "source",
)  # fmt: skip
REPLICATING: Final = ("rank", "step", "purpose", "group", "issue_ns", "bytes")
GRADIENT, BUFFER = "gradient", "buffer"
"""Purposes; buffers are what DDP broadcasts in forward."""
NO_PROGRESS: Final = tuple(Kind(kind).name.lower() for kind in SAMPLES)
"""Kinds of rows: side threads sample a job that stands still, too."""
PROGRESS: Final = tuple({*KINDS, "comm"} - {*NO_PROGRESS})
"""And waits for messages."""


@dataclass(frozen=True)
class RankActivity:
    """begun_ns: when it began something last, which samples are not; 0: it did nothing
    host_ns:  purpose -> how long issuing each communication of it took the thread that did, where that is known
    issued:   how many communications it issued in steps, and of how many nobody knows when they ended
    """

    begun_ns: int
    host_ns: Mapping[str, Int]
    issued: tuple[int, int]


def activity_rows(rows: RankRows) -> Columns:
    """ACTIVITY of the steps of a rank, its phases, actions of a pipeline's schedule, gauges and pauses."""
    return rows.take_arrays(ACTIVITY, np.flatnonzero(rows.are("kind", *KINDS)))


def replicating_rows(rows: RankRows) -> Columns:
    """REPLICATING of what keeps a rank a replica of others: gradients and buffers."""
    issued = rows.are("kind", "comm") & rows.are("purpose", GRADIENT, BUFFER) & rows.known("issue_ns")
    return rows.take_arrays(REPLICATING, np.flatnonzero(issued))


def find_activity(rows: pd.DataFrame | RankRows) -> RankActivity:
    """Of the rows of one rank."""
    rows = as_rows(rows)
    moved = rows.are("kind", *PROGRESS) | (rows.are("kind", "wait") & rows.known("peer"))
    comm = np.flatnonzero(rows.are("kind", "comm"))
    codes, names = rows.codes("purpose")
    purpose, host = codes[comm], rows.whole("host_ns", NOT_TOLD)[comm]
    timed = host != NOT_TOLD
    inside = rows.whole("step")[comm] >= 0
    unknown = ~rows.known("dur_ns")[comm] & rows.true("ended", missing=False)[comm]
    return RankActivity(
        begun_ns=int(rows.whole("start_ns")[moved].max()) if moved.any() else 0,
        host_ns={str(names[one]): host[timed & (purpose == one)] for one in np.unique(purpose[timed]) if one >= 0},
        issued=(int(inside.sum()), int((inside & unknown).sum())),
    )
