"""What a rank did in each step, a few rows of it: what ranks are compared by beside their communications."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd

from dsprof.live.tail import SAMPLES
from dsprof.schema import CALL_SITE, Kind
from dsprof.trace.load import Columns

from ..align.participants import NOT_TOLD
from ..arrays import Float
from ..columns import RankRows, as_rows

ACTIVITY: Final[Mapping[str, tuple[str, ...]]] = {
    "step": ("rank", "step", "kind", "value"),
    "phase": ("rank", "step", "kind", "name", "lane", "start_ns", "dur_ns", "ended", "bytes", "value", "grad",
              "source"),
    "pipe": ("rank", "step", "kind", "name", "stage", "start_ns", "dur_ns"),
    "gauge": ("rank", "kind", "name", "start_ns", "value"),
    "pause": ("rank", "step", "kind", "lane", "start_ns", "dur_ns", "value"),
}  # fmt: skip
"""Of rows of each kind, the columns that say something: of thousands of ranks there are millions of rows. `kind` is for
what is asked of whole ranks' rows, too."""
KINDS: Final = tuple(ACTIVITY)
ISSUED: Final = ("rank", "step", "purpose", "name", "group", "issue_ns", "bytes")
GRADIENT, BUFFER, PARAMETER, OTHER, BARRIER = "gradient", "buffer", "parameter", "other", "barrier"
"""Purposes; buffers are what DDP broadcasts in forward."""
REPLICATING: Final = (GRADIENT, BUFFER)
"""What keeps ranks replicas of each other."""
OF_THE_LOOP: Final = (OTHER, BARRIER)
"""What a script's own loop communicates, or nobody knows what for."""
NO_PROGRESS: Final = tuple(Kind(kind).name.lower() for kind in SAMPLES)
"""Kinds of rows: side threads sample a job that stands still, too."""
PROGRESS: Final = tuple({*KINDS, "comm"} - {*NO_PROGRESS})
"""And waits for messages."""


@dataclass(frozen=True, slots=True)
class RankActivity:
    """begun_ns: when it began something last, which samples are not; 0: it did nothing
    host_ns:  purpose -> how long issuing each communication of it took the thread that did, where that is known,
              float32
    issued:   how many communications it issued in steps, and of how many nobody knows when they ended
    formats:  (process group, purpose) -> the number format that most bytes of its gradients, or parameters, have
    lines:    (operation, bytes, line) of all calls of collectives whose lines were recorded
    """

    begun_ns: int
    host_ns: Mapping[str, Float]
    issued: tuple[int, int]
    formats: Mapping[tuple[str, str], str]
    lines: frozenset[tuple[str, int, str]]


def activity_rows(rows: RankRows) -> dict[str, Columns]:
    """ACTIVITY of the steps, phases, actions of a pipeline's schedule, gauges and pauses of a rank, by kind, each in
    order of its beginning."""
    found = {}
    for kind, columns in ACTIVITY.items():
        place = np.flatnonzero(rows.are("kind", kind))
        begun = rows.whole("start_ns")[place]
        if (begun[1:] < begun[:-1]).any():
            place = place[np.argsort(begun, kind="stable")]
        found[kind] = rows.take_arrays(columns, place)
    return found


def issued_rows(rows: RankRows) -> Columns:
    """ISSUED of what a rank communicates that is of no layer's computation: what keeps it a replica of others, if it is
    known when that was issued, and what its loop communicates in its groups; of these, where the issue is not known,
    the beginning stands for it."""
    replicating = rows.are("purpose", *REPLICATING) & rows.known("issue_ns")
    of_the_loop = rows.are("purpose", *OF_THE_LOOP) & ~rows.known("peer")
    place = np.flatnonzero(rows.are("kind", "comm") & (replicating | of_the_loop))
    columns = rows.take_arrays(ISSUED, place)
    if not rows.known("issue_ns")[place].all():
        issued = np.where(rows.known("issue_ns"), rows.whole("issue_ns"), rows.whole("start_ns"))[place]
        columns["issue_ns"] = pd.array(issued, dtype=columns["issue_ns"].dtype)
    return columns


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
        host_ns={
            str(names[one]): host[timed & (purpose == one)].astype(np.float32)
            for one in np.unique(purpose[timed])
            if one >= 0
        },
        issued=(int(inside.sum()), int((inside & unknown).sum())),
        formats=_formats(rows),
        lines=_lines(rows),
    )


def _formats(rows: RankRows) -> dict[tuple[str, str], str]:
    sent = rows.are("kind", "comm") & rows.are("purpose", GRADIENT, PARAMETER) & rows.known("dtype")
    place = np.flatnonzero(sent & rows.known("group"))
    (group, groups), (purpose, purposes), (dtype, dtypes) = (rows.codes(name) for name in ("group", "purpose", "dtype"))
    kinds = len(purposes) * len(dtypes)
    key = group[place] * kinds + purpose[place] * len(dtypes) + dtype[place]
    keys, which = np.unique(key, return_inverse=True)
    size = np.bincount(which, rows.whole("bytes")[place], len(keys))
    return {  # in order of size, so that the format of most bytes is what stays of a group and purpose
        (str(groups[one // kinds]), str(purposes[one % kinds // len(dtypes)])): str(dtypes[one % len(dtypes)])
        for one in keys[np.argsort(size, kind="stable")].tolist()
    }


def _lines(rows: RankRows) -> frozenset[tuple[str, int, str]]:
    place = np.flatnonzero(rows.are("kind", "mark") & rows.are("name", CALL_SITE) & rows.known("site"))
    operation, site = (rows.words(name, place).tolist() for name in ("purpose", "site"))
    return frozenset(zip(operation, rows.whole("bytes", NOT_TOLD)[place].tolist(), site, strict=True))
