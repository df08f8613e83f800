"""A hang that resolved itself: the verdict says at which step the job stood still, for how long, and for whom."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from synthetic import MS, Job

from dsprof.analyzer import analyze
from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.finding import Finding
from dsprof.schema import STANDSTILL, WENT_ON
from dsprof.trace import Trace

STEP, WAITS, LATE = 25, 0, 1
STOOD_MS = 700_000.0
FRAMES = [["/home/me/train.py", 33, "fetch"], ["/home/me/train.py", 50, "<module>"]]


def job(steps: int = 40, **about: Any) -> Job:
    """One rank begins the forward of a step very late."""
    return Job(
        steps=steps, forward=lambda rank, step: STOOD_MS if (rank, step) == (LATE, STEP) else 40, jitter=0.0, **about
    )


def launched(trace: Trace) -> Trace:
    """As if a launcher of ours had started it."""
    return replace(trace, run=replace(trace.run, started_ns=1, ended_ns=2, status=0))


def waited_ns(trace: Trace) -> tuple[int, int]:
    """When the rank that waited began to, and when the other came."""
    rows = trace.rows
    comm = rows[(rows["kind"] == "comm") & (rows["step"] == STEP) & (rows["seq"] == 2 * STEP)]
    issued = comm.set_index("rank")["issue_ns"]
    return int(issued[WAITS]), int(issued[LATE])


def told(trace: Trace, **about: Any) -> Trace:
    """With what the launcher wrote of it."""
    operation = {"name": "all_reduce", "group": "0", "seq": 2 * STEP, "start_ns": waited_ns(trace)[0], "tag": -1}
    hang = {
        "code": "run.hang", "kind": "missing", "words": "rank 1 has not reached it", "culprits": [LATE],
        "waiters": [WAITS], "operation": operation, "still_s": 602.0, "went_on": True, "stood_s": 700.2, **about,
    }  # fmt: skip
    trace = launched(trace)
    return replace(trace, run=replace(trace.run, hangs=[hang]))


def said(trace: Trace, rank: int, **about: Any) -> list[dict[str, Any]]:
    """What the rank's own watchdog wrote."""
    since, came = waited_ns(trace)
    about = {
        "works": False, "phases": [], "site": "/home/me/train.py:33",
        "threads": [{"name": "MainThread", "trains": True, "frames": FRAMES}], **about,
    }  # fmt: skip
    stood = {"fact": STANDSTILL, "rank": rank, "since_ns": since + 500 * MS, "at_ns": since + 600_000 * MS, **about}
    return [stood, {"fact": WENT_ON, "rank": rank, "since_ns": since + 500 * MS, "at_ns": came + 800 * MS}]


def with_facts(trace: Trace, facts: list[dict[str, Any]]) -> Trace:
    return replace(trace, run=replace(trace.run, facts=[*trace.run.facts, *facts]))


def stops(analysis: Analysis) -> list[Finding]:
    return [finding for finding in analysis.findings if finding.code == "pause.stop"]


WORDS = (
    "at step 25 the job stood still 700 s: it waited for rank 1 (train.py:33) in all_reduce 50 of group 0, then went on"
)


def test_what_the_launcher_told_is_in_the_verdict() -> None:
    trace = job().trace()
    analysis = analyze(with_facts(told(trace), said(trace, LATE)))
    (finding,) = stops(analysis)
    assert finding.title == WORDS
    assert (finding.where.ranks, finding.where.steps, finding.where.op) == ((1,), (25, 25), "all_reduce")
    assert [item.value for item in finding.evidence] == [700.2, "fetch (train.py:33) < <module> (train.py:50)"]
    (fix,) = finding.fixes
    assert fix.patch == ({"file": "/home/me/train.py", "line": 33, "argument": None, "value": None},)
    assert WORDS in analysis.verdict.headline
    assert analysis.verdict.status != "failed"


def test_one_that_came_after_the_last_look_is_no_hang() -> None:
    """The job went on, and ended, within the second between two looks of the launcher."""
    trace = told(job(steps=26).trace(), went_on=False, stood_s=None)
    analysis = analyze(replace(trace, run=replace(trace.run, status=7)))
    assert "run.hang" not in {finding.code for finding in analysis.findings}
    assert "stood still 700 s: it waited for rank 1 in all_reduce 50" in analysis.verdict.headline


def test_without_a_launcher_the_ranks_facts_tell() -> None:
    trace = job().trace()
    analysis = analyze(with_facts(trace, [*said(trace, WAITS, site="/home/me/train.py:50"), *said(trace, LATE)]))
    (finding,) = stops(analysis)
    assert finding.title == WORDS


@pytest.mark.parametrize(
    ("of_late", "both"),
    [
        pytest.param({"works": True}, True, id="it worked"),
        pytest.param({"phases": ["checkpoint"]}, True, id="it saved a checkpoint"),
        pytest.param({}, False, id="only one rank stood still"),
    ],
)
def test_what_the_ranks_facts_do_not_tell(of_late: dict[str, Any], both: bool) -> None:
    trace = job().trace()
    facts = [*said(trace, WAITS), *(said(trace, LATE, **of_late) if both else [])]
    (finding,) = stops(analyze(with_facts(trace, facts)))
    assert "the job stands still 1 time in" in finding.title


def test_the_launcher_that_called_nothing_a_hang_is_believed() -> None:
    trace = job().trace()
    facts = [*said(trace, WAITS), *said(trace, LATE)]
    (finding,) = stops(analyze(with_facts(launched(trace), facts)))
    assert "the job stands still 1 time in" in finding.title


def test_in_hardly_any_steps_it_is_said_all_the_same() -> None:
    trace = told(job(steps=26).trace())
    analysis = analyze(trace)
    assert "at step 25 the job stood still 700 s: it waited for rank 1 in all_reduce 50" in analysis.verdict.headline
