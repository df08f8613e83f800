"""Two runs of a job beside each other: what changed of the step, part by part, and which findings came and went."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from .align.steps import StepTime
from .analysis import Analysis
from .price.confidence_interval import interval
from .text import percent, with_interval


@dataclass(frozen=True)
class Difference:
    """What is different in the second of two runs.

    a_ms, b_ms:    mean ordinary step of each
    change_ms:     b_ms - a_ms, with the ends of its 95 % interval, by batches of steps. Two runs of one job differ by
                   more than their steps do: it says whether these runs differ, not why
    parts:         index part of the budget; a_ms, b_ms, change_ms, most changed first; sums to the steps'
    gone, came, stayed: codes of the problems that only the first, only the second, and both have
    unlike:        what else is different between the runs, so that the change may not be the job's own
    """

    a_ms: float
    b_ms: float
    change_ms: float
    low: float
    high: float
    parts: pd.DataFrame
    gone: tuple[str, ...]
    came: tuple[str, ...]
    stayed: tuple[str, ...]
    unlike: tuple[str, ...]

    @property
    def percent(self) -> float:
        """Of the first run's step."""
        return 100 * self.change_ms / self.a_ms if self.a_ms else 0.0

    @property
    def says(self) -> str:
        """In a sentence."""
        saved = with_interval(-self.change_ms, -self.high, -self.low, -self.percent)
        if self.low <= 0 <= self.high:
            return f"no difference that these steps can tell: the second {saved}"
        return f"the second {saved}"


class NothingToCompare(ValueError):
    """One of the runs has no complete step."""


def compare_runs(a: Analysis, b: Analysis) -> Difference:
    """What is different in `b`. Raises NothingToCompare."""
    step_a, step_b = _need_steps(a, "first"), _need_steps(b, "second")
    (low_a, high_a), (low_b, high_b) = interval(_by_step(a)), interval(_by_step(b))
    half = float(np.hypot(high_a - low_a, high_b - low_b)) / 2
    change = step_b.mean - step_a.mean
    parts = pd.DataFrame({"a_ms": pd.Series(a.budget), "b_ms": pd.Series(b.budget)}).fillna(0.0)
    parts["change_ms"] = parts["b_ms"] - parts["a_ms"]
    parts = parts[(parts["a_ms"] > 0) | (parts["b_ms"] > 0)]
    parts = parts.loc[parts["change_ms"].abs().sort_values(ascending=False, kind="stable").index]
    parts.index.name = "part"
    codes_a, codes_b = (list(dict.fromkeys(one.code for one in run.problems)) for run in (a, b))
    return Difference(
        a_ms=step_a.mean,
        b_ms=step_b.mean,
        change_ms=change,
        low=change - half,
        high=change + half,
        parts=parts,
        gone=tuple(code for code in codes_a if code not in codes_b),
        came=tuple(code for code in codes_b if code not in codes_a),
        stayed=tuple(code for code in codes_a if code in codes_b),
        unlike=tuple(_unlike(a, b)),
    )


def _need_steps(analysis: Analysis, which: str) -> StepTime:
    if analysis.step_ms is None:
        raise NothingToCompare(f"the {which} run ({analysis.run.id}) has no complete step")
    return analysis.step_ms


def _by_step(analysis: Analysis) -> np.ndarray:
    """Duration of each ordinary step, mean over ranks, ms."""
    ordinary = analysis.steps[analysis.steps["ordinary"].astype(bool)]
    by_step = (ordinary["dur_ns"].astype(float) / 1e6).groupby(ordinary["step"]).mean()
    values: np.ndarray = by_step.to_numpy(np.float64)
    return values


def _unlike(a: Analysis, b: Analysis) -> list[str]:
    """What is different between the runs themselves."""
    found = []
    hosts_a, hosts_b = ({info.host for info in run.run.ranks} for run in (a, b))
    if hosts_a != hosts_b:
        found.append(f"hosts: {', '.join(sorted(hosts_a))} and {', '.join(sorted(hosts_b))}")
    if a.ranks_expected != b.ranks_expected:
        found.append(f"ranks: {a.ranks_expected} and {b.ranks_expected}")
    for name in sorted({*a.run.versions, *b.run.versions}):
        one, other = a.run.versions.get(name, "none"), b.run.versions.get(name, "none")
        if one != other:
            found.append(f"{name}: {one} and {other}")
    for key in sorted({*a.run.knobs, *b.run.knobs}):
        if a.run.knobs.get(key) != b.run.knobs.get(key):
            found.append(f"--set {key}: {a.run.knobs.get(key, 'not set')} and {b.run.knobs.get(key, 'not set')}")
    if a.run.level != b.run.level:
        found.append(f"level: {a.run.level} and {b.run.level}")
    for which, run in (("first", a), ("second", b)):
        share = 100 * run.steps_judged / max(run.step_count, 1)
        if share < 50:
            found.append(f"only {percent(share)} of the steps of the {which} run are ordinary")
    return found
