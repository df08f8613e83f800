"""Which line of the script issued a collective that ranks disagree about: as its own row says (one of Flight Recorder),
or by the marks of the lines that issue alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

import pandas as pd

from dsprof.live.waiting import Communication
from dsprof.schema import ALL_MARKED, CALL_SITE, CAPTURE_GAP, CAPTURE_OFF, DTYPES

from .context import Context

MOST_RANKS: Final = 64
"""Whose rows are read: those of one version have the same lines."""
COLUMNS: Final = ("kind", "name", "group", "seq", "peer", "purpose", "bytes", "value", "site")


class CallSite(NamedTuple):
    """certain: it issued this one; else it issues such ones, and nobody knows of another line that does."""

    site: str
    certain: bool


def call_sites(context: Context, ranks: Iterable[int], operation: Communication) -> dict[int, CallSite]:
    """Rank -> the line that issued its `operation`, where one alone is known that issues alike."""
    every = context.run.level == "full"
    found: dict[int, CallSite] = {}
    for rank in list(ranks)[:MOST_RANKS]:
        rows = context.trace.read(rank, COLUMNS)
        own = _own(rows, operation)
        if own:
            found[rank] = CallSite(own, certain=True)
            continue
        marks = _marks(rows)
        if (marks["name"] == "").any():  # there are lines that are not marked
            continue
        dtype = operation.dtype or ""
        same = (marks["name"] == operation.name) & (marks["bytes"] == operation.bytes) & (marks["dtype"] == dtype)
        lines = marks["site"][same].unique()
        if len(lines) == 1 and lines[0]:
            found[rank] = CallSite(str(lines[0]), every or _all_looked_at(rows, operation))
    return found


def _own(rows: pd.DataFrame, operation: Communication) -> str | None:
    """The line that the collective's own row has, if it has one."""
    mine = (rows["kind"] == "comm") & (rows["group"] == operation.group) & (rows["seq"] == operation.seq)
    sites = rows["site"][mine & rows["peer"].isna()].dropna()
    return str(sites.iloc[0]) if len(sites) and operation.peer is None else None


def _marks(rows: pd.DataFrame) -> pd.DataFrame:
    """Lines that issue collectives: name, bytes, dtype; site, "": no line of Python's."""
    marks = rows[(rows["kind"] == "mark") & (rows["name"] == CALL_SITE)]
    text = marks[["purpose", "site"]].astype(object).fillna("")
    dtypes = [DTYPES[int(index)] for index in marks["value"].fillna(0)]
    return pd.DataFrame({"name": text["purpose"], "bytes": marks["bytes"], "dtype": dtypes, "site": text["site"]})


def _all_looked_at(rows: pd.DataFrame, operation: Communication) -> bool:
    """Whether so few were issued that are alike that each one's line is marked."""
    comm = rows["kind"] == "comm"
    alike = comm & (rows["name"] == operation.name) & (rows["bytes"] == operation.bytes)
    gaps = (rows["kind"] == "mark") & rows["name"].isin([CAPTURE_GAP, CAPTURE_OFF])
    return int(alike.sum()) <= ALL_MARKED and not gaps.any()
