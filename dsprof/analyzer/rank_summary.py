"""The second pass: a rank by itself, and all that is kept of its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeAlias, TypeVar

import pandas as pd

from dsprof.run import RunInfo
from dsprof.trace import Trace
from dsprof.trace.load import Columns, drain_columns
from dsprof.trace.map_ranks import Observer, each, map_parts
from dsprof.trace.merge import warn
from dsprof.trace.packed_table import PackedTable
from dsprof.trace.packing import ByRank

from .align.match import Matches
from .align.steps import completed_steps, no_steps, steps_taken
from .arrays import Int
from .budget.activity import ACTIVITY, ISSUED, RankActivity, activity_rows, find_activity, issued_rows
from .budget.capture_overhead import RECORDED, count_records
from .budget.intervals import Intervals
from .budget.step_budget import RankTime, in_ms, label_time, time_of_parts
from .budget.wait_table import CollectiveColumns, no_waits, waits_table
from .budget.wall_time import spans_outside_training
from .columns import RankRows
from .device import DeviceTime, device_time, host_waits, kernel_steps
from .device.host_waits import no_host_waits
from .freed_memory import give_back
from .graph.chains import RankChains
from .graph.chains_of_ranks import packed_part
from .graph.find_chains import find_chains
from .memory.use_by_step import nothing, sum_memory
from .work.layer_costs import NEEDED, staged_rows
from .work.mfu import RankWork, sum_work
from .work.module_times import join_modules, sum_modules
from .work.passes import PASS_COLUMNS, find_passes
from .work.stream_phases import no_stream_phases, stream_phases

Rows = TypeVar("Rows")


@dataclass(frozen=True, slots=True)
class RankSummary:
    """activity: how it communicated, in a few numbers (`budget.activity.find_activity`)
    outside_training: kind of schema.TIME_KINDS -> when its training thread was at it
    launching: when its device was in phases that the host had not launched whole yet (`graph.chains.RankChains`)
    behind:    the part of that for which it was late
    unseen:   why not all of the time of its device is known; empty: it is, or it has none
    seen_ns:  when its first row begins, and its last one ends
    work:     floating-point operations and the batch of a step (`mfu.sum_work`); None below level full
    taken:    how many steps it took, where somebody asked for a part of them only (`steps.steps_taken`)
    device:   what its device's streams did, where that was traced (`device.device_time`)
    kernel_steps: the steps of whose kernels its device has told (`device.kernel_steps`)
    """

    activity: RankActivity
    outside_training: Mapping[str, Intervals]
    launching: Intervals
    behind: Intervals
    unseen: str
    seen_ns: tuple[int, int]
    work: RankWork | None
    taken: int | None
    device: DeviceTime | None
    kernel_steps: Int


@dataclass(frozen=True)
class RankTables(Generic[Rows]):
    """What is measured of ranks in rows, of all of them one behind the other, in order of rank: a table of its own for
    each rank of thousands would take many times the room of what is in it. Until all ranks are there, what is taken
    from their rows as it stands is columns, and no table.

    activity: their steps, phases, actions, gauges and pauses, by kind (`budget.activity.ACTIVITY`)
    issued:   what they communicated that is of no layer's computation (`budget.activity.ISSUED`)
    staged:   of a pipeline, their layers and actions (`layer_costs.NEEDED`)
    recorded: how much was recorded in each step (`capture_overhead.RECORDED`)
    passes:   their forwards and backwards (`passes.PASS_COLUMNS`)
    memory:   what they had after each step (`use_by_step.COLUMNS`)
    host_waits: where they waited for their devices (`device.host_waits`)
    stream_phases: what their devices took for the phases that they launched (`stream_phases.STREAM_PHASES`)
    modules:  what each module takes a step (`module_times.sum_modules`)
    """

    activity: Mapping[str, Rows]
    issued: Rows
    staged: Rows
    recorded: pd.DataFrame
    passes: pd.DataFrame
    memory: pd.DataFrame
    host_waits: pd.DataFrame
    stream_phases: pd.DataFrame
    modules: pd.DataFrame


PartTables: TypeAlias = "RankTables[Columns]"


def join_parts(parts: Sequence[PartTables]) -> PartTables:
    """Those of some ranks, and of those after them, whose columns are used up; without any, no rows."""
    return RankTables(
        activity={kind: _drained([part.activity[kind] for part in parts], of) for kind, of in ACTIVITY.items()},
        issued=_drained([part.issued for part in parts], ISSUED),
        staged=_drained([part.staged for part in parts], NEEDED),
        recorded=_concat([part.recorded for part in parts], RECORDED),
        passes=_concat([part.passes for part in parts], PASS_COLUMNS),
        memory=_those_with_rows([part.memory for part in parts], nothing),
        host_waits=_those_with_rows([part.host_waits for part in parts], no_host_waits),
        stream_phases=_those_with_rows([part.stream_phases for part in parts], no_stream_phases),
        modules=join_modules([part.modules for part in parts]),
    )


def _drained(parts: Sequence[Columns], columns: Sequence[str]) -> Columns:
    found = drain_columns(parts, columns)
    give_back()  # of thousands of ranks, there is no room for the next table beside the freed parts of this one
    return found


def as_tables(ranks: PartTables) -> RankTables[pd.DataFrame]:
    """What was held as columns, as tables."""
    activity = {kind: _as_table(columns) for kind, columns in ranks.activity.items()}
    issued, staged = _as_table(ranks.issued), _as_table(ranks.staged)
    measured = (ranks.recorded, ranks.passes, ranks.memory, ranks.host_waits, ranks.stream_phases, ranks.modules)
    return RankTables(activity, issued, staged, *measured)


def _as_table(columns: Columns) -> pd.DataFrame:
    return pd.DataFrame(dict(columns), copy=False)


def _those_with_rows(tables: Sequence[pd.DataFrame], without: Callable[[], pd.DataFrame]) -> pd.DataFrame:
    """without: what there is if none has a row"""
    held = [table for table in tables if len(table)]
    return pd.concat(held, ignore_index=True) if held else without()


def _concat(tables: Sequence[pd.DataFrame], columns: Sequence[str]) -> pd.DataFrame:
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=list(columns))


@dataclass(frozen=True)
class MeasuredRanks(Generic[Rows]):
    """What is measured of some ranks, or of all of them.

    summaries: of each of those that have rows, what a study keeps
    chains: what their training threads, and their devices' streams, issued and waited for, part by part
            (`graph.chains_of_ranks.packed_part`): until the graph is made
    tables: of all of these
    steps:  where the time of their training threads went: of some ranks `step_budget.time_of_parts`, of all of them
            `step_budget.step_budget`
    waits:  of these threads (`budget.wait_table.WAIT_COLUMNS`)
    """

    summaries: Mapping[int, RankSummary]
    chains: tuple[tuple[tuple[int, ...], bytes], ...]
    tables: RankTables[Rows]
    steps: pd.DataFrame
    waits: PackedTable


@dataclass(frozen=True)
class MeasuredPart:
    """What is measured of some ranks; None where none of them has rows. warnings: that reading gave. failed: rank ->
    why it could not be analyzed."""

    measured: MeasuredRanks[Columns] | None
    warnings: tuple[str, ...]
    failed: Mapping[int, str]


@dataclass(frozen=True)
class SummarizeRanks:
    """What is measured of ranks. `collectives`, `matches`: of all ranks."""

    trace: Trace
    collectives: pd.DataFrame
    matches: Matches
    without_helper: frozenset[int] = frozenset()
    """Ranks whose records the native helper did not write."""

    def __call__(self, ranks: Sequence[int]) -> MeasuredPart:
        run = self.trace.run
        known = len(run.warnings)
        every = each(self._of_rank, ranks)
        found = {rank: result for rank, result in every.found.items() if result is not None}
        failed = dict(every.failed)
        try:
            times = self._times(found) if found else None
        except Exception:  # whatever is wrong with one rank, the others count
            alone = each(lambda rank: self._times({rank: found[rank]}), tuple(found))
            failed |= alone.failed
            found = {rank: found[rank] for rank in alone.found}
            times = self._times(found) if found else None
        if times is None:
            return MeasuredPart(None, tuple(run.warnings[known:]), failed)
        tables = [of_rank.tables for of_rank in found.values()]
        measured = MeasuredRanks(
            summaries=ByRank((rank, of_rank.summary) for rank, of_rank in found.items()),
            chains=(packed_part({rank: of_rank.chains for rank, of_rank in found.items()}),),
            tables=tables[0] if len(tables) == 1 else join_parts(tables),  # joined with those of others later
            steps=times[0],
            waits=times[1],
        )
        return MeasuredPart(measured, tuple(run.warnings[known:]), failed)

    def _times(self, found: Mapping[int, _OfRank]) -> tuple[pd.DataFrame, PackedTable]:
        """Where the time of these ranks' steps went, and what they waited for."""
        times = {rank: of_rank.time for rank, of_rank in found.items()}
        steps = time_of_parts(times, pd.concat([of_rank.steps for of_rank in found.values()], ignore_index=True))
        return steps, PackedTable(waits_table(times, self._collective_columns, steps))

    @cached_property
    def _collective_columns(self) -> CollectiveColumns:
        return CollectiveColumns.of(self.collectives)

    def _of_rank(self, rank: int) -> _OfRank | None:
        """Nothing without rows."""
        rows = RankRows(self.trace.read(rank))
        if not len(rows):
            return None
        native = rank not in self.without_helper
        return _summarize(rows, self.collectives, self.matches, rank, self.trace.run, native=native)


def summarize_ranks(
    trace: Trace,
    collectives: pd.DataFrame,
    matches: Matches,
    executor: Executor | None = None,
    observer: Observer | None = None,
) -> MeasuredRanks[pd.DataFrame]:
    """What is measured of all ranks that have rows. One that fails is left out, and `trace.run` warns of it."""
    told = Trace(trace.run, trace.source)  # what allocators held is not asked here, and need not travel
    without_helper = frozenset(item.rank for item in trace.run.ranks if not item.native)
    measure = SummarizeRanks(told, collectives, matches, without_helper)
    parts = map_parts(measure, trace.ranks, executor, observer, "summarize")
    for part in parts:
        for text in part.warnings:
            warn(trace.run, text)
    for part in parts:
        for rank, why in part.failed.items():
            warn(trace.run, f"rank {rank}: it could not be analyzed and is left out ({why})")
    found = [part.measured for part in parts if part.measured is not None]
    del parts
    tables = as_tables(join_parts([part.tables for part in found]))
    steps = [part.steps for part in found]
    return MeasuredRanks(
        summaries={rank: one for part in found for rank, one in part.summaries.items()},
        chains=tuple(packed for part in found for packed in part.chains),
        tables=tables,
        steps=in_ms(pd.concat(steps, ignore_index=True) if steps else time_of_parts({}, no_steps())),
        waits=PackedTable.joined([part.waits for part in found]) if found else PackedTable(no_waits()),
    )


@dataclass(frozen=True)
class _OfRank:
    """steps: that it completed (`align.steps.completed_steps`)
    time:  where its training thread's time went. It stays in the task."""

    summary: RankSummary
    chains: RankChains
    steps: pd.DataFrame
    time: RankTime
    tables: PartTables


def _summarize(
    rows: RankRows, collectives: pd.DataFrame, matches: Matches, rank: int, run: RunInfo, *, native: bool
) -> _OfRank:
    table = rows.table
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
        work=sum_work(table, native),
        taken=steps_taken(rows),
        device=device_time(table, rank, matches, run),
        kernel_steps=kernel_steps(rows),
    )
    tables = RankTables(
        activity=activity_rows(rows),
        issued=issued_rows(rows),
        staged=staged_rows(rows),
        recorded=count_records(rows),
        passes=find_passes(rows, time),
        memory=sum_memory(table, rank),
        host_waits=host_waits(rows, rank),
        stream_phases=stream_phases(table, rank),
        modules=sum_modules(rows, rank),
    )
    return _OfRank(summary, chains.without_waits(), completed_steps(rows), time, tables)
