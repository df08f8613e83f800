"""The run itself: a rank that ended before its time."""

from __future__ import annotations

import signal

import pandas as pd

from dsprof.run import BY_HAND, RankExit, failures

from ..context import Context
from ..finding import Evidence, Finding, Fix, Gain, Where
from .base import NotJudged, listed


def rank_died(context: Context) -> list[Finding]:
    """A rank ended by a signal or with an error: which was first, and what it was doing."""
    exits = context.run.exits
    if not exits:
        raise NotJudged("no launcher recorded how the ranks ended")
    failed = failures(exits)
    if not failed or context.run.status == BY_HAND:
        return []
    first = failed[0]
    columns = ("kind", "name", "step", "start_ns", "ended", "group", "seq")
    mine = context.trace.read(first.rank, columns)
    steps = mine.loc[mine["kind"] == "step", "step"]
    last_step = int(steps.max()) if len(steps) else -1
    evidence = [
        Evidence("ended by", first.how, ""),
        Evidence("last completed step", last_step if last_step >= 0 else "none", ""),
        Evidence("was doing", _doing(mine), ""),
    ]
    others = [item.rank for item in failed[1:]]
    if others:
        evidence.append(Evidence("ranks that failed after it", listed(others), ""))
    title = f"rank {first.rank} ended by {first.how} after step {last_step}" if last_step >= 0 else (
        f"rank {first.rank} ended by {first.how} before it completed a step")  # fmt: skip
    where = Where(ranks=(first.rank,), steps=(last_step, last_step) if last_step >= 0 else None)
    fixes = (Fix("code", _advice(first)),)
    gain = Gain(0.0, 0.0, 0.0, 0.0, method="none")
    return [Finding("run.rank-died", title, "high", where, tuple(evidence), gain, fixes)]


def _doing(rows: pd.DataFrame) -> str:
    """The innermost thing begun and not ended, or the last one seen."""
    unended = rows[~rows["ended"].fillna(True).astype(bool) & rows["kind"].isin(["comm", "wait", "phase", "mark"])]
    if len(unended):
        row = unended.sort_values("start_ns").iloc[-1]
        where = f" in group {row['group']}, number {row['seq']}" if row["kind"] == "comm" else ""
        return f"{row['name']}{where} (not completed)"
    seen = rows[rows["kind"].isin(["comm", "phase", "mark"])].sort_values("start_ns")
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
