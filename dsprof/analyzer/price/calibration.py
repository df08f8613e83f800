"""How far predictions come true, as constants: from the calibration pairs of `benchmarks/predictions.py`
(benchmarks/results/predictions.json). Its fresh pairs judge them.

The interval of a gain holds the noise of the steps that it is the mean of. What replay itself gets wrong comes on top:
of the gain, since a model is one, and of the step, since two runs of one job differ. On busy cores both are larger
(`contention` says what is expected there).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from ..finding import MEASURED_EXCESS, Gain


@dataclass(frozen=True)
class ModelError:
    """Half-widths at 95 %, as shares.

    of_gain: of the predicted gain
    of_step: of the mean step, on idle cores; `busy` comes on top where the job uses all of its cores, and a part of it
             where it uses a part of them
    """

    of_gain: float
    of_step: float
    busy: float
    busy_above: float = 0.0
    """What `busy` is more at the high end: many small collectives contend for cores with the computation in more ways
    than are counted, so more may be saved."""

    def half_ms(self, gain_ms: float, step_ms: float, load: float, *, above: bool = False) -> float:
        """Half-width in ms, to the low or the high end. `load`: share of the busiest cores' time that the job uses, 0
        to 1."""
        busy = self.busy + self.busy_above * above
        return math.hypot(self.of_gain * gain_ms, (self.of_step + busy * load) * step_ms)


MODEL_ERROR: Final = {
    "rank.straggler": ModelError(of_gain=0.084, of_step=0.024, busy=0.024),
    "data.stall": ModelError(of_gain=0.056, of_step=0.014, busy=0.021),
    "data.imbalance": ModelError(of_gain=0.035, of_step=0.01, busy=0.01),
    "pause.gc": ModelError(of_gain=0.05, of_step=0.014, busy=0.014),
    "comm.small-messages": ModelError(of_gain=0.25, of_step=0.02, busy=0.02, busy_above=0.05),
    "comm.exposed": ModelError(of_gain=0.175, of_step=0.014, busy=0.014),
    "pipeline.imbalance": ModelError(of_gain=0.08, of_step=0.015, busy=0.06),
    "pipeline.bubble": ModelError(of_gain=0.072, of_step=0.0225, busy=0.036),
}
"""Code -> what its predictions by replay miss by, beside the noise of the steps.

Each is the smallest, in steps of a tenth and not below half of what it was before, with which 95 % of the predictions
for the calibration pairs hold. (Those of small messages missed on busy cores alone, where more was saved.)"""
OUTSIDE_STEPS: Final = ModelError(of_gain=0.108, of_step=0.009, busy=0.018)
"""Of what comes between ordinary steps."""


CAME_TRUE: Final = {
    "checkpoint.stall": (24, 25),
    "comm.exposed": (25, 25),
    "comm.small-messages": (48, 50),
    "data.imbalance": (25, 25),
    "data.stall": (99, 100),
    "eval.uneven": (17, 25),
    "pause.gc": (25, 25),
    "pipeline.bubble": (22, 25),
    "pipeline.imbalance": (73, 75),
    "rank.straggler": (119, 125),
}
"""Code -> of how many predictions the interval held what was then measured, and how many there were: those of all runs
of all pairs of `benchmarks/predictions.py`, `came_true` in its results."""


def confidence(code: str) -> float | None:
    """The share of predictions for this code that came true, 0 to 1; None: none was ever tried."""
    held, made = CAME_TRUE.get(code, (0, 0))
    return round(held / made, 2) if made else None


OF_CONTENTION: Final = 0.6
"""Half-width of what communications are taken to cost more where nobody waits for them (`contention`), as its share."""


def with_model_error(gain: Gain, code: str, step_ms: float, load: float, contention_ms: float = 0.0) -> Gain:
    """`gain` with an interval that holds the model's error too. What gains nothing stays as it is.

    contention_ms: what was taken off the gain since cores are busy
    """
    error = OUTSIDE_STEPS if gain.method == MEASURED_EXCESS else MODEL_ERROR.get(code)
    if error is None or gain.ms <= 0:
        return gain

    def half(above: bool) -> float:
        return math.hypot(error.half_ms(gain.ms, step_ms, load, above=above), OF_CONTENTION * contention_ms)

    low = gain.ms - math.hypot(gain.ms - gain.low, half(False))
    high = gain.ms + math.hypot(gain.high - gain.ms, half(True))
    return replace(gain, low=low, high=high)
