"""What the rules work with: the measured run, its replay, and gains with their intervals.

What several rules use is worked out once: of the run, it is a property of `Context`; of one family, a function that is
marked `once`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.special import chdtri, stdtrit

from dsprof.run import RunInfo
from dsprof.trace import Trace

from .align.topology import Topology
from .budget.host_load import Gauges, HostLoad
from .budget.irregular import Irregular
from .device import Devices
from .finding import MEASURED_EXCESS, Gain
from .graph.step_graph import StepGraph
from .memory.use_by_step import MemoryUse, nothing

Float = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]

Found = TypeVar("Found")

BATCH: Final = 10
FEWEST_BATCHES: Final = 5
MOST_BATCHES: Final = 20
"""Batches of at least BATCH steps, but no fewer than five of them and no more than twenty."""


PHASE_COLUMNS: Final = ("rank", "step", "name", "lane", "start_ns", "dur_ns", "bytes", "value", "grad", "source")


@dataclass(frozen=True)
class Context:
    """A run, ready to be judged.

    rows:         of all ranks, those that they are compared by (`aligned.Aligned.compared`).
    trace:        all rows, aligned, to be read a rank at a time.
    steps, collectives, waits: as in `Analysis`.
    graph:        the ordinary steps, for replay; None without one.
    load:         how busy the hosts' cores are; None: not measured.
    gauges:       what threads and cores spent in each ordinary step.
    facts:        `RunInfo.facts` by their kind.
    irregular:    the steps that are not ordinary, and what they cost.
    topology:     which ranks are stages of a pipeline.
    clock_error_ms: how far the clocks of ranks may be apart.
    memory:       what the ranks had after each step (`use_by_step.COLUMNS`).
    memory_uses:  the most of it, by rank and place.
    device:       what the devices' streams did; None: their kernels were not traced.
    """

    run: RunInfo
    rows: pd.DataFrame
    trace: Trace
    steps: pd.DataFrame
    collectives: pd.DataFrame
    waits: pd.DataFrame
    graph: StepGraph | None
    step_ms: float
    load: HostLoad | None
    gauges: Gauges
    facts: Mapping[str, list[dict[str, Any]]] = field(default_factory=dict)
    irregular: Irregular = field(default_factory=Irregular)
    topology: Topology = field(default_factory=Topology)
    clock_error_ms: float = 0.0
    memory: pd.DataFrame = field(default_factory=nothing)
    memory_uses: tuple[MemoryUse, ...] = ()
    device: Devices | None = None
    kept: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What functions marked `once` found."""

    @cached_property
    def ordinary(self) -> pd.DataFrame:
        return self.steps[self.steps["ordinary"]]

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(int(rank) for rank in np.sort(self.steps["rank"].unique()))

    @cached_property
    def phases(self) -> pd.DataFrame:
        """PHASE_COLUMNS of every phase, of any thread and also if it did not end, by rank and start."""
        return self._of_kind("phase", PHASE_COLUMNS).sort_values(["rank", "start_ns"], kind="stable")

    @cached_property
    def training_phases(self) -> pd.DataFrame:
        """Those of `phases` that ended, of the training threads; `dur_ns` is never missing."""
        chosen = (self.phases["lane"] == "main") & self.phases["dur_ns"].notna()
        return self.phases[chosen].astype({"dur_ns": "int64"})

    @cached_property
    def _issued(self) -> pd.DataFrame:
        """Every communication of any rank: step, purpose, host_ns, dur_ns, ended."""
        return self._of_kind("comm", ("step", "purpose", "host_ns", "dur_ns", "ended"))

    def _of_kind(self, kind: str, columns: tuple[str, ...]) -> pd.DataFrame:
        return self.rows[list(columns)][self.rows["kind"] == kind]

    def host_ms(self, *purposes: str) -> float:
        """What issuing a communication of these purposes takes the thread that does, median; 0: not known."""
        host = self._issued["host_ns"][self._issued["purpose"].isin(purposes)].dropna().astype("int64")
        return float(host.median()) / 1e6 if len(host) else 0.0

    @cached_property
    def on_gpu(self) -> bool:
        """Whether the job computed or communicated on devices, for which steps are not replayed in this version."""
        if self.device is not None:
            return True
        comm = self._issued[self._issued["step"] >= 0]
        unknown = comm["dur_ns"].isna() & comm["ended"].fillna(False).astype(bool)
        return bool(self.facts.get("device")) or (len(comm) > 0 and bool(unknown.mean() > 0.5))

    @property
    def in_stages(self) -> bool:
        """Whether ranks are stages of a pipeline, which do different work."""
        return len(self.teams) > 1

    @cached_property
    def teams(self) -> list[Bool]:
        """Which of `ranks` are to do the same work, [R] a team: all, or those that hold the same stages."""
        stages = [self.topology.stage_of.get(rank, ()) for rank in self.ranks]
        team_of = {held: number for number, held in enumerate(sorted(set(stages)))}
        number = np.array([team_of[held] for held in stages], np.int64)
        return [number == team for team in range(len(team_of))]

    @property
    def ranks_missing(self) -> bool:
        """Whether the job had ranks whose steps were not captured."""
        return (self.run.world_size or 0) > len(self.ranks)

    @cached_property
    def step_numbers(self) -> npt.NDArray[np.int64]:
        numbers: npt.NDArray[np.int64] = np.sort(self.ordinary["step"].unique()).astype(np.int64)
        return numbers

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
    def _wide(self) -> dict[str, Float]:
        """Each number that is known of a step, [R, S] over the ordinary steps in order: a part of one array."""
        numbers = self.ordinary.select_dtypes("number")
        place = (np.searchsorted(self.ranks, self.ordinary["rank"].to_numpy(np.int64)),
                 np.searchsorted(self.step_numbers, self.ordinary["step"].to_numpy(np.int64)))  # fmt: skip
        wide = np.full((numbers.shape[1], len(self.ranks), len(self.step_numbers)), np.nan)
        wide[:, *place] = numbers.to_numpy(np.float64).T
        wide.flags.writeable = False
        return dict(zip(numbers.columns, wide, strict=True))

    def work(self, part: str) -> Float:
        """Time of a budget part in ms, [R, S] over the ordinary steps in order; or another number of `steps`."""
        return self._wide[part]

    @cached_property
    def input_sizes(self) -> Float | None:
        """Elements given to forward, [R, S] over the ordinary steps; None where the capture does not tell."""
        forward = self.phases[(self.phases["name"] == "forward") & self.phases["value"].notna()]
        if forward.empty:
            return None
        table = forward.groupby(["rank", "step"])["value"].sum().unstack()
        wide: Float = table.reindex(index=self.ranks, columns=self.step_numbers).to_numpy(np.float64)
        return None if np.isnan(wide).any() else wide

    def ranks_where(self, chosen: Bool) -> tuple[int, ...]:
        """The ranks at which `chosen`, [R], holds."""
        return tuple(np.array(self.ranks)[chosen].tolist())

    def noise_ms(self, durations: Float) -> float:
        """The noise floor: what the mean of these steps ([S], ms) could be off by, by chance.

        Not counted is what differs for a reason: steps that were given more input, and slow drift, which a comparison
        in turns cancels. So it is told from the differences between neighbours (von Neumann).
        """
        sizes = self.input_sizes
        if sizes is not None and len(durations) > 2:
            size = sizes[:, np.isin(self.step_numbers, self.replayed_steps)].mean(axis=0)
            if np.ptp(size) > 0:
                slope, level = np.polyfit(size, durations, 1)
                durations = durations - slope * size - level
        if len(durations) < 2:
            return float(np.abs(durations).sum()) / 2
        neighbours = float(1.96 * np.sqrt(np.mean(np.diff(durations) ** 2) / 2 / len(durations)))
        low, high = interval(durations)  # of what comes and goes in a fixed rhythm, neighbours say too much
        return min(neighbours, (high - low) / 2)

    def overlapped(self, before: Float, after: Float) -> Float:
        """`after`, where what is saved from `before` was only moved beside other work: there must be idle cores."""
        if self.load is None:
            return after
        return np.maximum(after, before - self.load.idle_in(self.replayed_steps))

    def cost(self, events: Float, *, rare: bool = False) -> Gain:
        """What `events` (ms each) that make steps irregular cost, divided over the steps after warm-up; percent of a
        step with its share of all that is irregular.

        The interval is Student's over the events, whose number is taken as given; of `rare` ones, which come at
        random, it is Poisson's for their number.
        """
        count, steps = len(events), len(self.irregular.steps)
        total = float(events.sum())
        if rare:
            low = float(chdtri(2 * count, 0.975)) / 2 / count * total
            high = float(chdtri(2 * count + 2, 0.025)) / 2 / count * total
        elif count > 1:
            half = float(stdtrit(count - 1, 0.975) * events.std(ddof=1) * np.sqrt(count))
            low, high = total - half, total + half
        else:  # one tells nothing about the next
            low, high = 0.0, 2 * total
        mean = total / steps
        whole = self.irregular.mean_ms
        return Gain(mean, 100 * mean / whole if whole else 0.0, low / steps, high / steps, method=MEASURED_EXCESS)

    def gain(self, saved: Float) -> Gain:
        """Mean of the ms saved in each step, with its 95 % interval."""
        low, high = interval(saved)
        mean = float(saved.mean()) if len(saved) else 0.0
        return Gain(mean, 100 * mean / self.step_ms if self.step_ms else 0.0, low, high)


def once(function: Callable[[Context], Found]) -> Callable[[Context], Found]:
    """`function`, which is only called the first time that it is asked about a context."""

    @wraps(function)
    def kept(context: Context) -> Found:
        if function not in context.kept:
            context.kept[function] = function(context)
        found: Found = context.kept[function]
        return found

    return kept


def interval(values: Float) -> tuple[float, float]:
    """95 % interval of the mean of a series, by batch means."""
    low, high = intervals(values[None])
    return float(low[0]), float(high[0])


def intervals(series: Float) -> tuple[Float, Float]:
    """95 % interval of the mean of each series, [N, S], by batch means: both ends, [N].

    Neighbouring steps are alike: what disturbs a host lasts for seconds. So a series is cut into a few long batches,
    and the interval is Student's over their means.
    """
    count = series.shape[1]
    if count < 2:  # one step tells nothing about the next
        total = series.sum(axis=1)
        return np.minimum(0.0, total), np.maximum(0.0, total)
    batches = min(max(FEWEST_BATCHES, count // BATCH), MOST_BATCHES, count)
    means = np.stack([batch.mean(axis=1) for batch in np.array_split(series, batches, axis=1)], axis=1)
    half = stdtrit(batches - 1, 0.975) * means.std(axis=1, ddof=1) / np.sqrt(batches)
    mean = series.mean(axis=1)
    return mean - half, mean + half
