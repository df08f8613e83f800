"""The way from a trace to a verdict."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from dsprof.run import RunInfo
from dsprof.schema import BUDGET_PARTS
from dsprof.trace import Trace, concat_rows

from .align.aligned import align
from .align.match import Matches, match_collectives
from .align.numbering import mismatches
from .align.steps import (
    captured_part,
    completed_steps,
    describe_steps,
    early_ends,
    lasting_change,
    step_time,
    without_training,
)
from .analysis import Analysis, CaptureQuality, Verdict
from .budget.capture_overhead import estimate_overhead, measure_overhead
from .budget.host_load import Gauges, measure_load
from .budget.irregular import find_irregular, mark_ordinary, profiled_steps
from .budget.step_budget import step_budget
from .budget.wait_table import waits_table
from .budget.wall_time import divide_time, run_span
from .device import compare_devices, unknown_kernels
from .graph.build_graph import build_graph
from .graph.validate import check
from .hang.transient_hang import passed_hangs
from .judge import judge
from .memory.allocator_state import summarize_memory
from .memory.use_by_step import memory_uses, nothing
from .rank_summary import summarize_ranks
from .study import Context
from .text import ms
from .verdict.headline import answer
from .work.layer_costs import layer_costs
from .work.mfu import judge_efficiency
from .work.module_times import module_times

__all__ = ["analyze"]


def analyze(trace: Trace) -> Analysis:
    """Explain a run. Never raises for a poor capture: what cannot be judged is named in `not_judged`."""
    run = trace.run

    # One clock, one numbering of steps, one name for each communication on all ranks.
    aligned = align(trace)
    rows, topology = aligned.compared, aligned.topology
    collectives = match_collectives(rows, run)
    matches = Matches(collectives)

    # Each rank by itself: what it did when it was not training, and where its training thread's time went.
    ranks = summarize_ranks(aligned.trace, collectives, matches)
    times = {rank: summary.time for rank, summary in ranks.items()}

    # All ranks together: their steps, and which of them are ordinary.
    steps = step_budget(times, completed_steps(rows[rows["rank"].isin(list(ranks))]))
    irregular = find_irregular(steps, rows, profiled_steps(run))
    steps = mark_ordinary(steps, irregular)
    ordinary, step_ms = steps[steps["ordinary"]], step_time(steps)

    overhead = measure_overhead(rows, ordinary)
    estimated = estimate_overhead(run, (summary.recorded for summary in ranks.values()), ordinary)

    # The step graph; what every rule says of it.
    graph = build_graph(times, {rank: summary.program for rank, summary in ranks.items()}, collectives, steps, run)
    checked = check(graph, aligned.clock_error_us / 1e3) if graph is not None else None
    held = [summary.memory for summary in ranks.values() if len(summary.memory)]
    memory = pd.concat(held, ignore_index=True) if held else nothing()
    uses = memory_uses(memory, run)
    traced = {rank: summary.device for rank, summary in ranks.items() if summary.device is not None}
    devices = compare_devices(traced, collectives, run)
    facts, gauges, waits = _facts_by_kind(run), Gauges(rows, steps), waits_table(times, collectives, steps)
    context = Context(
        run=run,
        rows=rows,
        trace=aligned.trace,
        steps=steps,
        collectives=collectives,
        waits=waits,
        graph=graph,
        step_ms=step_ms.mean if step_ms else 0.0,
        load=measure_load(run, gauges, facts, step_ms.mean if step_ms else 0.0),
        gauges=gauges,
        facts=facts,
        irregular=irregular,
        topology=topology,
        clock_error_ms=aligned.clock_error_us / 1e3,
        memory=memory,
        memory_uses=uses,
        device=devices,
    )
    findings, passed, not_judged, noise_ms = judge(context, checked)

    # The answer, and what it rests on.
    budget_by_rank = ordinary.groupby("rank")[list(BUDGET_PARTS)].mean()
    # A snapshot imported by itself tells when memory changed, and of no time what it went into.
    timed = len(steps) or not trace.memory or any(item.capture for item in run.ranks)
    span = run_span(run, (summary.seen_ns for summary in ranks.values())) if timed else None
    change = lasting_change(irregular.steps[irregular.ordinary], irregular.durations[irregular.ordinary])
    note = _describe_change(*change) if change else ""
    slowdown = note if change and change[2] > change[1] else ""
    taken = max((summary.taken for summary in ranks.values() if summary.taken is not None), default=None)
    part = "" if taken is None else captured_part(steps, taken)
    analysis = Analysis(
        run=run,
        ranks_expected=run.world_size or len(ranks),
        ranks_captured=tuple(ranks),
        step_count=int(steps.groupby("rank").size().max()) if len(steps) else 0,
        step_ms=step_ms,
        steps=steps,
        irregular=irregular.table,
        step_is=describe_steps(rows, run),
        budget={part: float(ordinary[part].mean()) for part in BUDGET_PARTS} if len(ordinary) else {},
        budget_by_rank=budget_by_rank,
        time=divide_time(span, steps, {rank: time.apart for rank, time in times.items()}, irregular) if span else {},
        slowest_rank=int(budget_by_rank["peer_wait"].idxmin()) if len(budget_by_rank) > 1 else None,
        collectives=collectives,
        waits=waits,
        trace=aligned.trace,
        layer_costs=tuple(layer_costs(concat_rows([summary.staged for summary in ranks.values()]))),
        modules=module_times({rank: summary.modules for rank, summary in ranks.items()}),
        efficiency=judge_efficiency(
            run,
            {rank: summary.work for rank, summary in ranks.items() if summary.work is not None},
            step_ms.mean if step_ms else 0.0,
            rows,
            topology,
        ),
        memory=summarize_memory(trace.memory),
        memory_steps=memory,
        memory_uses=uses,
        device=devices,
        findings=tuple(findings),
        passed=tuple(passed),
        not_judged=not_judged,
        noise_ms=noise_ms,
        notes=tuple(filter(None, (part, note, unknown_kernels(devices, run)))),
        verdict=Verdict("inconclusive", ""),
        capture=CaptureQuality(
            overhead_percent=estimated if overhead is None else overhead,
            overhead_measured=overhead is not None,
            dropped=sum(item.dropped for item in run.ranks),
            clock_error_us=aligned.clock_error_us if aligned.clocks_told else None,
            warnings=(*run.warnings, *aligned.warnings, *early_ends(steps), *mismatches(rows, run)),
            replay=checked,
        ),
    )
    missing = part or ("" if run.status else without_training(rows))
    longest = max(passed_hangs(context), key=lambda hang: hang.seconds, default=None)
    stood = "" if longest is None else longest.words
    verdict = answer(analysis, on_gpu=context.on_gpu, slowdown=slowdown, missing=missing, stood=stood)
    return replace(analysis, verdict=verdict)


def _facts_by_kind(run: RunInfo) -> Mapping[str, list[dict[str, Any]]]:
    facts: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for fact in run.facts:
        facts[str(fact.get("fact"))].append(fact)
    return dict(facts)


def _describe_change(first: int, before: float, after: float) -> str:
    how = "slower" if after > before else "faster"
    return f"steps are {how} from step {first} on: {ms(after)}, {ms(before)} before (medians)"
