"""Two sides held against each other: the decision, and where the difference lies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from dsprof.analyzer.price.confidence_interval import half_width
from dsprof.analyzer.text import percent

from .decide import MOST_PAIRS, SHOWN, Pairs, StepChange, decide, in_turns
from .measured import MeasuredRun
from .sides import commits, differences

LEAST_CHANGE: Final = 0.001
"""Of the step: what changed by less is left out of the tables of collectives, ranks and modules."""
MOST_ROWS: Final = 8
WITHIN: Final = 0.02

REGRESSION, NOT_CERTAIN = 1, 4


@dataclass(frozen=True)
class Changed:
    """What one thing took on each side, ms a step. low, high: 95 % interval of the difference; None of single runs."""

    name: str
    before: float
    after: float
    low: float | None
    high: float | None

    @property
    def ms(self) -> float:
        return self.after - self.before

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name, "before_ms": self.before, "after_ms": self.after, "ms": self.ms, "low": self.low,
            "high": self.high,
        }  # fmt: skip


@dataclass(frozen=True)
class RunComparison:
    """What changed from A to B.

    limit:   the share of the step by which B may be slower; None where nobody asked
    parts:   every budget part, in order; they sum to the step's change
    ranks, collectives, modules: what changed most
    appeared, gone: findings above `info` that only B, only A has: code and title
    """

    before: tuple[MeasuredRun, ...]
    after: tuple[MeasuredRun, ...]
    decision: StepChange
    within: float
    limit: float | None
    accepted: str
    step: Changed
    parts: tuple[Changed, ...]
    ranks: tuple[Changed, ...]
    collectives: tuple[Changed, ...]
    modules: tuple[Changed, ...]
    appeared: dict[str, str]
    gone: dict[str, str]
    warnings: tuple[str, ...]

    @property
    def regression(self) -> bool:
        """Whether B is surely slower, and by more than is allowed."""
        return self.limit is not None and self.decision.outcome == "worse" and self.decision.change > self.limit

    @property
    def status(self) -> int:
        """The exit status."""
        if self.regression:
            return REGRESSION
        return NOT_CERTAIN if self.decision.outcome == "not certain" else 0

    @property
    def headline(self) -> str:
        """The answer in one sentence."""
        size = percent(abs(100 * self.decision.change))
        if self.decision.outcome == "same":
            return f"the step takes the same, within {percent(100 * self.within)}"
        if self.decision.outcome == "not certain":
            most = self.decision.runs_more == MOST_PAIRS
            runs = f"no fewer than {MOST_PAIRS}" if most else str(self.decision.runs_more)
            return (
                f"the step is {size} {self._direction}, and runs of the same job may differ by as much; {runs} runs of "
                "each, in turns, may tell"
            )
        where = self._mostly()
        return f"the step is {size} {self._direction}{where}"

    @property
    def _direction(self) -> str:
        return "slower" if self.decision.change > 0 else "faster"

    def _mostly(self) -> str:
        """The part that explains half of the change or more."""
        worst = max(self.parts, key=lambda part: part.ms * math.copysign(1, self.step.ms), default=None)
        if worst is None or not self.step.ms or worst.ms / self.step.ms < 0.5:
            return ""
        return f", mostly by {worst.name.replace('_', ' ')}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "outcome": self.decision.outcome,
            "headline": self.headline,
            "regression": self.regression,
            "limit_percent": None if self.limit is None else 100 * self.limit,
            "accepted": self.accepted,
            "within_percent": 100 * self.within,
            "change": self.decision.to_dict(),
            "step": self.step.to_dict(),
            "parts": [part.to_dict() for part in self.parts],
            "ranks": [rank.to_dict() for rank in self.ranks],
            "collectives": [one.to_dict() for one in self.collectives],
            "modules": [one.to_dict() for one in self.modules],
            "findings": {"appeared": self.appeared, "gone": self.gone},
            "warnings": list(self.warnings),
            "before": {"runs": [run.name for run in self.before], "commits": commits(self.before)},
            "after": {"runs": [run.name for run in self.after], "commits": commits(self.after)},
        }


def compare(
    before: Sequence[MeasuredRun],
    after: Sequence[MeasuredRun],
    *,
    limit: float | None = None,
    within: float | None = None,
    accepted: Mapping[str, float] | None = None,
) -> RunComparison:
    """Hold `after` against `before`.

    limit:    by which share of the step B may be slower before it is a regression
    within:   a smaller difference is none; by default the limit, or WITHIN
    accepted: regressions that were agreed to, by name; their shares are added to the limit
    """
    if limit is not None:
        limit = (1 + limit) * math.prod(1 + share for share in (accepted or {}).values()) - 1
    near = within if within is not None else limit if limit is not None else WITHIN
    pairs = in_turns(before, after)
    decision = decide(before, after, near, pairs)

    def changes(names: Iterable[Any], value: Callable[[MeasuredRun, Any], float]) -> list[Changed]:
        return [
            _change(str(name), [value(run, name) for run in before], [value(run, name) for run in after], pairs)
            for name in dict.fromkeys(names)
        ]

    def most_changed(values: Callable[[MeasuredRun], Mapping[Any, float]]) -> tuple[Changed, ...]:
        found = changes((name for run in runs for name in values(run)), lambda run, name: values(run).get(name, 0.0))
        shown = [one for one in found if abs(one.ms) >= LEAST_CHANGE * step.before]
        return tuple(sorted(shown, key=lambda one: -abs(one.ms))[:MOST_ROWS])

    runs = (*before, *after)
    (step,) = changes(["step"], lambda run, _: run.mean_ms)
    of_a = {code: str(found["title"]) for run in before for code, found in run.findings.items()}
    of_b = {code: str(found["title"]) for run in after for code, found in run.findings.items()}
    return RunComparison(
        before=tuple(before),
        after=tuple(after),
        decision=decision,
        within=near,
        limit=limit,
        accepted=", ".join(accepted or {}),
        step=step,
        parts=tuple(
            changes((part for run in runs for part in run.parts_ms), lambda run, part: run.parts_ms.get(part, 0.0))
        ),
        ranks=most_changed(
            lambda run: {f"rank {rank}": ms for rank, ms in run.ranks_ms.items()} if run.ranks > 1 else {}
        ),
        collectives=most_changed(lambda run: run.collectives),
        modules=most_changed(lambda run: run.modules_ms),
        appeared={code: title for code, title in of_b.items() if code not in of_a},
        gone={code: title for code, title in of_a.items() if code not in of_b},
        warnings=tuple(differences(before, after)),
    )


def _by_rank(run: MeasuredRun) -> dict[str, float]:
    return {f"rank {rank}": spent for rank, spent in run.ranks_ms.items()}


def _change(name: str, before: list[float], after: list[float], pairs: Pairs | None) -> Changed:
    a, b = np.array(before), np.array(after)
    if pairs is not None:
        each = np.array([b[j] - a[i] for i, j in pairs])
        error, freedom = float(each.std(ddof=1)) / math.sqrt(len(each)), len(each) - 1
    elif len(a) > 1 and len(b) > 1:
        freedom = len(a) + len(b) - 2
        spread = math.sqrt((((a - a.mean()) ** 2).sum() + ((b - b.mean()) ** 2).sum()) / freedom)
        error = spread * math.sqrt(1 / len(a) + 1 / len(b))
    else:
        return Changed(name, float(a.mean()), float(b.mean()), None, None)
    half = half_width(error, freedom, SHOWN)
    mean = float(b.mean() - a.mean())
    return Changed(name, float(a.mean()), float(b.mean()), mean - half, mean + half)
