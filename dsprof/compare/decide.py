"""Worse, better, same or not certain: what two sets of runs of a job tell about the step's length.

Two runs of one job differ by more than the noise of their steps: by where their processes land, by what else the
machine does. So the unit here is the run, and never the step.

- Runs of A and B that took turns are compared in pairs, which have a session in common: Student's over the pairs.
- Otherwise it counts how far runs of one side lie apart, together with what is known beforehand of runs of one job
  (`PRIOR`), which weighs as much as PRIOR_RUNS runs: with one run a side there is nothing else.
- If all runs of one side were made before those of the other, whatever changed on the machine in between looks like a
  difference, and is allowed for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from dsprof.analyzer.price.confidence_interval import half_width, interval

from .measured import MeasuredRun

Pairs = list[tuple[int, int]]
Outcome = Literal["worse", "better", "same", "not certain"]

FEWEST_PAIRS: Final = 3
SURE: Final = 0.99
"""What is decided holds at this confidence: one false alarm in a hundred comparisons, at most."""
SHOWN: Final = 0.95
PRIOR: Final = 0.02
"""Runs of one job on a machine that has cores for it lie so far apart, as a share of the step: standard deviation."""
PRIOR_WAITED: Final = 0.5
"""And so much further for each part of the time in which ranks were ready to run and had no core."""
PRIOR_UNKNOWN: Final = 0.05
"""Where it was not captured whether they had."""
PRIOR_RUNS: Final = 4
FIRST_PAIRS: Final = 5
"""What is advised to begin with, where nothing is known of how far runs of this job lie apart."""
MOST_PAIRS: Final = 50


@dataclass(frozen=True)
class StepChange:
    """How much longer a step of B is than one of A, as a share of A's: positive is slower.

    outcome:   what holds at SURE
    change:    the estimate; low, high: its interval at SHOWN; surely: at SURE
    rests_on:  in words, what the interval comes from
    runs_more: pairs of runs, in turns, that would probably tell; 0 where it is decided
    """

    outcome: Outcome
    change: float
    low: float
    high: float
    surely: tuple[float, float]
    rests_on: str
    runs_more: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "outcome": self.outcome,
            "percent": round(100 * self.change, 3),
            "low": round(100 * self.low, 3),
            "high": round(100 * self.high, 3),
            "rests_on": self.rests_on,
            "pairs_that_would_tell": self.runs_more,
        }


def decide(
    before: Sequence[MeasuredRun], after: Sequence[MeasuredRun], within: float, pairs: Pairs | None
) -> StepChange:
    """within: a difference of at most this share of the step counts as none. pairs: what `in_turns` gives."""
    a, b = np.array([math.log(run.mean_ms) for run in before]), np.array([math.log(run.mean_ms) for run in after])
    if pairs is not None:
        differences = np.array([b[j] - a[i] for i, j in pairs])
        mean, freedom = float(differences.mean()), len(pairs) - 1
        error = float(differences.std(ddof=1)) / math.sqrt(len(pairs))
        spread = float(differences.std(ddof=1))
        rests_on = f"{len(pairs)} pairs of runs that took turns"
    else:
        mean = float(b.mean() - a.mean())
        variance, freedom = _between_runs(before, after, a, b)
        error = math.sqrt(variance * (1 / len(a) + 1 / len(b)))
        spread = math.sqrt(2 * variance)
        rests_on = f"{_runs(len(a))} against {_runs(len(b))}"
        if one_after_the_other(before, after) and max(len(a), len(b)) > 1:
            error, freedom = math.hypot(error, max(_prior(run) for run in (*before, *after))), PRIOR_RUNS
            rests_on += ", which were not made in turns"
    low, high = _ends(mean, error, freedom, SHOWN)
    surely = _ends(mean, error, freedom, SURE)
    outcome: Outcome = "not certain"
    if -within <= surely[0] and surely[1] <= within:
        outcome = "same"
    elif surely[0] > 0:
        outcome = "worse"
    elif surely[1] < 0:
        outcome = "better"
    more = 0
    if outcome == "not certain":
        more = FIRST_PAIRS if min(len(a), len(b)) == 1 else _pairs_that_would_tell(max(abs(mean), within), spread)
    return StepChange(outcome, math.expm1(mean), low, high, surely, rests_on, more)


def in_turns(before: Sequence[MeasuredRun], after: Sequence[MeasuredRun]) -> Pairs | None:
    """Which runs of the two sides are pairs, by index: of every two that began one after the other, one is of each
    side. None: they did not take turns."""
    if len(before) != len(after) or len(before) < FEWEST_PAIRS:
        return None
    order = sorted(
        [(run.started, run.name, 0, i) for i, run in enumerate(before)]
        + [(run.started, run.name, 1, i) for i, run in enumerate(after)]
    )
    pairs = []
    for first, second in zip(order[::2], order[1::2], strict=True):
        if first[2] == second[2] or not first[0]:
            return None
        (_, _, _, i), (_, _, _, j) = sorted((first, second), key=lambda one: one[2])
        pairs.append((i, j))
    return pairs


def one_after_the_other(before: Sequence[MeasuredRun], after: Sequence[MeasuredRun]) -> bool:
    """Whether all runs of one side began before the first of the other."""
    a, b = [run.started for run in before], [run.started for run in after]
    return max(a) < min(b) or max(b) < min(a)


def _between_runs(
    before: Sequence[MeasuredRun], after: Sequence[MeasuredRun], a: np.ndarray, b: np.ndarray
) -> tuple[float, int]:
    """The variance of a run's mean step, on a logarithmic scale, and its degrees of freedom."""
    runs = (*before, *after)
    known = float(np.mean([_prior(run) ** 2 + _noise(run) ** 2 for run in runs]))
    freedom = len(a) + len(b) - 2
    seen = float(((a - a.mean()) ** 2).sum() + ((b - b.mean()) ** 2).sum())
    return (PRIOR_RUNS * known + seen) / (PRIOR_RUNS + freedom), PRIOR_RUNS + freedom


def _prior(run: MeasuredRun) -> float:
    return PRIOR_UNKNOWN if math.isnan(run.waited) else PRIOR + PRIOR_WAITED * run.waited


def _noise(run: MeasuredRun) -> float:
    """Standard error of the run's mean step by the noise of its steps, as a share of it."""
    low, high = interval(np.array(run.steps_ms))
    return (high - low) / 4 / run.mean_ms


def _ends(mean: float, error: float, freedom: int, confidence: float) -> tuple[float, float]:
    half = half_width(error, freedom, confidence)
    return math.expm1(mean - half), math.expm1(min(mean + half, 700.0))


def _pairs_that_would_tell(wanted: float, spread: float) -> int:
    """So many that SURE's interval becomes narrower than the difference. spread: of a pair."""
    for pairs in range(FEWEST_PAIRS, MOST_PAIRS):
        if half_width(spread / math.sqrt(pairs), pairs - 1, SURE) < wanted:
            return pairs
    return MOST_PAIRS


def _runs(number: int) -> str:
    return "1 run" if number == 1 else f"{number} runs"
