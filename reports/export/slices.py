"""Rows of the trace as slices that nest: what timelines want."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pandas as pd

from dsprof.exported import DETAILS, SINCE

SPANS: Final = ("step", "phase", "module", "comm", "wait", "pipe", "copy", "kernel", "launch", "pause")
SAMPLES: Final = ("mem", "gauge")


@dataclass(frozen=True)
class Selection:
    """Which rows are wanted. steps: from the first on, before the second; None: all."""

    ranks: tuple[int, ...]
    steps: tuple[int, int] | None = None

    def of(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Of one rank's rows, those that begin within these steps."""
        if self.steps is None or rows.empty:
            return rows
        step = rows["step"].to_numpy(np.int64)
        wanted = rows[(rows["kind"] == "step").to_numpy() & (step >= self.steps[0]) & (step < self.steps[1])]
        if wanted.empty:
            return rows.iloc[:0]
        start = rows["start_ns"].to_numpy(np.int64)
        end = (wanted["start_ns"] + wanted["dur_ns"].fillna(0)).max()
        return rows[(start >= int(wanted["start_ns"].min())) & (start < int(end))]


def lanes(rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """The spans of one rank by track, each in the order in which they begin, the outer first. On a track any two nest
    or are disjoint: where communications overlap, a lane has several tracks. Steps have one of their own."""
    spans = rows[rows["kind"].isin([*SPANS, "mark"]) & rows["dur_ns"].notna()]
    spans = spans[(spans["kind"] != "mark") | (spans["dur_ns"].astype(np.int64) > 0)]
    track = np.where(spans["kind"] == "step", "steps", spans["lane"].astype(object).fillna("main").astype(str))
    for name, mine in spans.groupby(track, sort=True):
        ordered = mine.assign(dur_ns=mine["dur_ns"].astype(np.int64)).sort_values(
            ["start_ns", "dur_ns"], ascending=[True, False], kind="stable"
        )
        number = _tracks(ordered["start_ns"].to_numpy(np.int64), ordered["dur_ns"].to_numpy(np.int64))
        for index in range(int(number.max()) + 1):
            yield (str(name) if index == 0 else f"{name} ({index + 1})"), ordered[number == index]


def _tracks(start: np.ndarray, dur: np.ndarray) -> np.ndarray:
    """For each span, in the order of `lanes`, the first track on which it nests in or follows all others."""
    open_on: list[list[int]] = []
    number = np.zeros(len(start), np.int64)
    for i, (begin, end) in enumerate(zip(start.tolist(), (start + dur).tolist(), strict=True)):
        for track, ends in enumerate(open_on):
            while ends and ends[-1] <= begin:
                ends.pop()
            if not ends or end <= ends[-1]:
                ends.append(end)
                number[i] = track
                break
        else:
            open_on.append([end])
            number[i] = len(open_on) - 1
    return number


def marks(rows: pd.DataFrame) -> pd.DataFrame:
    """Moments that the script or dsprof marked."""
    return rows[(rows["kind"] == "mark") & ~(rows["dur_ns"].fillna(0).astype(np.int64) > 0)]


def samples(rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Values over time, by what they are of."""
    sampled = rows[rows["kind"].isin(SAMPLES) & rows["value"].notna()]
    for (name, lane), mine in sampled.groupby(
        [sampled["name"].astype(str), sampled["lane"].astype(object).fillna("").astype(str)], sort=True
    ):
        shown = f"{name} ({lane})" if lane and lane != "main" else name
        yield shown, mine.sort_values("start_ns", kind="stable")


def details(row: dict[str, Any]) -> dict[str, str | int | float]:
    """What is known of a row beside its name."""
    found: dict[str, str | int | float] = {}
    for column in DETAILS:
        value = row.get(column)
        if value is None or value is pd.NA or value != value or value == "":
            continue
        found[column] = value
    for column, called, sign in SINCE:
        value = row.get(column)
        if value is not None and value is not pd.NA:
            found[called] = sign * (int(value) - int(row["start_ns"]))
    return found


def records(rows: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Each row by its columns, with Python's own numbers."""
    names = list(rows.columns)
    for values in rows.itertuples(index=False, name=None):
        plain = (value.item() if isinstance(value, np.generic) else value for value in values)
        yield dict(zip(names, plain, strict=True))
