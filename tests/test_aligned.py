"""What of all ranks is held at once, and what is read a rank at a time, are corrected alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd
import pytest
from synthetic import Job

from dsprof.analyzer import analyze
from dsprof.analyzer.align.aligned import ARRIVED, align
from dsprof.trace import Trace
from dsprof.trace.load import EVERY_COLUMN

S = 1_000_000_000


def skewed() -> Trace:
    """Rank 1 is on a host whose clock is 5 s ahead, lost its first ten steps, and no reduction has a number."""
    trace = Job(steps=60).trace()
    other = replace(trace.run.ranks[1], host="other")
    rows = trace.rows
    of_second = rows["rank"] == 1
    for column in ("start_ns", "issue_ns"):
        rows.loc[of_second, column] += 5 * S
    rows = rows[~of_second | (rows["step"] >= 10) | (rows["step"] < 0)]
    rows.loc[(rows["rank"] == 1) & (rows["step"] >= 10), "step"] -= 10
    return Trace.of(replace(trace.run, ranks=[trace.run.ranks[0], other]), rows)


@pytest.mark.parametrize("numbered", [True, False])
def test_rows_read_later_are_those_that_ranks_are_compared_by(numbered: bool) -> None:
    trace = skewed() if numbered else Job().trace()
    if not numbered:
        rows = trace.rows
        rows.loc[rows["kind"] == "comm", "seq"] = pd.NA
        trace = Trace.of(trace.run, rows)
    aligned, rows_of_all = align(trace)
    arrivals = rows_of_all.table
    for rank in trace.ranks:
        compared = arrivals[arrivals["rank"] == rank].reset_index(drop=True)
        read = aligned.trace.read(rank, ARRIVED)
        read = read[read["kind"].isin(["comm", "step"])].reset_index(drop=True)
        pd.testing.assert_frame_equal(read, compared, check_categorical=False)
    assert arrivals.loc[arrivals["kind"] == "comm", "seq"].notna().all()
    steps = arrivals[arrivals["kind"] == "step"].groupby("rank")["step"].max()
    assert steps.nunique() == 1


def test_one_column_is_corrected_as_all_are() -> None:
    aligned, _ = align(skewed())
    for rank in (0, 1):
        every = aligned.trace.read(rank)
        for column in ("start_ns", "step", "seq", "name"):
            pd.testing.assert_series_equal(aligned.trace.read(rank, (column,))[column], every[column])


class Vanishing:
    """A source whose rank 1 can be read once."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.left = trace, {0: 100, 1: 1, 2: 100}

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.trace.ranks

    def read(self, rank: int, columns: Sequence[str] = EVERY_COLUMN) -> pd.DataFrame:
        self.left[rank] -= 1
        rows = self.trace.read(rank, columns)
        return rows if self.left[rank] >= 0 else rows.iloc[:0]


@pytest.mark.parametrize("numbered", [True, False])
def test_a_rank_that_is_gone_when_it_is_read_again_is_left_out(numbered: bool) -> None:
    trace = Job(ranks=3, forward=lambda rank, step: 90 if rank == 2 else 40).trace()
    if not numbered:
        rows = trace.rows
        rows.loc[rows["kind"] == "comm", "seq"] = pd.NA
        trace = Trace.of(trace.run, rows)
    analysis = analyze(Trace(trace.run, Vanishing(trace)))
    assert analysis.ranks_captured == (0, 2)
    assert "rank 1: its trace changed while it was read; it is left out" in analysis.capture.warnings
    assert analysis.step_ms is not None
    assert analysis.findings[0].where.ranks == (2,)


def test_of_a_rank_that_is_not_there_nothing_is_read() -> None:
    trace = Job().trace()
    assert len(trace.read(7)) == 0
    assert list(align(trace)[0].trace.read(7, ("step", "kind")).columns) == ["step", "kind"]
