"""The analyzer: a trace in, findings out. Pure: no files, no printing, no torch.

clock ─► match ─► budget ─► replay ─► rules ─► ranking
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from dsprof.run import RunInfo, last_processes
from dsprof.schema import BUDGET_PARTS
from dsprof.trace import Trace

from . import replay
from .analysis import Analysis, CaptureQuality, Verdict
from .attribution import attribute
from .budget import RankTime, paint, step_budget
from .clock import align
from .context import Change, Context
from .finding import SEVERITIES, Finding, severity_of
from .load import measure_load
from .match import match_collectives
from .rules import FAULTS, LEAST_SHARE, RULES, NotJudged
from .steps import align_steps, completed_steps, step_time
from .verdict import answer

__all__ = ["analyze"]

WAIT_COLUMNS = ("rank", "start_ns", "end_ns", "arrival_ns", "group", "seq")

Judged = TypeVar("Judged")

COLLECTIVE_NS = {True: 3_300.0, False: 52_000.0}
RECORD_NS = {True: 200.0, False: 1_600.0}
"""CPU time of recording a collective, and anything else, with the native recorder and with the Python one: measured
once in a tight loop, so an estimate. benchmarks/overhead.py measures what a job really pays."""


def analyze(trace: Trace) -> Analysis:
    """Explain a run. Never raises for a poor capture: what cannot be judged is named in `not_judged`."""
    run = trace.run
    rows, clock_error_us, warnings = align(_last_attempt(trace.rows, run), run)
    rows, renumbered = align_steps(rows)
    captured = tuple(int(rank) for rank in np.sort(rows["rank"].unique()))
    collectives = match_collectives(rows)
    times = {rank: paint(rows[rows["rank"] == rank], collectives, rank) for rank in captured}
    steps = step_budget(times, completed_steps(rows))
    middle = steps[steps["ordinary"]]
    step_ms = step_time(steps)
    context = _context(run, rows, steps, collectives, times, step_ms.mean if step_ms else 0.0)
    findings, passed, not_judged, noise_ms = _judge(context)
    by_rank = middle.groupby("rank")[list(BUDGET_PARTS)].mean()
    analysis = Analysis(
        run=run,
        ranks_expected=run.world_size or len(captured),
        ranks_captured=captured,
        step_count=int(steps.groupby("rank").size().max()) if len(steps) else 0,
        step_ms=step_ms,
        steps=steps,
        step_is="",
        time={},
        verdict=Verdict("inconclusive", ""),
        budget={part: float(middle[part].mean()) for part in BUDGET_PARTS} if len(middle) else {},
        budget_by_rank=by_rank,
        slowest_rank=int(by_rank["peer_wait"].idxmin()) if len(by_rank) > 1 else None,
        collectives=collectives,
        waits=_waits(times, collectives),
        rows=rows,
        findings=tuple(findings),
        passed=tuple(passed),
        not_judged=not_judged,
        noise_ms=noise_ms,
        capture=CaptureQuality(
            overhead_percent=_overhead(run, rows, middle),
            dropped=sum(item.dropped for item in run.ranks),
            clock_error_us=clock_error_us,
            warnings=(*run.warnings, *warnings, *renumbered),
        ),
    )
    return replace(analysis, verdict=answer(analysis))


def _last_attempt(rows: pd.DataFrame, run: RunInfo) -> pd.DataFrame:
    """What each rank's last process did: an elastic job's earlier ones ended in a failure and have their own steps."""
    last = pd.DataFrame([(item.rank, item.restart) for item in last_processes(run.ranks)], columns=["rank", "restart"])
    if last.empty:  # rows that no capture of ours is behind
        return rows
    return rows[pd.MultiIndex.from_frame(rows[["rank", "restart"]]).isin(pd.MultiIndex.from_frame(last))]


def _waits(times: dict[int, RankTime], collectives: pd.DataFrame) -> pd.DataFrame:
    tables = [time.waits.assign(rank=rank) for rank, time in times.items()]
    waits = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=["collective", *WAIT_COLUMNS])
    named = collectives[["group", "seq"]].reindex(waits["collective"])
    waits = waits.assign(group=named["group"].to_numpy(object), seq=named["seq"].astype("Int64").array)
    return waits[list(WAIT_COLUMNS)]


def _context(
    run: RunInfo,
    rows: pd.DataFrame,
    steps: pd.DataFrame,
    collectives: pd.DataFrame,
    times: dict[int, RankTime],
    step_ms: float,
) -> Context:
    facts: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for fact in run.facts:
        facts[str(fact.get("fact"))].append(fact)
    stepped = {rank: time for rank, time in times.items() if rank in set(steps["rank"])}
    programs = tuple(replay.programs(stepped, rows, collectives, steps)) if steps["ordinary"].any() else ()
    load = measure_load(run, rows, steps, facts, step_ms)
    return Context(run, rows, steps, collectives, programs, step_ms, load, dict(facts))


def _judge(context: Context) -> tuple[list[Finding], list[str], dict[str, str], float]:
    """Findings, worst first; the codes that passed; those that could not be judged and why; the noise floor in ms.

    The noise floor is that of the steps with every fault mended: one that strikes now and then must not hide in the
    noise that it makes.
    """
    found: dict[str, list[Finding]] = {}
    not_judged: dict[str, str] = {}

    def judge(codes: tuple[str, ...], rule: Callable[[], Judged]) -> Judged | None:
        try:
            return rule()
        except NotJudged as reason:
            not_judged.update(dict.fromkeys(codes, str(reason)))
        except Exception as error:  # one rule's mistake must not cost the others' findings
            not_judged.update(dict.fromkeys(codes, f"the rule failed: {type(error).__name__}: {error}"))
        return None

    changes: dict[str, Change] = {}
    noise_ms = 0.0
    if context.programs and context.on_gpu:
        not_judged |= dict.fromkeys(FAULTS, "the job ran on a device, whose time this version does not measure")
    elif context.programs:
        for code, (mended, _) in FAULTS.items():
            change = judge((code,), partial(mended, context))
            if change is not None:
                changes[code] = change
        shares, alone, left = attribute(context, changes)
        noise_ms = context.noise_ms(left)
        for code, change in changes.items():
            gains = context.gain(shares[code]), context.gain(alone[code])
            if gains[0].ms < LEAST_SHARE * context.step_ms:
                continue
            finding = judge((code,), partial(FAULTS[code][1], context, change, *gains))
            found[code] = [finding] if finding is not None else []
    else:
        not_judged |= dict.fromkeys(FAULTS, "no step was completed on all captured ranks")
    for codes, rule in RULES.items():
        for finding in judge(codes, partial(rule, context)) or []:
            found.setdefault(finding.code, []).append(finding)
    codes = (*FAULTS, *(code for of_rule in RULES for code in of_rule))
    rated = {code: [_rated(finding, noise_ms) for finding in found.get(code, [])] for code in codes}
    passed = [code for code, of in rated.items() if code not in not_judged and all(f.severity == "info" for f in of)]
    findings = [finding for of in rated.values() for finding in of]
    findings.sort(key=lambda f: (not f.code.startswith("run."), SEVERITIES.index(f.severity), -f.gain.ms))
    return findings, passed, not_judged, noise_ms


def _rated(finding: Finding, noise_ms: float) -> Finding:
    if finding.code.startswith("run."):
        return finding
    return replace(finding, severity=severity_of(finding.gain, noise_ms))


def _overhead(run: RunInfo, rows: pd.DataFrame, middle: pd.DataFrame) -> float | None:
    """What the records of a step should have cost, as a share of it: an estimate, not a measurement of this run."""
    if middle.empty:
        return None
    recorded = rows[(rows["source"] == "measured") & rows["step"].isin(middle["step"])]
    collectives = int((recorded["kind"] == "comm").sum())
    native = all(item.native for item in run.ranks)
    spent = collectives * COLLECTIVE_NS[native] + (len(recorded) - collectives) * RECORD_NS[native]
    return float(100 * spent / middle["dur_ns"].sum())
