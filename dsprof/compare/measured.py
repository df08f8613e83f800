"""What is kept of a run to compare it: small enough for a baseline file that continuous integration keeps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np
import pandas as pd

from dsprof.analyzer.analysis import WAITING, Analysis
from dsprof.analyzer.budget.host_load import Gauges
from dsprof.analyzer.text import clean

FEWEST_STEPS: Final = 5
MOST_STEPS: Final = 1_000_000
BASELINE_SCHEMA: Final = 1
CORE_WAIT: Final = "core_wait_seconds"


class NothingToCompare(Exception):
    """A run, or a baseline file, has nothing that can be compared. The message says why, and what to do."""


@dataclass(frozen=True)
class MeasuredRun:
    """A run, as it is compared.

    steps_ms:    the ordinary steps in their order, each the mean over the ranks
    parts_ms:    budget part -> ms a step; they sum to the mean step
    ranks_ms:    rank -> its own work a step, ms: what it did not spend waiting for others
    collectives: what is communicated -> ms a step of transfers, mean over the groups' collectives
    modules_ms:  module -> ms a step of its own in forward, backward and recomputation; empty below level full
    findings:    code and place -> {"severity", "title", "ms"} of those above `info`
    waited:      share of the time in which a rank was ready to run and had no core; NaN where it is not known
    """

    name: str
    started: str
    steps_ms: tuple[float, ...]
    parts_ms: dict[str, float]
    ranks_ms: dict[int, float] = field(default_factory=dict)
    collectives: dict[str, float] = field(default_factory=dict)
    modules_ms: dict[str, float] = field(default_factory=dict)
    findings: dict[str, dict[str, Any]] = field(default_factory=dict)
    waited: float = math.nan
    command: tuple[str, ...] = ()
    commit: str = ""
    hosts: tuple[str, ...] = ()
    ranks: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    knobs: dict[str, Any] = field(default_factory=dict)
    level: str = ""

    @property
    def mean_ms(self) -> float:
        return float(np.mean(self.steps_ms))

    @classmethod
    def of(cls, analysis: Analysis, name: str) -> MeasuredRun:
        """Raises NothingToCompare where the run has too few ordinary steps."""
        steps = analysis.steps[analysis.steps["ordinary"].astype(bool)]
        series = steps.groupby("step", sort=True)["dur_ns"].mean().to_numpy(np.float64) / 1e6
        if len(series) < FEWEST_STEPS:
            raise NothingToCompare(
                f"{name}: {len(series)} ordinary training steps were captured, and {FEWEST_STEPS} are needed: profile "
                "more steps"
            )
        run = analysis.run
        return cls(
            name=name,
            started=run.started,
            steps_ms=tuple(np.round(series, 6).tolist()),
            parts_ms={part: float(value) for part, value in analysis.budget.items()},
            ranks_ms=_own_work(analysis),
            collectives=_collectives(analysis, len(series)),
            modules_ms=_modules(analysis),
            findings=_findings(analysis),
            waited=_waited(analysis, steps),
            command=_job(run.command),
            commit=run.commit,
            hosts=tuple(sorted({rank.host for rank in run.ranks if rank.host} or ({run.host} - {""}))),
            ranks=analysis.ranks_expected,
            versions=dict(run.versions),
            knobs=dict(run.knobs),
            level=run.level,
        )

    def to_dict(self) -> dict[str, Any]:
        """For a baseline file."""
        found = asdict(self)
        found["ranks_ms"] = {str(rank): value for rank, value in self.ranks_ms.items()}
        found["waited"] = None if math.isnan(self.waited) else self.waited
        return {"schema": BASELINE_SCHEMA, **found}

    @classmethod
    def from_dict(cls, data: Any, name: str) -> MeasuredRun:
        """Raises NothingToCompare where it is not what `to_dict` makes."""
        try:
            if data["schema"] != BASELINE_SCHEMA:
                raise NothingToCompare(
                    f"{name}: a baseline of schema {data['schema']}, which this version does not know"
                )
            steps = tuple(float(value) for value in data["steps_ms"][:MOST_STEPS])
            if len(steps) < FEWEST_STEPS or not all(0 < value < math.inf for value in steps):
                raise ValueError("its steps are no times")
            return cls(
                name=clean(str(data["name"])),
                started=str(data["started"]),
                steps_ms=steps,
                parts_ms=_numbers(data["parts_ms"]),
                ranks_ms={int(rank): value for rank, value in _numbers(data["ranks_ms"]).items()},
                collectives=_numbers(data["collectives"]),
                modules_ms=_numbers(data["modules_ms"]),
                findings={clean(str(key)): dict(value) for key, value in data["findings"].items()},
                waited=math.nan if data["waited"] is None else float(data["waited"]),
                command=tuple(str(word) for word in data["command"]),
                commit=clean(str(data["commit"])),
                hosts=tuple(str(host) for host in data["hosts"]),
                ranks=int(data["ranks"]),
                versions={str(key): str(value) for key, value in data["versions"].items()},
                knobs=dict(data["knobs"]),
                level=str(data["level"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise NothingToCompare(
                f"{name}: not a baseline that `dsprof compare --save` wrote ({clean(error)})"
            ) from error


def _numbers(found: dict[str, Any]) -> dict[str, float]:
    return {clean(str(key)): float(value) for key, value in found.items()}


def _job(command: Sequence[str]) -> tuple[str, ...]:
    """The job's own words: flags of `dsprof run`, such as where the run folder lies, differ from run to run."""
    for index, word in enumerate(command):
        if word.endswith(".py") or word in ("-m", "--module", "--"):
            return tuple(command[index:])
    return tuple(command)


def _own_work(analysis: Analysis) -> dict[int, float]:
    table = analysis.budget_by_rank
    own = table.drop(columns=[part for part in WAITING if part in table]).sum(axis=1)
    return {int(rank): float(value) for rank, value in own.items()}


def _collectives(analysis: Analysis, steps: int) -> dict[str, float]:
    """By what moves and how, `all_reduce of gradients`: ms a step, of all groups together."""
    table = analysis.collectives
    ordinary = analysis.steps.loc[analysis.steps["ordinary"].astype(bool), "step"].unique()
    table = table[table["step"].isin(ordinary) & table["transfer_ns"].notna()]
    if table.empty:
        return {}
    purpose = table["purpose"].astype(object).fillna("other").astype(str)
    kind = table["name"].astype(str) + " (" + purpose + ")"
    spent = table["transfer_ns"].astype(np.float64).groupby(kind).sum() / 1e6 / steps
    return {str(key): float(value) for key, value in spent.items()}


def _modules(analysis: Analysis) -> dict[str, float]:
    table = analysis.modules
    if table.empty:
        return {}
    spent = table[["own_ms", "backward_own_ms", "recompute_ms"]].astype(np.float64).fillna(0.0).sum(axis=1)
    return {str(module): float(value) for module, value in zip(table["module"], spent, strict=True)}


def _findings(analysis: Analysis) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for finding in analysis.findings:
        if finding.severity == "info":
            continue
        key = finding.code
        if key not in found:  # the first is the worst of its code
            found[key] = {
                "severity": finding.severity,
                "title": finding.title,
                "ms": None if finding.gain is None else finding.gain.ms,
            }
    return found


def _waited(analysis: Analysis, ordinary: pd.DataFrame) -> float:
    """The largest share over the ranks, of their ordinary steps."""
    shares = []
    for rank in analysis.ranks_captured:
        rows = analysis.trace.read(rank, ("rank", "kind", "name", "start_ns", "value"))
        gauges = Gauges(rows, ordinary[ordinary["rank"] == rank])
        if gauges.ranks:
            shares.append(float(gauges.spent(CORE_WAIT).sum() / gauges.wall_ms.sum()))
    known = [share for share in shares if not math.isnan(share)]
    return min(max(known), 1.0) if known else math.nan
