"""The run itself: a rank that ended before its time."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Final, NamedTuple

import pandas as pd

from dsprof.live.frames import short
from dsprof.run import BY_HAND, RankExit, failures, last_processes
from dsprof.schema import CALL_SITE, UNCAUGHT

from ...finding import NOT_PRICED, Evidence, Finding, Fix, Where
from ...study import Study
from ...text import ms
from ..base import NotJudged, listed
from ..memory.oom_risk import killed_for_memory, why_out_of_memory
from ..rule import Look, Rule

UNTOLD: Final = "dsprof can name an exception only once `import torch` has attached it"
COLUMNS: Final = ("kind", "name", "step", "start_ns", "dur_ns", "ended", "group", "seq")


def rank_died(study: Study) -> list[Finding]:
    """A rank ended by a signal or with an error: which was first, and what it was doing."""
    exits = study.run.exits
    if not exits:
        raise NotJudged(_why_unknown(study))
    failed = failures(exits)
    if not failed or study.run.status == BY_HAND:
        return []
    first = failed[0]
    # Of a script that failed before there was any rank, it is not known whether it was to become one or to start some.
    who = f"rank {first.rank}" if study.run.ranks or study.run.world_size else "the script"
    mine = study.trace.read(first.rank, COLUMNS)
    steps = mine.loc[mine["kind"] == "step", "step"]
    last_step = int(steps.max()) if len(steps) else -1
    evidence = [
        Evidence("ended by", first.how, ""),
        Evidence("last completed step", last_step if last_step >= 0 else "none", ""),
    ]
    captured = any(info.rank == first.rank for info in study.run.ranks)
    if captured:
        evidence.append(Evidence("was doing", _doing(mine), ""))
    others = [item.rank for item in failed[1:]]
    if others:
        evidence.append(Evidence("ranks that failed after it", listed(others), ""))
    title = f"{who} ended by {first.how} " + (
        f"after step {last_step}" if last_step >= 0 else "before it completed a step"
    )
    where = Where(ranks=(first.rank,), steps=(last_step, last_step) if last_step >= 0 else None)
    advice = _advice(first) if captured or first.signal is not None else f"{_advice(first)}; {UNTOLD}"
    memory = _of_memory(study, first)
    raised = _uncaught(study, first.rank)
    if raised is not None:
        evidence.append(Evidence("exception", raised.words, ""))
        title += f": {raised.words}" if memory is None else ""
        advice = raised.advice
    if memory is not None:
        title += f": {memory}"
        evidence.append(Evidence("memory", memory, ""))
        advice = "memory.oom-risk says what held the memory, and what makes room"
    fixes = (Fix("code", advice),)
    gone = _gone_before(study, first, mine)
    if gone is not None:
        before, seconds = gone
        earlier = "" if seconds is None else f"{ms(1e3 * seconds)} "
        where = Where(ranks=(before,), steps=where.steps)
        evidence = [replace(item, metric=f"rank {first.rank}: {item.metric}") for item in evidence]
        if seconds is not None:
            evidence.append(Evidence(f"capture of rank {before} ended earlier by", round(seconds, 3), "s"))
        why = "something else than dsprof started it, so how it ended is not known here"
        advice, said = f"see the output of rank {before}: {why}", ""
        raised = _uncaught(study, before)
        if raised is not None:
            evidence.append(Evidence("exception", raised.words, ""))
            advice, said = raised.advice, f" ({raised.words})"
        fixes = (Fix("code", advice),)
        title = f"rank {before} was gone first{said}, {earlier}before {title}"
    return [Finding("run.rank-died", title, "high", where, tuple(evidence), NOT_PRICED, fixes)]


def _why_unknown(study: Study) -> str:
    """Why there is no exit of any rank."""
    if study.run.imported:
        return "an imported trace does not say how its ranks ended"
    if study.run.status is None:
        return "no launcher recorded how the ranks ended"
    return f"the command ended with status {study.run.status}, and what it started does not tell how its ranks ended"


class _Uncaught(NamedTuple):
    """An exception that ended a rank. words: `train.py:31: ValueError: what it said`."""

    words: str
    advice: str


def _uncaught(study: Study, rank: int) -> _Uncaught | None:
    """The last exception that `rank` did not catch, if it told of one."""
    told = [fact for fact in study.facts.get(UNCAUGHT, []) if fact.get("rank") == rank]
    if not told:
        return None
    kind, said, site = (str(told[-1].get(key) or "") for key in ("type", "message", "site"))
    words = ": ".join(part for part in (short(site), kind, said) if part)
    where = f"at {site}" if site else "in native code"
    return _Uncaught(words, f"{kind} was raised {where}: the rank's own output has the whole traceback")


def _gone_before(study: Study, failed: RankExit, rows: pd.DataFrame) -> tuple[int, float | None] | None:
    """The rank whose absence ended `failed`, and how many seconds earlier it was gone, if that is known: one that the
    launcher did not start, as where Lightning starts ranks itself, so that nobody knows how it ended. `rows`: of the
    rank that failed."""
    captures = {capture.rank: capture for capture in last_processes(study.run.ranks)}
    mine, known = captures.get(failed.rank), {item.rank for item in study.run.exits}
    if mine is None or not _communicates(rows):
        return None
    # Another clock has nothing to do with this one.
    here = [capture for capture in captures.values() if capture.clock_name == mine.clock_name]
    unknown = [capture for capture in here if capture.rank not in known]
    ended = {capture.rank: capture.closed_ns for capture in unknown if capture.closed_ns is not None}
    # The launcher reads the clock of its ranks, unless they are in containers with clocks of their own.
    one_clock = len(here) == sum(capture.host == mine.host for capture in captures.values())
    end_ns = mine.closed_ns or (failed.ended_ns if one_clock else None)
    first = min(ended, key=lambda rank: ended[rank], default=None)
    if first is not None and end_ns is not None and ended[first] < end_ns:
        return first, (end_ns - ended[first]) / 1e9
    # One that was killed, and did not wait for others that were gone.
    killed = [item.rank for item in unknown if not item.closed]
    alone = [rank for rank in killed if not _communicates(study.trace.read(rank, COLUMNS))]
    return (alone[0], None) if len(alone) == 1 else None


def _of_memory(study: Study, failed: RankExit) -> str | None:
    """In words, if it was for want of memory."""
    told = why_out_of_memory(study, failed.rank)
    if told is None and failed.signal == signal.SIGKILL:
        told = killed_for_memory(study, failed.rank)
        return None if told is None else f"killed for want of memory, says {told}"
    return told


def _unended(rows: pd.DataFrame) -> pd.DataFrame:
    """What had begun when the rank was gone."""
    return rows[~rows["ended"].fillna(True).astype(bool) & rows["kind"].isin(["comm", "wait", "phase", "mark"])]


def _communicates(rows: pd.DataFrame) -> bool:
    """Whether it was communicating then."""
    return bool(_unended(rows)["kind"].isin(["comm", "wait"]).any())


def _doing(rows: pd.DataFrame) -> str:
    """The innermost thing begun and not ended, or the last one seen."""
    unended = _unended(rows)
    if len(unended):
        row = unended.sort_values("start_ns").iloc[-1]
        where = f" in group {row['group']}, number {row['seq']}" if row["kind"] == "comm" else ""
        return f"{row['name']}{where} (not completed)"
    seen = rows[rows["kind"].isin(["comm", "phase", "mark"]) & (rows["name"] != CALL_SITE)].sort_values("start_ns")
    return f"after {seen.iloc[-1]['name']}" if len(seen) else "unknown: nothing was captured"


def _advice(item: RankExit) -> str:
    if item.signal == signal.SIGKILL:
        return (
            "SIGKILL comes from outside, most often the kernel's out-of-memory killer: "
            "see `dmesg`, the scheduler's log and the host's memory"
        )
    if item.signal in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL):
        return "native code crashed: run again with `python -X faulthandler` (PYTHONFAULTHANDLER=1) for its stack"
    if item.signal is not None:
        return "somebody sent the signal: see the scheduler's log for a time limit or a preemption"
    return "see the rank's own output above for the exception or the call that ended it"


RULES = (
    Rule(
        "run.rank-died", "a rank ended by a signal or with an error", looks=(Look(rank_died),), ends_run=True, place=80
    ),
)
