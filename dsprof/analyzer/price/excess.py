"""What costs that were measured by themselves gain, if they go: each with its interval."""

from __future__ import annotations

import math
from dataclasses import replace

from ..candidate import Between, Excess
from ..finding import Gain
from ..study import Study
from .gains import cost_outside_steps, mean_gain


def excess_gain(study: Study, excess: Excess) -> Gain:
    """The gain of doing without it."""
    if excess.per == "step":
        gain = mean_gain(study, excess.ms)
    else:
        gain = cost_outside_steps(study, excess.ms, rare=excess.per == "rare occasion")
    if excess.method is not None:
        gain = replace(gain, method=excess.method)
    if excess.less_ms is None:
        return gain
    low = gain.low - excess.less_ms
    if excess.least_part is not None:
        low = max(low, gain.low * excess.least_part)
    return widened(gain, low, gain.high)


def whole_ms(study: Study, excess: Excess) -> float:
    """The step that the excess is a part of, ms: with its share of all that is irregular, where that is what it is."""
    return study.step_ms if excess.per == "step" else study.irregular.mean_ms


def widened(gain: Gain, low_ms: float, high_ms: float) -> Gain:
    """`gain` with an interval that reaches down to `low_ms` and up to `high_ms` at least, and has a width.

    Without a width it would claim that the next run can't differ: then it reaches down to nothing.
    """
    low, high = min(gain.low, low_ms, gain.ms), max(gain.high, high_ms, gain.ms)
    if low >= high:
        low, high = min(low, 0.0), max(high, 0.0)
    return replace(gain, low=low, high=high)


def surely_most(gains: tuple[Gain, ...]) -> int:
    """Which of them surely gains most: whose low end is highest."""
    return max(range(len(gains)), key=lambda one: -math.inf if math.isnan(gains[one].low) else gains[one].low)


def between(gain: Gain, factor: Between) -> Gain:
    """`gain` of a change that is known up to a factor."""
    low = gain.low * factor.part if min(gain.low, factor.part) > 0 else gain.ms * min(factor.part, 0.0)
    return widened(gain, low, min(gain.high * factor.multiple, factor.most_ms))
