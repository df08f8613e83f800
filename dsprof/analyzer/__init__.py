"""The analyzer: a trace in, findings out. Pure: no files, no printing, no torch.

clock ─► topology ─► match ─► kinds of time, budget ─► ordinary steps ─► replay ─► rules ─► verdict
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from dsprof.run import RunInfo, last_processes
from dsprof.schema import BUDGET_PARTS
from dsprof.trace import Trace

from . import replay
from .analysis import Analysis, CaptureQuality, Verdict
from .budget import NOTHING, RankTime, paint, step_budget
from .clock import align, find_jumps
from .context import Context
from .irregular import Irregular, find_irregular, mark_ordinary
from .judge import judge
from .kinds import apart_spans, divide_time, run_span
from .load import measure_load
from .match import Matches, match_collectives, mismatches, number_by_order
from .steps import align_steps, completed_steps, describe_steps, early_ends, lasting_change, step_time
from .text import ms
from .topology import Topology, find_topology, name_pipeline_messages
from .verdict import answer

__all__ = ["analyze"]

WAIT_COLUMNS = ("rank", "start_ns", "end_ns", "arrival_ns", "group", "seq", "issued_step")

COLLECTIVE_NS = {True: 3_300.0, False: 52_000.0}
RECORD_NS = {True: 200.0, False: 1_600.0}
"""CPU time of recording a collective, and anything else, with the native recorder and with the Python one: measured
once in a tight loop, so an estimate. benchmarks/overhead.py measures what a job really pays."""


def analyze(trace: Trace) -> Analysis:
    """Explain a run. Never raises for a poor capture: what cannot be judged is named in `not_judged`."""
    run = trace.run
    rows = number_by_order(_last_attempt(trace.rows, run), run)
    rows, clock_error_us, warnings = align(rows, run)
    rows, renumbered = align_steps(rows)
    jump_us, jumps = find_jumps(rows)
    clock_error_us = max(clock_error_us, jump_us)
    topology = find_topology(rows, run)
    rows = name_pipeline_messages(rows, topology)
    collectives = match_collectives(rows, run)
    by_rank = _by_rank(rows)
    apart = {rank: apart_spans(of_rank) for rank, of_rank in by_rank.items()}
    matches = Matches(collectives)
    times = {rank: paint(of_rank, collectives, rank, run, apart[rank], matches) for rank, of_rank in by_rank.items()}
    steps = step_budget(times, completed_steps(rows))
    irregular = find_irregular(steps, rows)
    steps = mark_ordinary(steps, irregular)
    ordinary = steps[steps["ordinary"]]
    step_ms = step_time(steps)
    context = _context(run, rows, steps, collectives, times, step_ms.mean if step_ms else 0.0, irregular, topology)
    context = replace(context, clock_error_ms=clock_error_us / 1e3)
    findings, passed, not_judged, noise_ms = judge(context)
    budget_by_rank = ordinary.groupby("rank")[list(BUDGET_PARTS)].mean()
    span = run_span(run, rows)
    change = lasting_change(irregular.steps[irregular.ordinary], irregular.durations[irregular.ordinary])
    note = _describe_change(*change) if change else ""
    slowdown = note if change and change[2] > change[1] else ""
    analysis = Analysis(
        run=run,
        ranks_expected=run.world_size or len(by_rank),
        ranks_captured=tuple(sorted(by_rank)),
        step_count=int(steps.groupby("rank").size().max()) if len(steps) else 0,
        step_ms=step_ms,
        steps=steps,
        irregular=irregular.table,
        step_is=describe_steps(rows, run),
        budget={part: float(ordinary[part].mean()) for part in BUDGET_PARTS} if len(ordinary) else {},
        budget_by_rank=budget_by_rank,
        time=divide_time(span, steps, apart, irregular) if span else {},
        slowest_rank=int(budget_by_rank["peer_wait"].idxmin()) if len(budget_by_rank) > 1 else None,
        collectives=collectives,
        waits=_waits(times, collectives, steps),
        rows=rows,
        findings=tuple(findings),
        passed=tuple(passed),
        not_judged=not_judged,
        noise_ms=noise_ms,
        notes=(note,) if note else (),
        verdict=Verdict("inconclusive", ""),
        capture=CaptureQuality(
            overhead_percent=_overhead(run, rows, ordinary),
            dropped=sum(item.dropped for item in run.ranks),
            clock_error_us=clock_error_us,
            warnings=(*run.warnings, *warnings, *renumbered, *jumps, *early_ends(steps), *mismatches(rows, run)),
        ),
    )
    return replace(analysis, verdict=answer(analysis, on_gpu=context.on_gpu, slowdown=slowdown))


def _last_attempt(rows: pd.DataFrame, run: RunInfo) -> pd.DataFrame:
    """What each rank's last process did: an elastic job's earlier ones ended in a failure and have their own steps."""
    last = pd.DataFrame([(item.rank, item.restart) for item in last_processes(run.ranks)], columns=["rank", "restart"])
    if last.empty:  # rows that no capture of ours is behind
        return rows
    key = (rows["rank"].to_numpy(np.int64) << 16) | rows["restart"].to_numpy(np.int64)
    wanted = np.isin(key, (last["rank"].to_numpy(np.int64) << 16) | last["restart"].to_numpy(np.int64))
    return rows if wanted.all() else rows[wanted]


def _by_rank(rows: pd.DataFrame) -> dict[int, pd.DataFrame]:
    """Each rank's rows: of a table in order of rank, parts of it that take no room of their own."""
    rank = rows["rank"].to_numpy()
    if (np.diff(rank) < 0).any():
        return {int(one): of_rank for one, of_rank in rows.groupby("rank")}
    ranks, begins = np.unique(rank, return_index=True)
    ends = np.append(begins, len(rank))[1:]
    return {int(one): rows.iloc[a:b] for one, a, b in zip(ranks, begins, ends, strict=True)}


def _waits(times: dict[int, RankTime], collectives: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    tables = [time.waits.assign(rank=rank) for rank, time in times.items()]
    if not tables:
        return pd.DataFrame(columns=list(WAIT_COLUMNS))
    waits = pd.concat(tables, ignore_index=True)
    named = collectives[["group", "seq", "step"]].reindex(waits["collective"].where(waits["collective"] != NOTHING))
    issued = named["step"].to_numpy(np.float64)
    step = np.full(len(waits), np.nan)
    of_rank = waits.groupby("rank").indices
    for rank, mine in steps.groupby("rank"):
        chosen = of_rank.get(rank, np.empty(0, np.int64))
        at = (
            np.searchsorted(mine["start_ns"].to_numpy(np.int64), waits["start_ns"].to_numpy(np.int64)[chosen], "right")
            - 1
        )
        step[chosen[at >= 0]] = mine["step"].to_numpy(np.float64)[at[at >= 0]]
    earlier = issued < step
    waits = waits.assign(
        group=named["group"].to_numpy(object),
        seq=named["seq"].astype("Int64").array,
        issued_step=pd.array(np.where(earlier, issued, np.nan), "Int64"),
    )
    return waits[list(WAIT_COLUMNS)]


def _context(
    run: RunInfo,
    rows: pd.DataFrame,
    steps: pd.DataFrame,
    collectives: pd.DataFrame,
    times: dict[int, RankTime],
    step_ms: float,
    irregular: Irregular,
    topology: Topology,
) -> Context:
    facts: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for fact in run.facts:
        facts[str(fact.get("fact"))].append(fact)
    stepped = {rank: time for rank, time in times.items() if rank in set(steps["rank"])}
    judged = bool(steps["ordinary"].any())
    programs = tuple(replay.programs(stepped, rows, collectives, steps, run)) if judged else ()
    load = measure_load(run, rows, steps, facts, step_ms)
    return Context(run, rows, steps, collectives, programs, step_ms, load, dict(facts), irregular, topology)


def _describe_change(first: int, before: float, after: float) -> str:
    how = "slower" if after > before else "faster"
    return f"steps are {how} from step {first} on: {ms(after)}, {ms(before)} before (medians)"


def _overhead(run: RunInfo, rows: pd.DataFrame, ordinary: pd.DataFrame) -> float | None:
    """What the records of a step should have cost, as a share of it: an estimate, not a measurement of this run."""
    if ordinary.empty:
        return None
    recorded = (rows["source"] == "measured") & rows["step"].isin(ordinary["step"].unique())
    collectives = int((recorded & (rows["kind"] == "comm")).sum())
    native = all(item.native for item in run.ranks)
    spent = collectives * COLLECTIVE_NS[native] + (int(recorded.sum()) - collectives) * RECORD_NS[native]
    return float(100 * spent / ordinary["dur_ns"].sum())
