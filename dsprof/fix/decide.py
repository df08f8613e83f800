"""Kept, withdrawn or undecided: whether a change pays, from pairs of jobs that ran one after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from dsprof.analyzer.price.confidence_interval import half_width

FEWEST_PAIRS: Final = 3
PAIRS_OF_LITTLE: Final = 5
"""Whole jobs may be fast or slow by chance, say by where their processes land, and three or four pairs then fall on the
same side, of a change that does nothing, in one comparison of a hundred. So a saving that few pairs may show by chance,
below MUCH and not as large as was predicted, takes more."""
MUCH: Final = 0.4
"""Of the step."""
FARTHEST: Final = 50.0
"""A logarithm beyond which an end of an interval says nothing."""
LEAST_GAIN: Final = 0.01
"""Of the step: a change that saves less is not worth it."""
WRONG: Final = 0.005
"""How often, at most, a change that saves nothing is kept, over all looks together."""
WITHDRAWN_WRONG: Final = 0.05
"""And how often one that saves LEAST_GAIN is withdrawn, which harms nobody."""
SHOWN: Final = 0.95
"""Confidence of the interval that is told."""

Outcome = Literal["kept", "withdrawn", "undecided"]


@dataclass(frozen=True)
class Decision:
    """outcome: what was decided, or `undecided` as yet
    saved_ms:   what the pairs save in the mean
    low, high:  95 % interval of it
    percent:    of the original's step
    """

    outcome: Outcome
    saved_ms: float
    low: float
    high: float
    percent: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "ms": round(self.saved_ms, 3), "low": round(self.low, 3), "high": round(self.high, 3),
            "percent": round(self.percent, 2), "outcome": self.outcome,
        }  # fmt: skip


def decide(
    pairs: Sequence[tuple[float, float]], most_pairs: int, predicted: tuple[float, float] | None = None
) -> Decision:
    """What the pairs so far say. pairs: ms a step of the original and of the changed job, at least two; predicted: low
    and high end of what the change should save, ms.

    A machine that is busy makes both jobs of a pair longer by a factor, not by so many ms: what is averaged is the
    logarithm of the ratio of the two, and savings are of the mean of the originals. It is asked again after each pair,
    up to `most_pairs`, so each look has its part of the chance to be wrong. Kept: even the low end saves LEAST_GAIN of
    the step. Withdrawn: even the high end does not.
    """
    before, after = np.array(pairs).T
    ratios, step_ms = np.log(before / after), float(before.mean())
    looks = max(most_pairs - FEWEST_PAIRS + 1, 1)

    def saved_ms(ratio: float) -> float:
        return step_ms * -math.expm1(-max(ratio, -FARTHEST))

    mean = saved_ms(float(ratios.mean()))
    low, high = (saved_ms(end) for end in _interval(ratios, SHOWN))
    surely_low = saved_ms(_interval(ratios, 1 - WRONG / looks)[0])
    surely_high = saved_ms(_interval(ratios, 1 - WITHDRAWN_WRONG / looks)[1])
    outcome: Outcome = "undecided"
    few = FEWEST_PAIRS if _is_no_chance(mean, step_ms, predicted) else min(PAIRS_OF_LITTLE, most_pairs)
    if len(pairs) >= few and surely_low > LEAST_GAIN * step_ms:
        outcome = "kept"
    elif len(pairs) >= FEWEST_PAIRS and surely_high < LEAST_GAIN * step_ms:
        outcome = "withdrawn"
    return Decision(outcome, mean, low, high, 100 * mean / step_ms if step_ms else math.nan)


def _is_no_chance(saved_ms: float, step_ms: float, predicted: tuple[float, float] | None) -> bool:
    """Whether so much is saved, or just what was predicted, that jobs which happen to be fast do not explain it."""
    return saved_ms >= MUCH * step_ms or (predicted is not None and predicted[0] <= saved_ms <= predicted[1])


def _interval(values: np.ndarray, confidence: float) -> tuple[float, float]:
    """Student's, of the mean."""
    count = len(values)
    half = half_width(float(values.std(ddof=1)) / math.sqrt(count), count - 1, confidence)
    return float(values.mean()) - half, float(values.mean()) + half
