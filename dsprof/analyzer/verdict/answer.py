"""The answer: what was measured and what was judged, as everything that the reports draw."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import pandas as pd

from dsprof.schema import BUDGET_PARTS

from .. import signals
from ..align.steps import captured_part, describe_steps, early_ends, lasting_change, without_training
from ..analysis import Analysis, CaptureQuality
from ..budget.wall_time import divide_time, run_span
from ..device import unknown_kernels
from ..finding import Finding
from ..freed_memory import give_back
from ..graph.evaluation_order import Cyclic
from ..graph.path_summary import PathSummary, summarize_path
from ..hang.transient_hang import transient_hangs
from ..judge import Judged
from ..memory.allocator_state import summarize_memory
from ..signals import Absent
from ..study import Study
from ..text import ms
from ..work.layer_costs import layer_costs
from ..work.mfu import judge_efficiency
from ..work.module_times import module_times
from ..work.stack_difference import StackDifference, stack_difference
from ..work.stacks import outside_phases
from ..work.taken_cores import taken_cores
from .headline import verdict_of
from .next_step import NOT_YET
from .overrides import applied_knobs, lost_knobs, verified_fixes
from .useful_by_name import untold_work

__all__ = ["answer"]

FOR_CORES: Final = 0.3
"""Waiting for a core that is at least this share of the waiting for late ranks may be why they are late."""


def answer(study: Study, judgement: Judged) -> Analysis:
    """The analysis of a run, with its verdict."""
    give_back()  # what judging made
    run, steps, irregular, ranks = study.run, study.steps, study.irregular, study.summaries
    budget, budget_by_rank = _budget(study)
    # A snapshot imported by itself tells when memory changed, and of no time what it went into.
    timed = len(steps) or not study.trace.memory or any(item.capture for item in run.ranks)
    span = run_span(run, (summary.seen_ns for summary in ranks.values())) if timed else None
    outside = {rank: summary.outside_training for rank, summary in ranks.items()}
    change = lasting_change(irregular.steps[irregular.ordinary], irregular.durations[irregular.ordinary])
    note = _describe_change(*change) if change else ""
    taken = max((summary.taken for summary in ranks.values() if summary.taken is not None), default=None)
    part = "" if taken is None else captured_part(steps, taken)
    analysis = Analysis(
        run=run,
        ranks_expected=run.world_size or len(ranks),
        ranks_captured=tuple(ranks),
        step_count=int(steps.groupby("rank").size().max()) if len(steps) else 0,
        step_ms=study.step_time,
        steps=steps,
        irregular=irregular.table,
        step_is=describe_steps(study.of_kind("step"), study.trace),
        budget=budget,
        budget_by_rank=budget_by_rank,
        time=divide_time(span, steps, outside, irregular) if span else {},
        slowest_rank=int(budget_by_rank["peer_wait"].idxmin()) if len(budget_by_rank) > 1 else None,
        collectives=study.collectives,
        packed_waits=study.waits,
        trace=study.trace,
        layer_costs=tuple(layer_costs(study.tables.staged)),
        modules=module_times(study.tables.modules),
        efficiency=judge_efficiency(
            run,
            {rank: summary.work for rank, summary in ranks.items() if summary.work is not None},
            study.step_ms,
            study.mesh,
            study.topology,
        ),
        memory=summarize_memory(study.trace.memory),
        memory_steps=study.memory,
        memory_uses=study.memory_uses,
        device=study.device,
        critical_path=_critical_path(study),
        findings=tuple(_placed(finding, study) for finding in judgement.findings),
        passed=judgement.passed,
        not_judged=dict(judgement.not_judged),
        noise_ms=judgement.noise_ms,
        notes=(
            *filter(None, (part, note, unknown_kernels(study.device, run))),
            *applied_knobs(run),
            *verified_fixes(run),
        ),
        verdict=NOT_YET,
        capture=_quality(study),
    )
    verdict = verdict_of(
        analysis,
        unknown=study.chains_unknown,
        slowdown=note if change and change[2] > change[1] else "",
        missing=part or ("" if run.status else without_training(study.phases, study.communicated.nothing)),
        stood=_longest_hang(study),
        outside=line.words if (line := outside_phases(study)) is not None else "",
        crowded=_waiting_for_cores(study),
        untold=untold_work(study, judgement),
    )
    return replace(analysis, verdict=verdict, stack_difference=_stack_difference(study, analysis))


def _budget(study: Study) -> tuple[dict[str, float], pd.DataFrame]:
    """Mean of each part of the ordinary steps, in ms: of all ranks, and of each."""
    ordinary = study.ordinary
    every = {part: float(ordinary[part].mean()) for part in BUDGET_PARTS} if len(ordinary) else {}
    return every, ordinary.groupby("rank")[list(BUDGET_PARTS)].mean()


def _stack_difference(study: Study, analysis: Analysis) -> StackDifference | None:
    """Of the ranks of the worst finding that names some of several; else of the rank that is slowest."""
    if len(study.ranks) < 2:
        return stack_difference(study, study.ranks)
    named = [finding.where.ranks or () for finding in analysis.problems]
    some = [ranks for ranks in named if 0 < len(ranks) < len(study.ranks)]
    slowest = () if analysis.slowest_rank is None else (analysis.slowest_rank,)
    found = (stack_difference(study, ranks) for ranks in (*some, slowest))
    return next((one for one in found if one is not None), None)


def _critical_path(study: Study) -> PathSummary | None:
    graph = signals.replay.look(study)
    if isinstance(graph, Absent):
        return None
    try:
        return summarize_path(graph)
    except Cyclic:
        return None


def _placed(finding: Finding, study: Study) -> Finding:
    """With the coordinate of its ranks in the job's mesh, if it has one."""
    coordinate = study.mesh.in_common(finding.where.ranks or ())
    return replace(finding, where=replace(finding.where, coordinate=coordinate)) if coordinate else finding


def _quality(study: Study) -> CaptureQuality:
    run, aligned = study.run, study.aligned
    return CaptureQuality(
        overhead_percent=study.overhead_percent,
        overhead_measured=study.overhead_measured,
        dropped=sum(item.dropped for item in run.ranks),
        clock_error_us=aligned.clock_error_us if aligned.clocks_told else None,
        warnings=(
            *run.warnings,
            *aligned.warnings,
            *early_ends(study.steps),
            *study.communicated.mismatches,
            *lost_knobs(run),
        ),
        replay=study.checked,
    )


def _longest_hang(study: Study) -> str:
    """The longest of the hangs that resolved themselves, in words; empty without one."""
    longest = max(transient_hangs(study), key=lambda hang: hang.seconds, default=None)
    return "" if longest is None else longest.words


def _waiting_for_cores(study: Study) -> str:
    """How long training threads wait for a core, in words, where ranks may be late for that; else empty."""
    waits = study.gauges.spent("core_wait_seconds")
    waits = waits[np.isfinite(waits)]
    ordinary = study.ordinary
    late_ms = float(ordinary["peer_wait"].mean()) if len(ordinary) else 0.0
    if study.contended is None or not len(waits) or float(waits.mean()) < FOR_CORES * late_ms:
        return ""
    waits_for_core = f"a rank waits {ms(float(waits.mean()))} of each step for a core"
    return f"{waits_for_core}, {taken_cores(study).words}: run it with `dsprof run` where cores are free"


def _describe_change(first: int, before: float, after: float) -> str:
    how = "slower" if after > before else "faster"
    return f"steps are {how} from step {first} on: {ms(after)}, {ms(before)} before (medians)"
