"""Which line of the script issued a collective that ranks disagree about: as its own row says (one of Flight Recorder),
or by the marks of the lines that issue alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import pandas as pd

from dsprof.live.waiting import Communication
from dsprof.schema import ALL_MARKED, CALL_SITE, CAPTURE_GAP, CAPTURE_OFF, DTYPES
from dsprof.trace import Trace

MOST_RANKS: Final = 64
"""Whose rows are read: those of one version have the same lines."""
COLUMNS: Final = (
    "kind", "name", "group", "seq", "peer", "start_ns", "issue_ns", "ended", "purpose", "bytes", "value", "site",
)  # fmt: skip


class CallKind(NamedTuple):
    """What a mark tells of what its line issues."""

    name: str
    bytes: int
    dtype: str


class CallSite(NamedTuple):
    """certain: it issued this one; else it issues such ones, and nobody knows of another line that does."""

    site: str
    certain: bool


def call_sites(
    trace: Trace, ranks: Iterable[int], operation: Communication, stands: Mapping[int, str]
) -> dict[int, CallSite]:
    """Rank -> the line that issued its `operation`: the only one that is known to issue alike, or of several the one in
    which the rank `stands`. A line that waits for what another issued is none of them."""
    every = trace.run.level == "full"
    lossy = {item.rank for item in trace.run.ranks if item.dropped or item.damaged}
    found: dict[int, CallSite] = {}
    for rank in list(ranks)[:MOST_RANKS]:
        rows = trace.read(rank, COLUMNS)
        line = _line_of(rows, operation, stands.get(rank), every=every, lossy=rank in lossy)
        if line is not None:
            found[rank] = line
    return found


def _line_of(
    rows: pd.DataFrame, operation: Communication, stands: str | None, *, every: bool, lossy: bool
) -> CallSite | None:
    """Of one rank. every: each call's line was looked at; lossy: records are missing."""
    same = (rows["kind"] == "comm") & (rows["group"] == operation.group) & (rows["seq"] == operation.seq)
    mine = next(iter(rows[same & rows["peer"].isna()].to_dict("records")), None)
    if mine is None:
        return None
    if pd.notna(mine["site"]):
        return CallSite(str(mine["site"]), certain=True)
    # Its own size: those of a gather or an all-to-all differ between ranks.
    alike = CallKind(operation.name, -1 if pd.isna(mine["bytes"]) else int(mine["bytes"]), operation.dtype or "")
    marks = _marks(rows)
    of_these = (marks["name"] == alike.name) & (marks["bytes"] == alike.bytes) & (marks["dtype"] == alike.dtype)
    issued = int(mine["start_ns"] if pd.isna(mine["issue_ns"]) else mine["issue_ns"])
    all_marked = not lossy and _all_marked(rows, alike, issued, every=every)
    if all_marked:  # then a line that is marked later issued others only
        of_these &= marks["start_ns"] <= issued
    lines = set(marks["site"][of_these])
    under_way = pd.notna(mine["ended"]) and not mine["ended"]
    if stands is not None and under_way and (stands in lines or marks.empty):
        return CallSite(stands, certain=True)
    if len(lines) != 1 or "" in lines or (marks["name"] == "").any():  # the last: there are lines without a mark
        return None
    return CallSite(lines.pop(), certain=all_marked)


def _marks(rows: pd.DataFrame) -> pd.DataFrame:
    """Lines that issue collectives: name, bytes, dtype, start_ns; site, "": no line of Python's."""
    marks = rows[(rows["kind"] == "mark") & (rows["name"] == CALL_SITE)]
    text = marks[["purpose", "site"]].astype(object).fillna("")
    dtypes = [DTYPES[int(index)] for index in marks["value"].fillna(0)]
    found = {"name": text["purpose"], "bytes": marks["bytes"], "dtype": dtypes, "site": text["site"]}
    return pd.DataFrame({**found, "start_ns": marks["start_ns"]})


def _all_marked(rows: pd.DataFrame, alike: CallKind, until: int, *, every: bool) -> bool:
    """Whether the marks are of all lines that issued these up to then: of every call's, or of so few that none was left
    out."""
    marks = set(rows["name"][rows["kind"] == "mark"])
    if CAPTURE_GAP in marks:  # some may have been in what was given up
        return False
    same = rows[(rows["kind"] == "comm") & (rows["name"] == alike.name) & (rows["bytes"] == alike.bytes)]
    times = (same["issue_ns"].fillna(same["start_ns"]) <= until).sum()
    return every or (CAPTURE_OFF not in marks and int(times) <= ALL_MARKED)
