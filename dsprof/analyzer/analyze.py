"""The way from a trace to a verdict."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from dsprof.run import RunInfo, last_processes
from dsprof.schema import BUDGET_PARTS
from dsprof.trace import Trace

from .analysis import Analysis, CaptureQuality, Verdict
from .budget import paint, step_budget
from .build import build_graph
from .clock import align, find_jumps
from .context import Context
from .irregular import find_irregular, mark_ordinary
from .judge import judge
from .kinds import apart_spans, divide_time, run_span
from .load import Gauges, measure_load
from .match import Matches, match_collectives, mismatches, number_by_order
from .overhead import estimate_overhead
from .steps import align_steps, completed_steps, describe_steps, early_ends, lasting_change, step_time
from .text import ms
from .topology import find_topology, name_pipeline_messages
from .trust import check
from .verdict import answer
from .waits import waits_table

__all__ = ["analyze"]


def analyze(trace: Trace) -> Analysis:
    """Explain a run. Never raises for a poor capture: what cannot be judged is named in `not_judged`."""
    run = trace.run

    # One clock, one numbering of steps, one name for each communication on all ranks.
    aligned = _align(trace)
    topology = find_topology(aligned.rows, run)
    rows = name_pipeline_messages(aligned.rows, topology)
    collectives = match_collectives(rows, run)
    matches = Matches(collectives)

    # Each rank by itself: what it did when it was not training, and where its training thread's time went.
    by_rank = _by_rank(rows)
    apart = {rank: apart_spans(mine) for rank, mine in by_rank.items()}
    times = {rank: paint(mine, collectives, rank, run, apart[rank], matches) for rank, mine in by_rank.items()}

    # All ranks together: their steps, and which of them are ordinary.
    steps = step_budget(times, completed_steps(rows))
    irregular = find_irregular(steps, rows)
    steps = mark_ordinary(steps, irregular)
    ordinary, step_ms = steps[steps["ordinary"]], step_time(steps)

    # The step graph; what every rule says of it.
    graph = build_graph(times, by_rank, collectives, steps, run, matches)
    checked = check(graph, aligned.clock_error_us / 1e3) if graph is not None else None
    facts, gauges = _facts_by_kind(run), Gauges(rows, steps)
    context = Context(
        run=run,
        rows=rows,
        steps=steps,
        collectives=collectives,
        graph=graph,
        step_ms=step_ms.mean if step_ms else 0.0,
        load=measure_load(run, gauges, facts, step_ms.mean if step_ms else 0.0),
        gauges=gauges,
        facts=facts,
        irregular=irregular,
        topology=topology,
        clock_error_ms=aligned.clock_error_us / 1e3,
    )
    findings, passed, not_judged, noise_ms = judge(context, checked)

    # The answer, and what it rests on.
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
        waits=waits_table(times, collectives, steps),
        rows=rows,
        findings=tuple(findings),
        passed=tuple(passed),
        not_judged=not_judged,
        noise_ms=noise_ms,
        notes=(note,) if note else (),
        verdict=Verdict("inconclusive", ""),
        capture=CaptureQuality(
            overhead_percent=estimate_overhead(run, rows, ordinary),
            dropped=sum(item.dropped for item in run.ranks),
            clock_error_us=aligned.clock_error_us,
            warnings=(*run.warnings, *aligned.warnings, *early_ends(steps), *mismatches(rows, run)),
            replay=checked,
        ),
    )
    return replace(analysis, verdict=answer(analysis, on_gpu=context.on_gpu, slowdown=slowdown))


@dataclass(frozen=True)
class _Aligned:
    """Rows of each rank's last process, on one clock, with steps numbered alike."""

    rows: pd.DataFrame
    clock_error_us: float
    warnings: tuple[str, ...]


def _align(trace: Trace) -> _Aligned:
    run = trace.run
    rows = number_by_order(_last_attempt(trace.rows, run), run)
    rows, error_us, warnings = align(rows, run)
    rows, renumbered = align_steps(rows)
    jump_us, jumps = find_jumps(rows)
    return _Aligned(rows, max(error_us, jump_us), (*warnings, *renumbered, *jumps))


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


def _facts_by_kind(run: RunInfo) -> Mapping[str, list[dict[str, Any]]]:
    facts: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for fact in run.facts:
        facts[str(fact.get("fact"))].append(fact)
    return dict(facts)


def _describe_change(first: int, before: float, after: float) -> str:
    how = "slower" if after > before else "faster"
    return f"steps are {how} from step {first} on: {ms(after)}, {ms(before)} before (medians)"
