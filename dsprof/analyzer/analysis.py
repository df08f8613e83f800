"""The analyzer's answer: everything the reports draw, and nothing they have to work out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Final, Literal

import numpy as np
import pandas as pd

from dsprof.run import RunInfo
from dsprof.schema import BUDGET_PARTS, TIME_KINDS
from dsprof.trace import Trace
from dsprof.trace.packed_table import PackedTable

from .align.steps import StepTime
from .budget.irregular import warm_up
from .device import Devices
from .finding import Finding
from .graph.path_summary import PathSummary
from .graph.validate import ReplayCheck
from .memory.allocator_state import DeviceMemory
from .memory.use_by_step import MemoryUse, nothing
from .rules.registry import ends_run, rule_of
from .work.layer_costs import LayerCost
from .work.mfu import Efficiency
from .work.module_times import COLUMNS as MODULE_COLUMNS
from .work.stack_difference import StackDifference

FINDINGS_SCHEMA = 1
WAITING: Final = ("comm_exposed", "peer_wait", "bubble")
"""Parts of the budget in which a rank stands still for others; the rest of a step is its own work."""
LEAST_PERCENT: Final = 0.1
"""A remark that gains less of the step than this is not worth a line."""
LEAST_SHARE: Final = 5e-4
"""A part of less of the step is not shown, unless a finding is about it."""
LEAST_SECONDS: Final = 0.05
"""A kind of the run's time of less is not shown."""
MOST_RANKS_BELOW: Final = 3
"""Ranks that are told one by one below a part of the step."""


@dataclass(frozen=True)
class CaptureQuality:
    """How far the capture can be trusted."""

    overhead_percent: float | None
    """Hooks, samples after steps and side threads, as a share of the step (`capture_overhead`). None: not known."""
    dropped: int
    clock_error_us: float | None
    """How far the clocks of ranks may be apart. None: not known, as a trace does not tell which clocks it is of."""
    warnings: tuple[str, ...] = ()
    replay: ReplayCheck | None = None
    """How far the step graph agrees with what was measured; None without one."""
    overhead_measured: bool = False
    """False: `overhead_percent` is an estimate, the records written times what one costs."""


Status = Literal["healthy", "bottleneck", "inconclusive", "failed"]


@dataclass(frozen=True)
class Verdict:
    """The answer in one sentence.

    healthy:      what matters was judged, and what is neither compute nor optimizer is small or explained.
    bottleneck:   a finding above `info` says what holds the job back.
    inconclusive: time is lost that no rule could judge; the headline says where, and what would tell.
    failed:       the job did not do what it was started for: a rank died, or no step was completed.
    """

    status: Status
    headline: str


Tone = Literal["good", "unsure", "low", "medium", "high"]


@dataclass(frozen=True)
class RanksBelow:
    """A rank that a part of the step is told of by itself, or all others together.

    ms:     in that part, of several ranks the median
    own_ms: its own work, or, where its device was traced, how long the others stand still for it
    named:  whether a finding about this part names it
    """

    ranks: tuple[int, ...]
    ms: float
    own_ms: float
    named: bool


@dataclass(frozen=True)
class Analysis:
    """A run, explained.

    steps:       one row per (rank, step): rank, step, start_ns, dur_ns, ordinary (bool: judged, see `irregular.py`) and
                 one float column in ms per budget part, which sum to dur_ns / 1e6; of `other`, apart_ms went into
                 evaluation, checkpoints and compilation.
    irregular:   steps that are not ordinary (`irregular.TABLE_COLUMNS`).
    step_is:     what a step of this run is, where it is not one optimizer step after one backward; else empty.
    budget:      part -> ms, mean over ranks and ordinary steps; sums to step_ms.mean.
    budget_by_rank: index rank, a column per budget part, ms; rows sum to that rank's mean step.
    time:        kind of schema.TIME_KINDS -> s, mean over ranks; sums to the run's wall time.
    slowest_rank: the rank the others wait for most; None with one rank or no steps.
    collectives: one row per matched collective (`match.COLLECTIVE_COLUMNS`).
    waits:       one row per wait on a training thread: rank, start_ns, end_ns, arrival_ns (when the last peer was
                 there, within the wait; from then on the bytes move; null: it was for another lane's work), group,
                 seq (of what it waited for, if known), issued_step (the step it was issued in, where that is an
                 earlier one). Of many ranks there are millions: the table is made anew each time that it is asked for.
    trace:       all rows, on the common clock, to be read a rank at a time; `rows` are those of all ranks in one table
                 (dsprof.schema.COLUMNS), read anew each time.
    layer_costs: what each layer of the engine's pipelines takes; empty without one.
    modules:     what each module takes (`module_times.COLUMNS`); empty unless every module was timed.
    efficiency:  operations, MFU, samples and tokens a second; None below level full, or without a step.
    memory:      what the devices' allocators held in the end, of the ranks of which that is known.
    memory_steps: what the ranks had after each step (`use_by_step.COLUMNS`), and
    memory_uses: the most of it, by rank and place.
    device:      what the devices' streams did; None where their kernels were not traced.
    stack_difference: in which lines the ranks that the worst finding names differ from their peers; of a run without
                 such a finding, the slowest rank. None where none of these was sampled.
    critical_path: what the length of some ordinary steps is made of; None where no replay of them can be believed.
    findings:    worst first.
    passed:      codes of the rules that ran and found nothing above `info`.
    not_judged:  code -> why a rule could not be judged on this capture.
    noise_ms:    the run's own noise floor (`Study.noise_ms`).
    notes:       what else is worth knowing of the run, such as a lasting slowdown.
    """

    run: RunInfo
    ranks_expected: int
    ranks_captured: tuple[int, ...]
    step_count: int
    step_ms: StepTime | None
    steps: pd.DataFrame
    irregular: pd.DataFrame
    step_is: str
    budget: dict[str, float]
    budget_by_rank: pd.DataFrame
    time: dict[str, float]
    slowest_rank: int | None
    collectives: pd.DataFrame
    packed_waits: PackedTable
    trace: Trace
    findings: tuple[Finding, ...]
    passed: tuple[str, ...]
    not_judged: dict[str, str]
    noise_ms: float
    notes: tuple[str, ...]
    verdict: Verdict
    capture: CaptureQuality
    layer_costs: tuple[LayerCost, ...] = ()
    memory: tuple[DeviceMemory, ...] = ()
    memory_steps: pd.DataFrame = field(default_factory=nothing)
    memory_uses: tuple[MemoryUse, ...] = ()
    modules: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=list(MODULE_COLUMNS)))
    efficiency: Efficiency | None = None
    device: Devices | None = None
    critical_path: PathSummary | None = None
    stack_difference: StackDifference | None = None

    @property
    def waits(self) -> pd.DataFrame:
        """Made anew each time: of thousands of ranks ask `packed_waits` for those of some."""
        return self.packed_waits.table()

    @property
    def rows(self) -> pd.DataFrame:
        return self.trace.rows

    @property
    def problems(self) -> list[Finding]:
        """Findings above `info`, and what broke the run; worst first."""
        return [finding for finding in self.findings if finding.is_problem]

    @property
    def listed(self) -> list[Finding]:
        """Problems, and the remarks whose predicted gain is not next to nothing; worst first."""
        return [item for item in self.findings if item.is_problem or not 0 < item.weight.percent < LEAST_PERCENT]

    @property
    def remarks(self) -> list[Finding]:
        """Those of `listed` that are no problems."""
        return [finding for finding in self.listed if not finding.is_problem]

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks of the job that were not captured."""
        return tuple(sorted(set(range(self.ranks_expected)) - set(self.ranks_captured)))

    @property
    def blamed_rank(self) -> int | None:
        """The rank that the others wait for most in ordinary steps, where a finding says that it matters."""
        about = [item for item in self.problems if part_of(item.code) in WAITING]
        named = {rank for finding in about for rank in finding.where.ranks or ()}
        return self.slowest_rank if self.slowest_rank in named else None

    @property
    def hungry_rank(self) -> int | None:
        """The rank that a finding about memory names."""
        about = [item for item in self.problems if item.code.startswith("memory.")]
        return next((rank for finding in about for rank in finding.where.ranks or ()), None)

    @property
    def named_ranks(self) -> list[int]:
        """Ranks that are worth a look, the slowest first, then those that findings name."""
        named = [rank for finding in self.findings for rank in finding.where.ranks or ()]
        slowest = [] if self.slowest_rank is None else [self.slowest_rank]
        return list(dict.fromkeys([*slowest, *named]))

    @cached_property
    def step_to_show(self) -> tuple[int | None, str]:
        """A step that is worth a look, and why it: where the run broke, else a typical one. None: there is none."""
        broken = any(ends_run(finding.code) for finding in self.findings)
        if self.ranks_captured and (broken or self.step_ms is None):
            numbers = (self.trace.read(rank, ("step",))["step"] for rank in self.trace.ranks)
            last = max((int(of_rank.max()) for of_rank in numbers if len(of_rank)), default=-1)
            return (last, "the last one begun") if last >= 0 else (None, "")
        alone = self.steps["step"].nunique() == 1
        return typical_step(self.steps), "the only one" if alone else "the ordinary one nearest to the mean"

    @property
    def tone(self) -> Tone:
        """How grave the verdict is; that of a bottleneck by the worst finding's severity."""
        if self.verdict.status == "bottleneck":
            graver: dict[str, Tone] = {"high": "high", "medium": "medium", "low": "low"}
            return next((graver[one.severity] for one in self.problems if one.severity in graver), "low")
        return _TONES[self.verdict.status]

    @property
    def is_sound(self) -> bool:
        """Whether the run was judged, and its capture is whole: then how it was captured needs no second look."""
        capture = self.capture
        whole = not (self.missing_ranks or capture.dropped or capture.warnings)
        return whole and self.verdict.status in ("healthy", "bottleneck")

    @property
    def codes_by_part(self) -> dict[str, list[str]]:
        """Part of the step -> codes of the problems that lose time there."""
        return self._codes_by(part_of)

    @property
    def codes_by_time(self) -> dict[str, list[str]]:
        """The same by the kind of the run's time beside the ordinary steps."""
        return self._codes_by(kind_of)

    def _codes_by(self, place_of: Callable[[str], str | None]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for finding in self.problems:
            place = place_of(finding.code)
            if place is not None and finding.code not in found.setdefault(place, []):
                found[place].append(finding.code)
        return found

    @property
    def budget_shown(self) -> dict[str, float]:
        """The parts of the step that are worth a line, ms: what is not next to nothing, or what a finding is about."""
        least, told = LEAST_SHARE * sum(self.budget.values()), self.codes_by_part
        return {part: ms for part, ms in self.budget.items() if ms >= least or part in told}

    def ranks_below(self, part: str) -> list[RanksBelow]:
        """Which ranks a part of the step is told of by themselves: where findings about it name some, these, the other
        extreme, and the rest together."""
        table = self.budget_by_rank
        about = [finding for finding in self.problems if part_of(finding.code) == part]
        named = {rank for finding in about for rank in finding.where.ranks or () if rank in table.index}
        if len(table) < 2 or not named:
            return []
        picked = order = list(table[part].sort_values(ascending=False, kind="stable").index)
        if len(order) > MOST_RANKS_BELOW:
            picked = sorted(named)[: MOST_RANKS_BELOW - 1]
            picked += [rank for rank in (order[0], order[-1]) if rank not in picked][:1]
        own = own_work_of_budget(table)
        if self.delays is not None:
            own = self.delays.mean(axis=1).reindex(table.index, fill_value=0.0)
        told = [RanksBelow((rank,), table[part][rank], own[rank], rank in named) for rank in sorted(picked)]
        others = table.index.difference(picked)
        if len(others):
            told.append(RanksBelow(tuple(others), table[part][others].median(), own[others].median(), False))
        return told

    @property
    def steps_judged(self) -> int:
        """How many ordinary steps the budget and the findings are of."""
        return int(self.steps.loc[self.steps["ordinary"].astype(bool), "step"].nunique())

    @property
    def steps_looked_at(self) -> int:
        """How many steps there are after warm-up; 1 without one."""
        return max(self.step_count - warm_up(self.step_count), 1)

    @property
    def whole_step_ms(self) -> float | None:
        """Mean of all steps after warm-up: that of ordinary steps, and what irregular ones take beyond it, shared out
        over all of them; None without a complete step."""
        if self.step_ms is None:
            return None
        return self.step_ms.mean + float(self.irregular["excess_ms"].sum()) / self.steps_looked_at

    @property
    def delays(self) -> pd.DataFrame | None:
        """[rank, step] how long the others' devices stood still for a rank alone, mean over the others, ms: what
        rank.straggler says on devices. None unless every step was traced there, with collectives that were matched."""
        numbers = np.unique(self.steps["step"].to_numpy(np.int64)) if len(self.steps) else np.empty(0, np.int64)
        if self.device is None or not self.device.matched or not len(numbers):
            return None
        traced = bool(np.isin(numbers, self.device.steps).all())
        return self.device.delays_by_step(numbers) if traced else None

    def to_dict(self) -> dict[str, Any]:
        """findings.json, schema 1. Without a complete step `step_ms` is null and `budget` empty."""
        step_ms = None if self.step_ms is None else vars(self.step_ms)
        return {
            "schema": FINDINGS_SCHEMA,
            "run": {
                "id": self.run.id,
                "command": list(self.run.command),
                "ranks": {"expected": self.ranks_expected, "captured": len(self.ranks_captured)},
                "steps": self.step_count,
                "steps_judged": self.steps_judged,
                "step_is": self.step_is,
                "step_ms": step_ms,
                "whole_step_ms": self.whole_step_ms,
            },
            "budget": self.budget,
            "findings": [
                {**finding.to_dict(), "verified": self.run.verified.get(finding.code)} for finding in self.findings
            ],
            "verdict": {"status": self.verdict.status, "headline": self.verdict.headline},
            "time": self.time,
            "passed": list(self.passed),
            "not_judged": self.not_judged,
            "noise_ms": self.noise_ms if math.isfinite(self.noise_ms) else None,
            "notes": list(self.notes),
            "memory": [asdict(held) for held in self.memory],
            **({"memory_use": [use.to_dict() for use in self.memory_uses]} if self.memory_uses else {}),
            **({"efficiency": self.efficiency.to_dict()} if self.efficiency is not None else {}),
            **({"device": self.device.to_dict()} if self.device is not None else {}),
            **({"critical_path": self.critical_path.to_dict()} if self.critical_path is not None else {}),
            **({"modules": self.modules.to_dict("records")} if len(self.modules) else {}),
            "capture": {
                "overhead_percent": self.capture.overhead_percent,
                "overhead_measured": self.capture.overhead_measured,
                "dropped": self.capture.dropped,
                "clock_error_us": self.capture.clock_error_us,
                "warnings": list(self.capture.warnings),
                "replay": self.capture.replay.to_dict() if self.capture.replay is not None else None,
            },
        }


_TONES: Final[dict[str, Tone]] = {"healthy": "good", "inconclusive": "unsure", "failed": "high"}


def own_work_of_budget(budget_by_rank: pd.DataFrame) -> pd.Series:
    """Each rank's mean ordinary step without the parts in which it stood still for others, ms."""
    return budget_by_rank.drop(columns=[part for part in WAITING if part in budget_by_rank]).sum(axis=1)


def time_shown(time: Mapping[str, float]) -> dict[str, float]:
    """The kinds of a run's wall time that are worth a line, s, in the order of schema.TIME_KINDS."""
    return {kind: time[kind] for kind in TIME_KINDS if time.get(kind, 0.0) >= LEAST_SECONDS}


def typical_step(steps: pd.DataFrame) -> int | None:
    """The ordinary step of `Analysis.steps` whose duration, mean over ranks, is nearest to the mean of them all; None
    without one."""
    ordinary = steps[steps["ordinary"].astype(bool)]
    if ordinary.empty:
        return None
    times = (ordinary["dur_ns"].astype(float) / 1e6).groupby(ordinary["step"]).mean()
    return int((times - times.mean()).abs().idxmin())


def part_of(code: str) -> str | None:
    """The part of the ordinary step in which the time lost to a finding shows; None where it shows in none."""
    return next((part for part in _explained_by(code) if part in BUDGET_PARTS), None)


def kind_of(code: str) -> str | None:
    """The kind of time beside the ordinary steps in which the time lost to a finding shows; None where in none."""
    return next((kind for kind in _explained_by(code) if kind in TIME_KINDS), None)


def _explained_by(code: str) -> tuple[str, ...]:
    rule = rule_of(code)
    return rule.explains if rule is not None else ()
