"""The study of a run: everything measured, and nothing judged. Rules and the answer begin here, and never at rows.

What several rules use is worked out once: of the run, it is a property of `Study`; of one family, a function that is
marked `once`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import pandas as pd

from dsprof.run import RunInfo
from dsprof.trace import Trace
from dsprof.trace.map_ranks import Observer
from dsprof.trace.packed_table import PackedTable

from .align.aligned import Aligned, align
from .align.broadcast_tree import tree_arrivals
from .align.communicated import Communicated, summarize_arrivals
from .align.groups import Mesh
from .align.match import Matches, match_collectives
from .align.steps import StepTime, step_time
from .align.topology import Topology
from .arrays import Bool, Float, Int
from .budget.activity import ACTIVITY
from .budget.capture_overhead import estimate_overhead, measure_overhead
from .budget.host_load import Gauges, HostLoad, measure_load
from .budget.irregular import Irregular, find_irregular, mark_ordinary, profiled_steps
from .columns import RankRows, is_one_of
from .device import Devices, compare_devices
from .freed_memory import give_back
from .graph.chain_work import chain_work, hosts
from .graph.chains_of_ranks import PackedChains
from .graph.checked_graph import checked_graph
from .graph.step_graph import StepGraph
from .graph.validate import ReplayCheck
from .memory.use_by_step import MemoryUse, memory_uses
from .rank_summary import RankSummary, RankTables, summarize_ranks

Found = TypeVar("Found")

HOST_PARTS: Final = ("data", "pause")
"""Parts of the budget that no device does."""


@dataclass(frozen=True)
class Study:
    """A run as it was measured.

    aligned:      the ranks beside each other: one clock, one numbering of steps.
    communicated: what they communicated, beside `collectives`.
    summaries:    each rank by itself.
    tables:       what each rank did by itself, of all of them, such as `activity` and `memory`.
    steps, collectives, waits: as in `Analysis`.
    step_time:    durations of the ordinary steps; None without one.
    irregular:    the steps that are not ordinary, and what they cost.
    graph:        the ordinary steps, for replay; None without one.
    checked:      whether a replay of it agrees with what was measured; None without a graph.
    facts:        `RunInfo.facts` by their kind.
    gauges:       what threads and cores spent in each ordinary step.
    load:         how busy the hosts' cores are; None: not measured.
    memory_uses:  the most of `memory`, by rank and place.
    device:       what the devices' streams did; None: their kernels were not traced.
    overhead_percent: what capturing cost, as a share of the step; None: not known.
    overhead_measured: whether that was measured, or else estimated.
    """

    aligned: Aligned
    communicated: Communicated
    summaries: Mapping[int, RankSummary]
    tables: RankTables[pd.DataFrame]
    steps: pd.DataFrame
    step_time: StepTime | None
    irregular: Irregular
    collectives: pd.DataFrame
    waits: PackedTable
    graph: StepGraph | None
    checked: ReplayCheck | None
    facts: Mapping[str, list[dict[str, Any]]]
    gauges: Gauges
    load: HostLoad | None
    memory_uses: tuple[MemoryUse, ...]
    device: Devices | None
    overhead_percent: float | None
    overhead_measured: bool
    kept: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What functions marked `once` found."""

    @property
    def run(self) -> RunInfo:
        return self.trace.run

    @property
    def trace(self) -> Trace:
        """All rows, aligned, to be read a rank at a time."""
        return self.aligned.trace

    @property
    def passes(self) -> pd.DataFrame:
        """Forwards and backwards of all ranks, in order (`passes.PASS_COLUMNS`)."""
        return self.tables.passes

    @property
    def memory(self) -> pd.DataFrame:
        """What the ranks had after each step (`use_by_step.COLUMNS`)."""
        return self.tables.memory

    def of_kind(self, kind: str) -> pd.DataFrame:
        """The steps, phases, actions of a pipeline's schedule, gauges or pauses of all ranks, by rank and start
        (`budget.activity.ACTIVITY`)."""
        return self.tables.activity[kind]

    @property
    def topology(self) -> Topology:
        """Which ranks are stages of a pipeline."""
        return self.aligned.topology

    @property
    def mesh(self) -> Mesh:
        """The dimensions that like process groups form."""
        return self.communicated.mesh

    @property
    def clock_error_ms(self) -> float:
        """How far the clocks of ranks may be apart."""
        return self.aligned.clock_error_us / 1e3

    @property
    def step_ms(self) -> float:
        """Mean of the ordinary steps; 0 without one."""
        return self.step_time.mean if self.step_time else 0.0

    @property
    def ordinary(self) -> pd.DataFrame:
        """Those of `steps` that are judged. They are not kept: of thousands of ranks that would be all steps twice."""
        return self.steps[self.steps["ordinary"]]

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(np.unique(self.steps["rank"].to_numpy(np.int64)).tolist())

    @property
    def phases(self) -> pd.DataFrame:
        """Every phase, of any thread and also if it did not end, by rank and start."""
        return self.of_kind("phase")

    @cached_property
    def phase_rows(self) -> RankRows:
        """`phases`, column by column."""
        return RankRows(self.phases)

    @cached_property
    def training_phases(self) -> pd.DataFrame:
        """Those of `phases` that ended, of the training threads; `dur_ns` is never missing."""
        rows, names = self.phase_rows, ACTIVITY["phase"]
        chosen = rows.are("lane", "main") & rows.known("dur_ns")
        if chosen.all():  # of thousands of ranks there are too many to hold them twice
            columns = {**{name: rows.array(name) for name in names}, "dur_ns": rows.whole("dur_ns")}
        else:
            place = np.flatnonzero(chosen)
            columns = {**rows.take_arrays(names, place), "dur_ns": rows.whole("dur_ns")[place]}
        return pd.DataFrame(columns, copy=False)

    @cached_property
    def stream_phases(self) -> pd.DataFrame:
        """What devices took for the phases of the ordinary steps (`stream_phases.STREAM_PHASES`), by rank and launch;
        empty where no device leads in them."""
        table = self.tables.stream_phases
        inside = np.isin(table["step"].to_numpy(np.int64), self.step_numbers) & self.led_by_devices
        return table[inside].reset_index(drop=True)

    @cached_property
    def judged_collectives(self) -> RankRows:
        """`collectives` of the ordinary steps, column by column."""
        inside = np.isin(self.collectives["step"].to_numpy(np.int64), self.step_numbers)
        return RankRows(self.collectives if inside.all() else self.collectives.take(np.flatnonzero(inside)))

    def issued(self, *purposes: str) -> pd.DataFrame:
        """`budget.activity.ISSUED` of what the ranks communicated for these purposes, in the order of ranks."""
        table = self.tables.issued
        return table[is_one_of(table["purpose"], *purposes)]

    def host_ms(self, *purposes: str) -> float:
        """What issuing a communication of these purposes takes the thread that does, median; 0: not known."""
        told = [summary.activity.host_ns for summary in self.summaries.values()]
        host = [of_rank[purpose] for of_rank in told for purpose in purposes if purpose in of_rank]
        return float(np.median(np.concatenate(host), overwrite_input=True)) / 1e6 if host else 0.0

    @cached_property
    def on_gpu(self) -> bool:
        """Whether the job computed or communicated on devices."""
        if self.device is not None:
            return True
        issued, unknown = np.sum([(0, 0), *(one.activity.issued for one in self.summaries.values())], axis=0)
        return bool(self.facts.get("device")) or bool(unknown > 0.5 * issued)

    @cached_property
    def led_by_devices(self) -> bool:
        """Whether the graph has chains of devices, which lead their ranks, beside those of their hosts."""
        return self.graph is not None and len(self.graph.ranks) > self.graph.leads

    @cached_property
    def chains_unknown(self) -> str:
        """Why not all chains of the job are known: what the devices of some ranks did was not seen; empty: all are."""
        if not self.on_gpu or self.graph is None:
            return ""
        graph = self.graph
        beside = set(graph.ranks[graph.leads :])
        unseen = [rank for rank in graph.ranks[: graph.leads] if rank not in beside]
        return "" if not unseen else "; ".join(dict.fromkeys(self._why_unseen(rank) for rank in unseen))

    def _why_unseen(self, rank: int) -> str:
        summary = self.summaries[rank]
        if summary.unseen:
            return summary.unseen
        if self.device is not None:
            return "the device's kernels were traced, but not how they depend on their host"
        return "the job ran on a device, and what that did was not timed in every step"

    @property
    def contended(self) -> HostLoad | None:
        """How busy the cores are that the job computes and communicates on; None: not measured, or devices do it."""
        return None if self.on_gpu else self.load

    @property
    def in_stages(self) -> bool:
        """Whether ranks are stages of a pipeline, which do different work."""
        return len(self.peer_groups) > 1

    @cached_property
    def peer_groups(self) -> list[Bool]:
        """Which of `ranks` are to do the same work, [R] a peer_group: all, or those that hold the same stages."""
        stages = [self.topology.stage_of.get(rank, ()) for rank in self.ranks]
        team_of = {held: number for number, held in enumerate(sorted(set(stages)))}
        number = np.array([team_of[held] for held in stages], np.int64)
        return [number == peer_group for peer_group in range(len(team_of))]

    @property
    def ranks_missing(self) -> bool:
        """Whether the job had ranks whose steps were not captured."""
        return (self.run.world_size or 0) > len(self.ranks)

    @cached_property
    def step_numbers(self) -> npt.NDArray[np.int64]:
        return np.unique(self.ordinary["step"].to_numpy(np.int64))

    @cached_property
    def replayed_steps(self) -> npt.NDArray[np.int64]:
        """Those of the ordinary steps that the graph holds."""
        return self.need_graph().judged_steps

    def need_graph(self) -> StepGraph:
        """The graph, which a rule has by `need_steps`."""
        assert self.graph is not None
        return self.graph

    @property
    def step_range(self) -> tuple[int, int] | None:
        numbers = self.step_numbers
        return (int(numbers[0]), int(numbers[-1])) if len(numbers) else None

    @cached_property
    def _row_of(self) -> npt.NDArray[np.int32]:
        """The row of `steps` that each rank and ordinary step has, [R, S] in order; -1: none."""
        rows = np.flatnonzero(self.steps["ordinary"].to_numpy(bool))
        rank, step = (self.steps[name].to_numpy(np.int64)[rows] for name in ("rank", "step"))
        found = np.full((len(self.ranks), len(self.step_numbers)), -1, np.int32)
        found[np.searchsorted(self.ranks, rank), np.searchsorted(self.step_numbers, step)] = rows
        return found

    def work(self, part: str) -> Float:
        """Time of a budget part in ms, [R, S] over the ordinary steps in order; or another number of `steps`.

        What only a host does (HOST_PARTS) is its own time, also where its device had other things to do meanwhile."""
        if part in HOST_PARTS and self.led_by_devices:
            graph = self.need_graph()
            spent: Float = chain_work(graph, part)[hosts(graph)]
            return spent
        number, row = self.steps[part].to_numpy(np.float64), self._row_of
        return np.where(row >= 0, number[row], np.nan) if len(number) else np.full(row.shape, np.nan)

    @cached_property
    def input_sizes(self) -> Float | None:
        """Elements given to forward, [R, S] over the ordinary steps; None where the capture does not tell."""
        rows = self.phase_rows
        forward = np.flatnonzero(rows.are("name", "forward") & rows.known("value"))
        if not len(forward):
            return None
        wide = self.by_step(rows, rows.real("value"), forward)
        return None if np.isnan(wide).any() else wide

    def by_step(self, rows: RankRows, value: Float, place: Int) -> Float:
        """Sums of `value`, one a row, over the rows at these places, [R, S] over the ordinary steps in order; NaN where
        there is none."""
        return rows.by_step(value, place, np.array(self.ranks, np.int64), self.step_numbers)

    def ranks_where(self, chosen: Bool) -> tuple[int, ...]:
        """The ranks at which `chosen`, [R], holds."""
        return tuple(np.array(self.ranks)[chosen].tolist())


def once(function: Callable[[Study], Found]) -> Callable[[Study], Found]:
    """`function`, which is only called the first time that it is asked about a study."""

    @wraps(function)
    def kept(study: Study) -> Found:
        if function not in study.kept:
            study.kept[function] = function(study)
        found: Found = study.kept[function]
        return found

    return kept


def study(trace: Trace, executor: Executor | None = None, observer: Observer | None = None) -> Study:
    """Measure a run. Never raises for a poor capture: what is not there is None or empty.

    executor: runs what is of one rank alone, such as a ProcessPoolExecutor, or a Dask client's (`get_executor()`);
              None: this process does. The result is the same. A rank that fails costs that rank, with a warning.
    observer: told what is done, for how many ranks it is done and how many there are.
    """
    run = trace.run

    # First pass. One clock, one numbering of steps, one name for each communication on all ranks.
    aligned, arrivals = align(trace, executor, observer)
    collectives = match_collectives(arrivals, run)
    communicated = summarize_arrivals(arrivals, run, aligned.topology)
    matches = Matches(collectives, tree_arrivals(arrivals, collectives, run))
    del arrivals
    give_back()

    # Second pass. Each rank by itself: what it did when it was not training, and where its training thread's time went.
    measured = summarize_ranks(aligned.trace, collectives, matches, executor, observer)
    ranks, tables, steps, waits = measured.summaries, measured.tables, measured.steps, measured.waits
    activity = tables.activity
    del matches
    give_back()

    # All ranks together: their steps, and which of them are ordinary.
    irregular = find_irregular(steps, activity["phase"], profiled_steps(run))
    steps = mark_ordinary(steps, irregular)
    ordinary, length = steps[steps["ordinary"]], step_time(steps)
    overhead = measure_overhead(activity["gauge"], ordinary)
    estimated = estimate_overhead(run, tables.recorded, ordinary)
    del ordinary

    # The step graph, and whether to believe it.
    clock_error_ms = aligned.clock_error_us / 1e3
    chains = PackedChains(measured.chains)
    del measured  # what was issued and waited for is in the waits, and in the graph
    graph, checked = checked_graph(chains, collectives, steps, run, aligned.topology, clock_error_ms)

    # Memory, devices, cores.
    uses = memory_uses(tables.memory, run)
    traced = {rank: summary.device for rank, summary in ranks.items() if summary.device is not None}
    devices = compare_devices(traced, collectives, run)
    facts, gauges = run.facts_by_kind(), Gauges(activity["gauge"], steps)
    return Study(
        aligned=aligned,
        communicated=communicated,
        summaries=ranks,
        tables=tables,
        steps=steps,
        step_time=length,
        irregular=irregular,
        collectives=collectives,
        waits=waits,
        graph=graph,
        checked=checked,
        facts=facts,
        gauges=gauges,
        load=measure_load(run, gauges, facts, length.mean if length else 0.0),
        memory_uses=uses,
        device=devices,
        overhead_percent=estimated if overhead is None else overhead,
        overhead_measured=overhead is not None,
    )
