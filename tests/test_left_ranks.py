"""A rank that left with exit status 0 while others still communicate with it: it is named, not who failed for want of
it."""

from __future__ import annotations

from signal import SIGKILL, SIGTERM
from typing import Any

import pytest
from synthetic import Job

from dsprof.analyzer import analyze
from dsprof.analyzer.finding import Finding
from dsprof.run import RankExit
from dsprof.trace import Trace

FAILED, LEFT, LATE = 0, 1, 2
S = 1_000_000_000


def ended(rank: int, code: int | None, at_s: float, **about: Any) -> RankExit:
    return RankExit(rank, "host", 100 + rank, code, about.pop("signal", None), int(at_s * S), **about)


def findings(left: RankExit, *, closed_s: float | None = None, comes: tuple[int, ...] = ()) -> list[Finding]:
    """Of a job of three ranks, one of which fails at 9 s in its last all_reduce, for which only it and `comes` are
    there; torchrun ends the last one then. `closed_s`: when the capture of the one that left was closed."""
    exits = [ended(FAILED, 1, 9.0), left, ended(LATE, None, 9.1, signal=SIGTERM, stopped=True)]
    trace = Job(ranks=3, steps=5, exits=exits).trace()
    trace.run.groups["0"] = {"ranks": [0, 1, 2], "size": 3}
    rows = trace.rows
    last = (rows["kind"] == "comm") & (rows["seq"] == rows["seq"].max())
    rows = rows[~last | rows["rank"].isin([FAILED, *comes])].copy()
    rows.loc[last.reindex(rows.index), "ended"] = False
    failed_ns = int(rows["start_ns"].max()) + S // 10  # too soon to have stood still
    trace.run.ranks[FAILED].closed_ns = failed_ns
    info = trace.run.ranks[LEFT]
    info.closed, info.closed_ns = closed_s is not None, None if closed_s is None else failed_ns + int(closed_s * S)
    return analyze(Trace.of(trace.run, rows)).findings


def test_a_rank_that_left_without_closing_its_capture() -> None:
    first = findings(ended(LEFT, 0, 8.0))[0]
    assert (first.code, first.where.ranks, first.where.op) == ("run.hang", (LEFT,), "all_reduce")
    assert first.title == "rank 1 has not reached all_reduce 9 of group 0, in which rank 0 waits; rank 1 had ended"
    assert "rank 1 ended by: exit status 0" in [f"{item.metric}: {item.value}" for item in first.evidence]


def test_a_rank_that_left_in_order_is_told_by_its_capture() -> None:
    late_seen = ended(LEFT, 0, 9.05)  # by a launcher that had no core
    assert findings(late_seen, closed_s=-0.05)[0].where.ranks == (LEFT,)


def test_all_others_had_come() -> None:
    first = findings(ended(LEFT, 0, 8.0), comes=(LATE,))[0]
    assert (first.code, first.where.ranks) == ("run.hang", (LEFT,))
    assert "in which ranks 0, 2 wait" in first.title


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(ended(LEFT, 0, 9.5), id="left when the other had failed"),
        pytest.param(ended(LEFT, 0, 8.0, stopped=True), id="was ended"),
        pytest.param(ended(LEFT, None, 8.0), id="nobody knows"),
    ],
)
def test_who_did_not_leave_first_by_itself_is_not_accused(end: RankExit) -> None:
    first = findings(end)[0]
    assert (first.code, first.where.ranks) == ("run.rank-died", (FAILED,))


def test_who_was_killed_died() -> None:
    first = findings(ended(LEFT, None, 8.0, signal=SIGKILL))[0]
    assert (first.code, first.where.ranks) == ("run.rank-died", (LEFT,))
