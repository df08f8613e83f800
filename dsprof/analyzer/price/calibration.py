"""How far predictions come true, as constants: from the calibration pairs of `benchmarks/predictions.py`
(benchmarks/results/predictions.json); what is of one code is in its record. Its fresh pairs judge them. Codes that
have none there (gradients reduced or parameters gathered again, buffers, bytes that fill a link) have what the pairs of
`fix_pairs.py` and jobs over slow links allow: they miss by up to 5 %, and once by 9 % of what was measured to 40 %.

The interval of a gain holds the noise of the steps that it is the mean of. What replay itself gets wrong comes on top:
of the gain, since a model is one, and of the step, since two runs of one job differ. On busy cores both are larger
(`contention` says what is expected there).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from ..finding import MEASURED_EXCESS, Gain
from ..graph.validate import HeldOut


@dataclass(frozen=True)
class ModelError:
    """Half-widths at 95 %, as shares: what the predictions of a rule by replay miss by, beside the noise of the steps.

    Each is the smallest, in steps of a tenth and not below half of what it was before, with which 95 % of the
    predictions for the calibration pairs hold. (Those of small messages missed on busy cores alone, where more was
    saved.)

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


BETWEEN_RUNS: Final = ModelError(of_gain=0.0, of_step=0.014, busy=0.014)
"""What two runs of one job differ by, which every calibrated rule has: of predictions whose own error is told by the
spread of what was measured, and not by pairs."""
OUTSIDE_STEPS: Final = ModelError(of_gain=0.108, of_step=0.009, busy=0.018)
"""Of what comes between ordinary steps."""
OF_CONTENTION: Final = 0.6
"""Half-width of what communications are taken to cost more where nobody waits for them (`contention`), as its share. At
the high end they may cost nothing more: of steps of 37 ms with a dozen small buckets on two cores, a rank that was late
by 15 ms cost 14 to 18 ms, of which 4 to 5 were taken off."""


def with_model_error(
    gain: Gain,
    error: ModelError | None,
    step_ms: float,
    load: float,
    contention_ms: float = 0.0,
    held_out: HeldOut | None = None,
) -> Gain:
    """`gain` with an interval that holds the model's error too. What gains nothing stays as it is.

    error: of the rule; None: its predictions were never held against a run
    contention_ms: what was taken off the gain since cores are busy
    held_out: what the run's own steps, held out, were missed by: of the step by the model, and of a gain since the next
              steps are as unlike these as these are one another
    """
    least_ms = gain.ms
    if gain.method == MEASURED_EXCESS:
        # Where it comes as seldom as at the low end, no more than that is measured wrongly.
        error, held_out, least_ms = OUTSIDE_STEPS, None, max(gain.low, 0.0)
    if error is None or gain.ms <= 0:
        return gain

    def half(above: bool) -> float:
        own = (held_out.missed * step_ms, held_out.differs * gain.ms) if held_out is not None else ()
        of_gain_ms = gain.ms if above else least_ms
        of_contention = 0.0 if above else OF_CONTENTION * contention_ms
        return math.hypot(error.half_ms(of_gain_ms, step_ms, load, above=above), of_contention, *own)

    low = gain.ms - math.hypot(gain.ms - gain.low, half(False))
    high = gain.ms + contention_ms + math.hypot(gain.high - gain.ms, half(True))
    return replace(gain, low=low, high=high)
