"""Kept, withdrawn or undecided: whether a change pays, from pairs of jobs that ran one after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from scipy.special import stdtrit

FEWEST_PAIRS: Final = 3
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
    saved_ms:   mean of the pairs
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


def decide(pairs: Sequence[tuple[float, float]], most_pairs: int) -> Decision:
    """What the pairs so far say. pairs: ms a step of the original and of the changed job, at least two.

    It is asked again after each pair, up to `most_pairs`, so each look has its part of the chance to be wrong. Kept:
    even the low end saves LEAST_GAIN of the step. Withdrawn: even the high end does not.
    """
    before = np.array([pair[0] for pair in pairs])
    saved = before - np.array([pair[1] for pair in pairs])
    mean, step_ms = float(saved.mean()), float(before.mean())
    looks = max(most_pairs - FEWEST_PAIRS + 1, 1)
    low, high = _interval(saved, SHOWN)
    surely_low, _ = _interval(saved, 1 - WRONG / looks)
    _, surely_high = _interval(saved, 1 - WITHDRAWN_WRONG / looks)
    outcome: Outcome = "undecided"
    if len(pairs) >= FEWEST_PAIRS and surely_low > LEAST_GAIN * step_ms:
        outcome = "kept"
    elif len(pairs) >= FEWEST_PAIRS and surely_high < LEAST_GAIN * step_ms:
        outcome = "withdrawn"
    return Decision(outcome, mean, low, high, 100 * mean / step_ms if step_ms else math.nan)


def _interval(values: np.ndarray, confidence: float) -> tuple[float, float]:
    """Student's, of the mean."""
    count = len(values)
    half = float(stdtrit(count - 1, (1 + confidence) / 2) * values.std(ddof=1) / math.sqrt(count))
    return float(values.mean()) - half, float(values.mean()) + half
