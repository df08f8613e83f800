"""The interval of a gain that was replayed, with all that is known to make a prediction miss."""

from __future__ import annotations

from dataclasses import replace

from ..finding import MEASURED_ON_DEVICE, REPLAYED_ON_DEVICE, UPPER_BOUND, Gain
from ..study import Study
from ..work.device_idle import unseen_idle_ms
from .calibration import ModelError, with_model_error
from .contention import busy


def with_all_errors(study: Study, gain: Gain, error: ModelError | None, contention_ms: float = 0.0) -> Gain:
    """`gain` with an interval that holds the model's error, what held-out steps were missed by, and idle time of
    devices that was not seen. One that saves nothing stays as it is.

    error: of the kind of prediction; None: it was never held against a run
    contention_ms: what was taken off the gain since cores are busy
    """
    if gain.method in (MEASURED_ON_DEVICE, REPLAYED_ON_DEVICE, UPPER_BOUND):
        return gain
    seen = None if study.checked is None else study.checked.held_out
    gain = with_model_error(gain, error, study.step_ms, busy(study), contention_ms, seen)
    if gain.method == "replay" and gain.ms > 0:  # as much idle time may go, or turn up
        fewer, more = gain.unseen or (unseen_idle_ms(study), unseen_idle_ms(study))
        gain = replace(gain, low=gain.low - fewer, high=gain.high + more, unseen=None)
    return gain


def negated(gain: Gain) -> Gain:
    """The same change made the other way round."""
    return replace(gain, ms=-gain.ms, percent=-gain.percent, low=-gain.high, high=-gain.low)
