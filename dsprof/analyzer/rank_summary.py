"""The second pass: a rank by itself, and all that is kept of its rows."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass

import pandas as pd

from dsprof.run import RunInfo
from dsprof.trace import Trace
from dsprof.trace.map_ranks import Observer, map_ranks
from dsprof.trace.merge import warn

from .align.match import Matches
from .align.steps import steps_taken
from .budget.activity import RankActivity, find_activity
from .budget.capture_overhead import count_records
from .budget.intervals import Intervals
from .budget.step_budget import RankTime, label_time
from .budget.wall_time import spans_outside_training
from .columns import RankRows
from .device import DeviceTime, device_time
from .graph.chains import RankChains
from .graph.find_chains import find_chains
from .memory.use_by_step import sum_memory
from .work.layer_costs import staged_rows
from .work.mfu import RankWork, sum_work
from .work.module_times import sum_modules
from .work.passes import find_passes


@dataclass(frozen=True)
class RankSummary:
    """activity: what it did in each step, a few rows of it (`budget.activity.find_activity`)
    outside_training: kind of schema.TIME_KINDS -> when its training thread was at it
    launching: when its device was in phases that the host had not launched whole yet (`graph.chains.RankChains`)
    behind:    the part of that for which it was late
    unseen:   why not all of the time of its device is known; empty: it is, or it has none
    seen_ns:  when its first row begins, and its last one ends
    recorded: how much was recorded in each step (`capture_overhead.count_records`)
    staged:   of a pipeline, its layers and actions (`layer_costs.staged_rows`)
    passes:   its forwards and backwards (`passes.find_passes`)
    modules:  what each module takes a step (`module_times.sum_modules`)
    work:     floating-point operations and the batch of a step (`mfu.sum_work`); None below level full
    memory:   what it had after each step (`use_by_step.sum_memory`)
    taken:    how many steps it took, where somebody asked for a part of them only (`steps.steps_taken`)
    device:   what its device's streams did, where that was traced (`device.device_time`)
    """

    activity: RankActivity
    outside_training: Mapping[str, Intervals]
    launching: Intervals
    behind: Intervals
    unseen: str
    seen_ns: tuple[int, int]
    recorded: pd.DataFrame
    staged: pd.DataFrame
    passes: pd.DataFrame
    modules: pd.DataFrame
    work: RankWork | None
    memory: pd.DataFrame
    taken: int | None
    device: DeviceTime | None


@dataclass(frozen=True)
class MeasuredRank:
    """summary: what a study keeps of the rank
    time:    where its training thread's time went
    chains:  what that thread, and its device's stream, issued and waited for (`graph.chains`): until the graph is made
    """

    summary: RankSummary
    time: RankTime
    chains: RankChains


@dataclass(frozen=True)
class SummarizeRank:
    """What is measured of a rank, and the warnings that reading it gave; nothing without rows. `collectives`,
    `matches`: of all ranks."""

    trace: Trace
    collectives: pd.DataFrame
    matches: Matches
    without_helper: frozenset[int] = frozenset()
    """Ranks whose records the native helper did not write."""

    def __call__(self, rank: int) -> tuple[MeasuredRank | None, tuple[str, ...]]:
        run = self.trace.run
        known = len(run.warnings)
        rows = self.trace.read(rank)
        summary = (
            _summarize(rows, self.collectives, self.matches, rank, run, native=rank not in self.without_helper)
            if len(rows)
            else None
        )
        return summary, tuple(run.warnings[known:])


def summarize_ranks(
    trace: Trace,
    collectives: pd.DataFrame,
    matches: Matches,
    executor: Executor | None = None,
    observer: Observer | None = None,
) -> dict[int, MeasuredRank]:
    """What is measured of each rank that has rows. One that fails is left out, and `trace.run` warns of it."""
    told = Trace(trace.run, trace.source)  # what allocators held is not asked here, and need not travel
    without_helper = frozenset(item.rank for item in trace.run.ranks if not item.native)
    every = map_ranks(
        SummarizeRank(told, collectives, matches, without_helper), trace.ranks, executor, observer, "summarize"
    )
    for _, warnings in every.found.values():
        for text in warnings:
            warn(trace.run, text)
    for rank, why in every.failed.items():
        warn(trace.run, f"rank {rank}: it could not be analyzed and is left out ({why})")
    return {rank: summary for rank, (summary, _) in every.found.items() if summary is not None}


def _summarize(
    table: pd.DataFrame, collectives: pd.DataFrame, matches: Matches, rank: int, run: RunInfo, *, native: bool
) -> MeasuredRank:
    rows = RankRows(table)
    time = label_time(rows, collectives, rank, run, spans_outside_training(rows), matches)
    chains = find_chains(time, rows, collectives, matches, run)
    start = rows.whole("start_ns")
    summary = RankSummary(
        activity=find_activity(rows),
        outside_training=time.outside_training,
        launching=chains.launching,
        behind=chains.behind,
        unseen=chains.incomplete,
        seen_ns=(int(start.min()), int((start + rows.whole("dur_ns")).max())),
        recorded=count_records(rows),
        staged=staged_rows(rows),
        passes=find_passes(rows, time),
        modules=sum_modules(rows),
        work=sum_work(table, native),
        memory=sum_memory(table, rank),
        taken=steps_taken(rows),
        device=device_time(table, rank, matches, run),
    )
    return MeasuredRank(summary, time, chains)
