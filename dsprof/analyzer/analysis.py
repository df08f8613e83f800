"""The analyzer's answer: everything the reports draw, and nothing they have to work out."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd

from dsprof.run import RunInfo
from dsprof.trace import Trace

from .align.steps import StepTime
from .budget.irregular import warm_up
from .device import Devices
from .finding import Finding
from .graph.path_summary import PathSummary
from .graph.validate import ReplayCheck
from .memory.allocator_state import DeviceMemory
from .memory.use_by_step import MemoryUse, nothing
from .work.layer_costs import LayerCost
from .work.mfu import Efficiency
from .work.module_times import COLUMNS as MODULE_COLUMNS

FINDINGS_SCHEMA = 1


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
                 earlier one).
    trace:       all rows, on the common clock, to be read a rank at a time; `rows` are those of all ranks in one table
                 (dsprof.schema.COLUMNS), read anew each time.
    layer_costs: what each layer of the engine's pipelines takes; empty without one.
    modules:     what each module takes (`module_times.COLUMNS`); empty unless every module was timed.
    efficiency:  operations, MFU, samples and tokens a second; None below level full, or without a step.
    memory:      what the devices' allocators held in the end, of the ranks of which that is known.
    memory_steps: what the ranks had after each step (`use_by_step.COLUMNS`), and
    memory_uses: the most of it, by rank and place.
    device:      what the devices' streams did; None where their kernels were not traced.
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
    waits: pd.DataFrame
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

    @property
    def rows(self) -> pd.DataFrame:
        return self.trace.rows

    @property
    def steps_judged(self) -> int:
        """How many ordinary steps the budget and the findings are of."""
        return int(self.steps.loc[self.steps["ordinary"].astype(bool), "step"].nunique())

    @property
    def whole_step_ms(self) -> float | None:
        """Mean of all steps after warm-up: that of ordinary steps, and what irregular ones take beyond it, shared out
        over all of them; None without a complete step."""
        if self.step_ms is None:
            return None
        looked_at = max(self.step_count - warm_up(self.step_count), 1)
        return self.step_ms.mean + float(self.irregular["excess_ms"].sum()) / looked_at

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
